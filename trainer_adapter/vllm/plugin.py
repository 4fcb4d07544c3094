"""vLLM's entry point ``vllm.general_plugins``: registers the engine and the loader ``shardcast``.

vLLM calls ``register`` in every process, some of them more than once. It must neither fail nor be
felt where nobody uses Shardcast: on a vLLM for which this was not tested, the names are registered
all the same, and whoever uses one is told.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import shardcast
from shardcast.errors import EngineUnsupportedError

log = logging.getLogger("vllm.shardcast")  # below vLLM's own, which shows INFO and has a handler

NAME: Final = "shardcast"
SUPPORTED: Final = ("0.32.",)
"""Releases of vLLM whose private helpers were read and tested against."""

HELPERS: Final = (
    "vllm.config:set_current_vllm_config",
    "vllm.distributed.parallel_state:get_world_group",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine",
    "vllm.engine.arg_utils:EngineArgs",
    "vllm.model_executor.layers.attention:MLAAttention",
    "vllm.model_executor.layers.attention:is_deferred_attention_layer",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
    "vllm.model_executor.model_loader.reload.layerwise:LAYERWISE_INFO",
    "vllm.model_executor.model_loader.reload.layerwise:LOADING_LAYERS",
    "vllm.model_executor.model_loader.reload.layerwise:SKIP_LOAD_TENSORS",
    "vllm.model_executor.model_loader.reload.layerwise:_place_kernel_tensors",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.meta:to_meta_tensor",
    "vllm.model_executor.model_loader.reload.sanitize:layer_ref_sentinel",
    "vllm.model_executor.model_loader.reload.utils:get_tensor_load_numel",
    "vllm.v1.worker.worker_base:WorkerBase",
)
"""What we use of vLLM that is not its public interface: ``module:name``."""


def register() -> None:
    """Register the weight-transfer engine, the model loader and the worker method. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import (
        _LOAD_FORMAT_TO_MODEL_LOADER,
        register_model_loader,
    )

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, __name__, "ShardcastEngine")
    if NAME not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(NAME)(_loader_class())
    _install_worker_method()


def require_supported(version: str | None = None) -> None:
    """Check that this vLLM is one whose private helpers we know.

    Raises:
        EngineUnsupportedError: If it is not; says which are.
    """
    import vllm

    found = version if version is not None else str(vllm.__version__)
    known = ", ".join(f"{release}x" for release in SUPPORTED)
    if not found.startswith(SUPPORTED):
        raise EngineUnsupportedError(
            f"shardcast {shardcast.__version__} swaps weights in vLLM {known}, and this is vLLM "
            f"{found}: install one of those, or a newer shardcast"
        )
    missing = [helper for helper in HELPERS if not _is_there(helper)]
    if missing:
        raise EngineUnsupportedError(
            f"this vLLM {found} is not the one that shardcast {shardcast.__version__} knows: it "
            f"lacks {', '.join(missing)}"
        )


def _is_there(helper: str) -> bool:
    module, _, name = helper.partition(":")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def _loader_class() -> type[Any]:
    try:
        require_supported()
    except EngineUnsupportedError as error:
        log.warning("%s", error)
        return _refusing_loader()
    from vllm.engine.arg_utils import EngineArgs

    from trainer_adapter.vllm.loader import ShardcastLoader
    from trainer_adapter.vllm.pinning import pin_boots

    pin_boots(EngineArgs)
    return ShardcastLoader


def _refusing_loader() -> type[Any]:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RefusingLoader(BaseModelLoader):  # type: ignore[misc]
        """Stands for the loader where it would not work."""

        def __init__(self, load_config: Any) -> None:
            require_supported()
            super().__init__(load_config)

        def download_model(self, model_config: Any) -> None:
            require_supported()

        def load_weights(self, model: Any, model_config: Any) -> None:
            require_supported()

    return RefusingLoader


def _install_worker_method() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    def method(worker: Any, command: dict[str, Any]) -> dict[str, Any]:
        require_supported()
        from trainer_adapter.vllm.transfer import answer

        return answer(worker, command)

    if NAME not in WorkerBase.__dict__:
        setattr(WorkerBase, NAME, method)


def __getattr__(name: str) -> Any:
    """Import the engine's class when vLLM's factory asks for it, and not before.

    Raises:
        EngineUnsupportedError: On a vLLM that we do not know.
    """
    if name != "ShardcastEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_supported()
    from trainer_adapter.vllm.transfer import ShardcastEngine

    return ShardcastEngine

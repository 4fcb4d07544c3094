"""A whole reload of a running model inside one call, how to get out of it, and what vLLM forgets.

vLLM's layerwise reload (``model_loader/reload``) is the only way that also works where weights are
packed for a kernel. It puts the model on the meta device, has each layer loaded, processed and
copied into the memory that it had. Three things are ours:

- *Tied output embeddings*: the head keeps a packed copy of its own on CPUs, and gets no weights in a
  reload. It is packed again from the memory that it shares with the input embeddings.
- *Experts on CPUs*: a kernel that exists is taken for ready, and checkpoint rows land in packed
  memory. It is made anew.
- *Tensors that are no parameters* (what MLA absorbs, workspaces): they are rebound, and what was
  captured reads the old memory. Their values are copied into it.

On CPUs, what the reload would do is done beforehand where that can be (``preparing``).

Everything private of vLLM that this needs is imported here, in ``tree``, ``shadow``, ``preparing``
and ``agreement``; ``plugin`` refuses vLLM versions for which that was not tested.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise

from shardcast.errors import ShardcastError
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.torch_fit import same_bits
from trainer_adapter.vllm.memory import available_memory
from trainer_adapter.vllm.preparing import Prepared, Unprepared, prepare
from trainer_adapter.vllm.shadow import Arrivals, Shadow
from trainer_adapter.vllm.started import Started, refuse
from trainer_adapter.vllm.verifying import Ready

log = logging.getLogger("vllm.shardcast")

_MEMORY: Final = 2.0
"""How much memory is wanted for preparing a version, in its own size: embeddings are there
packed and as they are, one layer raw beside it, and room for the engine."""

Bare = tuple[torch.nn.Module, str, torch.Tensor]
"""A tensor that is an attribute of a layer and neither parameter nor buffer: layer, name, value."""

_KERNELS: Final = {
    "onednn_mm": "onednn",
    "weight_packed_linear_cpu": "amx",
    "zentorch_linear_unary": "zentorch",
    "linear": "torch",
}
"""By the function that a layer's ``cpu_linear`` calls (``layers/utils.py``)."""


class Model:
    """A model that vLLM runs in this process. The one thing here that has state: vLLM's own."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        device: torch.device,
        *,
        started: Started,
        ranks: int = 1,
        ahead: bool = True,
    ) -> None:
        """Take a model that is loaded.

        Args:
            model: The model.
            model_config: vLLM's ``ModelConfig``.
            device: Where it lies.
            started: What the engine was started with.
            ranks: Over how many ranks its tensors are cut.
            ahead: Whether weights may be prepared while the engine serves (``preparing``).
        """
        self._model = model
        self._config = model_config
        self._device = device
        self._ranks = ranks
        self._ahead = ahead
        self._whole = True  # the last load ended well
        self._started = started
        self._bare: list[Bare] = []  # of a load that has not ended well
        self._heads = dict(tied_heads(model))  # now: half way through a reload it does not show

    # --- could it load a version? ------------------------------------------------------------

    def prepare(self, checkpoint: Checkpoint, stopping: Callable[[], bool]) -> Ready:
        """Check a verified version against the model, and prepare as much as can be beside it.

        Args:
            checkpoint: The version.
            stopping: Says when to give up.

        Raises:
            EngineRefusedError: If it cannot be loaded, or would not be the same as booting with it.
            StoppedError: If ``stopping`` said so.
            ShardcastError: If the version cannot be read.
        """
        arrivals = self.check(checkpoint)
        prepared = None
        if self._device.type == "cpu":
            prepared = self._prepare(checkpoint, arrivals, stopping)
        return _Ready(self, checkpoint, prepared)

    def _prepare(
        self,
        checkpoint: Checkpoint,
        arrivals: dict[str, Arrivals] | None,
        stopping: Callable[[], bool],
    ) -> Prepared | None:
        number, began = checkpoint.version.number, time.monotonic()
        try:
            if not self._ahead:
                raise Unprepared("preparing is turned off")
            if arrivals is None:
                raise Unprepared("this model's loaders look at the data")
            _check_memory(checkpoint.bytes * self._ranks)
            prepared = prepare(
                self._model, checkpoint, arrivals, tied=self._heads, stopping=stopping
            )
        except ShardcastError:
            raise
        except Unprepared as reason:
            log.info("version %d will be loaded in the pause as a whole: %s", number, reason)
            return None
        except Exception:  # vLLM's methods were not made for this; its reload may do
            log.warning("version %d could not be prepared", number, exc_info=True)
            return None
        checkpoint.let_pages_go()
        took_s = time.monotonic() - began
        log.info("version %d is prepared (%.1f s)", number, took_s)
        return prepared

    def check(self, checkpoint: Checkpoint) -> dict[str, Arrivals] | None:
        """Check a verified version against the model, which is not touched.

        Returns:
            What would arrive at each parameter; None where that cannot be known.

        Raises:
            EngineRefusedError: If it cannot be loaded, or would not be the same as booting with it.
        """
        self._started.check_config(checkpoint)
        strict = self._config.quantization is None
        shadow = Shadow(self._model, ranks=self._ranks)
        try:
            arrivals = shadow.run(
                checkpoint.specs.values(),
                tied=[f"{name}.weight" for name in self._heads],
                strict=strict,
            )
        except NotImplementedError as error:
            log.info("version %d: %s", checkpoint.version.number, error)
            self._started.check_forms(checkpoint, "this model's loaders look at the data")
            return None
        finally:
            shadow.close()
        if not strict:
            self._started.check_forms(checkpoint, "the engine's model is quantised")
        for head, embedding in self._heads.items():
            _check_tied(checkpoint, arrivals, f"{head}.weight", f"{embedding}.weight")
        if others := self._started.differing(checkpoint):
            log.warning(
                "version %d comes with another %s: the engine keeps what it was started with; "
                "restart it to use them",
                checkpoint.version.number,
                ", ".join(others),
            )
        return arrivals

    # --- loading -----------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint) -> None:
        """Load all of a version into the running model.

        Raises:
            Exception: Whatever goes wrong; the model is unusable then, until ``unwind`` and
                another ``load``.
        """
        with torch.no_grad():
            self._load(checkpoint.tensors())

    def load_prepared(self, prepared: Prepared) -> bool:
        """Exchange all weights for prepared ones, where the model is whole; say whether it was.

        It may not be: our last load failed, or somebody else's reload of it broke off.

        Raises:
            Exception: As ``load``.
        """
        if not self._whole or not prepared.is_of(self._model):
            return False
        with torch.no_grad():
            self._whole = False
            bare = _bare_tensors(self._model)
            prepared.exchange()
            for layer in self._model.modules():
                if is_deferred_attention_layer(layer):
                    layer.process_weights_after_loading(self._config.dtype)
            _keep_addresses(bare)
            self._whole = True
        return True

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        coming = iter(tensors)
        first = next(coming, None)
        if first is None:  # vLLM would take that for a load that went well
            raise RuntimeError("there is no tensor to load")
        self.unwind()
        self._whole = False
        bare = self._bare = self._bare or _bare_tensors(self._model)
        heads = [self._model.get_submodule(name) for name in self._heads]
        if self._device.type == "cpu":
            _forget_expert_kernels(self._model)
        layerwise.initialize_layerwise_reload(self._model)
        _expect_nothing([*heads, *_without_weights(self._model)])
        self._model.load_weights(chain([first], coming))
        layerwise.finalize_layerwise_reload(self._model, self._config)
        for head in heads:
            head.quant_method.process_weights_after_loading(head)
        _keep_addresses(bare)
        self._bare = []
        left = [name for name, tensor in self._model.named_parameters() if tensor.is_meta]
        if left:
            raise RuntimeError(f"{len(left)} parameters were not loaded, among them {left[0]}")
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self._whole = True

    def unwind(self) -> None:
        """Take the model off the meta device and forget what was half loaded.

        The weights are whatever they are then; on a model that is whole it changes nothing.
        """
        model: Any = self._model
        if hasattr(model, "_original_do_torchao_reload"):
            model._do_torchao_reload = model._original_do_torchao_reload
        for layer in self._model.modules():
            info = layerwise.LAYERWISE_INFO.get(layer)
            if info is not None:
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()

    # --- what it runs on ---------------------------------------------------------------------

    def gemm(self) -> dict[str, int]:
        """Return how many linear layers, and how many layers' experts, go through which kernel."""
        found: dict[str, int] = {}
        experts: set[int] = set()  # more than one module may have them
        for module in self._model.modules():
            kernel = module.__dict__.get("cpu_linear")
            moe = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                names = getattr(getattr(kernel, "__code__", None), "co_names", ("linear",))
                name = next((_KERNELS[n] for n in names if n in _KERNELS), "other")
            elif moe is not None and id(moe) not in experts:
                experts.add(id(moe))
                name = _experts_kernel(moe)
            elif self._device.type != "cpu" and hasattr(module, "quant_method"):
                name = self._device.type
            else:
                continue
            found[name] = found.get(name, 0) + 1
        return found


class _Ready:
    """A version that a model is ready for (``verifying.Ready``)."""

    def __init__(self, model: Model, checkpoint: Checkpoint, prepared: Prepared | None) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._prepared = prepared

    def load(self) -> None:
        if self._prepared is None or not self._model.load_prepared(self._prepared):
            self._model.load(self._checkpoint)

    def close(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None


def _experts_kernel(moe: Any) -> str:
    """Return what a layer's experts go through: on CPUs the instructions, elsewhere vLLM's name."""
    kernel = getattr(moe, "fused_experts", moe)
    if getattr(kernel, "_use_zentorch", False):
        return "experts zentorch"
    return f"experts {getattr(kernel, 'isa', type(kernel).__name__)}"


def _check_memory(most: int) -> None:
    """Refuse to prepare where the host could run out of memory for it.

    Raises:
        Unprepared: If that is so; says what is wanted.
    """
    wanted = int(most * _MEMORY)
    free = available_memory()
    if free is not None and free < wanted:
        raise Unprepared(
            f"of {wanted / 2**30:.1f} GiB that a second copy of the weights may take "
            f"{free / 2**30:.1f} are available"
        )


def tied_heads(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of output embeddings and of the input embeddings whose memory they share."""
    by_weight = {
        id(module.weight): name
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if getattr(module, "weight", None) is not None
    }
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and id(getattr(module, "weight", None)) in by_weight:
            yield name, by_weight[id(module.weight)]


def _check_tied(
    checkpoint: Checkpoint, arrivals: dict[str, Arrivals], head: str, embedding: str
) -> None:
    """Refuse a head of its own where the engine's shares memory: one would overwrite the other."""
    of_head = arrivals[head].sources if head in arrivals else []
    of_embedding = arrivals[embedding].sources if embedding in arrivals else []
    if not of_head or not of_embedding or of_head == of_embedding:
        return
    wanted = {of_head[0], of_embedding[0]}
    found = {name: tensor for name, tensor in checkpoint.tensors() if name in wanted}
    if not same_bits(found[of_head[0]], found[of_embedding[0]]):
        raise refuse(
            f"{of_head[0]} differs from {of_embedding[0]}, but the engine was started with the "
            "two tied: restart it with this version"
        )


def _expect_nothing(layers: list[torch.nn.Module]) -> None:
    """Say that nothing will be loaded into some layers, so that vLLM does not warn of it."""
    for layer in layers:
        layerwise.get_layerwise_info(layer).load_numel_total = 0


def _without_weights(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers that have only what no checkpoint has, such as the tables of rotations."""
    for layer in model.modules():
        named = [*layer._parameters, *layer._buffers]
        if named and all(name in layer._non_persistent_buffers_set for name in named):
            yield layer


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _bare_tensors(model: torch.nn.Module) -> list[Bare]:
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, torch.Tensor)
    ]


def _keep_addresses(bare: list[Bare]) -> None:
    for module, name, old in bare:
        new = module.__dict__.get(name)
        if (
            isinstance(new, torch.Tensor)
            and new is not old
            and new.shape == old.shape
            and new.dtype == old.dtype
            and new.device == old.device
        ):
            old.data.copy_(new)
            module.__dict__[name] = old

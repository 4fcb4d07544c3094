"""What vLLM's own configuration says of the settings that decide whether an engine can swap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardcast.errors import EngineUnsupportedError
from trainer_adapter.vllm.plugin import require_supported
from trainer_adapter.vllm.serving import Settings, unsupported

_WITHOUT_WEIGHTS: Final = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
"""Methods of speculative decoding that draft from what was said before, or draft nothing."""


def settings_of(
    config: Any, *, plugins: str | None, engine_version: str = "", servers: int = 1
) -> Settings:
    """Read what matters of a configuration.

    Args:
        config: vLLM's ``VllmConfig``.
        plugins: ``VLLM_PLUGINS``; None where it is not set.
        engine_version: vLLM's, for whoever shows it.
        servers: API server processes in front of the engine.
    """
    transfer = config.weight_transfer_config
    return Settings(
        engine_version=engine_version,
        plugins=plugins,
        backend=None if transfer is None else str(transfer.backend),
        servers=servers,
        data_parallel=int(config.parallel_config.data_parallel_size),
        multimodal=bool(config.model_config.is_multimodal_model),
        connector=_connectors(config.kv_transfer_config),
        lora=config.lora_config is not None,
        may_sleep=bool(config.model_config.enable_sleep_mode),
    )


def stale_drafts(config: Any) -> str:
    """Return what a swap does not renew: the weights that draft tokens; empty where none do.

    Args:
        config: vLLM's ``VllmConfig``.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_WEIGHTS:
        return ""
    return (
        f"speculative decoding ({speculative.method}): a swap does not renew the weights that draft"
        " tokens. Answers are those of the version that is served, but the further it gets from the"
        " drafts, the fewer of them are accepted: start the engine again to renew them"
    )


def refusal(settings: Settings) -> str:
    """Return why an engine of this vLLM and these settings cannot swap; empty where it can."""
    why = unsupported(settings)
    if not why:
        try:
            require_supported()
        except EngineUnsupportedError as error:
            why = error.message
    return why


def _connectors(transfer: Any) -> Mapping[str, bool]:
    """Return the KV connectors' names, and whether each can forget what it holds.

    One that holds others says that it can whatever they do, so they are asked one by one.
    """
    if transfer is None or not transfer.kv_connector:
        return {}
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found = KVConnectorFactory.get_connector_class(transfer)
    forgets = {str(transfer.kv_connector): found.reset_cache is not KVConnectorBase_V1.reset_cache}
    held = (transfer.kv_connector_extra_config or {}).get("connectors") or []
    for one in held:
        forgets |= _connectors(type(transfer)(**one))
    return forgets

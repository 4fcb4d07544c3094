"""Which servers can be driven, and what is wrong with those that cannot. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainer_adapter.vllm.plugin import NAME

PLUGINS: Final = "VLLM_PLUGINS=shardcast,shardcast_http"
BACKEND: Final = (
    """--weight-transfer-config '{"backend": "shardcast"}' (in a program of your own:"""
    """ weight_transfer_config={"backend": "shardcast"})"""
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What matters of a server's configuration.

    Attributes:
        plugins: ``VLLM_PLUGINS``.
        engine: Whether there is an engine (a render server has none).
        backend: Of the weight transfer; None where it is not configured.
        servers: API server processes in front of the engine.
        data_parallel: Engines behind this server.
        multimodal: Whether the model takes more than text.
        connector: The KV connector's name, and whether it can forget what it holds.
        lora: Whether adapters are enabled.
        may_sleep: Whether sleep mode is.
    """

    engine_version: str
    plugins: str | None = None
    engine: bool = True
    backend: str | None = None
    servers: int = 1
    data_parallel: int = 1
    multimodal: bool = False
    connector: Mapping[str, bool] = field(default_factory=dict)
    lora: bool = False
    may_sleep: bool = False


def unsupported(settings: Settings) -> str:
    """Return why a server cannot swap, and what its operator must do; empty where it can."""
    plugins = settings.plugins
    if not settings.engine:
        return "this server has no engine (it only renders prompts)"
    if plugins is not None and NAME not in [name.strip() for name in plugins.split(",")]:
        return (
            f"VLLM_PLUGINS={plugins} lists all plug-ins that vLLM loads, and 'shardcast' is not among"
            f" them: start it with {PLUGINS}, and add the others that you need"
        )
    if settings.backend != NAME:
        found = (
            "no weight transfer" if settings.backend is None else f"backend {settings.backend!r}"
        )
        return f"the engine was started with {found}: start it with {BACKEND}"
    if settings.servers != 1:
        return (
            f"{settings.servers} API servers stand in front of one engine, and none knows what the"
            " others do: start it with --api-server-count 1"
        )
    if settings.data_parallel != 1:
        return (
            f"{settings.data_parallel} data-parallel engines behind one server cannot agree on a"
            " version: start independent servers, one for each replica, without any --data-parallel-..."
            " option"
        )
    for name, forgets in settings.connector.items():
        if not forgets:
            return (
                f"KV connector {name} cannot forget what it holds, and would hand the old weights'"
                " cache to requests on new ones: start the engine without it"
            )
    return ""


def demands_key(given: Sequence[str] | None, environment: str | None) -> bool:
    """Say whether vLLM guards ``/v1`` with an API key (``entrypoints/serve/middleware/register.py``).

    ``--api-key`` hides the environment's, also where it is empty: then there is none.

    Args:
        given: What ``--api-key`` says.
        environment: ``VLLM_API_KEY``.
    """
    return any(given or [environment])


def keep_refusal(settings: Settings, *, salting: bool) -> str:
    """Return why running requests cannot keep their KV cache over a swap; empty where they can."""
    if not salting:
        return (
            "requests are not salted by version, and other requests would find the old weights'"
            " prefixes: start the server with SHARDCAST_SALT=1 (in a program of your own: give every"
            " request a cache_salt of its version, and say so to attach), or swap with requests:"
            " recompute"
        )
    if settings.multimodal:
        return "the caches of a multi-modal model's encoders are not salted: swap with recompute"
    if settings.connector:
        return f"KV connector {next(iter(settings.connector))} is outside of what is salted"
    return ""

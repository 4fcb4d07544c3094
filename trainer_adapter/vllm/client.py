"""vLLM's engine client and adapter registry as the interfaces that swaps and adapters need.

Written against vLLM 0.32; ``Any`` stands for its classes, so that this module needs no vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardcast.engine.forms import Identity, Requests
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.ranks import RPC, Report, combine

PAUSES: Final[dict[Requests, tuple[str, bool]]] = {
    "recompute": ("keep", True),
    "wait": ("wait", True),
    "abort": ("abort", True),
    "keep": ("keep", False),
}
"""vLLM's pause mode and whether it clears its caches. With ``keep`` and a cleared cache it preempts
what runs, and computes it again from its tokens after the pause."""

DEATH_POLL_SECONDS: Final = 0.2


class VllmControl:
    """``EngineControl`` over vLLM's ``EngineClient``."""

    def __init__(self, client: Any, *, may_sleep: bool = False) -> None:
        """Drive an engine.

        Args:
            client: vLLM's engine client.
            may_sleep: Whether it was started with ``--enable-sleep-mode``.
        """
        self._client = client
        self._may_sleep = may_sleep

    async def tell(self, command: dict[str, Any]) -> Report:
        """Give all ranks a command, between two steps of the engine.

        Raises:
            ValueError: If the answer is none of ours.
        """
        return combine(await self._client.collective_rpc(RPC, args=(command,)))

    async def pause(self, requests: Requests) -> None:
        """Pause, and clear prefix, encoder and multi-modal caches unless requests keep theirs."""
        mode, clear = PAUSES[requests]
        await self._client.pause_generation(mode=mode, clear_cache=clear)

    async def resume(self) -> None:
        """Generate again."""
        await self._client.resume_generation()

    async def is_paused(self) -> bool:
        """Ask the scheduler."""
        return bool(await self._client.is_paused())

    async def is_asleep(self) -> bool:
        """Ask whether it sleeps. vLLM says so of every engine that is paused, by whomever."""
        return self._may_sleep and bool(await self._client.is_sleeping())

    async def set_label(self, label: str) -> None:
        """Set the version that tokens are stamped with; ask for it again, to be sure.

        Raises:
            RuntimeError: If it is another one afterwards.
        """
        await self._client.update_weight_version(label)
        said = await self._client.get_weight_version()
        if said != label:
            raise RuntimeError(f"the engine calls its weights {said!r} after they were labelled")

    async def death(self) -> str:
        """Return, once the engine process is gone, why."""
        while not (why := self.dead()):  # noqa: ASYNC110 - vLLM has a flag, and no event
            await asyncio.sleep(DEATH_POLL_SECONDS)
        return why

    def dead(self) -> str:
        """Say whether the engine process is gone."""
        return "vLLM's engine core has ended" if self._client.errored else ""


class VllmAdapters:
    """``AdapterHost`` over vLLM's ``OpenAIServingModels``."""

    def __init__(self, client: Any, state: Any, *, enabled: bool) -> None:
        self._client = client
        self._state = state
        self._enabled = enabled

    @property
    def _requests(self) -> Mapping[str, Any]:
        models = getattr(self._state, "openai_serving_models", None)
        requests: Mapping[str, Any] = {} if models is None else models.lora_requests
        return requests

    def refusal(self) -> str:
        """Say why there can be no adapters."""
        return "" if self._enabled else "this server takes no adapters: start it with --enable-lora"

    def models(self) -> set[str]:
        """Return the names that requests may use."""
        return set(self._requests)

    async def add(self, model: str, path: str) -> None:
        """Load an adapter on all ranks, and register its name.

        What is registered is read from where it was: under another path it is loaded anew.

        Raises:
            RuntimeError: If vLLM refuses it.
        """
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        known = self._requests.get(model)
        if known is not None and known.lora_path == path:
            await self.again(model)
            return
        await self.remove(model)
        request = LoadLoRAAdapterRequest(lora_name=model, lora_path=path)
        _check(await self._state.openai_serving_models.load_lora_adapter(request))

    async def remove(self, model: str) -> None:
        """Forget a name and drop its adapter from all ranks.

        Raises:
            RuntimeError: If vLLM refuses.
        """
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        known = self._requests.get(model)
        if known is None:
            return
        request = UnloadLoRAAdapterRequest(lora_name=model)
        _check(await self._state.openai_serving_models.unload_lora_adapter(request))
        await self._client.remove_lora(known.lora_int_id)

    async def again(self, model: str) -> None:
        """Load a registered adapter on all ranks again."""
        await self._client.add_lora(self._requests[model])

    async def present(self) -> set[str]:
        """Return the names whose adapters the ranks hold."""
        if not self._enabled:
            return set()
        ids = await self._client.list_loras()
        return {name for name, one in self._requests.items() if one.lora_int_id in ids}


def hold_adapter(identity: Identity, path: str) -> Checkpoint:
    """Verify an adapter's directory and keep its lease.

    Raises:
        ShardcastError: If it is not, byte for byte, what its manifest says.
    """
    with contextlib.ExitStack() as undo:
        checkpoint = Checkpoint(
            Path(path), run=identity.run, version=identity.version, digest=identity.digest
        )
        undo.callback(checkpoint.close)
        checkpoint.verify()
        undo.pop_all()
    return checkpoint


def _check(answer: Any) -> None:
    if isinstance(answer, str):
        return
    error = getattr(answer, "error", answer)
    raise RuntimeError(str(getattr(error, "message", error)))

"""LoRA adapters as versions: loaded under names that are never used again, put back after swaps.

vLLM finds an adapter's cached prefixes and its weights by name, so a name that is used twice can
serve what was there before. The name that requests use therefore carries version and digest. And
vLLM drops every adapter when the base model is reloaded, so they are all added again, and looked
for, before the engine is resumed. Each right after it was added: vLLM keeps as many as
``--max-cpu-loras`` says, and loads the others when a request wants them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from msgspec.structs import replace

from shardcast.engine.forms import MAX_LORAS, Identity, Lora, LoraRequest
from shardcast.errors import ShardcastError
from trainer_adapter.vllm.machine import Machine, SwapError
from trainer_adapter.vllm.verifying import code_of

RETIRED_SECONDS: Final = 3600.0
"""How long an adapter that was unloaded stays leased: longer than the requests that have it run."""


class AdapterHost(Protocol):
    """The server that knows adapters by the model name of requests. Methods may raise anything."""

    def refusal(self) -> str:
        """Say why there can be no adapters; empty where there can."""
        ...

    def models(self) -> set[str]:
        """Return the names that requests may use, whoever registered them."""
        ...

    async def add(self, model: str, path: str) -> None:
        """Load an adapter on all ranks, and register its name."""
        ...

    async def remove(self, model: str) -> None:
        """Forget a name and drop its adapter from all ranks. Unknown names are fine."""
        ...

    async def again(self, model: str) -> None:
        """Load a registered adapter on all ranks again."""
        ...

    async def present(self) -> set[str]:
        """Return the registered names whose adapters all ranks hold."""
        ...


class Held(Protocol):
    """A directory that was verified and is leased."""

    def changed(self) -> str | None:
        """Say why its files cannot be taken for what was verified any more, or None."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


Hold = Callable[[Identity, str], Held]
"""Verifies and leases an adapter's directory; blocks, and raises ``ShardcastError``."""


class Cell(Protocol):
    """Where the server's state lies."""

    machine: Machine


def model_name(name: str, identity: Identity) -> str:
    """Return how requests name an adapter of a version: unlike every other content's name."""
    return f"{name}@{identity.version}-{identity.digest[:12]}"


class Adapters:
    """The adapters of one server."""

    def __init__(
        self, host: AdapterHost, hold: Hold, cell: Cell, *, retired_s: float = RETIRED_SECONDS
    ) -> None:
        """Know of none yet.

        Args:
            host: Where they are loaded.
            hold: Verifies and leases them.
            cell: Where the server's state lies.
            retired_s: How long those that were unloaded stay leased.
        """
        self._retired_s = retired_s
        self._host = host
        self._hold = hold
        self._cell = cell
        self._held: dict[str, Held] = {}
        self._last: dict[str, Held] = {}
        self._lock = asyncio.Lock()

    async def load(self, request: LoraRequest) -> None:
        """Verify an adapter, load it, then unload the one that ``name`` stood for.

        Raises:
            SwapError: If it was refused or has failed; the old one is then still there.
        """
        self._check()
        if self._has(request):
            return
        model = model_name(request.name, request.identity)
        path = request.path or ""
        # Not under the lock: a swap that waits for it keeps the engine paused.
        held = await self._verified(request.identity, path)
        async with self._lock:
            try:
                self._check()
                if self._has(request):
                    held.close()
                    return
                old = self._find(request.name)
                if old is None and len(self._cell.machine.lora) >= MAX_LORAS:
                    raise SwapError(
                        "refused", f"{MAX_LORAS} adapters are loaded: unload one", phase="lora"
                    )
                await self._add(model, path, held)
            except BaseException:
                held.close()
                raise
            before = self._held.pop(model, None)
            if before is not None:  # it was loaded from another directory
                self._retire(request.name, before)
            self._held[model] = held
            self._set(
                request.name,
                Lora(
                    name=request.name,
                    model=model,
                    run=request.run,
                    version=request.version,
                    digest=request.digest,
                    path=path,
                    loaded=True,
                ),
            )
            if old is not None and old.model != model:
                await self._drop(old)

    async def unload(self, request: LoraRequest) -> None:
        """Unload what ``name`` stands for, if it is the version that the request names.

        Raises:
            SwapError: If it was refused or has failed.
        """
        self._check()
        async with self._lock:
            old = self._find(request.name)
            if old is None or old.digest != request.digest:
                return
            await self._drop(old)
            self._set(request.name, None)

    async def restore(self) -> list[str]:
        """Add all adapters again that the engine has dropped, also those of others; then look.

        Returns what could not be put back, a sentence for each.
        """
        async with self._lock:
            wanted = self._host.models()
            problems = {}
            for model in sorted(wanted - await self._host.present() if wanted else ()):
                try:
                    problem = await self._again(model)
                except Exception as error:
                    problem = f"adapter {model} could not be loaded again: {error}"
                if problem is not None:
                    problems[model] = problem
            there = wanted - problems.keys()
            machine = self._cell.machine
            lora = tuple(replace(one, loaded=one.model in there) for one in machine.lora)
            self._cell.machine = machine.with_lora(lora)
            return list(problems.values())

    # -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        machine = self._cell.machine
        if machine.dead:
            raise SwapError("dead", machine.why_not_ready(), phase="lora")
        if machine.activating is not None:
            version = machine.activating.version
            raise SwapError("busy", f"version {version} is being activated", phase="lora")
        if refusal := self._host.refusal():
            raise SwapError("unsupported", refusal, phase="lora")

    def _has(self, request: LoraRequest) -> bool:
        old = self._find(request.name)
        if old is None or not old.loaded:
            return False
        return Identity(old.run, old.version, old.digest) == request.identity

    async def _add(self, model: str, path: str, held: Held) -> None:
        try:
            await self._host.add(model, path)
            missing = model not in await self._host.present()
        except Exception as error:
            raise SwapError("failed", f"loading adapter {model}: {error}", phase="lora") from error
        if missing:
            raise SwapError("failed", f"adapter {model} is not there after loading", phase="lora")
        if (why := held.changed()) is not None:
            await self._host.remove(model)
            raise SwapError(
                "integrity", f"adapter {model}: {why} while it was loaded", phase="lora"
            )

    async def _again(self, model: str) -> str | None:
        """Load an adapter again; return why it is not there, whose files are not what they were.

        vLLM reads them anew. While its name is registered it would also do that for a request.
        """
        held = self._held.get(model)
        why = None if held is None else held.changed()
        missing = False
        if why is None:
            await self._host.again(model)
            missing = model not in await self._host.present()
            why = None if held is None else held.changed()
        if why is None:
            return f"adapter {model} is not there after it was loaded again" if missing else None
        await self._host.remove(model)
        return f"adapter {model}: {why} since it was verified; load it again"

    async def _verified(self, identity: Identity, path: str) -> Held:
        try:
            return await asyncio.to_thread(self._hold, identity, path)
        except ShardcastError as error:
            raise SwapError(code_of(error), str(error), phase="lora") from error

    async def _drop(self, old: Lora) -> None:
        try:
            await self._host.remove(old.model)
        except Exception as error:
            raise SwapError(
                "failed", f"unloading adapter {old.model}: {error}", phase="lora"
            ) from error
        held = self._held.pop(old.model, None)
        if held is not None:
            self._retire(old.name, held)

    def _retire(self, name: str, held: Held) -> None:
        """Keep the lease until the next one goes, or for a while: running requests may read it."""
        before = self._last.pop(name, None)
        if before is not None:
            before.close()
        self._last[name] = held
        asyncio.get_running_loop().call_later(self._retired_s, self._forget, name, held)

    def _forget(self, name: str, held: Held) -> None:
        if self._last.get(name) is held:
            del self._last[name]
            held.close()

    def _find(self, name: str) -> Lora | None:
        return next((one for one in self._cell.machine.lora if one.name == name), None)

    def _set(self, name: str, lora: Lora | None) -> None:
        machine = self._cell.machine
        others = [one for one in machine.lora if one.name != name]
        if lora is not None:
            others.append(lora)
        self._cell.machine = machine.with_lora(tuple(sorted(others, key=lambda one: one.name)))

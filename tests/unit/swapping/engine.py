"""An engine that does what a script says, and knows what nobody may ever see: half-loaded weights."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from shardcast.engine.forms import Identity, Requests
from trainer_adapter.vllm.ranks import (
    Outcome,
    Progress,
    RankFailure,
    RankReply,
    Report,
    Target,
    combine,
    read_command,
    write_reply,
)

OLD, NEW, NEXT = (
    Target(run="demo", version=n, digest=f"{n:064x}", path=f"/out/versions/{n:06d}", step=10 * n)
    for n in (1, 2, 3)
)
ELSEWHERE = Target(run="elsewhere", version=1, digest="e" * 64, path="/elsewhere")

POINTS = ("stage", "asleep", "pause", "load", "label", "resume")
"""The calls of an activation, in their order."""


class FakeClock:
    """Time that passes when a test says so. Short sleeps return at once and count."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self._lease = asyncio.Event()

    def now(self) -> int:
        self.seconds += 0.001
        return int(self.seconds * 1000)

    def monotonic(self) -> float:
        self.seconds += 0.001
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        if seconds < 0.9:
            self.seconds += seconds
            await asyncio.sleep(0)
            return
        await self._lease.wait()

    def end_leases(self) -> None:
        """Let all that is being waited for have passed; what is asked for later waits anew."""
        self._lease.set()
        self._lease = asyncio.Event()


class FakeEngine:
    """``EngineControl``. ``script`` says, by point, how the next call there goes.

    ``raise``: fails before it does anything. ``lost``: does it, and the answer is lost. ``cancel``:
    the call is cancelled from within. ``hang``: waits for ``release``, then does it; the engine has
    heard of a pause by then. ``unsent``: likewise, and it has not. ``die``: the process ends. ``refused``, ``restored``, ``poisoned``: what the ranks report of ``load``.
    """

    def __init__(self, served: Target | None = OLD, **script: str) -> None:
        self.weights: Target | None = served or ELSEWHERE
        self.ranks = RankReply(rank=0, served=served)
        self.paused = False
        self.label = "default"
        self.script: dict[str, str] = dict(script)
        self.calls: list[str] = []
        self.pauses: list[Requests] = []
        self.kept: list[bool] = []
        """Of every load: whether the ranks were told that requests keep their cache."""
        self.hanging = asyncio.Event()
        self.release = asyncio.Event()
        self.sleeping = False
        self.may_sleep = False
        self.resumed_half = False
        self.dropped_adapters = False
        self.polls = 2
        self.published: dict[str, Target] = {}
        """What the documents of a digest say, where that is not what the target says."""
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # --- the script ----------------------------------------------------------------------------

    async def _point(self, name: str) -> str:
        self.calls.append(name)
        what = self.script.pop(name, "")
        if self._death.done():
            await (
                asyncio.get_running_loop().create_future()
            )  # vLLM leaves such calls without answer
        if what == "raise":
            raise RuntimeError(f"{name} went wrong")
        if what == "cancel":
            raise asyncio.CancelledError
        if what == "die":
            self.die()
            await asyncio.get_running_loop().create_future()
        if what in {"hang", "unsent"}:
            self.hanging.set()
            await self.release.wait()
        return what

    def _answered(self, name: str, what: str) -> None:
        if what == "lost":
            raise RuntimeError(f"the answer of {name} was lost")

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result("killed")

    # --- EngineControl -------------------------------------------------------------------------

    async def tell(self, command: dict[str, Any]) -> Report:
        told = read_command(command)
        if told.op == "stage":
            assert told.target is not None
            what = await self._point("stage")
            self._stage(told.target, what)
            self._answered("stage", what)
        elif told.op == "activate":
            assert told.target is not None
            what = await self._point("load")
            self.kept.append(told.keep)
            if what == "nonsense":
                return None  # type: ignore[return-value]
            reply = self._load(told.target, what)
            self._answered("load", what)
            return combine([write_reply(reply)])
        else:
            await self._point("state")
            self._step()
        return combine([write_reply(self.ranks)])

    def _stage(self, target: Target, what: str) -> None:
        served = self.ranks.served
        if what in {"integrity", "incompatible"}:
            failed = RankFailure(
                digest=target.digest, version=target.version, code=what, message=f"{what}!"
            )
            self.ranks = replace(self.ranks, failed=failed, staged=None, staging=None)
        elif served is not None and served.identity == target.identity:
            self.ranks = replace(self.ranks, failed=None, staging=None)
        elif self.ranks.staged is None or self.ranks.staged.identity != target.identity:
            self._wanted, self._left = self.published.get(target.digest, target), self.polls
            progress = Progress(digest=target.digest, done=0, bytes=10)
            self.ranks = replace(self.ranks, staged=None, failed=None, staging=progress)

    def _step(self) -> None:
        if self.ranks.staging is None:
            return
        self._left -= 1
        if self._left <= 0:
            self.ranks = replace(self.ranks, staged=self._wanted, staging=None)

    def _load(self, target: Target, what: str) -> RankReply:
        assert self.paused, "the ranks were told to load while they generate"
        served = self.ranks.served
        said: dict[str, Any] = {"code": "failed", "message": f"the ranks say {what}"}
        outcome: Outcome = "activated"
        if what in {"refused", "restored"}:
            outcome = "refused" if what == "refused" or served is None else "restored"
            self.dropped_adapters |= what == "restored"
        elif what == "poisoned":
            outcome = "poisoned"
            self.weights = None  # half
            self.ranks = replace(self.ranks, served=None, staged=None, poisoned="half")
        elif served is not None and served.identity == target.identity:
            outcome, said = "already", {}
        elif self.ranks.staged is None or self.ranks.staged.digest != target.digest:
            outcome, said = "refused", {"code": "conflict", "message": "not staged"}
        else:
            said = {}
            self.weights = target = self.ranks.staged
            self.dropped_adapters = True
            self.ranks = replace(self.ranks, served=target, staged=None, poisoned="")
        return replace(self.ranks, outcome=outcome, phases_ms={"load": 1.0}, **said)

    async def pause(self, requests: Requests) -> None:
        # The scheduler stops at once; what takes time is that nothing runs any more.
        self.paused |= self.script.get("pause") == "hang"
        what = await self._point("pause")
        self.pauses.append(requests)
        self.paused |= what != "hang"
        self._answered("pause", what)

    async def resume(self) -> None:
        what = await self._point("resume")
        self.resumed_half |= self.weights is None
        self.paused = False
        self._answered("resume", what)

    async def is_paused(self) -> bool:
        await self._point("is_paused")
        return self.paused

    async def is_asleep(self) -> bool:
        await self._point("asleep")
        return self.sleeping or (self.may_sleep and self.paused)

    async def set_label(self, label: str) -> None:
        what = await self._point("label")
        self.label = label
        self._answered("label", what)

    async def death(self) -> str:
        return await asyncio.shield(self._death)

    def dead(self) -> str:
        return self._death.result() if self._death.done() else ""


class FakeHost:
    """``AdapterHost`` whose adapters go when its engine reloads.

    It holds ``capacity`` of them; each one more takes the place of another.
    """

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine
        self.registered: dict[str, str] = {}
        self.loaded: set[str] = set()
        self.capacity = 8
        self.forgetful = False
        self.broken: set[str] = set()
        self.why_not = ""
        self.deaf = False
        self.log: list[str] = []

    def refusal(self) -> str:
        return self.why_not

    def models(self) -> set[str]:
        return set(self.registered)

    async def add(self, model: str, path: str) -> None:
        self.log.append(f"add {model}")
        self.registered[model] = path
        await self.again(model)

    async def remove(self, model: str) -> None:
        self.log.append(f"remove {model}")
        self.registered.pop(model, None)
        self.loaded.discard(model)

    async def again(self, model: str) -> None:
        if model in self.broken:
            raise RuntimeError("no room for it")
        if self.forgetful:
            return
        while len(self.loaded - {model}) >= self.capacity:
            self.loaded.remove(min(self.loaded - {model}))
        self.loaded.add(model)

    async def present(self) -> set[str]:
        if self.deaf:
            raise RuntimeError("it does not answer")
        if self.engine is not None and self.engine.dropped_adapters:
            self.engine.dropped_adapters = False
            self.loaded.clear()
        return set(self.loaded)


class Leases:
    """Hands out leases of directories and knows which are held."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.changed: set[str] = set()
        self.error: Exception | None = None

    def __call__(self, identity: Identity, path: str) -> Lease:
        if self.error is not None:
            raise self.error
        self.held.add(path)
        return Lease(self, path)


class Lease:
    """One of them."""

    def __init__(self, leases: Leases, path: str) -> None:
        self._leases = leases
        self._path = path

    def changed(self) -> str | None:
        return "it was changed" if self._path in self._leases.changed else None

    def close(self) -> None:
        self._leases.held.discard(self._path)

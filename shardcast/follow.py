"""Following a run: what to do next is a pure function, a small loop does it.

Newest wins: as soon as a newer version is announced, work on an older one stops; what was verified
of it stays on disk and serves the newer one. Fetching goes on while a version is being activated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from shardcast.errors import ShardcastError
from shardcast.events import EventKind, WorkerEvent
from shardcast.heads import HeadKeeper
from shardcast.protocol.head import Head, VersionRef
from shardcast.protocol.limits import SKEW_MS
from shardcast.session import Obtained

RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
"""A version that could not be had is tried again after so long at most."""

LOOK_S: Final = 30.0
"""How often a follower looks at the clock."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Where a follower stands.

    Attributes:
        head: The newest accepted head, None before the first.
        expired: Whether it has expired, and versions of an expired head are not taken.
        current: Number of the version that ``current`` names, if it is whole.
        manifest: Its manifest.
        obtaining: Number of the version that is being fetched.
        ready: Number of the version that is complete and not activated yet.
        activating: Number of the version that is being activated.
    """

    head: Head | None = None
    expired: bool = False
    current: int | None = None
    manifest: str | None = None
    obtaining: int | None = None
    ready: int | None = None
    activating: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now; None and False mean nothing.

    Attributes:
        stop: Drop what is being fetched.
        obtain: Begin to fetch this.
        activate: Begin to activate what is ready.
        held: What is ready waits because the publisher holds activations.
    """

    stop: bool = False
    obtain: VersionRef | None = None
    activate: bool = False
    held: bool = False


def wanted(situation: Situation) -> VersionRef | None:
    """Return the version to be on, None for the one that is current.

    That is the head's ``version``: where it is newer, or where the current one was withdrawn or
    is not retained any more; an expired head moves a follower only away from a withdrawn one.
    """
    head = situation.head
    target = None if head is None else head.newest()
    if head is None or target is None:
        return None
    current = situation.current
    if current is None:
        return None if situation.expired else target
    if current == target.version and situation.manifest == target.manifest:
        return None
    if current in head.withdrawn:
        return target
    if situation.expired:
        return None
    if target.version > current or head.ref(current) is None:
        return target
    return None


def next_step(situation: Situation) -> Step:
    """Decide."""
    target = wanted(situation)
    if target is None or target.version == situation.activating:
        return Step(stop=situation.obtaining is not None)
    if situation.ready == target.version:
        held = situation.head is not None and situation.head.hold
        return Step(
            stop=situation.obtaining is not None,
            activate=not held and situation.activating is None,
            held=held,
        )
    activate = _worth_activating(situation)
    if situation.obtaining == target.version:
        return Step(activate=activate)
    if situation.obtaining is not None:
        return Step(stop=True, activate=activate)
    return Step(obtain=target, activate=activate)


def _worth_activating(situation: Situation) -> bool:
    """Say whether what is ready, though no longer the newest, is better than what is current."""
    head, ready = situation.head, situation.ready
    if head is None or ready is None or situation.activating is not None or head.hold:
        return False
    if head.ref(ready) is None or ready in head.withdrawn:
        return False
    return situation.current is None or ready > situation.current


class Acts(Protocol):
    """What a follower can do: the part of ``WorkerSession`` that it needs."""

    async def obtain(self, ref: VersionRef) -> Obtained:
        """Make a version complete on disk."""
        ...

    async def activate(self, ready: Obtained, *, busy: tuple[int, ...] = ()) -> Path:
        """Commit a version and switch to it."""
        ...


class Follower:
    """Performs steps until it is cancelled."""

    def __init__(
        self,
        acts: Acts,
        keeper: HeadKeeper,
        emit: Callable[[WorkerEvent], None],
        updated: Callable[[Obtained, Path, Head], None],
        *,
        accept_expired: bool = False,
        current: tuple[int, str] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            acts: Fetches and activates.
            keeper: Where heads come from.
            emit: Takes events.
            updated: Called after each activation.
            accept_expired: Take versions of an expired head.
            current: Number and manifest of the version that is current and whole.
            sleep: Waits.
            rng: Spreads retries.
        """
        self._run = keeper.state.run
        self._acts = acts
        self._keeper = keeper
        self._emit = emit
        self._updated = updated
        self._accept_expired = accept_expired
        self._current = current
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._obtaining: tuple[VersionRef, asyncio.Task[Obtained]] | None = None
        self._ready: Obtained | None = None
        self._activating: tuple[Obtained, asyncio.Task[Path]] | None = None
        self._resting: asyncio.Task[None] | None = None
        self._failures = 0
        self._frozen = False
        self._held: int | None = None

    async def run(self) -> None:
        """Follow. Ends by cancellation: fetching ends, a commit that has begun is finished."""
        try:
            while True:
                self._keeper.changed.clear()
                self._reap()
                self._tell_freshness()
                if self._perform(next_step(self._situation())):
                    continue
                await self._wait()
        finally:
            await self._end()

    # --- one round --------------------------------------------------------------------------

    def _situation(self) -> Situation:
        accepted = self._keeper.accepted
        return Situation(
            head=None if accepted is None else accepted.head,
            expired=self._expired() and not self._accept_expired,
            current=None if self._current is None else self._current[0],
            manifest=None if self._current is None else self._current[1],
            obtaining=None if self._obtaining is None else self._obtaining[0].version,
            ready=None if self._ready is None else self._ready.ref.version,
            activating=None if self._activating is None else self._activating[0].ref.version,
        )

    def _perform(self, step: Step) -> bool:
        """Begin what a step says; return whether the situation changed at once."""
        if step.stop and self._obtaining is not None and not self._obtaining[1].cancelling():
            self._obtaining[1].cancel()
            self._emit_version(EventKind.SUPERSEDED, self._obtaining[0])
        if step.held and self._ready is not None and self._held != self._ready.ref.version:
            self._held = self._ready.ref.version
            self._emit_version(EventKind.HELD, self._ready.ref)
        begun = False
        if step.obtain is not None and self._resting is None:
            obtaining = asyncio.ensure_future(self._acts.obtain(step.obtain))
            self._obtaining = (step.obtain, obtaining)
            begun = True
        if step.activate and self._ready is not None:
            ready, self._ready = self._ready, None
            busy = () if self._obtaining is None else (self._obtaining[0].version,)
            activating = asyncio.ensure_future(self._acts.activate(ready, busy=busy))
            self._activating = (ready, activating)
            begun = True
        return begun

    def _reap(self) -> None:
        """Take over what tasks have finished."""
        if self._obtaining is not None and self._obtaining[1].done():
            ref, task = self._obtaining
            self._obtaining = None
            if not task.cancelled():
                self._outcome(ref, task)
        if self._activating is not None and self._activating[1].done():
            ready, activation = self._activating
            self._activating = None
            if not activation.cancelled():
                self._activated(ready, activation)
        if self._resting is not None and self._resting.done():
            self._resting = None

    def _outcome(self, ref: VersionRef, task: asyncio.Task[Obtained]) -> None:
        try:
            self._ready = task.result()
            self._failures = 0
        except ShardcastError as error:
            self._failed(ref, error)

    def _activated(self, ready: Obtained, task: asyncio.Task[Path]) -> None:
        try:
            path = task.result()
        except ShardcastError as error:
            self._failed(ready.ref, error)
            return
        self._current = (ready.ref.version, ready.ref.manifest)
        accepted = self._keeper.accepted
        if accepted is not None:
            self._updated(ready, path, accepted.head)

    def _failed(self, ref: VersionRef, error: ShardcastError) -> None:
        self._failures += 1
        self._emit_version(EventKind.ERROR, ref, error)
        cap = min(RETRY_FIRST_S * 2.0 ** min(self._failures, 16), RETRY_CAP_S)
        self._resting = asyncio.ensure_future(self._rest(self._rng.uniform(cap / 2, cap)))

    async def _rest(self, seconds: float) -> None:
        await self._sleep(seconds)

    # --- freshness --------------------------------------------------------------------------

    def _expired(self) -> bool:
        accepted = self._keeper.accepted
        return accepted is not None and self._fresh_ms(accepted.head) <= 0

    def _fresh_ms(self, head: Head) -> int:
        return head.expires_at + SKEW_MS - self._keeper.clock_ms()

    def _tell_freshness(self) -> None:
        expired = self._expired()
        if expired != self._frozen:
            self._frozen = expired
            kind = EventKind.FROZEN if expired else EventKind.THAWED
            version, manifest = self._current or (None, None)
            self._emit(WorkerEvent(kind=kind, run=self._run, version=version, manifest=manifest))

    # --- waiting and ending -----------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait until a head comes, a task ends or the head expires."""
        waits: set[asyncio.Future[Any]] = set()
        for task in (
            None if self._obtaining is None else self._obtaining[1],
            None if self._activating is None else self._activating[1],
            self._resting,
        ):
            if task is not None:
                waits.add(task)
        changed = asyncio.ensure_future(self._keeper.changed.wait())
        helpers: list[asyncio.Future[Any]] = [changed]
        accepted = self._keeper.accepted
        if accepted is not None:
            left_s = max(self._fresh_ms(accepted.head), 0) / 1000 + 0.001
            # A clock may be set right at any time, so frozen followers look now and then too.
            pause = LOOK_S if self._frozen else min(left_s, LOOK_S)
            helpers.append(asyncio.ensure_future(self._rest(pause)))
        try:
            await asyncio.wait([*waits, *helpers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _end(self) -> None:
        tasks: list[asyncio.Task[Obtained] | asyncio.Task[Path] | asyncio.Task[None]] = []
        if self._obtaining is not None:
            tasks.append(self._obtaining[1])
        if self._activating is not None:
            tasks.append(self._activating[1])
        if self._resting is not None:
            tasks.append(self._resting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _emit_version(
        self, kind: EventKind, ref: VersionRef, error: ShardcastError | None = None
    ) -> None:
        self._emit(
            WorkerEvent(
                kind=kind,
                run=self._run,
                version=ref.version,
                step=ref.step,
                manifest=ref.manifest,
                bytes_total=ref.bytes,
                error=error,
            )
        )

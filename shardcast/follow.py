"""Following a run: what to do next is a pure function (``steps``), a small loop does it.

Fetching goes on while a version is being activated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

from shardcast.errors import ShardcastError
from shardcast.events import EventKind, WorkerEvent
from shardcast.heads import HeadKeeper
from shardcast.protocol.head import Head, OpenRef, VersionRef
from shardcast.protocol.limits import SKEW_MS
from shardcast.session import Obtained
from shardcast.steps import Situation, Step, gone, next_step

RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
"""A version that could not be had is tried again after so long at most."""

GIVE_WAY_LOOK_S: Final = 0.5
"""How often a follower that rests after a failure looks whether somebody waits."""

LOOK_S: Final = 30.0
"""How often a follower looks at the clock."""


class Acts(Protocol):
    """What a follower can do: the part of ``WorkerSession`` that it needs."""

    async def obtain(self, ref: VersionRef) -> Obtained:
        """Make a version complete on disk."""
        ...

    async def supersedes(self, newer: VersionRef) -> bool:
        """Say whether what is being obtained should be dropped for a newer version.

        If so, what that throws away is counted: say it only once for each that is dropped.
        """
        ...

    async def fetch_ahead(self, ref: OpenRef) -> bool:
        """Fetch some of what a head says of an open version; say whether there is more of it."""
        ...

    async def activate(self, ready: Obtained, *, busy: tuple[int, ...] = ()) -> Path:
        """Commit a version and switch to it."""
        ...


class Follower:
    """Performs steps until it is cancelled, or gives way.

    Attributes:
        failures: How often in a row a version could not be had; may be set before ``run``.
        gives_way: Asked while it rests after a failure, and does nothing else, whether somebody else
            should go on; None: nobody can.
        rest_s: Once it gave way: how long it would have rested yet.
    """

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
        self.failures = 0
        self.gives_way: Callable[[], bool] | None = None
        self.rest_s = 0.0
        self._rests_until = 0.0
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
        self._weighing: tuple[int, asyncio.Task[bool]] | None = None
        self._weighed: tuple[int, bool] | None = None
        self._ready: Obtained | None = None
        self._activating: tuple[Obtained, asyncio.Task[Path]] | None = None
        self._resting: asyncio.Task[None] | None = None
        self._ahead: tuple[OpenRef, asyncio.Task[bool]] | None = None
        self._gone_through: OpenRef | None = None
        self._frozen = False
        self._held: int | None = None

    async def run(self) -> None:
        """Follow. Ends by cancellation: fetching ends, a commit that has begun is finished.

        Also ends where it gives way.
        """
        try:
            while True:
                self._keeper.changed.clear()
                self._reap()
                self._tell_freshness()
                if self._perform(next_step(self._situation())):
                    continue
                if self._gives_way_now():
                    self.rest_s = max(self._rests_until - self._now(), 0.0)
                    return
                await self._wait()
        finally:
            await self._end()

    @property
    def _only_rests(self) -> bool:
        """Whether it rests after a failure and does nothing else."""
        busy = self._obtaining or self._weighing or self._activating or self._ready or self._ahead
        return self._resting is not None and busy is None

    def _gives_way_now(self) -> bool:
        return self._only_rests and self.gives_way is not None and self.gives_way()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # --- one round --------------------------------------------------------------------------

    def _situation(self) -> Situation:
        accepted = self._keeper.accepted
        return Situation(
            head=None if accepted is None else accepted.head,
            expired=self._expired() and not self._accept_expired,
            current=None if self._current is None else self._current[0],
            manifest=None if self._current is None else self._current[1],
            obtaining=None if self._obtaining is None else self._obtaining[0].version,
            weighed=None if self._weighed is None else self._weighed[0],
            switch=self._weighed is not None and self._weighed[1],
            ready=None if self._ready is None else self._ready.ref.version,
            activating=None if self._activating is None else self._activating[0].ref.version,
            ahead=None if self._ahead is None else self._ahead[0].version,
            gone_through=self._gone_through,
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
        if step.drop and self._ahead is not None and not self._ahead[1].cancelling():
            self._ahead[1].cancel()
        if step.ahead is not None:
            self._ahead = (step.ahead, asyncio.ensure_future(self._acts.fetch_ahead(step.ahead)))
            begun = True
        if step.weigh is not None and self._weighing is None:
            weighing = asyncio.ensure_future(self._acts.supersedes(step.weigh))
            self._weighing = (step.weigh.version, weighing)
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
            self._obtaining = self._weighed = None
            self._forget_weighing()
            if not task.cancelled():
                self._outcome(ref, task)
        if self._weighing is not None and self._weighing[1].done():
            newer, weighed = self._weighing
            self._weighing = None
            # Documents that cannot be had: the older version is finished meanwhile.
            failed = weighed.cancelled() or weighed.exception() is not None
            self._weighed = (newer, not failed and weighed.result())
        if self._activating is not None and self._activating[1].done():
            ready, activation = self._activating
            self._activating = None
            if not activation.cancelled():
                self._activated(ready, activation)
        if self._resting is not None and self._resting.done():
            self._resting = None
        if self._ahead is not None and self._ahead[1].done():
            opened, fetched = self._ahead
            self._ahead = None
            # What could not be had is tried again with the next head, or once the version is whole.
            failed = fetched.cancelled() or fetched.exception() is not None
            self._gone_through = None if not failed and fetched.result() else opened

    def _forget_weighing(self) -> None:
        """What was being weighed has ended: its weight does not matter any more."""
        if self._weighing is not None:
            self._weighing[1].cancel()

    def _outcome(self, ref: VersionRef, task: asyncio.Task[Obtained]) -> None:
        try:
            self._ready = task.result()
            self.failures = 0
        except ShardcastError as error:
            if self._gone(ref):
                self._emit_version(EventKind.SUPERSEDED, ref, error)
            else:
                self._failed(ref, error)

    def _gone(self, ref: VersionRef) -> bool:
        """Say whether a version that could not be had is one that nobody need have any more."""
        head = None if self._keeper.accepted is None else self._keeper.accepted.head
        return gone(head, ref.version)

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
        self.failures += 1
        self._emit_version(EventKind.ERROR, ref, error)
        cap = min(RETRY_FIRST_S * 2.0 ** min(self.failures, 16), RETRY_CAP_S)
        seconds = self._rng.uniform(0.0, cap)
        self._rests_until = self._now() + seconds
        self._resting = asyncio.ensure_future(self._rest(seconds))

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
            self._emit(
                WorkerEvent(
                    kind=kind,
                    run=self._run,
                    version=version,
                    manifest=manifest,
                    error=self._keeper.why_expired(),
                )
            )

    # --- waiting and ending -----------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait until a head comes, a task ends or the head expires."""
        waits: set[asyncio.Future[Any]] = set()
        for task in (
            None if self._obtaining is None else self._obtaining[1],
            None if self._weighing is None else self._weighing[1],
            None if self._activating is None else self._activating[1],
            None if self._ahead is None else self._ahead[1],
            self._resting,
        ):
            if task is not None:
                waits.add(task)
        changed = asyncio.ensure_future(self._keeper.changed.wait())
        helpers: list[asyncio.Future[Any]] = [changed]
        if self._only_rests and self.gives_way is not None:
            helpers.append(asyncio.ensure_future(self._rest(GIVE_WAY_LOOK_S)))
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
        tasks: list[asyncio.Future[Any]] = []
        if self._obtaining is not None:
            tasks.append(self._obtaining[1])
        if self._weighing is not None:
            tasks.append(self._weighing[1])
        if self._activating is not None:
            tasks.append(self._activating[1])
        if self._ahead is not None:
            tasks.append(self._ahead[1])
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

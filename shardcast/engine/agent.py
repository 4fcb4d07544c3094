"""The agent: keeps several engines at the version that this host's worker brings.

The worker fetches each version once and commits it; the agent has every engine stage it, lets at most
``max_swapping`` of them pause at a time, and keeps what they serve or have staged from being evicted.
One engine's trouble is nobody else's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardcast.canary import Canary, canary_in
from shardcast.engine.adapters import Use, use_of
from shardcast.engine.board import AgentOptions, Board, stored_head
from shardcast.engine.driver import Engine, Target
from shardcast.engine.forms import Identity
from shardcast.engine.leases import Leases
from shardcast.engine.metrics import EngineMetrics
from shardcast.engine.minder import Minder
from shardcast.engine.repairs import Repair, Repairs
from shardcast.engine.slots import Slots
from shardcast.errors import (
    DiskError,
    EngineError,
    EngineKeyError,
    MalformedError,
    UsageError,
)
from shardcast.events import EventKind, WorkerEvent
from shardcast.protocol.head import Head
from shardcast.protocol.manifest import Version
from shardcast.store.run import RunStore


class Agent:
    """Minds engines. For one event loop.

    Attributes:
        run_name: The run.
        metrics: What it counts.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        out: Path,
        run: str,
        emit: Callable[[WorkerEvent], None],
        options: AgentOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            engines: The engines, each once.
            out: The worker's directory.
            run: The run.
            emit: Takes events; called in this loop.
            options: How they are minded.
            clock: Monotonic seconds.
            rng: Spreads retries.

        Raises:
            UsageError: If there is no engine, or one twice.
        """
        names = [engine.name for engine in engines]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"--engine-url {twice[0]} is given twice")
        if not names:
            raise UsageError("--engine needs at least one --engine-url URL")
        self.metrics = EngineMetrics(run)
        self._engines = list(engines)
        self.run_name = run
        self._greeted = False
        self._store = RunStore(out, run)
        self._emit = emit
        self._head: Head | None = None
        self._current: Target | None = None
        self._given_head: Callable[[], Head | None] = lambda: None
        self._options = options or AgentOptions()
        rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._board = Board(
            run=run,
            options=self._options,
            leases=Leases(self._store, self._refused),
            slots=Slots(
                self._options.max_swapping,
                self._wake,
                clock=clock,
                silent_s=self._options.lease_s + self._options.margin_s,
            ),
            head=self._newest_head,
            retain=self._retain,
            repairs=Repairs(run, emit, self.metrics, self._repaired, clock=clock, rng=rng),
            use=Use(self._options.adapter),
        )
        self._minders = [
            Minder(
                engine,
                self._board,
                emit,
                self.metrics,
                canary=self._canary,
                clock=clock,
                rng=rng,
            )
            for engine in engines
        ]

    def find(self, digest: str) -> Target | None:
        """Return a version that is leased for an engine, by its digest."""
        return self._board.leases.targets.get(digest)

    def follow_head(self, head: Callable[[], Head | None]) -> None:
        """Say where the newest accepted head is; while none is there, the last one known counts.

        At first that is the one on disk.
        """
        self._given_head = head

    def repair_with(self, repair: Repair) -> None:
        """Say who repairs a version that an engine calls damaged (``Worker.repair``).

        Until then that is only told.
        """
        self._board.repairs.repair = repair

    async def run(self) -> None:
        """Mind the engines until cancelled. They are left as they are.

        Begins with ``greet``, where that was not called.

        Raises:
            UsageError: If an engine refuses the key that it is shown at the start.
            EngineError: If what answers at the start is no engine that can be driven.
        """
        try:
            if not self._greeted:
                await self.greet()
            async with asyncio.TaskGroup() as group:
                for minder in self._minders:
                    group.create_task(minder.run(), name=f"minding {minder.name}")
        finally:
            await self.close()

    async def greet(self) -> None:
        """Look at every engine once, so that what they serve is leased before anything is evicted.

        Raises:
            UsageError: If an engine refuses the key.
            EngineError: If what answers is no engine that can be driven.
        """
        self._greeted = True
        self._head = stored_head(self._store)
        results = await asyncio.gather(
            *(minder.greet() for minder in self._minders), return_exceptions=True
        )
        for result in results:
            if isinstance(result, EngineKeyError):
                raise UsageError(result.message, source=result.source) from result
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def update(self, target: Target) -> None:
        """A version is current on this disk, and whole.

        Where the system refuses to hold it, that is told, and tried again.
        """
        self._current = target
        self.look()

    def look(self) -> None:
        """Something may have changed: a head came."""
        self._take_current()
        newest = self._board.newest
        if newest is not None:
            self.metrics.newest.set(newest)
        self._wake()

    async def close(self) -> None:
        """Close connections and give leases back. Activations go on at the engines."""
        await self._board.repairs.close()
        await asyncio.gather(*(engine.close() for engine in self._engines), return_exceptions=True)
        self._board.leases.close()
        self._store.close()

    # --- what the minders ask ---------------------------------------------------------------

    def _newest_head(self) -> Head | None:
        """Return the newest head there ever was: who gives them may have none for a while."""
        given, known = self._given_head(), self._head
        if given is not None and (known is None or given.sequence >= known.sequence):
            self._head = given
        return self._head

    def _wake(self) -> None:
        for minder in self._minders:
            minder.wake.set()

    def _take_current(self) -> None:
        """Hold the version that is current; once that is done engines are to take it."""
        target, board = self._current, self._board
        if target is None:
            return
        if target == board.target and target.digest in board.leases.targets:
            return
        if not board.leases.hold(target):
            return  # it is being evicted, and a newer one comes; or it is held at a later look
        try:
            use = self._use_of(target)
        except DiskError as error:
            board.leases.refuse(target.identity, error)
            return
        board.target, board.use = target, use
        self.metrics.current.set(target.version)
        self._wake()

    def _refused(self, identity: Identity, error: DiskError) -> None:
        self._emit(
            WorkerEvent(
                kind=EventKind.ERROR,
                run=self.run_name,
                version=identity.version,
                manifest=identity.digest,
                error=DiskError(
                    f"version {identity.version} cannot be kept for engines, which is tried again: "
                    f"{error.message}",
                    source=error.source,
                ),
            )
        )

    def _retain(self) -> None:
        self._take_current()
        needed = set[str]().union(*(minder.needs for minder in self._minders))
        needed |= {one.digest for one in (self._board.target, self._current) if one is not None}
        self._board.leases.keep(needed)
        self._board.repairs.keep(needed)

    def _repaired(self, target: Target) -> None:
        self._board.leases.hold(target)
        self._wake()

    def _version(self, target: Target) -> Version | None:
        version = self._store.load_state(target.version)
        return version if version is not None and version.manifest == target.digest else None

    def _use_of(self, target: Target) -> Use:
        name, version = self._options.adapter, self._version(target)
        if version is None:
            return Use(name)
        return use_of(version.layout, name=name, mode=self._options.mode)

    def _canary(self, target: Target) -> Canary | None:
        try:
            version = self._version(target)
        except DiskError as error:
            raise EngineError(
                f"the canary of version {target.version} cannot be read, which is tried again: "
                f"{error.message}",
                source=error.source,
            ) from error
        if version is None:
            return None
        try:
            return canary_in(version.layout.metadata)
        except MalformedError as error:
            self._emit(
                WorkerEvent(
                    kind=EventKind.ENGINE_FAILED,
                    run=self.run_name,
                    version=target.version,
                    manifest=target.digest,
                    error=EngineError(f"version {target.version}: {error.message}"),
                )
            )
            return None

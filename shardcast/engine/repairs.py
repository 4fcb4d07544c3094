"""Versions that an engine calls damaged, or cannot read, are looked at and repaired by this host's worker.

One repair of a version at a time, whoever asks; whether it helped or not, the next one of the same version comes
after a rest that grows, so that a disk that damages everything is not hashed and fetched for ever. Once
something was repaired every engine is told again at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardcast.engine.driver import Target
from shardcast.engine.metrics import EngineMetrics
from shardcast.errors import EngineError, EngineRefusedError, ShardcastError
from shardcast.events import EventKind, WorkerEvent

if TYPE_CHECKING:
    from shardcast.mending import Repaired

FIRST_REST_S: Final = 10.0
MOST_REST_S: Final = 600.0
"""A look hashes all of a version: at most a hundredth of the time, even for a large one."""

Repair = Callable[[int, str], Awaitable["Repaired"]]
"""Looks at a version, by number and manifest, and repairs it: ``Worker.repair``."""


def is_about_files(error: EngineRefusedError) -> bool:
    """Say whether an engine was refused a version's bytes, or got wrong ones."""
    reasons = error.reason in ("integrity", "unavailable")
    return reasons and error.phase not in ("pause", "resume", "serve")


@dataclass(slots=True)
class _Tried:
    """How often a version was looked at, and when it may be again."""

    times: int = 0
    rests_until: float = 0.0


class Repairs:
    """Has versions repaired, for all engines of one agent. For one event loop.

    Attributes:
        repair: Does it; None: nobody does, and what engines say is only told.
        count: How often something was repaired.
    """

    def __init__(
        self,
        run: str,
        emit: Callable[[WorkerEvent], None],
        metrics: EngineMetrics,
        ended: Callable[[Target], None],
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Repair nothing yet.

        Args:
            run: The run.
            emit: Takes events.
            metrics: Counts.
            ended: Called after each.
            clock: Monotonic seconds.
            rng: Spreads rests.
        """
        self.repair: Repair | None = None
        self.count = 0
        self._run = run
        self._emit = emit
        self._metrics = metrics
        self._ended = ended
        self._clock = clock
        self._rng = rng
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tried: dict[str, _Tried] = {}
        self._told: set[tuple[str, str]] = set()

    def ask(self, target: Target, engine: str) -> None:
        """An engine calls a version damaged: have it looked at, unless that is or was just done."""
        tried = self._tried.setdefault(target.digest, _Tried())
        if self.repair is None or target.digest in self._tasks:
            return
        if tried.times and self._clock() < tried.rests_until:
            return
        work = self._look(self.repair, target, engine)
        self._tasks[target.digest] = asyncio.create_task(work, name=f"repairing {target.version}")

    def under_way(self, digest: str | None) -> bool:
        """Say whether a version is being repaired: to look at it meanwhile would be in vain."""
        return digest in self._tasks

    def keep(self, digests: Collection[str]) -> None:
        """Give up on all other versions: no engine needs them any more."""
        for digest, task in self._tasks.items():
            if digest not in digests:
                task.cancel()
        for digest in [one for one in self._tried if one not in digests and one not in self._tasks]:
            del self._tried[digest]
            self._told = {told for told in self._told if told[0] != digest}

    async def close(self) -> None:
        """End what is under way; what was verified is kept."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, repair: Repair, target: Target, engine: str) -> None:
        try:
            repaired = await repair(target.version, target.digest)
        except ShardcastError as error:
            self._metrics.repairs.labels("failed").inc()
            self._tell(EventKind.ERROR, target, error)
        else:
            self._outcome(repaired, target, engine)
        finally:
            del self._tasks[target.digest]
            self._rest(target)
            self._ended(target)

    def _outcome(self, repaired: Repaired, target: Target, engine: str) -> None:
        if repaired.damage:  # the worker has told of it
            self._metrics.repairs.labels("repaired").inc()
            self._told = {told for told in self._told if told[0] != target.digest}
            self.count += 1
            return
        self._metrics.repairs.labels("intact").inc()
        if (target.digest, engine) not in self._told:
            self._told.add((target.digest, engine))
            error = EngineError(
                f"every byte of version {target.version} in {target.path} is right, and engine "
                f"{engine} calls it damaged or cannot read it: it must see this very path and be "
                "able to read all that is in it; if it does, restart it",
                source=engine,
            )
            self._tell(EventKind.INTACT, target, error, engine)

    def _rest(self, target: Target) -> None:
        tried = self._tried.setdefault(target.digest, _Tried())
        if self._clock() > tried.rests_until + MOST_REST_S:
            tried.times = 0  # the last trouble was another one
        tried.times += 1
        rest_s = min(FIRST_REST_S * 2.0 ** min(tried.times - 1, 16), MOST_REST_S)
        tried.rests_until = self._clock() + self._rng.uniform(rest_s / 2, rest_s)

    def _tell(
        self, kind: EventKind, target: Target, error: ShardcastError, engine: str | None = None
    ) -> None:
        self._emit(
            WorkerEvent(
                kind=kind,
                run=self._run,
                version=target.version,
                step=target.step,
                manifest=target.digest,
                path=target.path,
                engine=engine,
                error=error,
            )
        )

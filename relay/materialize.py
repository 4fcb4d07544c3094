"""Materialising: a relay rebuilds full shards from a version that it has and a delta.

So cold workers are served without another full copy from upstream. Until a shard is rebuilt,
requests for it are answered 503: a fill would fetch what is about to be here. That is bounded: once
the delta has been gone through, whatever it did not give is filled as usual, and so is everything
when nothing has come on for ``rebuild_patience_s``.

Rebuilt shards go where fills go, by the same rules (``RelayRun.claims``): whoever writes an extent
claims it first, and only what was verified against its signed digest is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from relay.catalog import DataBlob, Known, ShardBlob
from relay.node import Node
from relay.prefetch import wanted_versions
from relay.rebuild import Failure, Outcome, look_again, rebuild, shards_to_rebuild
from relay.runs import RelayRun
from shardcast.errors import BusyError, DiskError, ShardcastError
from shardcast.protocol.delta import CODECS, FrameAt
from shardcast.protocol.head import DeltaRef, Head
from shardcast.protocol.route import Held, find_route
from shardcast.store.stored import ShardState, StoredVersion

log = logging.getLogger("relay.materialize")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """A version to rebuild, from which base (a manifest; None: a compressed copy)."""

    version: int
    base: str | None


def steps_to(number: int, head: Head, held: Mapping[str, Held]) -> list[Step]:
    """Return by which versions a relay gets to one with deltas alone; nothing if it cannot. Pure.

    Args:
        number: The version, listed or open.
        head: The head.
        held: What is on disk, by manifest. Deltas start from what is whole.
    """
    here = {manifest for manifest, found in held.items() if found.share >= 1.0}
    if head.open is not None and head.open.version == number:
        for delta in head.open.deltas:
            if delta.base is None or delta.base in here:
                return [Step(number, delta.base)]
            before = steps_to(delta.base_version or 0, head, held)
            if before:
                return [*before, Step(number, delta.base)]
        return []
    wanted = head.ref(number)
    if wanted is None or wanted.manifest in here:
        return []
    best, own = cheapest(wanted.deltas, here), held.get(wanted.manifest)
    share = 1.0 if own is None else 1.0 - own.share
    direct = round(share * min(wanted.bytes, wanted.bytes if best is None else best.bytes))
    route = find_route(wanted, head.versions, held, direct)
    steps: list[Step] = []
    for hop in route.hops:
        best = cheapest(hop.ref.deltas, here)
        if best is None or best.bytes >= hop.ref.bytes:
            return []
        steps.append(Step(hop.ref.version, best.base))
        here.add(hop.ref.manifest)
    return steps


def cheapest(deltas: Sequence[DeltaRef], here: Collection[str]) -> DeltaRef | None:
    """Return the delta of fewest bytes whose base is here."""
    usable = [delta for delta in deltas if delta.base is None or delta.base in here]
    return min(usable, key=lambda delta: delta.bytes, default=None)


@dataclass(slots=True)
class _Hope:
    """A version that is about to be rebuilt here: who asks for its shards is told to come again.

    Attributes:
        closed: Whether all of its documents are named.
        until: When it is given up unless something comes on (monotonic).
        over: Whether the delta was gone through, or cannot be used.
        lost: Shards that the delta did not give.
    """

    closed: bool
    until: float
    over: bool = False
    lost: set[int] = field(default_factory=set)


class Materializer:
    """Rebuilds shards of all runs. Used on the event loop; threads do the work.

    Args:
        node: What all share.
    """

    def __init__(self, node: Node) -> None:
        limits = node.config.limits
        self.threads = max(1, min(limits.rebuild_threads, os.cpu_count() or 1))
        self.node = node
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="rebuild")
        self._hopes: dict[tuple[str, int], _Hope] = {}
        self._useless: dict[str, set[str]] = {}
        self.shards = self.bytes = self.failures = 0

    def close(self) -> None:
        """Wait for the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def watch(self, run: RelayRun) -> None:
        """Be told of every new head of a run."""
        run.on_change.append(lambda: self._news(run))

    # --- what is about to be rebuilt --------------------------------------------------------------

    def steps(self, run: RelayRun, number: int) -> list[Step]:
        """Return by which versions one can be rebuilt with what is whole here, the last one it."""
        if run.head is None:
            return []
        held = {
            stored.version.manifest: _held(stored)
            for stored in run.stored.values()
            if stored.version.manifest is not None
        }
        return steps_to(number, run.head.head, held)

    def way_to(self, run: RelayRun, number: int) -> list[Step]:
        """Return how a version is rebuilt now. What no way leads to any more is not waited for.

        Its base may have been evicted, or have turned out damaged, since the head came.
        """
        steps = self.steps(run, number)
        if not steps:
            ways = {s.version for n in wanted_versions(run) for s in self.steps(run, n)}
            for (name, version), hope in self._hopes.items():
                if name == run.name and version not in ways:
                    hope.over = True
        return steps

    def awaited(self, run: RelayRun, known: ShardBlob) -> bool:
        """Say whether a shard that is not here is about to be rebuilt."""
        if not self.node.keeper.held:
            return False
        now = self.node.clock()
        for place in known.places:
            hope = self._hopes.get((run.name, place.version))
            if hope is not None and not hope.over and now < hope.until:
                return place.shard not in hope.lost
        return False

    def _news(self, run: RelayRun) -> None:
        """Begin to hope for what a new head lists; forget what it does not list any more."""
        if run.head is None:
            return
        head, listed = run.head.head, set(run.catalog.numbers())
        for key in [k for k in self._hopes if k[0] == run.name and k[1] not in listed]:
            del self._hopes[key]
        useless = self._useless.get(run.name, set())
        useless &= {blob.digest for n in listed for blob in run.catalog.delta_blobs(n)}
        for number in wanted_versions(run):
            for step in self.steps(run, number):
                opened = head.open is not None and head.open.version == step.version
                self._hope(run, step.version, closed=not opened)

    def _hope(self, run: RelayRun, version: int, *, closed: bool) -> None:
        key, until = (run.name, version), self._deadline()
        hope = self._hopes.get(key)
        if hope is None:
            self._hopes[key] = _Hope(closed, until)
        elif not closed:
            hope.until, hope.over = (
                until,
                False,
            )  # every head of an open version may bring more of it
        elif not hope.closed:
            self._hopes[key] = _Hope(closed, until, lost=hope.lost)

    def _deadline(self) -> float:
        return self.node.clock() + self.node.config.limits.rebuild_patience_s

    def came_on(self, run: RelayRun, version: int) -> None:
        """Note that something of a version came: patience begins anew."""
        hope = self._hopes.get((run.name, version))
        if hope is not None:
            hope.until = self._deadline()

    def gone_through(self, run: RelayRun, version: int) -> None:
        """Note that a version's delta gave what it could: the rest is filled."""
        hope = self._hopes.get((run.name, version))
        if hope is not None and hope.closed:
            hope.over = True

    def report(self) -> dict[str, object]:
        """Return how that stands, for people and tools."""
        now = self.node.clock()
        return {
            "shards": self.shards,
            "bytes": self.bytes,
            "failures": self.failures,
            "awaited": [
                {"run": run, "version": version}
                for (run, version), hope in sorted(self._hopes.items())
                if not hope.over and now < hope.until
            ],
        }

    # --- the work ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def begin(self, run: RelayRun, target: StoredVersion, step: Step) -> Iterator[Work]:
        """Hold base and target while the block rebuilds one from the other.

        Raises:
            BusyError: If one is being evicted at this moment, or just was.
        """
        base = None
        if step.base is not None:
            found = (s for s in run.stored.values() if s.version.manifest == step.base)
            base = next(found, None)
            if base is None:
                raise BusyError(f"the base of version {step.version} was evicted", source=step.base)
        with contextlib.ExitStack() as stack:
            stack.enter_context(target.lease())
            if base is not None:
                stack.enter_context(base.lease())
            yield Work(self, run, target, base, self._useless.setdefault(run.name, set()))

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run something in a thread of the pool; a cancellation is delivered once it is done."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait([future])
                if not future.cancelled():
                    future.exception()  # seen
            raise

    def lost(self, run: RelayRun, version: int, shards: Sequence[int]) -> None:
        """Note that a delta does not give some shards: they are filled."""
        hope = self._hopes.get((run.name, version))
        if hope is not None:
            hope.lost.update(shards)


class Work:
    """The rebuilding of one version by one delta.

    Attributes:
        failed: Whether something of the delta was of no use.
        trouble: Why nothing more can be written.
    """

    def __init__(
        self,
        owner: Materializer,
        run: RelayRun,
        target: StoredVersion,
        base: StoredVersion | None,
        useless: set[str],
    ) -> None:
        self.failed = False
        self.trouble: DiskError | None = None
        self._owner = owner
        self._run = run
        self._target = target
        self._base = base
        self._useless = useless
        self._frames: dict[str, tuple[FrameAt, ...]] = {}
        self._find_frames()

    def _find_frames(self) -> None:
        """Look which blobs rebuild which shards."""
        number = self._target.version.number
        base = None if self._base is None else self._base.version.manifest
        count = self._target.version.layout.shard_count
        for part in self._run.catalog.delta_parts(number, base):
            if part.codec not in CODECS or part.shards.stop > count:
                self.failed = True
                log.warning(
                    "run %s: version %d: its delta of codec %s for shards up to %d is of no use",
                    self._run.name,
                    number,
                    part.codec,
                    part.shards.stop - 1,
                )
                continue
            self._frames.update((blob.digest, frames) for blob, frames in part.placed())

    def blobs(self) -> list[Known]:
        """Return the delta blobs that rebuild something that is missing, in shard order."""
        found = (self._run.find(d) for d in self._frames if self._wanted(d))
        return [known for known in found if known is not None]

    def _wanted(self, digest: str) -> frozenset[int]:
        """Return the shards of a blob that are missing, of known digest, and nobody writes."""
        if digest in self._useless:
            return frozenset()
        return shards_to_rebuild(self._frames[digest], self._target, self._run.claims)

    async def use(self, known: Known) -> None:
        """Rebuild what one blob gives. A cancellation leaves whole shards only."""
        if self.trouble or not isinstance(known, DataBlob) or known.digest not in self._frames:
            return
        run, owner, number = self._run, self._owner, self._target.version.number
        wanted = self._wanted(known.digest)
        if not wanted:
            return
        claims = {(number, shard) for shard in wanted}
        run.claims |= claims
        try:
            outcome = await owner.in_pool(partial(self._rebuild, known, wanted))
        except DiskError as error:
            owner.lost(run, number, sorted(wanted))
            self.trouble = error
            return
        finally:
            run.claims -= claims
        if outcome is None:
            return
        owner.shards += outcome.shards
        owner.bytes += outcome.bytes
        owner.node.metrics.materialized.inc(outcome.shards)
        owner.node.metrics.materialized_bytes.inc(outcome.bytes)
        if outcome.shards:
            owner.came_on(run, number)
        for failure in outcome.failures:
            await self._failed(known, failure)

    def _rebuild(self, known: DataBlob, wanted: frozenset[int]) -> Outcome | None:
        """Rebuild shards; None if the blob is not here. Blocking."""
        found = self._run.shelf.open(known.digest)
        if found is None:
            return None
        fd, _ = found
        try:
            if self._target.damaged is not None:
                self._target.restore_files()
            return rebuild(fd, self._frames[known.digest], wanted, self._target, self._base)
        finally:
            os.close(fd)

    async def _failed(self, known: DataBlob, failure: Failure) -> None:
        """Find out whose fault it was, say so, and leave the shards to fills."""
        run, owner, number = self._run, self._owner, self._target.version.number
        self.failed = True
        bad = await self._bad_base(failure)
        if not bad:
            self._useless.add(known.digest)
        cause = "base" if bad else "delta"
        owner.failures += 1
        owner.node.metrics.materialize_failures.labels(cause=cause).inc()
        owner.lost(run, number, failure.shards)
        log.error(
            "run %s: version %d, shards %d-%d are not rebuilt from delta blob %s and are fetched: %s",
            run.name,
            number,
            failure.shards[0],
            failure.shards[-1],
            known.digest,
            f"{_shards(bad)} of the base are damaged on this disk" if bad else failure.reason,
        )

    async def _bad_base(self, failure: Failure) -> list[int]:
        """Hash what a wrong frame was decoded from again; return what is damaged."""
        base, run = self._base, self._run
        if base is None:
            return []
        number = base.version.number
        gone = [s for s in failure.read if base.state(s) is ShardState.MISSING]
        claims = {(number, shard) for shard in failure.read if shard not in gone} - run.claims
        run.claims |= claims
        try:
            shards = sorted(shard for _, shard in claims)
            return gone + await self._owner.in_pool(partial(look_again, base, shards))
        except ShardcastError as error:
            log.warning("run %s: version %d: %s", run.name, number, error)
            return gone
        finally:
            run.claims -= claims


def _held(stored: StoredVersion) -> Held:
    layout = stored.version.layout
    missing = sum(layout.extent(shard).length for shard in stored.missing())
    return Held(layout.total_bytes, layout.total_bytes - missing)


def _shards(numbers: Sequence[int]) -> str:
    return f"shards {', '.join(map(str, sorted(numbers)[:8]))}"

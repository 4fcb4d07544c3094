"""The relay's core: its runs, and how a blob that is not on disk gets there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol

from relay.admission import Admission
from relay.catalog import DocumentBlob, Known, ShardBlob
from relay.config import RelayConfig
from relay.descriptors import budget
from relay.fill import Fill, Target
from relay.filling import Fills
from relay.keeping import Keeper, Keeping
from relay.metrics import Metrics
from relay.opened import Opened
from relay.pacing import Pacer
from relay.parents import Parents, Place
from relay.readers import Leases, Readers
from relay.respond import Identity
from relay.responses import Responses
from relay.routes import ROUNDS, Sources
from relay.runs import RelayRun
from relay.siblings import Siblings
from relay.targets import SpareTarget, target_for
from relay.threads import in_thread_or
from shardcast.errors import NetworkError, NotFoundError, ShardcastError
from shardcast.store.run import RunStore
from shardcast.store.store import Store

log = logging.getLogger("relay.node")

CLAIM_WAIT_S: Final = 3.0
"""How long a request waits for somebody who reads or writes its shard on this disk: the shard may
be here in a moment, and until then it cannot be fetched."""


READING_THREADS: Final = 8
"""Readers of cold shards wait for the disk in these, however many they are: enough for any disk to
be busy. Nothing that brings a new head here waits behind them."""


class Feed(Protocol):
    """Where heads come from: the store itself (an origin) or the parents."""

    async def prepare(self) -> None:
        """Serve what the store has already, before anyone can connect."""
        ...

    async def run(self) -> None:
        """Feed heads to the node until cancelled."""
        ...

    async def refresh(self, run: RelayRun) -> None:
        """Look for a newer head now, and for documents that are known by name only."""
        ...

    async def discover(self, name: str) -> None:
        """Look for a run that is not known yet."""
        ...


class Making(Protocol):
    """Who makes room on a full disk."""

    async def make(self, run: RelayRun, number: int, needed: int) -> bool:
        """Remove versions until so many bytes are free; say whether they are."""
        ...


class Reporting(Protocol):
    """Who reads what is on disk again."""

    @property
    def age_s(self) -> float:
        """Seconds since everything was read."""
        ...

    def report(self) -> dict[str, object]:
        """Return how that stands, for people and tools."""
        ...


class Rebuilding(Protocol):
    """Who rebuilds shards from a version that is here and a delta."""

    def awaited(self, run: RelayRun, known: ShardBlob) -> bool:
        """Say whether a shard that is not here is about to be rebuilt."""
        ...

    def report(self) -> dict[str, object]:
        """Return how that stands, for people and tools."""
        ...

    def close(self) -> None:
        """Wait for the threads."""
        ...


class Node:
    """What handlers, feeds and background work share. Used on the event loop.

    Attributes:
        config: What the relay was told.
        store: Its store.
        identity: Its name in the tree.
        runs: The runs it knows, by name.
        draining: Whether it is about to stop.
        sources: Where fills come from; None at an origin.
        room: Makes room on a full disk.
        scrub: Reads what is on disk again.
        rebuilding: Rebuilds shards from deltas; None: they are fetched.
        sending: Blobs that are being sent at the moment.
        responses: Which versions they are of.
        keeper: Whether this process may change the store.
        reading: Threads that wait for the disk on behalf of readers; heads and documents have others.
    """

    def __init__(
        self,
        config: RelayConfig,
        store: Store,
        node: str,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.store = store
        self.clock = clock
        self.started = clock()
        self.identity = Identity(node=node, via=f"1.1 shardcast-{node[:12]}")
        self.metrics = Metrics()
        self.budget = budget()
        self._leases = Leases(self.budget.leases)
        self.admission = Admission(config.limits, self.budget, clock, config.trusted_proxies)
        self.pacer = Pacer.limiting(
            config.limit_rate_bytes_per_s, config.limit_rate_client_bytes_per_s, loop
        )
        self.parents = Parents(config, node)
        self.siblings = Siblings(config.siblings, node, clock) if config.siblings else None
        self.sources = (
            None
            if config.origin
            else Sources(config, node, self.parents, self.siblings, self.metrics)
        )
        self.fills = Fills(
            loop,
            self.metrics,
            threads=min(config.limits.fill_threads, self.budget.fills),
            most=config.limits.max_fills,
        )
        self.reading = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="relay-read")
        self.responses = Responses(clock)
        self.keeper = Keeper(store, needed=config.writes, clock=clock)
        self.runs: dict[str, RelayRun] = {}
        self.draining = False
        self.feed: Feed | None = None
        self.room: Making | None = None
        self.scrub: Reporting | None = None
        self.rebuilding: Rebuilding | None = None
        self.sending = 0
        self.on_run: list[Callable[[RelayRun], None]] = []
        self._discovered = float("-inf")
        self._refreshing: dict[str, asyncio.Task[None]] = {}

    @property
    def depth(self) -> int:
        """How far this relay is from the origin."""
        return self.place.depth

    @property
    def place(self) -> Place:
        """Where this relay stands in the tree."""
        place = self.parents.place
        return place if self.config.depth is None else Place(self.config.depth(), place.path)

    # --- runs -----------------------------------------------------------------------------------

    def add_run(self, store: RunStore) -> RelayRun:
        """Begin to serve a run; the same object for the same name."""
        run = self.runs.get(store.run)
        if run is None:
            # Only beside an origin does another process, its publisher, remove versions.
            readers = Readers(
                self.clock,
                self.config.limits.recent_s,
                leases=self._leases if self.config.origin and self.config.depth is None else None,
            )
            run = self.runs[store.run] = RelayRun(store, self.clock, readers)
            run.replaces = not self.config.origin
            run.on_change.append(lambda: self._head_changed(run))
            for hook in self.on_run:
                hook(run)
        return run

    async def find_run(self, name: str) -> RelayRun | None:
        """Return a run that has a head; looks for a new one at most once a second."""
        run = self.runs.get(name)
        if run is not None and run.head is not None:
            return run
        now, pause = self.clock(), self.config.limits.refresh_pause_s
        if self.feed is not None and now - self._discovered > pause:
            self._discovered = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.limits.refresh_wait_s):
                    await self.feed.discover(name)
        run = self.runs.get(name)
        return run if run is not None and run.head is not None else None

    async def refresh(self, run: RelayRun, digest: str) -> None:
        """Look for news of a run until a digest is known: one look at a time, at most one a second."""
        task = self._refreshing.get(run.name)
        if task is None:
            if self.clock() - run.refreshed < self.config.limits.refresh_pause_s:
                return
            run.refreshed = self.clock()
            task = asyncio.get_running_loop().create_task(self._refresh(run))
            self._refreshing[run.name] = task
            task.add_done_callback(lambda _done: self._refreshing.pop(run.name, None))
        wait_s = self.config.limits.refresh_wait_s
        known = asyncio.ensure_future(run.wait_known(digest, wait_s))
        try:
            await asyncio.wait({task, known}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            known.cancel()

    async def _refresh(self, run: RelayRun) -> None:
        # Bounded: while a silent parent is waited for, others could tell the news.
        try:
            async with asyncio.timeout(self.config.limits.refresh_wait_s):
                if self.feed is not None:
                    await self.feed.refresh(run)
        except (ShardcastError, TimeoutError) as error:
            log.info("run %s: refreshing the head: %r", run.name, error)

    def _head_changed(self, run: RelayRun) -> None:
        self.fills.hasten(run.name)
        if run.head is not None:
            self.metrics.sequence.labels(run=run.name).set(run.head.sequence)
            self.metrics.version.labels(run=run.name).set(run.head.head.version or 0)

    # --- blobs ----------------------------------------------------------------------------------

    def fill(self, run: RelayRun, known: Known, *, for_sibling: bool = False) -> Fill:
        """Return the fill of a blob, started if it is not on its way yet.

        Raises:
            NotFoundError: At an origin, or where the head has just moved on.
            BusyError: If its place is being written otherwise.
            NetworkError: If too much is on its way already, or a sibling asks for what comes
                from a sibling.
        """
        fill = self.fills.get(run.name, known.digest)
        if fill is not None:
            if for_sibling and fill.lateral:
                raise NetworkError(f"blob {known.digest} comes from a sibling at the moment")
            return fill
        if self.sources is None:
            raise NotFoundError(f"blob {known.digest} of run {run.name!r} is not here")
        if self.fills.full(run.name):
            raise NetworkError(f"{len(self.fills.open())} blobs are on their way already")
        if for_sibling and self.siblings is not None and self.siblings.owner(known.digest):
            raise NetworkError(f"this relay does not own blob {known.digest}")
        if isinstance(known, ShardBlob) and not self.keeper.held:
            target: Target = SpareTarget(run, known)
        else:
            target = target_for(run, known)
        route = self.sources.route(
            run.name,
            known.digest,
            document=isinstance(known, DocumentBlob),
            for_sibling=for_sibling,
            # No parent comes to have again what the head has dropped.
            rounds=1 if run.catalog.lingers(known) else ROUNDS,
        )
        return self.fills.start(target, route, run.rank(known))

    async def open_here(self, run: RelayRun, known: Known) -> Opened | None:
        """Open a blob that is on disk, or will be in a moment by what is going on; else None."""
        opened = run.open_now(known) or await self._look(run, known)
        if opened is None and await self._ready_to_fill(run, known):
            opened = await self._look(run, known)
        # Its fill may have ended while a thread looked: without this look it would be fetched again.
        return opened or run.open_now(known)

    async def _look(self, run: RelayRun, known: Known) -> Opened | None:
        """Open a blob that may have to be hashed. Nothing stays open after a cancellation."""
        if run.surely_absent(known):
            return None  # what is new does not wait behind who reads what is cold

        def close(opened: Opened | None) -> None:
            if opened is not None:
                opened.close()

        reading = None if isinstance(known, DocumentBlob) else self.reading
        return await in_thread_or(partial(run.open, known), close, reading)

    async def _ready_to_fill(self, run: RelayRun, known: Known) -> bool:
        """Wait until a fill can be started that is kept; return whether there was a wait.

        A shard whose extent is just looked at or written otherwise cannot be filled. While one relay
        takes the place of another, both may fill and only one may keep. And a fill that nobody
        waited for was given up when the relay began to drain.
        """
        waited = False
        while (fill := self.fills.get(run.name, known.digest)) and fill.cancel.cancelled:
            waited = True
            await fill.finished()
        if isinstance(known, ShardBlob) and self.keeper.state is Keeping.WAITING:
            waited = True
            await self.keeper.hoped(self.config.limits.take_over_wait_s)
        return await self._freed(run, known) or waited

    async def _freed(self, run: RelayRun, known: Known) -> bool:
        """Wait for whoever works on a shard's extent without fetching it; return whether one did."""
        if not isinstance(known, ShardBlob) or self.sources is None:
            return False
        claim = (known.places[0].version, known.places[0].shard)
        if claim not in run.claims or self.fills.get(run.name, known.digest) is not None:
            return False
        if self.rebuilding is not None and self.rebuilding.awaited(run, known):
            return False  # its readers are told, and come again
        await run.claims.freed(claim, CLAIM_WAIT_S)
        return True

    async def ensure(self, run: RelayRun, known: Known) -> None:
        """Bring a blob here if it is not; wait until it is verified.

        Raises:
            ShardcastError: If it does not come.
        """
        opened = await self.open_here(run, known)
        if opened is not None:
            opened.close()
            return
        fill = self.fill(run, known)
        await fill.finished()
        if fill.error is not None:
            raise fill.error

    async def close(self) -> None:
        """End every look for news."""
        looks = list(self._refreshing.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    def wake_runs(self) -> None:
        """Let everyone who waits for a head look again."""
        for run in self.runs.values():
            run.wake()

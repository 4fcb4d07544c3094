"""Retention: which versions leave the disk. Nothing is deleted under a reader."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from relay.isolation import for_each
from relay.node import Node
from relay.responses import overdue
from relay.runs import RelayRun
from relay.threads import in_thread
from shardcast.errors import BusyError
from shardcast.store.retention import Held, Keep, choose_evictions, collect

log = logging.getLogger("relay.retaining")

EVERY_S = 5.0
ABANDONED_MS = 3_600_000
"""What was staged at an origin so long ago, and was passed by since, was given up."""
COLLECT_S = 30.0
"""Longest time between two looks for leftovers."""


def keep_of(node: Node) -> Keep:
    """Return what the options say."""
    config = node.config
    return Keep(
        count=config.keep,
        quota_bytes=config.quota_bytes,
        max_age_ms=None if config.keep_for_s is None else int(config.keep_for_s * 1000),
    )


def choose(node: Node, run: RelayRun, held: list[Held], staged: set[int]) -> tuple[int, ...]:
    """Choose what to evict: what the head dropped, then what is over a bound. Pure.

    The newest whole version stays whatever happens, so does what is newer (it is on its way),
    what was asked for a moment ago, and anything while there is no head.
    """
    if run.head is None or not held:
        return ()
    head = run.head.head
    now = node.clock()
    newest = run.complete_version()
    recent = {n for n, at in run.used.items() if now - at < node.config.limits.recent_s}
    on_way = {v.number for v in held if newest is None or v.number >= newest}
    protected = recent | on_way
    named = {ref.version for ref in head.versions}
    if head.open is not None:
        named.add(head.open.version)
    newest_named = max(named, default=0)
    dropped = {v.number for v in held if v.number not in named and v.number <= newest_named}
    if node.config.origin:
        # Uploads under way are staged, and nothing names them yet; nor what was given up, of which the
        # next one takes what it can.
        dropped -= {v.number for v in held if v.number in staged and v.age_ms < ABANDONED_MS}
    kept = [v for v in held if v.number not in dropped]
    over = choose_evictions(kept, keep_of(node), protected)
    return tuple(sorted((dropped - protected) | set(over)))


def held_versions(run: RelayRun) -> tuple[list[Held], set[int]]:
    """Return the versions on disk, and which of them are staged. Blocking."""
    held = []
    staged = set(run.store.staged())
    for number in {*run.store.committed(), *staged}:
        stored = run.store.stored(number)
        if stored is None:
            continue
        try:
            born = stored.directory.stat().st_ctime
        except OSError:
            continue
        age_ms = int(max(0.0, time.time() - born) * 1000)
        held.append(Held(number, stored.version.layout.total_bytes, age_ms))
    return held, staged


class Retention:
    """Removes versions in the background."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._collected: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look every few seconds until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await for_each(self._node.runs.values(), "retention", self.apply)

    async def apply(self, run: RelayRun) -> None:
        """Evict what one run does not need."""
        run.let_go()
        held, staged = await asyncio.to_thread(held_versions, run)
        evict = choose(self._node, run, held, staged)
        self._cut_off(run, evict)
        sequence = run.head.sequence if run.head is not None else 0
        # What a full disk left behind goes once it is old enough, whether or not a new head comes.
        before, at = self._collected.get(run.name, (-1, 0.0))
        if not evict and before == sequence and self._node.clock() - at < COLLECT_S:
            return
        self._collected[run.name] = sequence, self._node.clock()
        claimed = {number for number, _shard in run.claims}
        evict = tuple(number for number in evict if number not in claimed)
        for number in evict:
            run.stored.pop(number, None)
        # What a version that lingers is rebuilt from stays with it.
        keep = run.catalog.digests()
        # To its end: who comes after this process may have the store by then.
        gone = await in_thread(partial(self._collect, run, evict, keep))
        await asyncio.to_thread(run.shelf.prune)
        for number in gone:
            run.used.pop(number, None)
            self._node.metrics.evicted.inc()
            log.info("run %s: version %d evicted", run.name, number)
        await run.attach()

    def _cut_off(self, run: RelayRun, evict: tuple[int, ...]) -> None:
        """Wait no longer for readers of versions beyond those that may linger."""
        if run.head is None:
            return
        responses, catalog = self._node.responses, run.catalog
        sent = responses.versions(run.name)
        for number in overdue(sent, catalog.numbers(), evict, catalog.lingering()):
            count = responses.cut(run.name, number)
            if count:
                log.warning(
                    "run %s: version %d must go, and newer ones are read, too: %d responses cut off",
                    run.name,
                    number,
                    count,
                )

    def _collect(
        self, run: RelayRun, numbers: tuple[int, ...], keep: frozenset[str]
    ) -> tuple[int, ...]:
        """Evict, and remove documents that nothing names any more. Blocking."""
        lock = run.store.lock("publish", what=f"retention of run {run.name!r}")
        try:
            with lock:
                return collect(run.store, numbers, keep=keep).versions
        except BusyError:
            return ()  # a publisher is at work; it collects by itself

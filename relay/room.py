"""Room on a full disk, or within a quota: which versions go so that a newer one can come.

Retention (``relay.retaining``) removes what the options say, every few seconds. This removes what
nobody needs at the moment when something does not fit, whatever the options say. In this order:
what no head retains any more, then the versions that have been here longest; never the newest
whole version of a run, never what is being fetched or read (its lease says so), unless it is read
more slowly than any worker would. What was asked for a moment ago goes last, and only where the
disk itself is too small for what the run's head calls newest: then everyone waits for that, and
readers of the old one go on elsewhere. An origin gives up only what no head retains: nobody else
has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from relay.node import Node
from relay.retaining import held_versions
from relay.runs import RelayRun
from relay.threads import in_thread
from shardcast.errors import DiskFullError, ShardcastError
from shardcast.protocol.manifest import Version
from shardcast.store.files import disk_errors
from shardcast.store.retention import Held

log = logging.getLogger("relay.room")

PAUSE_S: Final = 2.0
"""Between two looks of which the first found nothing to remove: a full disk is no reason to spin."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that could go.

    Attributes:
        run: Its run.
        number: It.
        bytes: What it takes at most.
        age_ms: How long it has been here.
        dropped: Whether no head retains it.
        recent: Whether it was asked for a moment ago.
    """

    run: str
    number: int
    bytes: int
    age_ms: int
    dropped: bool
    recent: bool = False


def candidates(
    node: Node, run: RelayRun, held: Iterable[Held], staged: set[int], wanted: int | None
) -> list[Candidate]:
    """Return which versions of a run could go for the sake of ``wanted``. Pure."""
    if run.head is None:
        return []
    head, now = run.head.head, node.clock()
    named = {ref.version for ref in head.versions}
    newcomers = {head.version}
    if head.open is not None:
        named.add(head.open.version)
        newcomers.add(head.open.version)
    coming = newcomers | {wanted}
    recent = {n for n, at in run.used.items() if now - at < node.config.limits.recent_s}
    claimed = {number for number, _shard in run.claims}
    spared = claimed | coming | {run.complete_version()}
    if wanted is None or wanted not in newcomers:
        spared |= recent
    if node.config.origin:
        spared |= named | staged
    newest = max(named, default=0)
    return [
        Candidate(run.name, v.number, v.bytes, v.age_ms, v.number not in named, v.number in recent)
        for v in held
        if v.number not in spared and v.number <= newest
    ]


def in_order(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates, the most dispensable first. Pure."""
    return sorted(found, key=lambda c: (c.recent, not c.dropped, -c.age_ms, c.run, c.number))


class Room:
    """Makes room. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = asyncio.Lock()
        self._in_vain = float("-inf")

    def watch(self, run: RelayRun) -> None:
        """Be asked by a run before it begins a version, and when one does not fit."""
        run.admit = lambda version: self._admit(run, version)
        run.short = lambda number, needed: run.spawn(self._make_quietly(run, number, needed))

    async def make(self, run: RelayRun, number: int, needed: int) -> bool:
        """Remove versions until ``needed`` bytes are free on the disk and within the quota.

        Args:
            run: The run that needs them.
            number: Its version that they are for, which stays.
            needed: Bytes.

        Returns:
            Whether they are free now.
        """
        async with self._lock:
            if await self._enough(needed):
                return True
            if self._node.clock() - self._in_vain < PAUSE_S:
                return False
            for victim in await self._victims(run, number):
                if victim.recent and needed <= await asyncio.to_thread(self._free_bytes):
                    break  # a quota is no reason to take from readers what they read
                if not await self._evict(victim, f"run {run.name}, version {number}"):
                    self._cut_off(victim)
                    continue
                if await self._enough(needed):
                    return True
            self._in_vain = self._node.clock()
            log.warning(
                "run %s, version %d: %d bytes do not fit, and every other version is needed or "
                "being read; give the store more room, or a smaller --keep",
                run.name,
                number,
                needed,
            )
            return False

    def _cut_off(self, victim: Candidate) -> None:
        """Wait no longer for who reads a version that is in the way more slowly than any worker."""
        count = self._node.responses.cut(victim.run, victim.number, late=True)
        if count:
            log.warning(
                "run %s: version %d is in the way, and is read too slowly: %d responses cut off",
                victim.run,
                victim.number,
                count,
            )

    async def _make_quietly(self, run: RelayRun, number: int, needed: int) -> None:
        try:
            await self.make(run, number, needed)
        except ShardcastError as error:
            log.warning("run %s: making room for version %d: %s", run.name, number, error)

    def _admit(self, run: RelayRun, version: Version) -> None:
        """Refuse to begin an older version beyond the quota; the newest always gets its place.

        Raises:
            DiskFullError: If it does not fit; room is being made then, where there is any.
        """
        quota, size = self._node.config.quota_bytes, version.layout.total_bytes
        if quota is None or run.head is None or self._held_bytes() + size <= quota:
            return
        run.short(version.number, size)
        head = run.head.head
        coming = (head.version, None if head.open is None else head.open.version)
        if version.number not in coming:
            raise DiskFullError(
                f"version {version.number} of run {run.name!r} has {size} bytes, and "
                f"{self._held_bytes()} of the quota of {quota} are taken",
                source=str(run.store.root),
            )

    def _held_bytes(self) -> int:
        return sum(
            stored.version.layout.total_bytes
            for run in self._node.runs.values()
            for stored in run.stored.values()
        )

    async def _enough(self, needed: int) -> bool:
        quota = self._node.config.quota_bytes
        if quota is not None and self._held_bytes() + needed > quota:
            return False
        return needed <= await asyncio.to_thread(self._free_bytes)

    def _free_bytes(self) -> int:
        """Return what the file system has. Blocking."""
        root = self._node.store.root
        with disk_errors(root, "looking for free space"):
            found = os.statvfs(root)
        return found.f_bavail * found.f_frsize

    async def _victims(self, wanting: RelayRun, number: int) -> list[Candidate]:
        found: list[Candidate] = []
        for run in list(self._node.runs.values()):
            held, staged = await asyncio.to_thread(held_versions, run)
            wanted = number if run is wanting else None
            found += candidates(self._node, run, held, staged, wanted)
        return in_order(found)

    async def _evict(self, victim: Candidate, whom: str) -> bool:
        """Remove one version unless somebody reads it; say whether it is gone."""
        run = self._node.runs[victim.run]
        if any(number == victim.number for number, _shard in run.claims):
            return False
        try:
            gone = await in_thread(partial(run.store.evict, victim.number))
        except ShardcastError as error:
            log.warning("run %s: version %d: %s", victim.run, victim.number, error)
            return False
        if gone:
            run.stored.pop(victim.number, None)
            run.used.pop(victim.number, None)
            self._node.metrics.evicted.inc()
            log.warning(
                "run %s: version %d (%d bytes) evicted: no room for %s",
                victim.run,
                victim.number,
                victim.bytes,
                whom,
            )
        return gone

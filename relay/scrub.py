"""Reading what is on disk again, slowly and for ever, to find what rotted there.

Serving compares size, time and inode of a file; a bit that flips on the disk changes none of them.
So every shard and blob is hashed again at a bounded rate (an eighth of it while anything is sent or
fetched). A relay fetches what it finds damaged through an ordinary fill; an origin, and a worker
that serves, can ask nobody: they mark the version damaged, say so, and stop serving that shard.

**Repair in place.** A relay's fill writes into the extent of the committed version. That exposes
nobody to anything worse: a shard found damaged is *missing* from that moment, so no new reader gets
it from the extent; who is being sent it already gets bytes that were wrong before, or right ones, or
a mixture, and checks the digest as always; nobody else reads a relay's files. A worker's files are
read by engines, which check nothing: a worker repairs only with bytes that were verified elsewhere
first (``shardcast.obtain``).

While a shard is hashed its extent is claimed, so that no fill writes to it and half-written bytes are
never taken for damage; the version is leased, so that it stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from relay import respond
from relay.copies import copy_local
from relay.isolation import for_each
from relay.node import Node
from relay.runs import RelayRun
from relay.salvaging import salvage_missing
from relay.threads import in_thread
from shardcast.errors import BusyError, DiskError, ShardcastError
from shardcast.store.stored import ShardState, StoredVersion

log = logging.getLogger("relay.scrub")

BUSY_SHARE: Final = 8
"""While bytes are sent or fetched, one in so many of the usual bytes is read."""
IDLE_S: Final = 5.0
"""Between two passes over a store with little or nothing in it."""
_SMALLEST: Final = 4096
"""What looking at a blob counts as, at least: opening it costs about as much as reading a page."""

_T = TypeVar("_T")


def pause_s(count: int, rate_bytes_per_s: int, took_s: float, *, busy: bool) -> float:
    """Return how long to rest after reading ``count`` bytes in ``took_s`` seconds. Pure."""
    share = BUSY_SHARE if busy else 1
    return max(0.0, max(count, _SMALLEST) * share / rate_bytes_per_s - took_s)


def rotated(items: Sequence[_T], start: float) -> list[_T]:
    """Return all items in order, beginning at a place given as a share of the whole. Pure."""
    cut = int(len(items) * start)
    return [*items[cut:], *items[:cut]]


class Scrubber:
    """Reads one relay's store again. Used on the event loop."""

    def __init__(
        self,
        node: Node,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            node: Whose store; its clock is the clock.
            sleep: Waits.
            rng: Chooses where the first pass begins: a relay that is restarted often would else
                read the same versions again and again.
        """
        self._node = node
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311 - spreads work, keeps no secret
        self._bytes = 0
        self._damaged = 0
        self._passes = 0
        self._passed = node.clock()
        self._at: str | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last full pass; before the first: since the start."""
        return self._node.clock() - self._passed

    def report(self) -> dict[str, object]:
        """Return how it stands, for people and tools."""
        return {
            "rate_bytes_per_s": self._node.config.scrub_rate_bytes_per_s,
            "bytes": self._bytes,
            "damaged": self._damaged,
            "passes": self._passes,
            "last_pass_s": round(self.age_s, 1) if self._passes else None,
            "at": self._at,
        }

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read_all()
            await self._sleep(IDLE_S)

    async def read_all(self) -> None:
        """Read everything once. The first time it begins anywhere."""
        start = 0.0 if self._passes else self._rng.random()

        async def read(run: RelayRun) -> None:
            for number in rotated(sorted(run.stored, reverse=True), start):
                await self._version(run, number, start)
            await self._shelf(run, start)

        await for_each(self._node.runs.values(), "scrubbing", read)
        self._at = None
        self._passes += 1
        self._passed = self._node.clock()

    # --- shards -----------------------------------------------------------------------------

    async def _version(self, run: RelayRun, number: int, start: float) -> None:
        stored = run.stored.get(number)
        if stored is None:
            return
        self._at = f"{run.name}/{number}"
        if self._node.sources is None and stored.committed and stored.missing():
            await self._recall(run, stored)
        for shard in rotated(range(stored.version.layout.shard_count), start):
            if run.stored.get(number) is not stored or not stored.alive:
                return  # evicted, perhaps by another process, or begun anew
            if stored.state(shard) is ShardState.MISSING:
                continue
            began = self._node.clock()
            if not await self._shard(run, stored, shard):
                await self._repair(run, stored)
            await self._rest(stored.version.layout.extent(shard).length, began)

    async def _shard(self, run: RelayRun, stored: StoredVersion, shard: int) -> bool:
        """Read one shard; say whether it is not known to be bad."""
        claim = (stored.version.number, shard)
        if claim in run.claims:
            return True
        run.claims.add(claim)
        try:
            good = await in_thread(partial(_look, stored, shard))
        except BusyError:
            return True  # it is being evicted
        except DiskError as error:
            if not stored.alive:
                return True  # its publisher evicted it while it was read
            log.error("run %s: %s", run.name, error)
            good = not await in_thread(partial(_give_up, stored, shard))
        finally:
            run.claims.discard(claim)
        self._read(stored.version.layout.extent(shard).length)
        if not good:
            self._found(run, stored.damaged or f"shard {shard} of {stored.directory} is damaged")
        return good

    async def _recall(self, run: RelayRun, stored: StoredVersion) -> None:
        """Look whether somebody put the bytes of missing shards back: a worker, or a backup."""
        try:
            found = await salvage_missing(run, stored)
        except ShardcastError as error:
            if stored.alive:
                log.error("run %s: %s", run.name, error)
            return
        if found and not stored.missing():
            log.info("run %s: version %d is whole again", run.name, stored.version.number)

    async def _repair(self, run: RelayRun, stored: StoredVersion) -> None:
        """Bring damaged shards again: from another version on this disk, else from upstream."""
        if self._node.sources is None:
            if self._node.config.on_damage is not None:
                self._node.config.on_damage(run.name, stored.version.number)
            return
        try:
            others = list(run.stored.values())
            await copy_local(run, stored, others)
            for shard in stored.missing():
                digest = stored.version.digests[shard]
                known = None if digest is None else run.find(digest)
                if known is not None:
                    await self._node.ensure(run, known)
            if stored.missing():  # the fill went to a newer version that lacked it too
                await copy_local(run, stored, others)
        except ShardcastError as error:
            log.warning("run %s: repairing version %d: %s", run.name, stored.version.number, error)
            return
        if not stored.missing():
            log.info("run %s: version %d is whole again", run.name, stored.version.number)

    # --- documents and delta blobs ------------------------------------------------------------

    async def _shelf(self, run: RelayRun, start: float) -> None:
        try:
            digests = sorted(await in_thread(run.store.blobs))
        except ShardcastError as error:
            log.error("run %s: %s", run.name, error)
            return
        self._at = f"{run.name}/blobs"
        for digest in rotated(digests, start):
            began = self._node.clock()
            try:
                size = await in_thread(partial(run.shelf.look_again, digest))
            except ShardcastError as error:
                log.error("run %s: %s", run.name, error)
                continue
            if size is None:
                self._found(run, f"blob {digest} is damaged on disk and was removed")
                await self._fetch(run, digest)
            self._read(size or 0)
            await self._rest(size or 0, began)

    async def _fetch(self, run: RelayRun, digest: str) -> None:
        known = run.find(digest)
        if known is None or self._node.sources is None:
            return
        try:
            await self._node.ensure(run, known)
        except ShardcastError as error:
            log.warning("run %s: blob %s: %s", run.name, digest, error)

    # --- pace and account ---------------------------------------------------------------------

    async def _rest(self, count: int, began: float) -> None:
        node = self._node
        busy = node.sending > 0 or bool(node.fills.open())
        took = node.clock() - began
        await self._sleep(pause_s(count, node.config.scrub_rate_bytes_per_s, took, busy=busy))

    def _read(self, count: int) -> None:
        self._bytes += count
        self._node.metrics.scrubbed.inc(count)

    def _found(self, run: RelayRun, what: str) -> None:
        self._damaged += 1
        self._node.metrics.scrub_damaged.inc()
        if self._node.sources is not None:
            then = "it is fetched again"
        elif self._node.config.depth is None:
            then = "nobody can repair it here: publish it again"
        else:
            then = "the worker fetches it again"
        log.error("run %s: %s; %s", run.name, what, then)


def _look(stored: StoredVersion, shard: int) -> bool:
    """Hash a shard from the disk; leave the page cache as it was. Blocking."""
    extent = stored.version.layout.extent(shard)
    with stored.lease():
        fd = stored.open_file(extent.file)
        try:
            warm = respond.in_page_cache(fd, extent.offset, extent.length)
            good = stored.look_again(shard)
            if not warm:
                os.posix_fadvise(fd, extent.offset, extent.length, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return good


def _give_up(stored: StoredVersion, shard: int) -> bool:
    """Take a shard that cannot be read for damaged, unless its file is merely out of reach now.

    Returns:
        Whether it counts as damaged.
    """
    try:
        with stored.lease():
            os.close(stored.open_file(stored.version.layout.extent(shard).file))
            stored.discard(shard, "it cannot be read")
    except ShardcastError:
        return False
    return True

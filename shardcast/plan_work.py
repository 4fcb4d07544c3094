"""Performing one plan for a version: shards from this disk and over the network.

Nothing is recorded as good before its bytes were hashed against the signed digest *where they
lie*; what turns out bad is fetched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from blake3 import blake3
from xxhash import xxh3_128

from shardcast.cancel import Cancel
from shardcast.errors import DiskError, IntegrityError, ShardcastError
from shardcast.fetch import Transfer
from shardcast.protocol.layout import Extent
from shardcast.protocol.limits import MAX_SHARD_BYTES
from shardcast.protocol.plan import FileReuse, Plan, ShardCopy
from shardcast.pulling import AsideSink, ExtentSink, FetchPool
from shardcast.store.files import COPY_CHUNK_BYTES, disk_errors, read_into, write_all
from shardcast.store.renewing import is_missing, is_unreadable
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion


@dataclass(slots=True)
class Tally:
    """How far a version is. Written under a lock, read by anyone.

    Attributes:
        total_bytes: Size of the version.
        done_bytes: Of those, verified in place.
        fetched_bytes: What the network carried, documents and waste included.
        hedged_bytes: Of those, what came twice because a slow request was raced by a second one.
        delta_bytes: Of those, delta blobs.
    """

    total_bytes: int = 0
    done_bytes: int = 0
    fetched_bytes: int = 0
    hedged_bytes: int = 0
    delta_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes on this disk that were not what they should be."""

    version: int
    path: str
    error: IntegrityError


class AllowanceError(ShardcastError):
    """A version on the way to another one turned out too dear."""


class Shards:
    """What is done with single shards on this disk, counted and told. Thread-safe.

    Attributes:
        tally: What was done so far.
    """

    def __init__(
        self,
        tally: Tally,
        damaged: Callable[[Damage], None],
        cancel: Cancel,
        allowance: int | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            tally: Counts.
            damaged: Called when local bytes turn out bad.
            cancel: Ends hashing and copying.
            allowance: Fetch no more bytes than this; None: any number.
        """
        self.tally = tally
        self._damaged = damaged
        self._cancel = cancel
        self._allowance = allowance
        self._lock = threading.Lock()

    def spend(self, count: int) -> None:
        """Bytes are about to be fetched.

        Raises:
            AllowanceError: If they are more than are left.
        """
        with self._lock:
            if self._allowance is None:
                return
            self._allowance -= count
            if self._allowance < 0:
                raise AllowanceError("it costs more than the way over it is worth")

    def done(self, stored: StoredVersion, shard: int, xxh3: bytes) -> None:
        """A shard was verified in place.

        Raises:
            DiskError: If that cannot be recorded.
        """
        stored.record(shard, xxh3)
        with self._lock:
            self.tally.done_bytes += stored.version.layout.extent(shard).length

    def hash(
        self,
        source: StoredVersion,
        extent: Extent,
        stored: StoredVersion | None = None,
        target: Extent | None = None,
    ) -> tuple[str | None, bytes]:
        """Hash an extent of ``source`` and, if given, write it to ``target`` of ``stored``.

        Returns:
            BLAKE3 in hex (None if the bytes cannot be had from there) and xxh3-128.

        Raises:
            DiskError: If they cannot be written, or this process cannot read anything (it has no
                descriptor left).
            TransferCancelledError: If it was cancelled.
        """
        digest, fast = blake3(), xxh3_128()
        buffer = memoryview(bytearray(min(COPY_CHUNK_BYTES, extent.length)))
        with ExitStack() as files:
            try:
                fd = source.open_file(extent.file)
            except DiskError as error:
                if is_unreadable(error) or is_missing(error):
                    return None, b""
                raise
            files.callback(os.close, fd)
            out = -1
            if stored is not None and target is not None:
                out = stored.open_file(target.file, writable=True)
                files.callback(os.close, out)
            done = 0
            while done < extent.length:
                self._cancel.check()
                piece = buffer[: min(len(buffer), extent.length - done)]
                try:
                    with disk_errors(source.directory / extent.path, "reading"):
                        if read_into(fd, piece, extent.offset + done) != len(piece):
                            return None, b""
                except DiskError as error:
                    if is_unreadable(error):
                        return None, b""
                    raise
                digest.update(piece)
                fast.update(piece)
                if target is not None:
                    with disk_errors(target.path, "writing"):
                        write_all(out, piece, target.offset + done)
                done += len(piece)
        return digest.hexdigest(), fast.digest()

    def bad(self, source: StoredVersion, shard: int) -> None:
        """A shard that was held for good is not."""
        source.discard(shard, "its bytes have another digest")
        self.tell(source, shard, "has another digest than the signed one")

    def tell(self, stored: StoredVersion, shard: int, what: str) -> None:
        """Tell that a shard on this disk is damaged."""
        number, path = stored.version.number, stored.version.layout.extent(shard).path
        error = IntegrityError(
            f"version {number}, {path}, shard {shard}: {what}; it is fetched again",
            source=str(stored.directory / path),
        )
        self._damaged(Damage(number, path, error))

    def count_done(self, stored: StoredVersion, done: Iterable[int]) -> None:
        """Note which shards are in place at the moment."""
        layout = stored.version.layout
        with self._lock:
            self.tally.done_bytes = sum(layout.extent(shard).length for shard in done)

    def count_fetched(self, pool: FetchPool, delta_bytes: int) -> None:
        """Note what a pool has carried, and how much of that were delta blobs."""
        with self._lock:
            self.tally.fetched_bytes += pool.received_bytes
            self.tally.hedged_bytes += pool.hedged_bytes
            self.tally.delta_bytes += delta_bytes


@dataclass(frozen=True, slots=True)
class Adopt:
    """Hash shard ``shard`` of a file that was linked from ``reuse``."""

    shard: int
    reuse: FileReuse


def local_tasks(plan: Plan, stored: StoredVersion) -> Iterator[Adopt | ShardCopy]:
    """Yield what a plan takes from this disk."""
    for reuse in plan.files:
        for shard in stored.version.layout.file_shards(reuse.file):
            yield Adopt(shard, reuse)
    yield from plan.copies
    rebuilt = _rebuilt(plan)
    yield from (repeat for repeat in plan.repeats if repeat.source.shard not in rebuilt)


def _rebuilt(plan: Plan) -> frozenset[int]:
    return frozenset(extent.shard for fetch in plan.deltas for extent in fetch.targets)


class PlanWork:
    """One plan being performed. Thread-safe."""

    def __init__(
        self,
        shards: Shards,
        store: RunStore,
        stored: StoredVersion,
        sources: dict[int, StoredVersion],
        pool: FetchPool,
        plan: Plan,
        asides: ExitStack,
    ) -> None:
        """Do nothing yet.

        Args:
            shards: Does what is done with single ones.
            store: The run's directory.
            stored: The version that is made.
            sources: Other versions on this disk, by number.
            pool: Fetches.
            plan: What to do.
            asides: Closed when the pool has ended: shards that wait beside a committed version go.
        """
        self._asides = asides
        self._shards = shards
        self._store = store
        self._plan = plan
        self._stored = stored
        self._sources = {**sources, stored.version.number: stored}
        self._pool = pool
        self._lock = threading.Lock()
        self._coming: dict[str, list[int]] = {}
        rebuilt = _rebuilt(plan)
        self._repeats: dict[int, list[int]] = {}
        for repeat in plan.repeats:
            if repeat.source.shard in rebuilt:
                self._repeats.setdefault(repeat.source.shard, []).append(repeat.target.shard)

    # --- what deltas bring ------------------------------------------------------------------

    def good(self, shard: int, xxh3: bytes) -> None:
        """A shard was rebuilt: whatever has the same bytes is a copy of it."""
        self._shards.done(self._stored, shard, xxh3)
        for repeat in self._repeats.get(shard, ()):
            self._copy(self._stored, self._stored.version.layout.extent(shard), repeat)

    def plain(self, shards: Sequence[int]) -> None:
        """Shards that no delta brought are fetched, each with those that have the same bytes."""
        for shard in shards:
            digest = self._stored.version.digests[shard]
            assert digest is not None
            self._shards.spend(self._stored.version.layout.extent(shard).length)
            self.fetch(digest, [shard, *self._repeats.get(shard, ())])

    def is_whole(self, base: StoredVersion, shard: int) -> bool:
        """Hash a base's shard again; one that is not good is marked so.

        Raises:
            DiskError: If this process cannot read anything.
        """
        found, _ = self._shards.hash(base, base.version.layout.extent(shard))
        if found == base.version.digests[shard]:
            return True
        self._shards.bad(base, shard)
        return False

    # --- what the network brings ------------------------------------------------------------

    def fetch_planned(self) -> None:
        """Fetch what the plan says comes as it is."""
        for fetch in self._plan.fetches:
            self.fetch(fetch.digest, [extent.shard for extent in fetch.targets])

    def fetch(self, digest: str, shards: list[int]) -> None:
        """Fetch a digest once, for all shards that have it."""
        with self._lock:
            if digest in self._coming:
                self._coming[digest] += shards
                return
            self._coming[digest] = shards[1:]
        first = self._stored.version.layout.extent(shards[0])

        def arrived(transfer: Transfer) -> None:
            if isinstance(sink, AsideSink):
                sink.place(transfer.xxh3)
            self._shards.done(self._stored, first.shard, transfer.xxh3)
            with self._lock:
                others = self._coming.pop(digest)
            for shard in others:
                self._copy(self._stored, first, shard)

        sink: AsideSink | ExtentSink
        if self._stored.committed:
            sink = AsideSink(self._store, self._stored, first.shard)
            self._asides.callback(sink.remove)
        else:
            sink = ExtentSink(self._stored, first.shard)
        self._pool.submit(
            digest,
            first.length,
            sink,
            name=f"shard {first.shard} ({first.path}) of version {self._stored.version.number}",
            done=arrived,
            limit=MAX_SHARD_BYTES,
        )

    def local(self, task: Adopt | ShardCopy) -> None:
        """Get a shard from this disk; what is not good there is fetched."""
        if isinstance(task, ShardCopy):
            self._copy(self._sources[task.source_version], task.source, task.target.shard)
            return
        source = self._sources[task.reuse.source_version]
        extent = self._stored.version.layout.extent(task.shard)
        index = [entry.path for entry in source.version.layout.files].index(task.reuse.source_path)
        offset = extent.shard - self._stored.version.layout.file_shards(extent.file).start
        origin = source.version.layout.extent(
            source.version.layout.file_shards(index).start + offset
        )
        if self._linked(source, origin, extent):
            self._adopt(source, origin, extent)
        else:
            self._copy(source, origin, task.shard)

    def _linked(self, source: StoredVersion, origin: Extent, extent: Extent) -> bool:
        try:
            ours = os.stat(self._stored.directory / extent.path, follow_symlinks=False)
            theirs = os.stat(source.directory / origin.path, follow_symlinks=False)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def _adopt(self, source: StoredVersion, origin: Extent, extent: Extent) -> None:
        digest = self._stored.version.digests[extent.shard]
        assert digest is not None
        found, xxh3 = self._shards.hash(self._stored, extent)
        if found == digest:
            self._shards.done(self._stored, extent.shard, xxh3)
        else:
            self._shards.bad(source, origin.shard)
            self.fetch(digest, [extent.shard])

    def _copy(self, source: StoredVersion, origin: Extent, shard: int) -> None:
        digest = self._stored.version.digests[shard]
        assert digest is not None
        target = self._stored.version.layout.extent(shard)
        found, xxh3 = None, b""
        if self._stored.committed:  # its readers check nothing: only right bytes are written to it
            found, _ = self._shards.hash(source, origin)
        if found == digest or not self._stored.committed:
            found, xxh3 = self._shards.hash(source, origin, self._stored, target)
        if found == digest:
            self._shards.done(self._stored, shard, xxh3)
        else:
            self._shards.bad(source, origin.shard)
            self.fetch(digest, [shard])

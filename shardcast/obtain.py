"""Bringing a version's shards onto the disk: from what is here already, and over the network.

The plan is pure (protocol.plan); this performs it, local work on all cores while the network
works. Nothing is recorded as good before its bytes were hashed against the signed digest *where
they lie*; what turns out bad is fetched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3
from xxhash import xxh3_128

from shardcast.cancel import Cancel
from shardcast.documents import OpenPool
from shardcast.errors import BusyError, DiskFullError, IntegrityError, ShardcastError
from shardcast.fetch import Transfer
from shardcast.hashing import default_threads
from shardcast.protocol.layout import Extent
from shardcast.protocol.limits import MAX_SHARD_BYTES
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Delta, FileReuse, Holding, Plan, ShardCopy, plan_version
from shardcast.pulling import AsideSink, ExtentSink, FetchPool
from shardcast.rebuilding import DeltaFailure, Rebuilding
from shardcast.store.files import COPY_CHUNK_BYTES, disk_errors, read_into, write_all
from shardcast.store.run import RunStore
from shardcast.store.stored import ShardState, StoredVersion
from shardcast.store.version_files import make_files

_ROUNDS: Final = 3
"""Plans made for one version: a later one is needed where a disk changes under our hands."""


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


class Obtainer:
    """Makes one version complete on disk.

    Attributes:
        failures: What deltas did not bring.
    """

    def __init__(
        self,
        store: RunStore,
        open_pool: OpenPool,
        cancel: Cancel,
        *,
        tally: Tally | None = None,
        damaged: Callable[[Damage], None] = lambda damage: None,
        threads: int | None = None,
        allowance: int | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            store: The run's directory.
            open_pool: Makes the pool that fetches.
            cancel: Ends it; what was verified stays.
            tally: Counts.
            damaged: Called when local bytes turn out bad.
            threads: For local work; None means all cores.
            allowance: Fetch no more bytes than this; None: any number.
        """
        self.store = store
        self._open_pool = open_pool
        self._cancel = cancel
        self.tally = tally or Tally()
        self._damaged = damaged
        self._threads = threads or default_threads()
        self._lock = threading.Lock()
        self._allowance = allowance
        self.failures: list[DeltaFailure] = []

    def obtain(self, version: Version, deltas: Sequence[Delta] = ()) -> StoredVersion:
        """Return the version with every shard verified, staged or (if it was before) committed.

        Args:
            version: The version.
            deltas: What leads to it, best first. What they do not bring is fetched plainly, and
                ``failures`` says why.

        Raises:
            AllowanceError: If it would cost more than it may.
            DiskFullError: If there is no room, naming what is needed and what is free.
            DiskError: If the system refuses otherwise.
            NetworkError, IntegrityError: If no source delivers what is missing.
            TransferCancelledError: If it was cancelled.
        """
        self.tally.total_bytes = version.layout.total_bytes
        with disk_errors(self.store.root, f"bringing version {version.number} here"):
            sources = self._lease_sources(version.number)
            try:
                stored, found = self._prepare(version, sources)
                with stored.lease():
                    self._complete(version, stored, sources, deltas, found=found)
            finally:
                for source in sources:
                    source.release_lease()
        return stored

    def _complete(
        self,
        version: Version,
        stored: StoredVersion,
        sources: Sequence[StoredVersion],
        deltas: Sequence[Delta],
        *,
        found: bool,
    ) -> None:
        if found:
            self._confirm(stored)
        for _ in range(_ROUNDS):
            done = stored.present()
            self._count_done(stored, done)
            holdings = [_holding(source) for source in sources]
            plan = plan_version(version, done, holdings, () if self.failures else deltas)
            if not (plan.files or plan.copies or plan.deltas or plan.fetches or plan.repeats):
                break
            self.spend(plan.fetch_bytes)
            self._perform(plan, stored, {source.version.number: source for source in sources})
        if not stored.complete:
            raise IntegrityError(
                f"version {version.number} still lacks {len(stored.missing())} shards: "
                "its files change on disk",
                source=str(stored.directory),
            )

    # --- before -----------------------------------------------------------------------------

    def _lease_sources(self, target: int) -> list[StoredVersion]:
        """Return the other versions on disk, leased, the best sources first."""
        found: list[StoredVersion] = []
        for number in [*self.store.committed(), *self.store.staged()]:
            stored = self.store.stored(number) if number != target else None
            if stored is not None:
                with suppress(BusyError):
                    stored.acquire_lease()
                    found.append(stored)
        return found

    def _prepare(
        self, version: Version, sources: list[StoredVersion]
    ) -> tuple[StoredVersion, bool]:
        """Stage the version, or find it where it is; every file gets its full size.

        Returns:
            The version, and whether it was here before.
        """
        store, number = self.store, version.number
        here = store.stored(number)
        lost = (store.version_directory(number), store.staging_directory(number))
        if here is None and any(directory.is_dir() for directory in lost):
            store.save_state(version)  # its state was lost: look at it again
            here = store.stored(number)
        if here is None or (
            not here.committed and here.version.layout_digest != version.layout_digest
        ):
            return self._stage_anew(version, sources), False
        stored = store.stage(version, files=False)
        if not stored.committed:
            self._recycle(version, stored.directory)
        elif stored.damaged is not None:
            error = IntegrityError(stored.damaged, source=str(stored.directory))
            self._damaged(Damage(number, str(stored.directory), error))
        self._with_room(version, stored.directory, sources)
        if stored.committed:
            stored.restore_files()
        return stored, True

    def _stage_anew(self, version: Version, sources: list[StoredVersion]) -> StoredVersion:
        """Stage the version; files that a committed version has become hard links to them."""
        directory = self.store.staging_directory(version.number)
        if directory.exists():
            self.store.evict(version.number)
        committed = {s.version.number: s for s in sources if s.committed}
        holdings = [_holding(source) for source in committed.values()]
        for reuse in plan_version(version, (), holdings).files:
            source = committed[reuse.source_version]
            target = directory / version.layout.files[reuse.file].path
            with disk_errors(target, "linking"):
                target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # no hard links here: it is copied like everything else
                os.link(source.directory / reuse.source_path, target, follow_symlinks=False)
        self._recycle(version, directory)
        self._with_room(version, directory, sources)
        return self.store.stage(version, files=False)

    def _recycle(self, version: Version, directory: Path) -> None:
        """Overwrite files of an evicted version instead of making new ones, where that is safe."""
        self.store.spares.claim(directory, {e.path: e.bytes for e in version.layout.files})

    def _with_room(self, version: Version, directory: Path, sources: list[StoredVersion]) -> None:
        """Make the files; where there is no room, give up other unfinished versions for it."""
        try:
            make_files(version, directory)
        except DiskFullError:
            others = [source for source in sources if not source.committed]
            if not others:
                raise
            for source in others:
                sources.remove(source)
                source.release_lease()
                self.store.evict(source.version.number)
            make_files(version, directory)

    def _confirm(self, stored: StoredVersion) -> None:
        """Look at what the journal of an earlier process says is there.

        Where it says nothing of a shard, but files have bytes there, they are hashed against the
        signed digests: that is faster than any network.
        """
        layout, digests = stored.version.layout, stored.version.digests
        present = stored.present()
        shards = [s for s in present if stored.state(s) is ShardState.RECORDED]

        def confirm(shard: int) -> None:
            self._cancel.check()
            if not stored.confirm(shard):
                self._tell(stored, shard, "changed since it was verified")

        def salvage(shard: int) -> None:
            digest, xxh3 = self.hash(stored, layout.extent(shard), None, None)
            if digest == digests[shard]:
                stored.record(shard, xxh3)

        if not stored.committed:
            self._all(confirm, shards)
        # What this process has looked at before and found bad need not be hashed again.
        if stored.committed or shards or not present:
            self._all(salvage, [s for s in stored.missing() if stored.written(s)])

    def _count_done(self, stored: StoredVersion, done: Iterable[int]) -> None:
        layout = stored.version.layout
        with self._lock:
            self.tally.done_bytes = sum(layout.extent(shard).length for shard in done)

    # --- the plan ---------------------------------------------------------------------------

    def _perform(
        self, plan: Plan, stored: StoredVersion, sources: dict[int, StoredVersion]
    ) -> None:
        with ExitStack() as open_now:
            pool = open_now.enter_context(self._open_pool())
            work = _Work(self, stored, sources, pool, plan)
            rebuilding = open_now.enter_context(
                Rebuilding(stored, sources, pool, self._cancel, work, threads=self._threads)
            )
            try:
                rebuilding.start(plan.deltas, fed=work.fetch_planned)
                self._all(work.local, _local_tasks(plan, stored))
                rebuilding.finish()
                pool.finish()
            finally:
                with self._lock:
                    self.failures += rebuilding.failures
                    self.tally.delta_bytes += rebuilding.arrived_bytes
                    self.tally.fetched_bytes += pool.received_bytes
                    self.tally.hedged_bytes += pool.hedged_bytes

    def _all(self, action: Callable[..., None], items: Iterable[object]) -> None:
        """Do ``action`` for all items, on all cores; the first error ends it and is raised."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="local") as executor:
            futures: list[Future[None]] = [executor.submit(action, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                wait(futures)
                raise

    # --- shared with the work ---------------------------------------------------------------

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
        """A shard was verified in place."""
        stored.record(shard, xxh3)
        with self._lock:
            self.tally.done_bytes += stored.version.layout.extent(shard).length

    def hash(
        self,
        source: StoredVersion,
        extent: Extent,
        stored: StoredVersion | None,
        target: Extent | None,
    ) -> tuple[str | None, bytes]:
        """Hash an extent of ``source`` and, if given, write it to ``target`` of ``stored``.

        Returns:
            BLAKE3 in hex (None if the bytes cannot be read) and xxh3-128.
        """
        digest, fast = blake3(), xxh3_128()
        buffer = memoryview(bytearray(min(COPY_CHUNK_BYTES, extent.length)))
        with ExitStack() as files:
            try:
                fd = source.open_file(extent.file)
            except ShardcastError:
                return None, b""
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
                    if read_into(fd, piece, extent.offset + done) != len(piece):
                        return None, b""
                except OSError:
                    return None, b""
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
        self._tell(source, shard, "has another digest than the signed one")

    def _tell(self, stored: StoredVersion, shard: int, what: str) -> None:
        number, path = stored.version.number, stored.version.layout.extent(shard).path
        error = IntegrityError(
            f"version {number}, {path}, shard {shard}: {what}; it is fetched again",
            source=str(stored.directory / path),
        )
        self._damaged(Damage(number, path, error))


@dataclass(frozen=True, slots=True)
class _Adopt:
    """Hash shard ``shard`` of a file that was linked from ``reuse``."""

    shard: int
    reuse: FileReuse


def _local_tasks(plan: Plan, stored: StoredVersion) -> Iterator[_Adopt | ShardCopy]:
    for reuse in plan.files:
        for shard in stored.version.layout.file_shards(reuse.file):
            yield _Adopt(shard, reuse)
    yield from plan.copies
    rebuilt = _rebuilt(plan)
    yield from (repeat for repeat in plan.repeats if repeat.source.shard not in rebuilt)


def _rebuilt(plan: Plan) -> frozenset[int]:
    return frozenset(extent.shard for fetch in plan.deltas for extent in fetch.targets)


class _Work:
    """One plan being performed. Thread-safe."""

    def __init__(
        self,
        owner: Obtainer,
        stored: StoredVersion,
        sources: dict[int, StoredVersion],
        pool: FetchPool,
        plan: Plan,
    ) -> None:
        self._owner = owner
        self._plan = plan
        self.stored = stored
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
        self._owner.done(self.stored, shard, xxh3)
        for repeat in self._repeats.get(shard, ()):
            self._copy(self.stored, self.stored.version.layout.extent(shard), repeat)

    def plain(self, shards: Sequence[int]) -> None:
        """Shards that no delta brought are fetched, each with those that have the same bytes."""
        for shard in shards:
            digest = self.stored.version.digests[shard]
            assert digest is not None
            self._owner.spend(self.stored.version.layout.extent(shard).length)
            self.fetch(digest, [shard, *self._repeats.get(shard, ())])

    def is_whole(self, base: StoredVersion, shard: int) -> bool:
        """Hash a base's shard again; one that is not good is marked so."""
        found, _ = self._owner.hash(base, base.version.layout.extent(shard), None, None)
        if found == base.version.digests[shard]:
            return True
        self._owner.bad(base, shard)
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
        first = self.stored.version.layout.extent(shards[0])

        def arrived(transfer: Transfer) -> None:
            if isinstance(sink, AsideSink):
                sink.place(transfer.xxh3)
            self._owner.done(self.stored, first.shard, transfer.xxh3)
            with self._lock:
                others = self._coming.pop(digest)
            for shard in others:
                self._copy(self.stored, first, shard)

        sink = (
            AsideSink(self._owner.store, self.stored, first.shard)
            if self.stored.committed
            else ExtentSink(self.stored, first.shard)
        )
        self._pool.submit(
            digest,
            first.length,
            sink,
            name=f"shard {first.shard} ({first.path}) of version {self.stored.version.number}",
            done=arrived,
            limit=MAX_SHARD_BYTES,
        )

    def local(self, task: _Adopt | ShardCopy) -> None:
        """Get a shard from this disk; what is not good there is fetched."""
        if isinstance(task, ShardCopy):
            self._copy(self._sources[task.source_version], task.source, task.target.shard)
            return
        source = self._sources[task.reuse.source_version]
        extent = self.stored.version.layout.extent(task.shard)
        index = [entry.path for entry in source.version.layout.files].index(task.reuse.source_path)
        offset = extent.shard - self.stored.version.layout.file_shards(extent.file).start
        origin = source.version.layout.extent(
            source.version.layout.file_shards(index).start + offset
        )
        if self._linked(source, origin, extent):
            self._adopt(source, origin, extent)
        else:
            self._copy(source, origin, task.shard)

    def _linked(self, source: StoredVersion, origin: Extent, extent: Extent) -> bool:
        try:
            ours = os.stat(self.stored.directory / extent.path, follow_symlinks=False)
            theirs = os.stat(source.directory / origin.path, follow_symlinks=False)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def _adopt(self, source: StoredVersion, origin: Extent, extent: Extent) -> None:
        digest = self.stored.version.digests[extent.shard]
        assert digest is not None
        found, xxh3 = self._owner.hash(self.stored, extent, None, None)
        if found == digest:
            self._owner.done(self.stored, extent.shard, xxh3)
        else:
            self._owner.bad(source, origin.shard)
            self.fetch(digest, [extent.shard])

    def _copy(self, source: StoredVersion, origin: Extent, shard: int) -> None:
        digest = self.stored.version.digests[shard]
        assert digest is not None
        target = self.stored.version.layout.extent(shard)
        found, xxh3 = None, b""
        if self.stored.committed:  # its readers check nothing: only right bytes are written to it
            found, _ = self._owner.hash(source, origin, None, None)
        if found == digest or not self.stored.committed:
            found, xxh3 = self._owner.hash(source, origin, self.stored, target)
        if found == digest:
            self._owner.done(self.stored, shard, xxh3)
        else:
            self._owner.bad(source, origin.shard)
            self.fetch(digest, [shard])


def _holding(stored: StoredVersion) -> Holding:
    return Holding(stored.version, stored.present())

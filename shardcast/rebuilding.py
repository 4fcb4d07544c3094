"""Rebuilding shards from delta blobs: fetched into memory, decoded, verified, then written.

Blobs come through the pool that fetches shards, verified before they are looked at. Each frame is
decoded in a thread as soon as its blob is there; each shard of it is hashed against the signed
digest, and only a right one is written. What does not come out right is fetched as it is: never is
more lost than the frame. Then the bytes of the base that the frame started from are hashed too,
which tells whose fault it was: this disk's, or the publisher's.

Memory: blobs that were asked for and are not decoded yet are bounded; a frame in work takes its
target and its base ranges, at most 16 MiB each, in one thread a core. Base files are read, not
mapped (base_files.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from xxhash import xxh3_128_digest

from shardcast.base_files import BaseFiles
from shardcast.cancel import Cancel
from shardcast.errors import (
    IntegrityError,
    MalformedError,
    NetworkError,
    ShardcastError,
    UsageError,
)
from shardcast.fetch import MemorySink
from shardcast.frames import Arena, checked_shards, decoded
from shardcast.protocol.delta import frames_of
from shardcast.protocol.layout import Extent
from shardcast.protocol.limits import MAX_DELTA_BLOB_BYTES, MAX_SHARD_BYTES, MIB
from shardcast.protocol.plan import DeltaFetch
from shardcast.pulling import FetchPool
from shardcast.store.files import disk_errors, write_all
from shardcast.store.stored import StoredVersion

WINDOW_BYTES: Final = 64 * MIB
"""Delta blobs that were asked for and are not decoded yet: 32 of the usual size, or one large one."""

_LOOK_S: Final = 0.2
"""How often ``finish`` looks whether the pool has failed."""


class Rebuilt(Protocol):
    """Takes what comes of the frames. Called from any thread, never under a lock."""

    def good(self, shard: int, xxh3: bytes) -> None:
        """A shard was rebuilt, verified and written."""
        ...

    def plain(self, shards: Sequence[int]) -> None:
        """These shards must be fetched as they are."""
        ...

    def is_whole(self, base: StoredVersion, shard: int) -> bool:
        """Hash a base's shard again; one that is not good is marked so."""
        ...


@dataclass(frozen=True, slots=True)
class DeltaFailure:
    """Shards that a delta did not bring.

    Attributes:
        version: The version that they belong to.
        base: Number of the version that the delta starts from, None for a compressed copy.
        shards: Which.
        error: Why; its kind says who must act: MalformedError the publisher, IntegrityError the
            owner of this disk, NetworkError whoever runs the sources.
    """

    version: int
    base: int | None
    shards: tuple[int, ...]
    error: ShardcastError


@dataclass(slots=True, eq=False)
class _Blob:
    """A blob on its way, and how many of its frames are not done."""

    fetch: DeltaFetch
    frames: int = 0
    settled: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    """One frame of a blob that is here: its bytes, all its extents, and those of them to write."""

    base: int | None
    data: memoryview
    extents: tuple[Extent, ...]
    wanted: frozenset[int]


class Rebuilding:
    """Performs the delta part of a plan. Use as a context manager: leaving it ends every thread.

    Attributes:
        failures: What the deltas did not bring; complete after ``finish``.
        arrived_bytes: Delta blobs that came.
    """

    def __init__(
        self,
        target: StoredVersion,
        bases: Mapping[int, StoredVersion],
        pool: FetchPool,
        cancel: Cancel,
        rebuilt: Rebuilt,
        *,
        threads: int,
    ) -> None:
        """Start nothing yet.

        Args:
            target: The version to write to.
            bases: The versions to read from, by number; all leased.
            pool: Fetches the blobs.
            cancel: Ends it.
            rebuilt: Told what came of it.
            threads: For decoding.
        """
        self._target = target
        self._bases = bases
        self._pool = pool
        self._cancel = cancel
        self._rebuilt = rebuilt
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._arenas = threading.local()
        self._changed = threading.Condition()
        self._waiting: deque[DeltaFetch] = deque()
        self._coming: set[_Blob] = set()
        self._window = 0
        self._fed: Callable[[], None] | None = None
        self._proven: set[tuple[int, int]] = set()
        self._error: BaseException | None = None
        self._closed = False
        self.failures: list[DeltaFailure] = []
        self.arrived_bytes = 0

    def start(self, fetches: Sequence[DeltaFetch], fed: Callable[[], None]) -> None:
        """Begin to fetch.

        Args:
            fetches: The blobs.
            fed: Called once, when all of them have been asked for: what comes after them may be.
        """
        self._fed = fed
        if fetches:
            try:
                import shardcast.codec.decode  # noqa: F401 - compiled: not where no delta is used
            except ImportError as error:
                for fetch in fetches:
                    self._fail(fetch.base, [e.shard for e in fetch.targets], UsageError(str(error)))
                fetches = ()
        self._waiting.extend(fetches)
        self._feed()

    def finish(self) -> None:
        """Wait until every frame was decoded or given up, or the pool has failed.

        Raises:
            DiskError: If the rebuilt bytes could not be written.
            TransferCancelledError: If it was cancelled.
        """
        while not self._pool.stopped:
            self._cancel.check()
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._waiting and not self._coming:
                    return
                self._changed.wait(_LOOK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- blobs ------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Ask for as many blobs as the window has room for."""
        while (blob := self._next()) is not None:
            self._submit(blob)
        with self._changed:
            fed = None
            if not self._waiting and not self._closed:
                fed, self._fed = self._fed, None
        if fed is not None:
            fed()

    def _next(self) -> _Blob | None:
        with self._changed:
            if self._closed or self._error is not None or not self._waiting:
                return None
            size = self._waiting[0].blob.bytes
            if self._window and self._window + size > WINDOW_BYTES:
                return None
            blob = _Blob(self._waiting.popleft())
            self._coming.add(blob)
            self._window += size
            return blob

    def _submit(self, blob: _Blob) -> None:
        sink = MemorySink()
        self._pool.submit(
            blob.fetch.blob.digest,
            blob.fetch.blob.bytes,
            sink,
            name=f"a delta of version {self._target.version.number}",
            done=lambda transfer: self._arrived(blob, sink),
            limit=MAX_DELTA_BLOB_BYTES,
            lost=lambda error: self._lost(blob, error),
            instead=sum(extent.length for extent in blob.fetch.targets),
        )

    def _arrived(self, blob: _Blob, sink: MemorySink) -> None:
        frames = list(self._frames(blob.fetch, memoryview(sink.data)))
        with self._changed:
            if self._closed or blob.settled:
                return
            self.arrived_bytes += blob.fetch.blob.bytes
            blob.frames = len(frames)
            for frame in frames:
                self._executor.submit(self._rebuild, blob, frame)

    def _lost(self, blob: _Blob, error: ShardcastError) -> None:
        """No source has it: what it stands for comes as it is."""
        with self._changed:
            if self._closed or blob.settled or blob.frames:
                return
            self._settle(blob)
        shards = [extent.shard for extent in blob.fetch.targets]
        problem = f"the blob {blob.fetch.blob.digest} cannot be had: {error.message}"
        self._fail(blob.fetch.base, shards, NetworkError(problem, source=error.source))
        self._feed()

    def _settle(self, blob: _Blob) -> None:
        blob.settled = True
        self._coming.discard(blob)
        self._window -= blob.fetch.blob.bytes
        self._changed.notify_all()

    def _frames(self, fetch: DeltaFetch, data: memoryview) -> Iterator[_Frame]:
        """Yield the frames of a blob that have anything wanted."""
        layout = self._target.version.layout
        wanted = frozenset(extent.shard for extent in fetch.targets)
        for frame in frames_of(fetch.blob, fetch.first_shard):
            if not wanted.isdisjoint(frame.shards):
                extents = tuple(layout.extent(shard) for shard in frame.shards)
                encoded = data[frame.offset : frame.offset + frame.length]
                yield _Frame(fetch.base, encoded, extents, wanted)

    # --- frames -----------------------------------------------------------------------------

    def _rebuild(self, blob: _Blob, frame: _Frame) -> None:
        try:
            if not self._closed and self._error is None:
                self._cancel.check()
                self._decode(frame)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                blob.frames -= 1
                if not blob.frames:
                    self._settle(blob)
                self._changed.notify_all()
        self._feed()

    def _decode(self, frame: _Frame) -> None:
        """Rebuild a frame's shards; those that do not come out right are fetched as they are."""
        base = None if frame.base is None else self._bases[frame.base]
        length = sum(extent.length for extent in frame.extents)
        bases, targets = self._own_arenas()
        room = bases.room(min(length, MAX_SHARD_BYTES))
        with contextlib.closing(BaseFiles(base, room)) as reader:
            data, problem = decoded(frame.data, length, reader, targets)
        wrong: list[int] = []
        target = self._target.version
        for extent, piece in checked_shards(data, frame.extents, target, frame.wanted):
            self._cancel.check()
            if piece is None:
                wrong.append(extent.shard)
            else:
                self._place(extent, piece)
        if not wrong:
            return
        if reader.gap:  # the plan guessed that it would not be needed: nobody's fault
            self._rebuilt.plain(wrong)
            return
        problem = problem or "they come out with other digests than the signed ones"
        self._fail(frame.base, wrong, self._blame(base, reader.touched, problem))

    def _place(self, extent: Extent, data: memoryview) -> None:
        """Write the bytes of a shard, which are right: all that ever comes to be where shards lie."""
        stored = self._target
        with disk_errors(stored.directory / extent.path, "writing"):
            fd = stored.open_file(extent.file, writable=True)
            try:
                write_all(fd, data, extent.offset)
                if stored.committed:  # a repair: as durable as what it repairs
                    os.fsync(fd)
            finally:
                os.close(fd)
        self._rebuilt.good(extent.shard, xxh3_128_digest(data))

    def _blame(
        self, base: StoredVersion | None, touched: Collection[int], problem: str
    ) -> ShardcastError:
        """Say who must act: look at the bytes of the base that were used, each shard once."""
        damaged: list[int] = []
        for shard in sorted(touched):
            if base is None or (base.version.number, shard) in self._proven:
                continue
            self._cancel.check()
            if self._rebuilt.is_whole(base, shard):
                with self._changed:
                    self._proven.add((base.version.number, shard))
            else:
                damaged.append(shard)
        if base is not None and damaged:
            return IntegrityError(
                f"version {base.version.number}, which it starts from, is damaged here",
                source=str(base.directory),
            )
        return MalformedError(f"the publisher's frame is wrong: {problem}")

    def _fail(self, base: int | None, shards: Sequence[int], error: ShardcastError) -> None:
        failure = DeltaFailure(self._target.version.number, base, tuple(shards), error)
        with self._changed:
            self.failures.append(failure)
        self._rebuilt.plain(shards)

    def _own_arenas(self) -> tuple[Arena, Arena]:
        """Return this thread's buffers, for base ranges and for what is rebuilt."""
        own: tuple[Arena, Arena] | None = getattr(self._arenas, "own", None)
        if own is None:
            own = self._arenas.own = (Arena(), Arena())
        return own

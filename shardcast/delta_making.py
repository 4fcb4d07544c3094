"""Making a delta: frames on all cores, right after their bytes were hashed, blobs as they fill.

What is announced must rebuild the target from what *readers* have of the base. So the base's bytes
are compared with what was recorded when they were verified, and every frame is decoded again and
compared. Shards that do not stand that are left out of the delta, and it says so; a delta is never
worth a failed publication.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import xxhash
from blake3 import blake3

from shardcast.codec.decode import decode_frame_into
from shardcast.codec.encode import encode_frame
from shardcast.codec.spans import Tensor, header_bytes, read_tensors
from shardcast.deltas import (
    BaseMap,
    Delta,
    MadeFrame,
    Packer,
    Tensors,
    describe,
    frame_runs,
    run_bytes,
    runs_to_encode,
)
from shardcast.errors import IntegrityError, MalformedError, ShardcastError
from shardcast.hashing import ShardHash, default_threads
from shardcast.protocol.delta import DeltaPart
from shardcast.protocol.layout import Layout
from shardcast.protocol.manifest import Version
from shardcast.sharing import Stopping, share_out
from shardcast.store.contents import Contents
from shardcast.store.files import disk_errors
from shardcast.store.stored import StoredVersion

log = logging.getLogger("shardcast.deltas")

KeepBlob = Callable[[str, bytes], None]
"""Keeps a blob under its digest; called from several threads."""

RUN_AHEAD: Final = 4
"""Frames that may be done before an earlier one is: they wait in memory."""

_KNOWN_SHARE: Final = 0.5
"""A frame of which the base has less than this is no delta: it would only be a compressed copy, which costs
every worker its decoding and is announced on demand (``--compress``)."""
_DENSE: Final = 0.25
"""A frame that saves no more than this may hold shards that are better sent as they are."""

_TINY: Final = 0.001

_POLL_S: Final = 0.05


def tensors_of(layout: Layout, locate: Callable[[int], Path]) -> Tensors:
    """Read where the tensors of a version lie, from the headers of its safetensors files.

    What cannot be read, or changes later, costs bytes, never a wrong byte.

    Args:
        layout: The version's layout.
        locate: Returns where the file with that index lies now.
    """
    return Tensors(layout, [_file_tensors(layout, n, locate(n)) for n in range(len(layout.files))])


def _file_tensors(layout: Layout, file: int, path: Path) -> list[Tensor]:
    entry = layout.files[file]
    try:
        with disk_errors(path, "reading"), open(path, "rb") as opened:
            start = opened.read(8)
            length = header_bytes(start)
            if length is None or length > entry.bytes:
                return []
            return read_tensors(start + opened.read(length - 8), file, entry.bytes)
    except ShardcastError as error:
        log.info("no tensors of %s: %s", path, error)
        return []


class _NoBase:
    """What frames of a compressed copy start from."""

    def range(self, file: int, offset: int, length: int) -> memoryview:
        raise MalformedError(f"a frame without a base asks for byte {offset} of file {file}")


class DeltaMaker:
    """Makes one delta to one version. Its ``use`` is called from several threads.

    Args:
        layout_digest: Digest of the target's layout.
        target: Its layout and tensors.
        base: The version to start from, leased by the caller; None for a compressed copy.
        keep: Keeps the delta's blobs.
        threads: How many threads will call ``use``.
    """

    def __init__(
        self,
        layout_digest: str,
        target: Tensors,
        base: StoredVersion | None,
        keep: KeepBlob,
        *,
        threads: int | None = None,
    ) -> None:
        self._layout = target.layout
        self._base = base
        self._contents = None if base is None else Contents(base)
        known = None if base is None else tensors_of(base.version.layout, _locator(base))
        self._map = BaseMap(target, known)
        self._known = frozenset(() if base is None else base.version.digests)
        self._keep = keep
        self._packer = Packer(layout_digest, None if base is None else base.version.manifest)
        self._ahead = RUN_AHEAD * (threads or default_threads())
        self._order = {run.start: n for n, run in enumerate(frame_runs(target.layout))}
        self._done: dict[int, list[MadeFrame]] = {}
        self._next = 0
        self._progress = threading.Condition()
        self._own = threading.local()
        self._good_base: dict[int, bool] = {}
        self._left_out: dict[str, set[int]] = {}
        self._failure: str | None = None
        self._kept: set[str] = set()
        self._used_bytes = self._covered_bytes = 0

    @property
    def base(self) -> Version | None:
        """The version that it starts from."""
        return None if self._base is None else self._base.version

    @property
    def promising(self) -> bool:
        """Whether it is worth waiting for: until now it brings most of the bytes, or the base has them."""
        with self._progress:
            most = self._covered_bytes >= _KNOWN_SHARE * self._used_bytes
            return self._failure is None and most

    @property
    def told_before(self) -> int:
        """The shard before which ``fresh`` has returned all that there is."""
        with self._progress:
            if self._failure is not None or self._next >= len(self._order):
                end = self._layout.shard_count
            else:
                end = next(start for start, n in self._order.items() if n == self._next)
            untold = None if self._failure is not None else self._packer.untold()
            return end if untold is None else min(untold, end)

    def fresh(self) -> list[DeltaPart]:
        """Return what is kept and was not returned before: parts for a version that streams.

        The finished delta has the same blobs, listed in other parts. A call while ``use`` is
        called elsewhere is fine.
        """
        with self._progress:
            blobs = [] if self._failure is not None else list(self._packer.cut())
        try:
            self._keep_all(blobs)
        except ShardcastError as error:
            self._fail(str(error))
        with self._progress:
            return [] if self._failure is not None else self._packer.fresh(self._kept)

    def notes(self) -> list[str]:
        """Return what people should know about the delta: what it lacks, and why."""
        name = (
            "a compressed copy"
            if self._base is None
            else (f"the delta from version {self._base.version.number}")
        )
        if self._failure is not None:
            return [f"without {name}: {self._failure}"]
        return [
            f"{name} leaves out {len(shards)} of {self._layout.shard_count} shards "
            f"(the first is {min(shards)}): {why}"
            for why, shards in sorted(self._left_out.items())
        ]

    def use(
        self, run: range, data: memoryview, hashes: Sequence[ShardHash], stopping: Stopping
    ) -> None:
        """Make the frames of a run; its numbers are one of ``frame_runs``."""
        number = self._order[run.start]
        with self._progress:
            while number >= self._next + self._ahead and not stopping() and not self._failure:
                self._progress.wait(_POLL_S)
        if self._failure is not None or stopping():
            return
        digests = {shard: found.digest for shard, found in zip(run, hashes, strict=True)}
        frames = self._frames(run, data, digests)
        with self._progress:
            covered = {shard for frame in frames for shard in frame.shards}
            self._used_bytes += len(data)
            self._covered_bytes += sum(
                self._layout.extent(shard).length
                for shard, digest in digests.items()
                if shard in covered or digest in self._known
            )
        try:
            self._deliver(number, frames)
        except ShardcastError as error:  # the disk is full: the version may still find room
            self._fail(str(error))

    def finish(self, version: Version) -> Delta | None:
        """Return the delta to a complete version, its blobs kept; None if there is none worth it.

        Args:
            version: The target, its digests those that ``use`` was given.
        """
        if self._contents is not None:
            self._contents.close()
        if self._failure is not None:
            return None
        try:
            with self._progress:
                blobs = list(self._packer.finish())
            self._keep_all(blobs)
        except ShardcastError as error:
            self._fail(str(error))
            return None
        base = None if self._base is None else self._base.version
        delta = describe(version, base, self._packer.parts())
        return delta if delta.ref.bytes < max(delta.total, 1) else None

    # --- inner workings ---------------------------------------------------------------------

    def _frames(self, run: range, data: memoryview, digests: Mapping[int, str]) -> list[MadeFrame]:
        """Return the frames that are worth it; one that only bridges where nothing changed."""
        wanted = {shard for shard, digest in digests.items() if digest not in self._known}
        wanted -= self._unsafe(wanted)
        if not wanted and self._base is not None and all(self._bridgeable(s) for s in run):
            frame = self._frame(run, data, 0)
            return [] if frame is None else [frame]
        frames: list[MadeFrame] = []
        for part in runs_to_encode(run, wanted, self._bridgeable):
            start = self._length(range(run.start, part.start))
            piece = data[start : start + self._length(part)]
            raw = {shard: self._layout.extent(shard).length for shard in part if shard in wanted}
            frames += self._cheapest(part, piece, raw)
        return frames

    def _cheapest(self, run: range, data: memoryview, raw: Mapping[int, int]) -> list[MadeFrame]:
        """Return the frame of a run; of its halves, where one of them is better left out."""
        own = {shard: length for shard, length in raw.items() if shard in run}
        whole = self._frame(run, data, sum(own.values())) if own else None
        if whole is None or whole.saved > _DENSE * sum(own.values()) or len(run) == 1:
            return [] if whole is None else [whole]
        middle = run.start + len(run) // 2
        first, second = range(run.start, middle), range(middle, run.stop)
        cut = self._length(first)
        halves = [
            *self._cheapest(first, data[:cut], own),
            *self._cheapest(second, data[cut:], own),
        ]
        sparse = sum(len(half.shards) for half in halves) < len(run)
        saved = sum(half.saved for half in halves)
        return halves if sparse and saved >= whole.saved - _TINY * len(data) else [whole]

    def _length(self, run: range) -> int:
        return run_bytes(self._layout, run)

    def _frame(self, run: range, data: memoryview, raw: int) -> MadeFrame | None:
        """Make and try one frame; None if it is not worth it or does not rebuild its bytes."""
        base = self._contents or _NoBase()
        pieces = self._map.pieces(run)
        known = sum(piece.length for piece in pieces if piece.base is not None)
        if self._base is not None and known < _KNOWN_SHARE * len(data):
            return None
        try:
            frame = encode_frame(data, pieces, base)
            if raw and len(frame) >= raw:
                return None
            rebuilt = self._scratch(len(data))
            decode_frame_into(frame, memoryview(rebuilt), base)
        except Exception as error:  # whatever it is, the version itself is whole
            log.debug("no frame of shards %d-%d", run.start, run.stop - 1, exc_info=True)
            self._leave_out(run, f"encoding failed ({type(error).__name__}: {error})")
            return None
        if rebuilt != data:  # a bytearray first: one memcmp (two memoryviews take 20 times as long)
            log.error("a frame of shards %d-%d does not rebuild them", run.start, run.stop - 1)
            self._leave_out(run, "its frame does not rebuild them, which is a bug of the codec")
            return None
        return MadeFrame(run, frame, raw - len(frame) if raw else 0)

    def _scratch(self, length: int) -> bytearray:
        """Return memory of this thread to decode into: most frames of a version are as long."""
        buffer: bytearray | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) != length:
            buffer = self._own.buffer = bytearray(length)
        return buffer

    def _bridgeable(self, shard: int) -> bool:
        return self._map.in_place(shard) and not self._unsafe([shard])

    def _unsafe(self, shards: Sequence[int] | set[int]) -> set[int]:
        """Return the shards whose predecessors are not on this disk as readers have them."""
        unsafe: set[int] = set()
        for shard in shards:
            needed = self._map.needs(range(shard, shard + 1))
            if not all(self._good(old) for old in needed):
                unsafe.add(shard)
        if unsafe:
            self._leave_out(sorted(unsafe), "the base is damaged on this disk")
        return unsafe

    def _good(self, old: int) -> bool:
        """Say whether a shard of the base is what was verified once."""
        if old not in self._good_base:
            self._good_base[old] = self._is_good(old)
        return self._good_base[old]

    def _is_good(self, old: int) -> bool:
        if self._base is None or self._contents is None:
            return False
        extent = self._base.version.layout.extent(old)
        try:
            data = self._contents.range(extent.file, extent.offset, extent.length)
        except ShardcastError as error:
            log.warning("version %d: %s", self._base.version.number, error)
            return False
        recorded = self._base.recorded(old)
        if recorded is not None:
            return xxhash.xxh3_128_digest(data) == recorded
        return blake3(data).hexdigest() == self._base.version.digests[old]

    def _deliver(self, number: int, frames: list[MadeFrame]) -> None:
        """Hand frames to the packer in shard order; keep the blobs that are whole."""
        blobs: list[tuple[str, bytes]] = []
        with self._progress:
            self._done[number] = frames
            while self._next in self._done:
                for frame in self._done.pop(self._next):
                    blobs += self._packer.add(frame)
                self._next += 1
            self._progress.notify_all()
        self._keep_all(blobs)

    def _keep_all(self, blobs: Sequence[tuple[str, bytes]]) -> None:
        for digest, data in blobs:
            self._keep(digest, data)
            with self._progress:
                self._kept.add(digest)

    def _leave_out(self, shards: Sequence[int], why: str) -> None:
        with self._progress:
            self._left_out.setdefault(why, set()).update(shards)

    def _fail(self, why: str) -> None:
        with self._progress:
            self._failure = self._failure or why
            self._done.clear()
            self._progress.notify_all()


def _locator(stored: StoredVersion) -> Callable[[int], Path]:
    return lambda file: stored.directory / stored.version.layout.files[file].path


def make_delta(
    target: StoredVersion,
    base: StoredVersion | None,
    keep: KeepBlob,
    *,
    threads: int | None = None,
) -> tuple[Delta | None, list[str]]:
    """Make a delta between two versions on disk; say what it lacks.

    Both are leased by the caller.

    Raises:
        IntegrityError, MalformedError: If the target is damaged.
        DiskError: If it cannot be read.
    """
    layout = target.version.layout
    count = threads or default_threads()
    maker = DeltaMaker(
        target.version.layout_digest,
        tensors_of(layout, _locator(target)),
        base,
        keep,
        threads=count,
    )
    contents = Contents(target)
    runs = frame_runs(layout)

    def work(_tool: None, run: range, stopping: Stopping) -> None:
        extents = [layout.extent(shard) for shard in run]
        pieces = [contents.range(e.file, e.offset, e.length) for e in extents]
        hashes = [ShardHash(blake3(piece).hexdigest(), b"") for piece in pieces]
        for extent, found in zip(extents, hashes, strict=True):
            if found.digest != target.version.digests[extent.shard]:
                raise IntegrityError(
                    f"{extent.path}, shard {extent.shard} is damaged", source=str(target.directory)
                )
        maker.use(run, memoryview(b"".join(pieces)), hashes, stopping)

    share_out(
        runs,
        work,
        threads=max(1, min(count, len(runs))),
        tool=nullcontext,
        name="delta",
    )
    contents.close()
    delta = maker.finish(target.version)
    return delta, maker.notes()

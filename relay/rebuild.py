"""Rebuilding shards from a delta blob and a base on this disk. Everything blocks.

Every shard is hashed against its signed digest before a byte of it is written, so neither a wrong
delta nor a damaged base can spoil a version: their shards are left for a fill. In memory are one
frame, what it decodes to, and the ranges of the base that it names.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from shardcast.base_files import BaseFiles
from shardcast.codec.frame import MAX_FRAME_BYTES
from shardcast.errors import IntegrityError, MalformedError, ShardcastError
from shardcast.frames import Arena, checked_shards, decoded
from shardcast.protocol.delta import FrameAt
from shardcast.protocol.layout import Extent
from shardcast.protocol.limits import MIB
from shardcast.store.files import disk_errors, read_into, write_all
from shardcast.store.stored import ShardState, StoredVersion

log = logging.getLogger("relay.rebuild")

_MISSING: Final = ShardState.MISSING
_OVERHEAD_BYTES: Final = 2 * MIB
"""What the header of a frame may add to its bytes: 65,536 segments."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A frame that did not rebuild its shards.

    Attributes:
        shards: Those that were wanted.
        reason: Why, for people.
        read: Shards of the base that it was decoded from.
    """

    shards: tuple[int, ...]
    reason: str
    read: frozenset[int]


@dataclass(slots=True)
class Outcome:
    """What a blob gave."""

    shards: int = 0
    bytes: int = 0
    failures: list[Failure] = field(default_factory=list)


def shards_to_rebuild(
    frames: Iterable[FrameAt], target: StoredVersion, claims: Container[tuple[int, int]]
) -> frozenset[int]:
    """Return the shards of frames that are missing, of known digest, and that nobody writes."""
    number, digests = target.version.number, target.version.digests
    return frozenset(
        shard
        for frame in frames
        for shard in frame.shards
        if target.state(shard) is _MISSING
        and digests[shard] is not None
        and (number, shard) not in claims
    )


class VerifiedBase:
    """The bytes of a base as frames read them, of shards only that are good on disk now.

    Attributes:
        read: The shards that were read since ``begin``.
    """

    def __init__(self, stored: StoredVersion | None) -> None:
        self.read: set[int] = set()
        self._stored = stored
        # Pages of it are touched once a blob, not once a frame.
        self._files = BaseFiles(stored, memoryview(bytearray(MAX_FRAME_BYTES if stored else 0)))
        self._good: set[int] = set()

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of file number ``file``.

        Raises:
            MalformedError: If the base has no such bytes.
            IntegrityError: If they are not good.
            DiskError: If they cannot be read.
        """
        if self._stored is None:
            raise MalformedError(f"a frame without a base names file {file}")
        layout = self._stored.version.layout
        if not 0 <= file < len(layout.files) or offset + length > layout.files[file].bytes:
            raise MalformedError(f"version {layout.version} has no byte {offset} of file {file}")
        if not length:
            return memoryview(b"")
        first, size = layout.file_shards(file).start, layout.shard_bytes
        for shard in range(first + offset // size, first + (offset + length - 1) // size + 1):
            self.read.add(shard)
            if shard not in self._good and not self._stored.confirm(shard):
                raise IntegrityError(f"shard {shard} of base {layout.version} is not good on disk")
            self._good.add(shard)
        return self._files.range(file, offset, length)

    def begin(self) -> None:
        """Begin with a frame: what was returned before is overwritten."""
        self.read.clear()
        self._files.rewind()

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()


class _Files:
    """The files of a version that shards are written to, open for a while."""

    def __init__(self, stored: StoredVersion) -> None:
        self._stored = stored
        self._open: dict[int, int] = {}

    def fd(self, file: int) -> int:
        if file not in self._open:
            self.close()  # shards come in order: one file at a time
            self._open[file] = self._stored.open_file(file, writable=True)
        return self._open[file]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def rebuild(
    fd: int,
    frames: Sequence[FrameAt],
    wanted: frozenset[int],
    target: StoredVersion,
    base: StoredVersion | None,
) -> Outcome:
    """Rebuild shards of a version from a verified delta blob; record those that came out right.

    Both versions are leased, and the wanted shards claimed, by the caller.

    Args:
        fd: The blob, open.
        frames: Its frames.
        wanted: The shards to write; their digests are known.
        target: Where to.
        base: What the frames start from; None: nothing.

    Raises:
        DiskError: If the target or the blob cannot be read or written.
    """
    outcome = Outcome()
    reader, files, arena = VerifiedBase(base), _Files(target), Arena()
    with contextlib.closing(reader), contextlib.closing(files):
        for frame in frames:
            shards = [s for s in frame.shards if s in wanted and target.state(s) is _MISSING]
            if not shards:
                continue
            reader.begin()
            extents = [target.version.layout.extent(shard) for shard in frame.shards]
            data, problem = _decode(fd, frame, sum(e.length for e in extents), reader, arena)
            wrong: list[int] = []
            for extent, piece in checked_shards(data, extents, target.version, shards):
                if piece is None:
                    wrong.append(extent.shard)
                else:
                    _keep(extent, piece, target, files, outcome)
            if wrong:
                reason = problem or "its frame decodes to other bytes than were signed"
                failure = Failure(tuple(wrong), reason, frozenset(reader.read))
                outcome.failures.append(failure)
    return outcome


def _decode(
    fd: int, frame: FrameAt, total: int, base: VerifiedBase, arena: Arena
) -> tuple[memoryview, str]:
    """Return the bytes of a frame's shards, and why there are none.

    Raises:
        DiskError: If the blob cannot be read.
    """
    if total > MAX_FRAME_BYTES or frame.length > total + _OVERHEAD_BYTES:
        return memoryview(b""), f"a frame of {frame.length} bytes for {total}"
    data = memoryview(bytearray(frame.length))
    with disk_errors("delta blob", "reading"):
        got = read_into(fd, data, frame.offset)
    if got != frame.length:
        return memoryview(b""), "a delta blob ends early"
    return decoded(data, total, base, arena)


def _keep(
    extent: Extent, data: memoryview, target: StoredVersion, files: _Files, outcome: Outcome
) -> None:
    """Write a shard whose bytes are right, and record it."""
    target.require_room(extent.shard)
    with disk_errors(target.directory / extent.path, "writing"):
        write_all(files.fd(extent.file), data, extent.offset)
    target.record(extent.shard, xxhash.xxh3_128_digest(data))
    outcome.shards += 1
    outcome.bytes += extent.length


def look_again(base: StoredVersion, shards: Sequence[int]) -> list[int]:
    """Hash shards of a base again, after a frame that read them was wrong; return the bad ones.

    Nobody writes to them meanwhile: the caller has claimed them.
    """
    bad = []
    for shard in shards:
        try:
            if not base.look_again(shard):
                bad.append(shard)
        except ShardcastError as error:
            log.warning("version %d, shard %d: %s", base.version.number, shard, error)
            bad.append(shard)
    return bad

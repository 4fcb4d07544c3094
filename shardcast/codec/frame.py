"""The frame format: how the bytes of consecutive shards are rebuilt from ranges of a base.

A frame is a header and payloads. The header cuts the target into segments, each of a group and (where
the group has one) with its range of the base; a group is one payload in one mode. All integers are LEB128;
a base offset is the zigzag difference to where the segment before it ended.

    "SCF1"  target length  groups  {mode, type, payload length}  segments  {length, group, [file, offset]}  payloads
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardcast.codec.elements import ElementType
from shardcast.errors import LimitError, MalformedError
from shardcast.protocol.limits import MAX_SHARD_BYTES

MAGIC: Final = b"SCF1"
MAX_FRAME_BYTES: Final = MAX_SHARD_BYTES
MAX_SEGMENTS: Final = 1 << 16
MAX_GROUPS: Final = 1 << 8
_MAX_VARINT: Final = 9


class Mode(enum.IntEnum):
    """How a group's payload holds its segments; numbers never change their meaning.

    Attributes:
        RAW: As they are.
        ZSTD: Compressed.
        ZSTD_BASE: Compressed with the base ranges as what came before.
        SAME: Equal to the base ranges; no payload.
        CHANGES: What differs from the base ranges (``__kernel.encode_changes``).
        DIFFERENCES: Byte planes of the differences in the order of the values, each compressed or not.
        PLANES: Byte planes of the elements, each compressed or not.
        SUBTRACTED: Byte planes of the bits less the base's, each compressed or not.
        XORED: Byte planes of the bits that differ, each compressed or not.
    """

    RAW = 0
    ZSTD = 1
    ZSTD_BASE = 2
    SAME = 3
    CHANGES = 4
    DIFFERENCES = 5
    PLANES = 6
    SUBTRACTED = 7
    XORED = 8

    @property
    def based(self) -> bool:
        """Whether its segments have ranges of the base."""
        return self not in (Mode.RAW, Mode.ZSTD, Mode.PLANES)


@dataclass(frozen=True, slots=True)
class BaseRange:
    """``length`` bytes at ``offset`` of file number ``file`` of the base's layout."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The next ``length`` bytes of the target: in group ``group``, from ``base``."""

    length: int
    group: int
    base: BaseRange | None


@dataclass(frozen=True, slots=True)
class Group:
    """A payload: its mode, the type of its elements, its bytes."""

    mode: Mode
    type: ElementType
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame, taken apart."""

    groups: tuple[Group, ...]
    segments: tuple[Segment, ...]

    @property
    def target_bytes(self) -> int:
        """What it rebuilds."""
        return sum(segment.length for segment in self.segments)


def write_frame(groups: Sequence[Group], segments: Sequence[Segment]) -> bytes:
    """Return the bytes of a frame."""
    head = bytearray(MAGIC)
    _put(head, sum(segment.length for segment in segments))
    _put(head, len(groups))
    for group in groups:
        head += bytes((group.mode, group.type))
        _put(head, len(group.payload))
    _put(head, len(segments))
    file = end = 0
    for segment in segments:
        _put(head, segment.length)
        _put(head, segment.group)
        if segment.base is not None:
            _put(head, _zigzag(segment.base.file - file))
            _put(head, _zigzag(segment.base.offset - end))
            file, end = segment.base.file, segment.base.offset + segment.length
    return b"".join((head, *(group.payload for group in groups)))


def read_frame(data: bytes | memoryview, target_bytes: int) -> Frame:
    """Take a frame apart; nothing is decoded yet.

    Args:
        data: All of its bytes.
        target_bytes: What it must rebuild.

    Raises:
        MalformedError: If it is no frame, or rebuilds another number of bytes.
        LimitError: If it has more parts than frames have.
    """
    reader = _Reader(memoryview(data))
    if bytes(reader.take(len(MAGIC))) != MAGIC:
        raise MalformedError("a frame begins with something else")
    if reader.number() != target_bytes or target_bytes > MAX_FRAME_BYTES:
        raise MalformedError(f"a frame does not rebuild {target_bytes} bytes")
    heads = [reader.group() for _ in range(reader.count(MAX_GROUPS, "groups"))]
    segments: list[Segment] = []
    file = end = left = 0
    left = target_bytes
    for _ in range(reader.count(MAX_SEGMENTS, "segments")):
        length, group = reader.number(), reader.number()
        if length > left or group >= len(heads):
            raise MalformedError("a segment of a frame lies outside of it")
        base = None
        if heads[group][0].based:
            file += _unzigzag(reader.number())
            offset = end + _unzigzag(reader.number())
            if file < 0 or offset < 0:
                raise MalformedError("a segment of a frame lies outside of its base")
            base, end = BaseRange(file, offset), offset + length
        segments.append(Segment(length, group, base))
        left -= length
    if left:
        raise MalformedError(f"the segments of a frame leave {left} bytes out")
    groups = [Group(mode, kind, reader.take(size)) for mode, kind, size in heads]
    if reader.left:
        raise MalformedError(f"{reader.left} bytes follow a frame")
    return Frame(tuple(groups), tuple(segments))


def _put(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else ~value << 1 | 1


def _unzigzag(value: int) -> int:
    return ~(value >> 1) if value & 1 else value >> 1


class _Reader:
    """Reads a header, bounded by its bytes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise MalformedError("a frame ends early")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        value = 0
        for shift in range(0, 7 * _MAX_VARINT, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise MalformedError("a number in a frame is too long")

    def count(self, most: int, what: str) -> int:
        count = self.number()
        if count > most:
            raise LimitError(f"a frame has {count} {what}; {most} are the most")
        return count

    def group(self) -> tuple[Mode, ElementType, int]:
        mode, kind = self.take(2)
        try:
            return Mode(mode), ElementType(kind), self.number()
        except ValueError:
            raise MalformedError(f"a frame has a group of mode {mode}, type {kind}") from None

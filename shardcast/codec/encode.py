"""Making frames: for each element type the cheapest way to tell the new bytes from the old."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shardcast.codec import kernel, planes
from shardcast.codec.elements import ElementType
from shardcast.codec.frame import BaseRange, Group, Mode, Segment, write_frame

_FEW: Final = 4
"""Changes are listed where at most one element in so many changed; beyond that planes are smaller."""

_TEXT_BYTES: Final = 1 << 20
"""So many bytes that are no numbers may be a header or a text, in which things move."""

_DENSE: Final = 8
"""Lists that take more than this share of the bytes are compared with planes."""


class BaseReader(Protocol):
    """The bytes that a frame starts from."""

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of file number ``file``.

        Raises:
            MalformedError: If they are not there.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the new version, and what is known about them.

    Attributes:
        length: How many.
        type: What they are.
        base: Where the base has their predecessors, None if nowhere.
    """

    length: int
    type: ElementType = ElementType.BYTES
    base: BaseRange | None = None


@dataclass(slots=True)
class _Collected:
    """The pieces of one group: of one type, all with a base or all without."""

    type: ElementType
    based: bool
    ranges: list[tuple[memoryview | None, int, memoryview, int, int]]
    length: int = 0


def encode_frame(new: memoryview, pieces: Sequence[Piece], base: BaseReader) -> bytes:
    """Return a frame that rebuilds ``new``.

    Args:
        new: At most MAX_FRAME_BYTES.
        pieces: They fill ``new``; a piece that is no multiple of its type's width is bytes.
        base: What they start from.

    Raises:
        MalformedError: If the base lacks a range.
    """
    collected: dict[tuple[ElementType, bool], _Collected] = {}
    segments: list[Segment] = []
    order: list[tuple[ElementType, bool]] = []
    at = 0
    for piece in pieces:
        key = (piece.type, piece.base is not None)
        if key not in collected:
            collected[key] = _Collected(piece.type, key[1], [])
            order.append(key)
        group = collected[key]
        old = (
            None
            if piece.base is None
            else base.range(piece.base.file, piece.base.offset, piece.length)
        )
        group.ranges.append((old, 0, new, at, piece.length // piece.type.width))
        group.length += piece.length
        segments.append(Segment(piece.length, order.index(key), piece.base))
        at += piece.length
    groups = [_encode_group(collected[key]) for key in order]
    return write_frame(groups, _merged(segments, groups))


def _encode_group(group: _Collected) -> Group:
    candidates: list[Callable[[], Group]] = []
    if group.based:
        if kernel.encode_changes(group.type, group.ranges, 0) is not None:
            return Group(Mode.SAME, group.type, b"")
        elements = sum(entry[4] for entry in group.ranges)
        changes = kernel.encode_changes(group.type, group.ranges, elements // _FEW)
        if changes is not None:
            found = Group(Mode.CHANGES, group.type, changes)
            if len(changes) * _DENSE <= group.length:
                return found
            candidates.append(lambda: found)
        candidates.append(lambda: _planes(Mode.DIFFERENCES, group, group.ranges))
        if group.type is ElementType.BYTES and group.length <= _TEXT_BYTES:
            candidates.append(lambda: _text(group))
    bare = [(None, 0, new, at, count) for _, _, new, at, count in group.ranges]
    candidates.append(lambda: _planes(Mode.PLANES, group, bare))
    if group.type is ElementType.BYTES:
        candidates.append(lambda: Group(Mode.ZSTD, group.type, planes.compress(_joined(group))))
    candidates.append(lambda: Group(Mode.RAW, group.type, _joined(group)))
    return min((make() for make in candidates), key=lambda made: len(made.payload))


def _planes(
    mode: Mode, group: _Collected, ranges: list[tuple[memoryview | None, int, memoryview, int, int]]
) -> Group:
    split = bytearray(group.length)
    kernel.split_planes(group.type, ranges, split)
    return Group(mode, group.type, planes.pack(split, group.type.width))


def _text(group: _Collected) -> Group:
    old = b"".join(entry[0][: entry[4]] for entry in group.ranges if entry[0] is not None)
    return Group(Mode.ZSTD_BASE, group.type, planes.compress(_joined(group), memoryview(old)))


def _joined(group: _Collected) -> bytes:
    width = group.type.width
    return b"".join(new[at : at + count * width] for _, _, new, at, count in group.ranges)


def _merged(segments: Sequence[Segment], groups: Sequence[Group]) -> list[Segment]:
    """Join neighbours that belong to one group and lie together in the base, too."""
    joined: list[Segment] = []
    for segment in segments:
        if not groups[segment.group].mode.based:
            segment = Segment(segment.length, segment.group, None)
        last = joined[-1] if joined else None
        if last is not None and last.group == segment.group and _follows(last, segment):
            joined[-1] = Segment(last.length + segment.length, last.group, last.base)
        else:
            joined.append(segment)
    return joined


def _follows(first: Segment, second: Segment) -> bool:
    if first.base is None or second.base is None:
        return first.base is second.base
    return (second.base.file, second.base.offset) == (
        first.base.file,
        first.base.offset + first.length,
    )

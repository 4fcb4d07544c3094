"""Making frames: for each element type the cheapest way to tell the new bytes from the old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from shardcast.codec import kernel, planes
from shardcast.codec.elements import ElementType
from shardcast.codec.frame import (
    MAX_FRAME_BYTES,
    MAX_SEGMENTS,
    BaseRange,
    Group,
    Mode,
    Segment,
    write_frame,
)

if TYPE_CHECKING:
    from shardcast.codec._kernel import Segment as KernelSegment

_SPARSE: Final = 16
"""Changes of at most one element in so many are listed without another look."""

_SURE: Final = 64
_SURE_ELEMENTS: Final = 32
"""A list of at most a byte for so many bytes, and elements, is taken: nothing else comes near."""

_MOST_CHANGES: Final = 3 << 20
"""Longer lists are cut, which bounds the encoder's memory: about 45 bytes a change."""

_SAMPLE_BLOCK: Final = 8 << 10
_SAMPLE_EVERY: Final = 16
"""Where it is open which way is the shortest, each is tried on one block in so many."""

_CLOSE: Final = 1.15
"""Ways that need at most so much more than the best, by the sample, are tried on everything."""

_DENSE: Final = (Mode.DIFFERENCES, Mode.SUBTRACTED, Mode.XORED)
_ALIKE: Final = 1.02
"""Of these, which differ in the numbers alone, a sample shows the best more sharply."""

_SMALL_TEXT: Final = 1 << 20
"""Texts up to this size are compressed thoroughly."""


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
        text: They are no numbers but a header or a text, in which things move.
    """

    length: int
    type: ElementType = ElementType.BYTES
    base: BaseRange | None = None
    text: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive bytes of the new version, and of the base."""

    start: int
    length: int
    base: BaseRange | None
    old: memoryview | None

    def part(self, skip: int, length: int) -> _Run:
        """Return ``length`` bytes of it from ``skip`` on."""
        if self.base is None or self.old is None:
            return _Run(self.start + skip, length, None, None)
        base = BaseRange(self.base.file, self.base.offset + skip)
        return _Run(self.start + skip, length, base, self.old[skip : skip + length])


@dataclass(frozen=True, slots=True)
class _Part:
    """What is coded together: runs of one type, all with a base or all without."""

    new: memoryview
    type: ElementType
    based: bool
    text: bool
    runs: list[_Run]

    @property
    def length(self) -> int:
        return sum(run.length for run in self.runs)

    def with_runs(self, runs: list[_Run]) -> _Part:
        return _Part(self.new, self.type, self.based, self.text, runs)

    def segments(self, *, based: bool) -> list[KernelSegment]:
        """Return them as the kernel takes them."""
        width = self.type.width
        return [
            (run.old if based else None, 0, self.new, run.start, run.length // width)
            for run in self.runs
        ]

    def joined(self) -> bytes:
        return b"".join(self.new[run.start : run.start + run.length] for run in self.runs)

    def joined_base(self) -> memoryview:
        return memoryview(b"".join(run.old for run in self.runs if run.old is not None))

    def between(self, low: int, high: int) -> list[_Run]:
        """Return the bytes from ``low`` to ``high``, counted through all runs."""
        found, at = [], 0
        for run in self.runs:
            first, last = max(low - at, 0), min(high - at, run.length)
            if first < last:
                found.append(run.part(first, last - first))
            at += run.length
        return found

    def halves(self) -> tuple[_Part, _Part]:
        middle = self.length // self.type.width // 2 * self.type.width
        return (
            self.with_runs(self.between(0, middle)),
            self.with_runs(self.between(middle, self.length)),
        )

    def sample(self) -> _Part:
        """Return one block in sixteen; everything where that is little."""
        length = self.length
        if self.text or length < 64 * _SAMPLE_BLOCK:
            return self
        step = _SAMPLE_EVERY * _SAMPLE_BLOCK
        starts = range(min(step, length) // 2 // _SAMPLE_BLOCK * _SAMPLE_BLOCK, length, step)
        runs = [run for at in starts for run in self.between(at, at + _SAMPLE_BLOCK)]
        return self.with_runs(runs)


def encode_frame(new: memoryview, pieces: Sequence[Piece], base: BaseReader) -> bytes:
    """Return a frame that rebuilds ``new``.

    Args:
        new: At most MAX_FRAME_BYTES.
        pieces: They fill ``new``; each is a whole number of its elements.
        base: What they start from.

    Raises:
        MalformedError: If the base lacks a range.
        ValueError: If the pieces do not fill ``new``, or end within an element.
    """
    if sum(piece.length for piece in pieces) != len(new) or len(new) > MAX_FRAME_BYTES:
        raise ValueError(f"pieces do not fill {len(new)} bytes of a frame")
    if any(piece.length % piece.type.width for piece in pieces):
        raise ValueError("a piece ends within an element")
    groups: list[Group] = []
    segments: list[tuple[int, Segment]] = []
    for part in _parts(new, pieces, base):
        for group, coded in _encode(part):
            based = group.mode.based
            segments += [
                (run.start, Segment(run.length, len(groups), run.base if based else None))
                for run in coded.runs
            ]
            groups.append(group)
    segments.sort(key=lambda entry: entry[0])
    merged = _merged([segment for _, segment in segments])
    if len(merged) > MAX_SEGMENTS and len(pieces) > 1:
        # Tensors of a few bytes each: telling where they come from costs more than they do.
        return encode_frame(new, [Piece(len(new))], base)
    return write_frame(groups, merged)


def _parts(new: memoryview, pieces: Sequence[Piece], base: BaseReader) -> list[_Part]:
    parts: dict[tuple[ElementType, bool, bool], _Part] = {}
    at = 0
    for piece in _joined(pieces):
        key = (piece.type, piece.base is not None, piece.text)
        old = None
        if piece.base is not None:
            old = base.range(piece.base.file, piece.base.offset, piece.length)
        part = parts.setdefault(key, _Part(new, *key, []))
        part.runs.append(_Run(at, piece.length, piece.base, old))
        at += piece.length
    return list(parts.values())


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of a kind that lie together in the base, too: they become one segment.

    Before they are coded: changes are told by the borders of the segments.
    """
    joined: list[Piece] = []
    for piece in pieces:
        if not piece.length:
            continue
        last = joined[-1] if joined else None
        if last is not None and _kind(last) == _kind(piece) and _lie_together(last, piece):
            joined[-1] = replace(last, length=last.length + piece.length)
        else:
            joined.append(piece)
    return joined


def _kind(piece: Piece) -> tuple[ElementType, bool]:
    return piece.type, piece.text


def _encode(part: _Part) -> list[tuple[Group, _Part]]:
    """Return the shortest way to tell a part; long lists of changes in several groups."""
    known: dict[Mode, bytes] = {}
    if part.based:
        most = part.length // part.type.width // _SPARSE
        changes = kernel.encode_changes(part.type, part.segments(based=True), most)
        if changes is not None:
            if not changes:
                return [(Group(Mode.SAME, part.type, b""), part)]
            if len(changes) * max(_SURE, _SURE_ELEMENTS * part.type.width) <= part.length:
                return [(Group(Mode.CHANGES, part.type, changes), part)]
            known[Mode.CHANGES] = changes
    promising = _promising(part, known)
    if Mode.CHANGES in promising and Mode.CHANGES not in known:
        changes = kernel.encode_changes(part.type, part.segments(based=True), _MOST_CHANGES)
        if changes is None:
            first, second = part.halves()
            return _encode(first) + _encode(second)
        known[Mode.CHANGES] = changes
    for mode in promising:
        if mode not in known:
            known[mode] = _payload(mode, part)
    best = min(known, key=lambda mode: len(known[mode]))
    if len(known[best]) >= part.length:
        best, known[Mode.RAW] = Mode.RAW, part.joined()
    return [(Group(best, part.type, known[best]), part)]


def _promising(part: _Part, known: dict[Mode, bytes]) -> list[Mode]:
    """Return the ways that may be the shortest, by a sample; adds to ``known`` what is found."""
    modes = [Mode.PLANES]
    if part.based:
        modes += [Mode.CHANGES, *_DENSE]
    if part.text:
        modes.append(Mode.ZSTD_BASE if part.based else Mode.ZSTD)
    sample = part.sample()
    share = sample.length / part.length
    sizes: dict[Mode, float] = {}
    for mode in modes:
        if mode in known:
            sizes[mode] = len(known[mode]) * share
            continue
        if mode is Mode.CHANGES and sample.length // sample.type.width > _MOST_CHANGES:
            continue
        payload = _payload(mode, sample)
        sizes[mode] = len(payload)
        if sample is part:
            known[mode] = payload
    framing = _SAMPLE_EVERY * part.type.width  # of few bytes much
    limit = min(sizes.values()) * _CLOSE + framing
    dense = min((sizes[mode] for mode in _DENSE if mode in sizes), default=limit)
    sharper = min(limit, dense * _ALIKE + framing)
    return [m for m, size in sizes.items() if size <= (sharper if m in _DENSE else limit)]


def _payload(mode: Mode, part: _Part) -> bytes:
    elements = part.length // part.type.width
    match mode:
        case Mode.CHANGES:
            changes = kernel.encode_changes(part.type, part.segments(based=True), elements)
            assert changes is not None
            return changes
        case Mode.ZSTD:
            return planes.compress(part.joined(), thorough=part.length <= _SMALL_TEXT)
        case Mode.ZSTD_BASE:
            small = part.length <= _SMALL_TEXT
            return planes.compress(part.joined(), part.joined_base(), thorough=small)
        case _:
            split = [bytearray(elements) for _ in range(part.type.width)]
            segments = part.segments(based=mode.based)
            kernel.split_planes(part.type, segments, split, planes.WAYS[mode])
            return planes.pack(split)


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbours that belong to one group and lie together in the base, too."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and last.group == segment.group and _lie_together(last, segment):
            joined[-1] = Segment(last.length + segment.length, last.group, last.base)
        else:
            joined.append(segment)
    return joined


def _lie_together(first: Piece | Segment, second: Piece | Segment) -> bool:
    if first.base is None or second.base is None:
        return first.base is second.base
    return (second.base.file, second.base.offset) == (
        first.base.file,
        first.base.offset + first.length,
    )

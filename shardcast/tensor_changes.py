"""What changed between two versions, tensor by tensor, and what telling it costs.

Pure but for the bytes that it is given. A frame codes many tensors together, so what a tensor costs
is its share of each payload: by its changed elements where changes are listed, else by its bytes.
The shares add up to the frames; what names the segments is counted apart.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardcast.codec import kernel
from shardcast.codec.elements import ElementType
from shardcast.codec.encode import BaseReader, Piece
from shardcast.codec.frame import Mode, read_frame
from shardcast.codec.spans import Tensor
from shardcast.deltas import BaseMap, Tensors

FRAMING: Final = "framing"
PLAIN: Final = "shards"
"""How bytes travel that no frame tells."""


@dataclass(slots=True)
class Row:
    """A tensor, or the bytes of a file that belong to none.

    Attributes:
        name: The tensor, or the file's path.
        dtype: As safetensors names it; None: no tensor.
        shape: Its shape.
        bytes: Its size; of a tensor that was removed, its old one.
        elements: How many numbers it has (bytes, where the codec knows no better).
        change: What became of it: ``same``, ``changed``, ``added``, ``removed`` or ``retyped``.
        old_dtype: Its type in the base, where that was another one.
        moved: Whether it lies elsewhere than in the base: at another place, or in another file.
        resized: Whether it has another number of bytes than in the base.
        compared: Elements that have a predecessor.
        changed: Those of them that differ.
        wire: What it costs, by the codec's mode.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    bytes: int
    elements: int
    change: str = "same"
    old_dtype: str | None = None
    moved: bool = False
    resized: bool = False
    compared: int = 0
    changed: int = 0
    wire: dict[str, float] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> int:
        """What it costs in all."""
        return round(sum(self.wire.values()))

    @property
    def density(self) -> float | None:
        """The share of its elements that differ, of those that have a predecessor."""
        return self.changed / self.compared if self.compared else None

    @property
    def ratio(self) -> float | None:
        """How many times fewer bytes than it has; None where it costs nothing."""
        wire = self.wire_bytes
        return self.bytes / wire if wire else None

    @property
    def codec(self) -> str:
        """The modes that tell it, the costliest first."""
        told = {mode: cost for mode, cost in self.wire.items() if cost > 0}
        return "+".join(sorted(told, key=lambda mode: -told[mode])) or "-"


@dataclass(frozen=True, slots=True)
class Changes:
    """All of it.

    Attributes:
        tensors: Those of the new version in its order, then those that it has not any more.
        others: Everything else of its files: headers and whole files that hold no tensors.
        framing: What frames take to name their segments.
    """

    tensors: tuple[Row, ...]
    others: tuple[Row, ...]
    framing: int

    @property
    def wire_bytes(self) -> int:
        """What travels in all."""
        rows = (*self.tensors, *self.others)
        return self.framing + round(sum(sum(row.wire.values()) for row in rows))

    def count(self, change: str) -> int:
        """Return how many tensors became that."""
        return sum(row.change == change for row in self.tensors)


class Tally:
    """Adds up what frames tell. Thread-safe.

    Args:
        target: The new version.
        base: The old one.
    """

    def __init__(self, target: Tensors, base: Tensors) -> None:
        self.map = BaseMap(target, base)
        self._layout = target.layout
        self._lock = threading.Lock()
        self._framing = 0
        self._rows: list[list[Row]] = []
        self._starts: list[list[int]] = []
        self._others = [Row(e.path, None, (), 0, 0) for e in target.layout.files]
        for file, tensors in enumerate(target.files):
            self._rows.append([_row(tensor) for tensor in tensors])
            self._starts.append([tensor.offset for tensor in tensors])
            rest = target.layout.files[file].bytes - sum(tensor.length for tensor in tensors)
            self._others[file].bytes = self._others[file].elements = rest
        self._removed = self._relate(target, base)

    def _relate(self, target: Tensors, base: Tensors) -> list[Row]:
        """Note what became of each tensor; return those that are gone."""
        old = {tensor.name: tensor for tensors in base.files for tensor in tensors}
        for rows, tensors in zip(self._rows, target.files, strict=True):
            for row, tensor in zip(rows, tensors, strict=True):
                before = old.pop(tensor.name, None)
                if before is None:
                    row.change = "added"
                    continue
                path = target.layout.files[tensor.file].path
                was = base.layout.files[before.file].path
                row.moved = (path, tensor.offset) != (was, before.offset)
                row.resized = tensor.length != before.length or tensor.shape != before.shape
                if before.dtype != tensor.dtype:
                    row.change, row.old_dtype = "retyped", before.dtype
        sizes = {entry.path: entry.bytes for entry in base.layout.files}
        for other, entry in zip(self._others, target.layout.files, strict=True):
            if other.name not in sizes:
                other.change = "added"
            else:
                other.resized = entry.bytes != sizes[other.name]
        gone = [_row(tensor) for tensor in old.values()]
        for row in gone:
            row.change = "removed"
        return gone

    def add(self, run: range, new: memoryview, frame: bytes | None, base: BaseReader) -> None:
        """Take in the bytes of consecutive shards.

        Args:
            run: The shards.
            new: Their bytes.
            frame: What rebuilds them; None: they travel as they are.
            base: The old version's bytes.

        Raises:
            MalformedError: If the frame is none, or the base lacks a range.
        """
        pieces = list(self._pieces(run))
        counts = _count(pieces, new, base)
        costs: list[dict[str, float]] = [{} for _ in pieces]
        framing = 0
        if frame is None:
            for (piece, _row_of), cost in zip(pieces, costs, strict=True):
                cost[PLAIN] = piece.length
        else:
            framing = _share(frame, len(new), [piece for piece, _ in pieces], counts, costs)
        with self._lock:
            self._framing += framing
            for (piece, row), count, cost in zip(pieces, counts, costs, strict=True):
                if count is not None:
                    row.compared += piece.length // piece.type.width
                    row.changed += count
                for mode, amount in cost.items():
                    row.wire[mode] = row.wire.get(mode, 0.0) + amount

    def leave_out(self, run: range) -> None:
        """Take in shards that the base has, somewhere: nothing travels for them."""
        with self._lock:
            for piece, row in self._pieces(run):
                if piece.base is not None:
                    row.compared += piece.length // piece.type.width

    def changes(self) -> Changes:
        """Return what was added up."""
        tensors = [row for rows in self._rows for row in rows]
        for row in (*tensors, *self._others):
            if row.change == "same" and (row.changed or row.resized or row.compared < row.elements):
                row.change = "changed"
        others = tuple(row for row in self._others if row.bytes or row.change != "same")
        return Changes((*tensors, *self._removed), others, self._framing)

    def _pieces(self, run: range) -> Iterator[tuple[Piece, Row]]:
        """Yield the pieces of a run with the row that each belongs to."""
        places = ((e.file, e.offset, e.length) for e in map(self._layout.extent, run))
        file, offset, left = next(places)
        for piece in self.map.pieces(run):
            while not left:
                file, offset, left = next(places)
            yield piece, self._row_at(file, offset)
            skip = piece.length
            while skip:
                step = min(skip, left)
                offset, left, skip = offset + step, left - step, skip - step
                if skip:
                    file, offset, left = next(places)

    def _row_at(self, file: int, offset: int) -> Row:
        found = bisect.bisect_right(self._starts[file], offset) - 1
        if found >= 0:
            row = self._rows[file][found]
            if offset < self._starts[file][found] + row.bytes:
                return row
        return self._others[file]


def _row(tensor: Tensor) -> Row:
    elements = tensor.length // tensor.type.width
    return Row(tensor.name, tensor.dtype, tensor.shape, tensor.length, elements)


def _count(
    pieces: Sequence[tuple[Piece, Row]], new: memoryview, base: BaseReader
) -> list[int | None]:
    """Return how many elements of each piece differ from their predecessors, None without any."""
    found: list[int | None] = [None] * len(pieces)
    grouped: dict[ElementType, list[int]] = {}
    starts: list[int] = []
    at = 0
    for index, (piece, _) in enumerate(pieces):
        starts.append(at)
        at += piece.length
        if piece.base is not None:
            grouped.setdefault(piece.type, []).append(index)
    for kind, indices in grouped.items():
        segments: list[tuple[memoryview, int, memoryview, int, int]] = []
        for index in indices:
            piece = pieces[index][0]
            if piece.base is None:
                continue
            old = base.range(piece.base.file, piece.base.offset, piece.length)
            segments.append((old, 0, new, starts[index], piece.length // kind.width))
        for index, count in zip(indices, kernel.count_changes(kind, [*segments]), strict=True):
            found[index] = count
    return found


def _share(
    frame: bytes,
    length: int,
    pieces: Sequence[Piece],
    counts: Sequence[int | None],
    costs: Sequence[dict[str, float]],
) -> int:
    """Give each piece its share of a frame's payloads; return what the frame takes besides."""
    parts = read_frame(frame, length)
    stops: list[int] = []
    for piece in pieces:
        stops.append((stops[-1] if stops else 0) + piece.length)
    shares: list[dict[int, float]] = [{} for _ in parts.groups]
    lengths: list[dict[int, float]] = [{} for _ in parts.groups]
    at = index = 0
    for segment in parts.segments:
        end = at + segment.length
        while at < end:
            while stops[index] <= at:
                index += 1
            overlap = min(end, stops[index]) - at
            weight = overlap / pieces[index].length * (counts[index] or 0)
            share, bytes_ = shares[segment.group], lengths[segment.group]
            share[index] = share.get(index, 0.0) + weight
            bytes_[index] = bytes_.get(index, 0.0) + overlap
            at += overlap
    for group, share, bytes_ in zip(parts.groups, shares, lengths, strict=True):
        weights = share if group.mode is Mode.CHANGES and any(share.values()) else bytes_
        total = sum(weights.values())
        for one, weight in weights.items():
            mode = group.mode.name.lower().replace("_", "-")
            costs[one][mode] = costs[one].get(mode, 0.0) + len(group.payload) * weight / total
    return len(frame) - sum(len(group.payload) for group in parts.groups)

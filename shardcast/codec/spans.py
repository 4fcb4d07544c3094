"""Where a version's bytes are numbers, and where the version before has the same ones.

Only the encoder looks: frames name what they start from, so the decoder needs none of this.
"""

from __future__ import annotations

import bisect
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardcast.codec.elements import SAFETENSORS, ElementType
from shardcast.codec.encode import Piece
from shardcast.codec.frame import BaseRange

MAX_HEADER_BYTES: Final = 100_000_000
"""What safetensors itself allows."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """``length`` bytes of one type at ``offset`` of file number ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    length: int

    @property
    def type(self) -> ElementType:
        """How the codec takes it."""
        return SAFETENSORS.get(self.dtype, ElementType.BYTES)


def header_bytes(start: bytes) -> int | None:
    """Return how long a safetensors header is, from a file's first 8 bytes; None if it has none."""
    if len(start) < 8:
        return None
    (length,) = struct.unpack("<Q", start[:8])
    return 8 + length if 2 <= length <= MAX_HEADER_BYTES else None


def read_tensors(header: bytes, file: int, size: int) -> list[Tensor]:
    """Return the tensors of a safetensors file in file order; none where it is not one.

    Args:
        header: Its first bytes, as many as ``header_bytes`` says.
        file: Its number, for the result.
        size: Its length.
    """
    try:
        entries = json.loads(header[8:])
        tensors = [
            _tensor(name, entry, file, len(header))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return []
    tensors.sort(key=lambda tensor: tensor.offset)
    end = len(header)
    for tensor in tensors:
        if tensor.offset < end or tensor.length < 0:
            return []
        end = tensor.offset + tensor.length
    return tensors if end <= size else []


def _tensor(name: str, entry: Mapping[str, Any], file: int, start: int) -> Tensor:
    first, last = entry["data_offsets"]
    if not (isinstance(first, int) and isinstance(last, int)):
        raise TypeError("offsets are no integers")
    shape = tuple(int(n) for n in entry["shape"])
    return Tensor(name, str(entry["dtype"]), shape, file, start + first, last - first)


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes at ``offset`` of a file of the new version; ``text``: of no tensor."""

    offset: int
    length: int
    type: ElementType
    base: BaseRange | None
    text: bool = False


@dataclass(frozen=True, slots=True)
class OldFile:
    """A file of the base: its number in the layout, its size."""

    file: int
    size: int


def file_spans(
    size: int,
    tensors: Sequence[Tensor],
    same_path: OldFile | None,
    old_tensors: Mapping[str, Tensor],
) -> list[Span]:
    """Cut a file of the new version into spans, in order, without gaps.

    A tensor starts from the tensor of its name and type, wherever that lies, as far as it reaches;
    everything else from the bytes at the same place of the file of the same path.

    Args:
        size: Of the new file.
        tensors: Its tensors, in file order.
        same_path: The base's file of the same path.
        old_tensors: All tensors of the base, by name.
    """
    spans: list[Span] = []
    at = 0
    for tensor in tensors:
        spans += _in_place(at, tensor.offset - at, same_path)
        spans += _of_tensor(tensor, old_tensors.get(tensor.name))
        at = tensor.offset + tensor.length
    spans += _in_place(at, size - at, same_path)
    return spans


def _in_place(offset: int, length: int, old: OldFile | None) -> Iterator[Span]:
    covered = 0 if old is None else max(0, min(length, old.size - offset))
    if covered and old is not None:
        yield Span(offset, covered, ElementType.BYTES, BaseRange(old.file, offset), text=True)
    if length > covered:
        yield Span(offset + covered, length - covered, ElementType.BYTES, None, text=True)


def _of_tensor(tensor: Tensor, old: Tensor | None) -> Iterator[Span]:
    covered = 0
    if old is not None and old.dtype == tensor.dtype:
        covered = min(tensor.length, old.length)
        covered -= covered % tensor.type.width
        if covered:
            yield Span(tensor.offset, covered, tensor.type, BaseRange(old.file, old.offset))
    if tensor.length > covered:
        yield Span(tensor.offset + covered, tensor.length - covered, tensor.type, None)


def pieces_between(spans: Sequence[Span], start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of the bytes from ``start`` to ``stop`` of the file that ``spans`` cut.

    Elements that a boundary cuts are bytes.
    """
    first = bisect.bisect_right(spans, start, key=lambda span: span.offset) - 1
    for span in spans[max(first, 0) :]:
        low, high = max(start, span.offset), min(stop, span.offset + span.length)
        if span.offset >= stop:
            return
        if low >= high:
            continue
        width = span.type.width
        whole_low = span.offset + -(-(low - span.offset) // width) * width
        whole_high = span.offset + (high - span.offset) // width * width
        if whole_low >= whole_high:
            yield _piece(span, low, high, ElementType.BYTES)
            continue
        if low < whole_low:
            yield _piece(span, low, whole_low, ElementType.BYTES)
        yield _piece(span, whole_low, whole_high, span.type)
        if whole_high < high:
            yield _piece(span, whole_high, high, ElementType.BYTES)


def _piece(span: Span, low: int, high: int, kind: ElementType) -> Piece:
    base = span.base
    if base is not None:
        base = BaseRange(base.file, base.offset + low - span.offset)
    return Piece(high - low, kind, base, span.text)

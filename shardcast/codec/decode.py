"""Rebuilding bytes from a frame and a base. Knows nothing of tensors; trusts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcast.codec import kernel, planes
from shardcast.codec.encode import BaseReader
from shardcast.codec.frame import Frame, Group, Mode, Segment, read_frame
from shardcast.errors import MalformedError

if TYPE_CHECKING:
    from shardcast.codec._kernel import Segment as KernelSegment


def decode_frame(data: bytes | memoryview, target_bytes: int, base: BaseReader) -> bytearray:
    """Return the bytes that a frame rebuilds. Their digests decide whether they are right.

    Args:
        data: The frame.
        target_bytes: How many bytes the shards that it stands for have.
        base: The bytes that it starts from.

    Raises:
        MalformedError: If it is no frame, or asks for a range that the base has not.
        LimitError: If it has more parts than frames have.
    """
    frame = read_frame(data, target_bytes)  # before so much is allocated
    out = bytearray(target_bytes)
    _decode(frame, base, memoryview(out))
    return out


def decode_frame_into(data: bytes | memoryview, out: memoryview, base: BaseReader) -> None:
    """Rebuild all bytes of ``out``, which may be a buffer that is used again and again.

    After an error ``out`` holds anything.

    Raises:
        MalformedError: If it is no frame, or asks for a range that the base has not.
        LimitError: If it has more parts than frames have.
    """
    _decode(read_frame(data, len(out)), base, out)


def _decode(frame: Frame, base: BaseReader, out: memoryview) -> None:
    of_group: list[list[tuple[int, Segment]]] = [[] for _ in frame.groups]
    at = 0
    for segment in frame.segments:
        of_group[segment.group].append((at, segment))
        at += segment.length
    for group, segments in zip(frame.groups, of_group, strict=True):
        _decode_group(group, segments, base, out)


def _decode_group(
    group: Group, segments: list[tuple[int, Segment]], base: BaseReader, out: memoryview
) -> None:
    width = group.type.width
    length = sum(segment.length for _, segment in segments)
    if any(segment.length % width for _, segment in segments):
        raise MalformedError(f"a segment of a frame ends within an element of {width} bytes")
    olds = [
        None if s.base is None else base.range(s.base.file, s.base.offset, s.length)
        for _, s in segments
    ]
    ranges: list[KernelSegment] = [
        (old, 0, out, start, segment.length // width)
        for old, (start, segment) in zip(olds, segments, strict=True)
    ]
    match group.mode:
        case Mode.SAME:
            if len(group.payload):
                raise MalformedError("a group that equals its base has a payload")
            for old, (start, segment) in zip(olds, segments, strict=True):
                out[start : start + segment.length] = old or b""
        case Mode.CHANGES:
            try:
                kernel.decode_changes(group.type, ranges, group.payload)
            except ValueError as error:
                raise MalformedError(f"frame: {error}") from error
        case Mode.RAW:
            if len(group.payload) != length:
                raise MalformedError(
                    f"a frame has {len(group.payload)} bytes where {length} belong"
                )
            _scatter(group.payload, segments, out)
        case Mode.ZSTD:
            _scatter(planes.decompress(group.payload, length), segments, out)
        case Mode.ZSTD_BASE:
            old_bytes = memoryview(b"".join(old for old in olds if old is not None))
            _scatter(planes.decompress(group.payload, length, old_bytes), segments, out)
        case Mode.DIFFERENCES | Mode.PLANES | Mode.SUBTRACTED | Mode.XORED:
            merged = planes.unpack(group.payload, width, length // width)
            kernel.merge_planes(group.type, ranges, merged, planes.WAYS[group.mode])


def _scatter(
    data: bytes | memoryview, segments: list[tuple[int, Segment]], out: memoryview
) -> None:
    view, at = memoryview(data), 0
    for start, segment in segments:
        out[start : start + segment.length] = view[at : at + segment.length]
        at += segment.length

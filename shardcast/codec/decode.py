"""Rebuilding bytes from a frame and a base. Knows nothing of tensors; trusts nothing."""

from __future__ import annotations

from shardcast.codec import kernel, planes
from shardcast.codec.encode import BaseReader
from shardcast.codec.frame import Group, Mode, Segment, read_frame
from shardcast.errors import MalformedError


def decode_frame(data: bytes | memoryview, target_bytes: int, base: BaseReader) -> bytearray:
    """Return the bytes that a frame rebuilds. Their digests decide whether they are right.

    Args:
        data: The frame.
        target_bytes: How many bytes the shards that it stands for have.
        base: The bytes that it starts from.

    Raises:
        MalformedError: If it is no frame, or asks for a range that the base has not.
    """
    frame = read_frame(data, target_bytes)
    out = bytearray(target_bytes)
    view = memoryview(out)
    starts: list[int] = []
    at = 0
    for segment in frame.segments:
        starts.append(at)
        at += segment.length
    for index, group in enumerate(frame.groups):
        mine = [
            (start, segment)
            for start, segment in zip(starts, frame.segments, strict=True)
            if segment.group == index
        ]
        _decode_group(group, mine, base, view)
    return out


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
    ranges = [
        (old, 0, out, start, segment.length // width)
        for old, (start, segment) in zip(olds, segments, strict=True)
    ]
    match group.mode:
        case Mode.SAME:
            if len(group.payload):
                raise MalformedError("a group that equals its base has a payload")
            _scatter(b"".join(old for old in olds if old is not None), segments, out)
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
            old = memoryview(b"".join(old for old in olds if old is not None))
            _scatter(planes.decompress(group.payload, length, old), segments, out)
        case Mode.DIFFERENCES | Mode.PLANES:
            merged = planes.unpack(group.payload, width, length // width)
            kernel.merge_planes(group.type, ranges, merged)
        case _:
            raise MalformedError(f"a frame has a group of mode {group.mode}")


def _scatter(
    data: bytes | memoryview, segments: list[tuple[int, Segment]], out: memoryview
) -> None:
    view, at = memoryview(data), 0
    for start, segment in segments:
        out[start : start + segment.length] = view[at : at + segment.length]
        at += segment.length

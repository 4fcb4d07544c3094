"""Byte planes, each compressed where that pays: the payload of dense groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zstandard

from shardcast.codec.frame import Mode
from shardcast.errors import MalformedError

WAYS: Final = {Mode.PLANES: 0, Mode.DIFFERENCES: 0, Mode.SUBTRACTED: 1, Mode.XORED: 2}
"""What the kernel calls the ways that elements are told in planes; without a base they are all one."""

_WORTH: Final = 1024
"""A plane is compressed if that saves one byte in so many: decompressing costs time, too."""

_FAST: Final = 1
_SLOWER: Final = 3
_THOROUGH: Final = 12

_FEW: Final = 3
"""Planes that shrink to one part in so many hold few different bytes: the slower level may find more."""
_TRIED: Final = 512 << 10
"""What it finds is told by so much of a plane, or by a sixteenth."""


def compress(
    data: bytes | bytearray | memoryview, base: memoryview | None = None, *, thorough: bool = False
) -> bytes:
    """Return data compressed, with what ``base`` holds known on both sides."""
    return _compress(data, _THOROUGH if thorough else _FAST, base)


def _compress(
    data: bytes | bytearray | memoryview, level: int, base: memoryview | None = None
) -> bytes:
    return zstandard.ZstdCompressor(
        level=level,
        dict_data=None if base is None else _dictionary(base),
        write_checksum=False,
        write_dict_id=False,
    ).compress(data)


def decompress(data: bytes | memoryview, length: int, base: memoryview | None = None) -> bytes:
    """Return exactly ``length`` bytes from what ``compress`` wrote.

    Raises:
        MalformedError: If it holds something else; checked before anything is allocated.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared != length:
            raise MalformedError(f"{declared} compressed bytes where {length} belong")
        dictionary = None if base is None else _dictionary(base)
        found = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(
            data, max_output_size=length, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise MalformedError(f"compressed bytes do not decompress: {error}") from error
    if len(found) != length:
        raise MalformedError(f"{len(found)} decompressed bytes where {length} belong")
    return found


def _dictionary(base: memoryview) -> zstandard.ZstdCompressionDict | None:
    # An empty dictionary is none to zstandard; few bytes are of no use to it.
    if len(base) < 8:
        return None
    return zstandard.ZstdCompressionDict(bytes(base), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def pack(planes: Sequence[bytes | bytearray]) -> bytes:
    """Return planes of equal length, each with a flag and its length before it."""
    packed: list[bytes | bytearray] = []
    for plane in planes:
        smaller = _shortest(memoryview(plane))
        if len(smaller) < len(plane) - len(plane) // _WORTH:
            packed += [b"\1" + len(smaller).to_bytes(4, "little"), smaller]
        else:
            packed += [b"\0" + len(plane).to_bytes(4, "little"), plane]
    return b"".join(packed)


def _shortest(plane: memoryview) -> bytes:
    fast = _compress(plane, _FAST)
    if len(fast) * _FEW > len(plane):
        return fast
    size = max(_TRIED, len(plane) // 16)
    if len(plane) > size:
        middle = (len(plane) - size) // 2
        part = plane[middle : middle + size]
        before, after = (len(_compress(part, level)) for level in (_FAST, _SLOWER))
        if after + before // _WORTH >= before:
            return fast
    return min(fast, _compress(plane, _SLOWER), key=len)


def unpack(data: bytes | memoryview, width: int, size: int) -> list[bytes | memoryview]:
    """Return ``width`` planes of ``size`` bytes.

    Raises:
        MalformedError: If ``pack`` did not write it.
    """
    view, at = memoryview(data), 0
    planes: list[bytes | memoryview] = []
    for _ in range(width):
        length = int.from_bytes(view[at + 1 : at + 5], "little")
        body = view[at + 5 : at + 5 + length]
        if len(view) < at + 5 or len(body) != length or view[at] > 1:
            raise MalformedError("byte planes end early")
        if view[at]:
            planes.append(decompress(body, size))
        elif length == size:
            planes.append(body)
        else:
            raise MalformedError(f"a plane of {length} bytes where {size} belong")
        at += 5 + length
    if at != len(view):
        raise MalformedError("bytes follow the byte planes")
    return planes

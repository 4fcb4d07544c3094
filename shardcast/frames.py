"""One frame of a delta: what it rebuilds, and which shards of that are right.

Whoever rebuilds (a worker, a relay, an origin that is published to) goes by this: a frame is decoded
whatever it is, and of what comes out a shard counts only once its BLAKE3 is the signed one.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

from shardcast.errors import ShardcastError
from shardcast.protocol.layout import Extent
from shardcast.protocol.limits import MAX_SHARD_BYTES
from shardcast.protocol.manifest import Version

if TYPE_CHECKING:
    from shardcast.codec.encode import BaseReader

log = logging.getLogger("shardcast.frames")


class Arena:
    """A buffer for one frame after the other: its pages are touched once, not each time."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def room(self, length: int) -> memoryview:
        """Return ``length`` bytes of it; what was in them is gone."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        return memoryview(self._buffer)[:length]


def decoded(
    data: memoryview, length: int, base: BaseReader, arena: Arena
) -> tuple[memoryview, str]:
    """Return what a frame rebuilds, and why that is nothing. Raises nothing of the frame's making.

    Args:
        data: The frame.
        length: How many bytes its shards have.
        base: What it starts from; what it raises is a reason, too.
        arena: Where to: what was decoded into it before is gone.
    """
    from shardcast.codec.decode import decode_frame_into  # compiled: not where no delta is used

    if length > MAX_SHARD_BYTES:
        return memoryview(b""), f"a frame stands for {length} bytes; {MAX_SHARD_BYTES} are the most"
    try:
        out = arena.room(length)
        decode_frame_into(data, out, base)
        return out, ""
    except ShardcastError as error:
        return memoryview(b""), error.message
    except Exception as error:  # a bug of the decoder costs bytes, never what else goes on
        log.exception("decoding a frame broke")
        return memoryview(b""), f"decoding broke: {type(error).__name__}: {error}"


def checked_shards(
    data: memoryview, extents: Sequence[Extent], version: Version, wanted: Container[int]
) -> Iterator[tuple[Extent, memoryview | None]]:
    """Yield the wanted shards of a decoded frame: their bytes if these are the signed ones, else None.

    Args:
        data: What was decoded, perhaps nothing.
        extents: All shards of the frame, in order.
        version: Theirs; it knows the digests of those that are wanted.
        wanted: The shards to look at.
    """
    at = 0
    for extent in extents:
        piece = data[at : at + extent.length]
        at += extent.length
        if extent.shard in wanted:
            right = blake3(piece).hexdigest() == version.digests[extent.shard]
            yield extent, piece if right else None

"""Layouts and parts: which files a version has, how they are cut into shards, their digests."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import LimitError, MalformedError
from shardcast.protocol.digest import pack_digests, unpack_digests
from shardcast.protocol.documents import (
    Count,
    Digest,
    Document,
    Positive,
    RunName,
    Step,
    Text,
    check_run,
    decode,
    encode,
)
from shardcast.protocol.envelope import decode_base64
from shardcast.protocol.limits import (
    MAX_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_FILES,
    MAX_METADATA_BYTES,
    MAX_METADATA_ITEMS,
    MAX_PART_SHARDS,
    MAX_SHARD_BYTES,
    MAX_SHARDS,
    MIN_SHARD_BYTES,
    SHARDS_WANTED,
)
from shardcast.protocol.paths import check_tree

LAYOUT_FORMAT: Final = "shardcast.layout/1"
PART_FORMAT: Final = "shardcast.part/1"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file: its path in the version's directory and its size."""

    path: str
    bytes: Count


class Layout(Document, frozen=True, kw_only=True, dict=True):
    """A version as a directory of files. Known before any of their bytes are."""

    format: Literal["shardcast.layout/1"] = LAYOUT_FORMAT
    run: RunName
    version: Positive
    step: Step
    lineage: Text
    created_at: Count
    shard_bytes: Annotated[int, msgspec.Meta(ge=MIN_SHARD_BYTES, le=MAX_SHARD_BYTES)]
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_METADATA_ITEMS)]
    files: Annotated[list[FileEntry], msgspec.Meta(min_length=1, max_length=MAX_FILES)]

    def check(self) -> None:
        """Check paths, shard size, counts and totals.

        Raises:
            MalformedError: Naming what does not fit (UnsafePathError for a path).
        """
        if self.shard_bytes & (self.shard_bytes - 1):
            raise MalformedError(f"shard_bytes {self.shard_bytes} is not a power of two")
        check_run(self.run)
        texts = [text for item in self.metadata.items() for text in item]
        weight = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if weight > MAX_METADATA_BYTES:
            raise LimitError(f"metadata of {weight} bytes is over {MAX_METADATA_BYTES}")
        if self.total_bytes > MAX_BYTES:
            raise LimitError(f"files of {self.total_bytes} bytes in all are over {MAX_BYTES}")
        if self.shard_count > MAX_SHARDS:
            raise LimitError(f"{self.shard_count} shards are over the limit of {MAX_SHARDS}")
        check_tree(entry.path for entry in self.files)

    @cached_property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.bytes for entry in self.files)

    @cached_property
    def _first_shards(self) -> list[int]:
        first, starts = 0, []
        for entry in self.files:
            starts.append(first)
            first += -(-entry.bytes // self.shard_bytes)
        return [*starts, first]

    @property
    def shard_count(self) -> int:
        """How many shards the version has. An empty file has none."""
        return self._first_shards[-1]

    def file_shards(self, file: int) -> range:
        """Return the shard numbers of the file with index ``file``."""
        return range(self._first_shards[file], self._first_shards[file + 1])

    def extent(self, shard: int) -> Extent:
        """Return where shard ``shard`` lies.

        Raises:
            IndexError: If the layout has no such shard.
        """
        if not 0 <= shard < self.shard_count:
            raise IndexError(f"shard {shard} of {self.shard_count}")
        file = bisect.bisect_right(self._first_shards, shard) - 1
        entry = self.files[file]
        offset = (shard - self._first_shards[file]) * self.shard_bytes
        length = min(self.shard_bytes, entry.bytes - offset)
        return Extent(shard=shard, file=file, path=entry.path, offset=offset, length=length)

    def extents(self) -> Iterator[Extent]:
        """Yield the extents of all shards in order."""
        return (self.extent(shard) for shard in range(self.shard_count))


@dataclass(frozen=True, slots=True)
class Extent:
    """Shard ``shard``: ``length`` bytes at ``offset`` of the file ``path`` (index ``file``)."""

    shard: int
    file: int
    path: str
    offset: int
    length: int


class Part(Document, frozen=True, kw_only=True, dict=True):
    """The digests of consecutive shards of one layout, from ``first_shard`` on."""

    format: Literal["shardcast.part/1"] = PART_FORMAT
    layout: Digest
    first_shard: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS)]
    digests: str

    def check(self) -> None:
        """Check that the digests are 1 to 4096 whole ones, of shards that can exist.

        Raises:
            MalformedError: If they are not.
        """
        count = len(self.shard_digests)
        if not 1 <= count <= MAX_PART_SHARDS:
            raise LimitError(f"{count} digests; a part has 1 to {MAX_PART_SHARDS}")
        if self.shards.stop > MAX_SHARDS:
            raise LimitError(f"shard {self.shards.stop - 1} is over the limit of {MAX_SHARDS}")

    @cached_property
    def shard_digests(self) -> tuple[str, ...]:
        """The digests in hex, in shard order."""
        return unpack_digests(decode_base64(self.digests, what="digests"))

    @property
    def shards(self) -> range:
        """The numbers of the shards that this part covers."""
        return range(self.first_shard, self.first_shard + len(self.shard_digests))


def encode_layout(layout: Layout) -> bytes:
    """Return the bytes of a layout.

    Raises:
        MalformedError: If readers would refuse it (UnsafePathError, LimitError where they fit).
    """
    return encode(layout)


def decode_layout(data: bytes) -> Layout:
    """Decode and check a layout.

    Raises:
        MalformedError: If it is not a layout (UnsafePathError, LimitError where they fit).
    """
    return decode(data, Layout, limit=MAX_DOCUMENT_BYTES, what="layout")


def encode_part(layout: str, first_shard: int, digests: tuple[str, ...] | list[str]) -> bytes:
    """Return the bytes of a part of the layout with digest ``layout``.

    Raises:
        MalformedError: If readers would refuse it.
    """
    packed = base64.b64encode(pack_digests(digests)).decode("ascii")
    return encode(Part(layout=layout, first_shard=first_shard, digests=packed))


def decode_part(data: bytes) -> Part:
    """Decode and check a part.

    Raises:
        MalformedError: If it is not a part.
    """
    return decode(data, Part, limit=MAX_DOCUMENT_BYTES, what="part")


def split_parts(digests: tuple[str, ...] | list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield ``(first_shard, digests)`` for the parts of a whole version."""
    for first in range(0, len(digests), MAX_PART_SHARDS):
        yield first, list(digests[first : first + MAX_PART_SHARDS])


def choose_shard_bytes(total_bytes: int, previous: int | None = None) -> int:
    """Return the shard size for a checkpoint of ``total_bytes``.

    The largest power of two not above ``total_bytes / 64``, clamped to 256 KiB - 16 MiB; the
    previous version's value is kept while it is within 4x, so that unchanged shards stay equal.
    """
    wanted = max(total_bytes // SHARDS_WANTED, 1)
    size = 1 << (wanted.bit_length() - 1)
    size = min(max(size, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    if previous is not None and size <= previous * 4 and previous <= size * 4:
        return previous
    return size

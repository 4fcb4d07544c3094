"""Delta parts: which blobs rebuild which shards of a version from a base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import LimitError, MalformedError, MixAndMatchError
from shardcast.protocol.documents import Digest, Document, decode, encode
from shardcast.protocol.head import DeltaRef, OpenDeltaRef
from shardcast.protocol.layout import Layout
from shardcast.protocol.limits import (
    MAX_DELTA_BLOB_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_FRAMES,
    MAX_PART_SHARDS,
    MAX_SHARDS,
)

DELTA_FORMAT: Final = "shardcast.delta/1"

CODEC: Final = "scf/1"
"""The frame format of our publishers, as delta parts name it (docs/PROTOCOL.md, section 9)."""

CODECS: Final = frozenset({CODEC})
"""The frame formats that can be decoded."""

ShardRun = Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_SHARDS)]
FrameBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_DELTA_BLOB_BYTES)]


class DeltaBlob(msgspec.Struct, frozen=True, kw_only=True):
    """One blob of whole frames; each frame is ``(shards it rebuilds, bytes it takes)``."""

    digest: Digest
    bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_DELTA_BLOB_BYTES)]
    frames: Annotated[
        list[tuple[ShardRun, FrameBytes]], msgspec.Meta(min_length=1, max_length=MAX_FRAMES)
    ]


@dataclass(frozen=True, slots=True)
class FrameAt:
    """A frame: where it lies in its blob, and which shards it rebuilds."""

    offset: int
    length: int
    shards: range


def frames_of(blob: DeltaBlob, first_shard: int) -> tuple[FrameAt, ...]:
    """Return the frames of a blob whose first one begins with ``first_shard``."""
    frames: list[FrameAt] = []
    offset, shard = 0, first_shard
    for count, length in blob.frames:
        frames.append(FrameAt(offset, length, range(shard, shard + count)))
        offset, shard = offset + length, shard + count
    return tuple(frames)


class DeltaPart(Document, frozen=True, kw_only=True):
    """Blobs that rebuild consecutive shards of ``layout``, from ``first_shard`` on."""

    format: Literal["shardcast.delta/1"] = DELTA_FORMAT
    layout: Digest
    base: Digest | None
    codec: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._/-]{0,63}\Z")]
    first_shard: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS)]
    blobs: Annotated[list[DeltaBlob], msgspec.Meta(min_length=1, max_length=MAX_FRAMES)]

    def check(self) -> None:
        """Check that frames fill their blobs and stay within the shard limit.

        Raises:
            MalformedError: If they do not.
        """
        for blob in self.blobs:
            filled = sum(size for _, size in blob.frames)
            if filled != blob.bytes:
                raise MalformedError(
                    f"frames of blob {blob.digest} take {filled} bytes of {blob.bytes}"
                )
        if self.shards.stop > MAX_SHARDS:
            raise LimitError(f"shard {self.shards.stop - 1} is over the limit of {MAX_SHARDS}")

    @property
    def shards(self) -> range:
        """The numbers of the shards that this delta part rebuilds."""
        count = sum(shards for blob in self.blobs for shards, _ in blob.frames)
        return range(self.first_shard, self.first_shard + count)

    def placed(self) -> Iterator[tuple[DeltaBlob, tuple[FrameAt, ...]]]:
        """Yield each blob with its frames."""
        first = self.first_shard
        for blob in self.blobs:
            frames = frames_of(blob, first)
            yield blob, frames
            first = frames[-1].shards.stop


def encode_delta_part(part: DeltaPart) -> bytes:
    """Return the bytes of a delta part.

    Raises:
        MalformedError: If readers would refuse it.
    """
    return encode(part)


def decode_delta_part(data: bytes) -> DeltaPart:
    """Decode and check a delta part.

    Raises:
        MalformedError: If it is not one.
    """
    return decode(data, DeltaPart, limit=MAX_DOCUMENT_BYTES, what="delta part")


def assemble_deltas(
    ref: DeltaRef | OpenDeltaRef, layout_digest: str, layout: Layout, parts: Sequence[DeltaPart]
) -> tuple[DeltaPart, ...]:
    """Put the delta parts of one delta together: in shard order, each shard rebuilt once at most.

    Args:
        ref: The head's entry for the delta.
        layout_digest: Digest of the target's layout.
        layout: The target's layout.
        parts: Those of ``ref.parts`` that are here, already verified against their digests.

    Raises:
        MixAndMatchError: If a part is of another layout or base, names shards that the layout has
            not or that another part names, or they weigh more than the head says.
    """
    name = f"a delta of version {layout.version} of run {layout.run!r}"
    for part in parts:
        if part.layout != layout_digest:
            raise MixAndMatchError(f"{name}: a part belongs to layout {part.layout}")
        if part.base != ref.base:
            raise MixAndMatchError(f"{name}: a part has base {part.base}, not {ref.base}")
        if part.shards.stop > layout.shard_count:
            raise MixAndMatchError(
                f"{name}: a part names shard {part.shards.stop - 1}; the version has "
                f"{layout.shard_count}"
            )
    ordered = tuple(sorted(parts, key=lambda part: part.first_shard))
    for first, second in pairwise(ordered):
        if first.shards.stop > second.first_shard:
            raise MixAndMatchError(f"{name}: two parts name shard {second.first_shard}")
    weight = sum(blob.bytes for part in ordered for blob in part.blobs)
    if isinstance(ref, DeltaRef) and weight > ref.bytes:
        raise MixAndMatchError(f"{name}: its blobs weigh {weight} bytes, the head says {ref.bytes}")
    return ordered

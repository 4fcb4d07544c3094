"""Manifests: the identity of a complete version; and how its documents are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import MalformedError, MixAndMatchError, WrongRunError
from shardcast.protocol.documents import Digest, Document, decode, encode
from shardcast.protocol.head import OpenRef, VersionRef
from shardcast.protocol.layout import Extent, Layout, Part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_PARTS

MANIFEST_FORMAT: Final = "shardcast.manifest/1"


class Manifest(Document, frozen=True, kw_only=True):
    """A complete version: its layout and all its parts in shard order."""

    format: Literal["shardcast.manifest/1"] = MANIFEST_FORMAT
    layout: Digest
    parts: Annotated[list[Digest], msgspec.Meta(max_length=MAX_DOCUMENT_PARTS)]

    def check(self) -> None:
        """Check that no part is listed twice.

        Raises:
            MalformedError: If one is.
        """
        if len(set(self.parts)) != len(self.parts):
            raise MalformedError("a part is listed twice")


def encode_manifest(layout: str, parts: Sequence[str]) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        MalformedError: If readers would refuse it.
    """
    return encode(Manifest(layout=layout, parts=list(parts)))


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest.

    Raises:
        MalformedError: If it is not one.
    """
    return decode(data, Manifest, limit=MAX_DOCUMENT_BYTES, what="manifest")


@dataclass(frozen=True, slots=True)
class Version:
    """A version as far as its documents tell: complete, or open with some digests still unknown.

    Attributes:
        layout: The layout.
        layout_digest: Its digest.
        digests: Digest of each shard in order; None where no part has named it yet.
        manifest: Digest of the manifest, None while the version is open.
        documents: Digests of all documents that describe it: layout, parts, manifest.
    """

    layout: Layout
    layout_digest: str
    digests: tuple[str | None, ...]
    manifest: str | None
    documents: tuple[str, ...]

    @property
    def number(self) -> int:
        """The version number."""
        return self.layout.version

    @property
    def complete(self) -> bool:
        """Whether every shard's digest is known and a manifest pins them."""
        return self.manifest is not None

    def shards_of(self) -> Mapping[str, Extent]:
        """Return an extent for each known digest (the first, where digests repeat)."""
        found: dict[str, Extent] = {}
        for shard, digest in enumerate(self.digests):
            if digest is not None and digest not in found:
                found[digest] = self.layout.extent(shard)
        return found


def contradicts(one: Version, other: Version) -> bool:
    """Say whether two versions of one number cannot both be its publisher's."""
    if one.layout_digest != other.layout_digest:
        return True
    return one.complete and other.complete and one.manifest != other.manifest


def bound_parts(layout: Layout, parts: Sequence[str]) -> None:
    """Check that a layout can have so many parts, before any of them is fetched.

    Every part names at least one shard, so a list that is longer than the shards are many is
    endless data in small pieces.

    Raises:
        MixAndMatchError: If there are more parts than shards, or one is listed twice.
    """
    if len(parts) > layout.shard_count or len(set(parts)) != len(parts):
        raise MixAndMatchError(
            f"version {layout.version} of run {layout.run!r}: {len(parts)} parts, "
            f"{len(set(parts))} of them different, for {layout.shard_count} shards"
        )


def assemble(
    ref: VersionRef, run: str, manifest: Manifest, layout: Layout, parts: Sequence[Part]
) -> Version:
    """Put the documents of a complete version together.

    Args:
        ref: The head's entry for it.
        run: The run that the head belongs to.
        manifest: Its manifest, already verified against ``ref.manifest``.
        layout: Its layout, already verified against ``manifest.layout``.
        parts: Its parts in the manifest's order, already verified against their digests.

    Raises:
        WrongRunError: If the layout is of another run.
        MixAndMatchError: If the documents do not belong together.
    """
    name = f"version {ref.version} of run {run!r}"
    _check_layout(layout, run=run, version=ref.version, step=ref.step, name=name)
    if layout.total_bytes != ref.bytes:
        raise MixAndMatchError(f"{name}: head says {ref.bytes} bytes, layout {layout.total_bytes}")
    digests: list[str | None] = []
    for part in parts:
        if part.layout != manifest.layout:
            raise MixAndMatchError(f"{name}: a part belongs to layout {part.layout}")
        if part.first_shard != len(digests) or part.shards.stop > layout.shard_count:
            raise MixAndMatchError(
                f"{name}: a part names shards {part.first_shard} to {part.shards.stop - 1} where "
                f"{len(digests)} of {layout.shard_count} are named already"
            )
        digests.extend(part.shard_digests)
    if len(digests) != layout.shard_count:
        raise MixAndMatchError(
            f"{name}: parts name {len(digests)} shards, the layout has {layout.shard_count}"
        )
    _check_lengths(layout, digests, name)
    return Version(
        layout=layout,
        layout_digest=manifest.layout,
        digests=tuple(digests),
        manifest=ref.manifest,
        documents=(ref.manifest, manifest.layout, *manifest.parts),
    )


def assemble_open(ref: OpenRef, run: str, layout: Layout, parts: Sequence[Part]) -> Version:
    """Put the documents of an open version together; parts may come in any order, with gaps.

    Raises:
        WrongRunError: If the layout is of another run.
        MixAndMatchError: If the documents do not belong together or two parts overlap.
    """
    name = f"open version {ref.version} of run {run!r}"
    _check_layout(layout, run=run, version=ref.version, step=ref.step, name=name)
    digests: list[str | None] = [None] * layout.shard_count
    for part in parts:
        if part.layout != ref.layout:
            raise MixAndMatchError(f"{name}: a part belongs to layout {part.layout}")
        if part.shards.stop > layout.shard_count:
            raise MixAndMatchError(f"{name}: a part names shard {part.shards.stop - 1}")
        for shard, digest in zip(part.shards, part.shard_digests, strict=True):
            if digests[shard] is not None:
                raise MixAndMatchError(f"{name}: two parts name shard {shard}")
            digests[shard] = digest
    _check_lengths(layout, digests, name)
    return Version(
        layout=layout,
        layout_digest=ref.layout,
        digests=tuple(digests),
        manifest=None,
        documents=(ref.layout, *ref.parts),
    )


def _check_layout(layout: Layout, *, run: str, version: int, step: int | None, name: str) -> None:
    if layout.run != run:
        raise WrongRunError(f"{name}: the layout is of run {layout.run!r}")
    if layout.version != version:
        raise MixAndMatchError(f"{name}: the layout is of version {layout.version}")
    if layout.step != step:
        raise MixAndMatchError(f"{name}: head says step {step}, the layout {layout.step}")


def _check_lengths(layout: Layout, digests: Sequence[str | None], name: str) -> None:
    """Refuse a digest that stands for two lengths: one of them must be a lie.

    Otherwise bytes that were hashed as one extent could be taken for another that is longer.
    """
    lengths: dict[str, int] = {}
    for file, entry in enumerate(layout.files):
        left = entry.bytes
        for shard in layout.file_shards(file):
            digest, length = digests[shard], min(left, layout.shard_bytes)
            left -= length
            if digest is not None and lengths.setdefault(digest, length) != length:
                raise MixAndMatchError(
                    f"{name}: digest {digest} stands for {lengths[digest]} and for {length} bytes"
                )

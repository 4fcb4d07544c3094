"""One version that is being uploaded: what the documents that came so far say of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from shardcast.errors import MalformedError
from shardcast.protocol import manifest as manifests
from shardcast.protocol.delta import DELTA_FORMAT, DeltaPart, decode_delta_part
from shardcast.protocol.head import OpenRef, VersionRef
from shardcast.protocol.layout import (
    LAYOUT_FORMAT,
    PART_FORMAT,
    Layout,
    Part,
    decode_layout,
    decode_part,
)
from shardcast.protocol.manifest import Manifest, Version
from shardcast.store.stored import StoredVersion

Document = Layout | Part | Manifest | DeltaPart


class _AnyFormat(msgspec.Struct):
    format: str


def decode_any(data: bytes) -> Document:
    """Decode an uploaded document by the format that it names.

    Raises:
        MalformedError: If it is none of ours.
    """
    try:
        kind = msgspec.json.decode(data, type=_AnyFormat).format
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError("it is not a document") from error
    match kind:
        case manifests.MANIFEST_FORMAT:
            return manifests.decode_manifest(data)
        case _ if kind == LAYOUT_FORMAT:
            return decode_layout(data)
        case _ if kind == PART_FORMAT:
            return decode_part(data)
        case _ if kind == DELTA_FORMAT:
            return decode_delta_part(data)
    raise MalformedError(f"it is a document of format {kind[:80]!r}, which nobody uploads")


@dataclass
class Upload:
    """One version on its way, known by its layout."""

    layout_digest: str
    touched: float
    layout: Layout | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    manifest: tuple[str, Manifest] | None = None
    delta_parts: dict[str, DeltaPart] = field(default_factory=dict)
    blobs: dict[str, int] = field(default_factory=dict)
    stored: StoredVersion | None = None
    index: dict[str, int] = field(default_factory=dict)
    copying: asyncio.Task[None] | None = None
    rebuilding: asyncio.Task[None] | None = None
    tried: set[str] = field(default_factory=set)

    def take(self, digest: str, document: Document) -> None:
        """Take in a document of this version."""
        match document:
            case Layout():
                self.layout = document
            case Part():
                self.parts[digest] = document
            case Manifest():
                self.manifest = (digest, document)
            case DeltaPart():
                self.delta_parts[digest] = document
                self.blobs.update({blob.digest: blob.bytes for blob in document.blobs})

    def forget(self, digest: str, document: Document) -> None:
        """Take a document back that turned out not to belong here."""
        match document:
            case Layout():
                self.layout = None
            case Part():
                del self.parts[digest]
            case Manifest():
                self.manifest = None
            case DeltaPart():
                del self.delta_parts[digest]
                for blob in document.blobs:
                    self.blobs.pop(blob.digest, None)

    def has(self, digest: str) -> bool:
        """Say whether a document was taken in."""
        return (
            (digest == self.layout_digest and self.layout is not None)
            or digest in self.parts
            or digest in self.delta_parts
            or (self.manifest is not None and self.manifest[0] == digest)
        )

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return what is under way for it."""
        return [task for task in (self.copying, self.rebuilding) if task is not None]

    def version(self, run: str) -> Version | None:
        """Return what the documents so far say, None before the layout.

        Raises:
            TrustError: If they do not belong together.
        """
        layout = self.layout
        if layout is None:
            return None
        if self.manifest is not None and all(d in self.parts for d in self.manifest[1].parts):
            digest, manifest = self.manifest
            ref = VersionRef(
                version=layout.version,
                step=layout.step,
                manifest=digest,
                bytes=layout.total_bytes,
                deltas=[],
            )
            parts = [self.parts[d] for d in manifest.parts]
            return manifests.assemble(ref, run, manifest, layout, parts)
        parts_apart = self._apart()
        ref_open = OpenRef(
            version=layout.version,
            step=layout.step,
            layout=self.layout_digest,
            parts=list(parts_apart),
            deltas=[],
        )
        return manifests.assemble_open(ref_open, run, layout, list(parts_apart.values()))

    def _apart(self) -> dict[str, Part]:
        """Return parts that name each shard once: a version may close with other parts."""
        taken: set[int] = set()
        apart: dict[str, Part] = {}
        for digest, part in self.parts.items():
            if taken.isdisjoint(part.shards):
                apart[digest] = part
                taken.update(part.shards)
        return apart


def layout_of(digest: str, document: Document) -> str:
    """Return the digest of the layout that a document belongs to."""
    return digest if isinstance(document, Layout) else document.layout

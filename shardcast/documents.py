"""Getting the documents that describe a version: fetched, verified, kept, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shardcast.errors import MixAndMatchError
from shardcast.fetch import MemorySink, Transfer
from shardcast.protocol import trust
from shardcast.protocol.head import OpenRef, VersionRef
from shardcast.protocol.layout import Layout, decode_layout
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.protocol.manifest import Manifest, Version, bound_parts, decode_manifest
from shardcast.pulling import FetchPool
from shardcast.store.run import RunStore


class OpenPool(Protocol):
    """Makes a pool for a batch of blobs."""

    def __call__(self) -> FetchPool:
        """Return a new pool."""
        ...


class DocumentFetcher:
    """Brings documents into a run's ``blobs/``.

    Sizes are bounded before anything is written: each document by its limit, their number by
    what the layout can need.
    """

    def __init__(
        self, store: RunStore, open_pool: OpenPool, count: Callable[[int], None] = lambda n: None
    ) -> None:
        """Fetch nothing yet.

        Args:
            store: Where documents are kept.
            open_pool: Makes a pool for each batch.
            count: Called with the bytes that a batch cost.
        """
        self._store = store
        self._open_pool = open_pool
        self._count = count

    def ref_of(self, manifest: str) -> VersionRef:
        """Return what a head would say of the version with this manifest.

        Raises:
            NetworkError, IntegrityError: If no source delivers its documents.
            MalformedError: If they are not documents.
        """
        document, layout = self._manifest_and_layout(manifest)
        bound_parts(layout, document.parts)
        return VersionRef(
            version=layout.version,
            step=layout.step,
            manifest=manifest,
            bytes=layout.total_bytes,
            deltas=[],
        )

    def version(self, ref: VersionRef, state: trust.TrustState) -> Version:
        """Return a complete version, put together from its documents.

        Raises:
            NetworkError, IntegrityError: If no source delivers a document.
            MalformedError: If one is none.
            TrustError: If they do not belong together or contradict what was seen before.
            DiskError: If they cannot be kept.
        """
        version = self._store.load_version(ref)
        if version is None:
            document, layout = self._manifest_and_layout(ref.manifest)
            _check_early(ref, self._store.run, layout)
            bound_parts(layout, document.parts)
            self._ensure(document.parts, "a part")
            version = self._store.load_version(ref)
        if version is None:
            raise MixAndMatchError(f"documents of version {ref.version} vanished from the disk")
        trust.check_version(state, version)
        return version

    def open(self, ref: OpenRef, state: trust.TrustState) -> Version:
        """Return what an open version's documents say until now.

        Raises:
            NetworkError, IntegrityError: If no source delivers a document.
            MalformedError: If one is none.
            TrustError: If they do not belong together or contradict what was seen before.
            DiskError: If they cannot be kept.
        """
        layout = decode_layout(self._get(ref.layout, "the layout"))
        if (layout.run, layout.version) != (self._store.run, ref.version):
            raise MixAndMatchError(
                f"open version {ref.version} of run {self._store.run!r} has a layout of version "
                f"{layout.version} of run {layout.run!r}"
            )
        bound_parts(layout, ref.parts)
        self._ensure(ref.parts, "a part")
        version = self._store.load_open(ref)
        if version is None:
            raise MixAndMatchError(f"documents of version {ref.version} vanished from the disk")
        trust.check_version(state, version)
        return version

    def _manifest_and_layout(self, manifest: str) -> tuple[Manifest, Layout]:
        document = decode_manifest(self._get(manifest, "the manifest"))
        return document, decode_layout(self._get(document.layout, "the layout"))

    def _get(self, digest: str, name: str) -> bytes:
        self._ensure([digest], name)
        data = self._store.read_blob(digest)
        if data is None:
            raise MixAndMatchError(f"{name} {digest} vanished from the disk")
        return data

    def _ensure(self, digests: Sequence[str], name: str) -> None:
        missing = [digest for digest in digests if self._store.read_blob(digest) is None]
        if not missing:
            return
        with self._open_pool() as pool:
            for digest in missing:
                sink = MemorySink()

                def keep(transfer: Transfer, sink: MemorySink = sink) -> None:
                    self._store.write_blob(transfer.digest, bytes(sink.data))

                pool.submit(
                    digest,
                    None,
                    sink,
                    name=f"{name} {digest}",
                    done=keep,
                    limit=MAX_DOCUMENT_BYTES,
                )
            try:
                pool.finish()
            finally:
                self._count(pool.received_bytes)


def _check_early(ref: VersionRef, run: str, layout: Layout) -> None:
    """Refuse a layout of something else before its parts are fetched."""
    if (layout.run, layout.version, layout.total_bytes) != (run, ref.version, ref.bytes):
        raise MixAndMatchError(
            f"version {ref.version} of run {run!r} ({ref.bytes} bytes) has a layout of version "
            f"{layout.version} of run {layout.run!r} ({layout.total_bytes} bytes)"
        )

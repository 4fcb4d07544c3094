"""A small version and its documents, made by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from blake3 import blake3

from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import VersionRef
from shardcast.protocol.layout import FileEntry, Layout, encode_layout, encode_part
from shardcast.protocol.manifest import Version, encode_manifest
from shardcast.store.files import write_all
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion

KIB = 1024


@dataclass(frozen=True)
class Sample:
    """A version, the head's entry for it, its documents and its files' bytes."""

    version: Version
    ref: VersionRef
    blobs: dict[str, bytes]
    files: dict[str, bytes]

    def shard(self, number: int) -> bytes:
        extent = self.version.layout.extent(number)
        return self.files[extent.path][extent.offset : extent.offset + extent.length]

    def write_documents(self, run: RunStore) -> None:
        for digest, data in self.blobs.items():
            run.write_blob(digest, data)

    def write_shard(self, stored: StoredVersion, number: int) -> None:
        extent = self.version.layout.extent(number)
        fd = stored.open_file(extent.file, writable=True)
        write_all(fd, memoryview(self.shard(number)), extent.offset)
        os.close(fd)
        stored.record(number, xxhash.xxh3_128_digest(self.shard(number)))

    def fill(self, run: RunStore) -> StoredVersion:
        self.write_documents(run)
        stored = run.stage(self.version)
        for number in stored.missing():
            self.write_shard(stored, number)
        return stored


def make_sample(
    number: int = 1, files: dict[str, bytes] | None = None, *, created_at: int = 1
) -> Sample:
    if files is None:
        files = {
            "a/model.safetensors": os.urandom(600 * KIB),
            "config.json": b'{"n": %d}' % number,
            "empty": b"",
        }
    layout = Layout(
        run="test",
        version=number,
        step=number * 10,
        lineage="one",
        created_at=created_at,
        shard_bytes=256 * KIB,
        metadata={},
        files=[FileEntry(path=path, bytes=len(data)) for path, data in sorted(files.items())],
    )
    digests = [
        blake3(files[e.path][e.offset : e.offset + e.length]).hexdigest() for e in layout.extents()
    ]
    layout_data = encode_layout(layout)
    part = encode_part(digest_of(layout_data), 0, digests)
    manifest = encode_manifest(digest_of(layout_data), [digest_of(part)])
    blobs = {digest_of(data): data for data in (layout_data, part, manifest)}
    version = Version(
        layout=layout,
        layout_digest=digest_of(layout_data),
        digests=tuple(digests),
        manifest=digest_of(manifest),
        documents=(digest_of(manifest), digest_of(layout_data), digest_of(part)),
    )
    ref = VersionRef(
        version=number,
        step=number * 10,
        manifest=digest_of(manifest),
        bytes=layout.total_bytes,
        deltas=[],
    )
    return Sample(version, ref, blobs, files)


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "test", "test")


@pytest.fixture
def sample() -> Sample:
    return make_sample()

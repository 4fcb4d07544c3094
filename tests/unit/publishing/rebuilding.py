"""A reader of deltas that is as simple as can be: documents from ``blobs/``, files read whole."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from shardcast.codec.decode import decode_frame
from shardcast.protocol.delta import DeltaPart, assemble_deltas, decode_delta_part
from shardcast.protocol.head import DeltaRef, VersionRef
from shardcast.protocol.manifest import Version
from shardcast.store.run import RunStore


class Files:
    """The bytes of a base: its files, as its layout numbers them."""

    def __init__(self, directory: Path | None, paths: list[str]) -> None:
        self._files = [] if directory is None else [(directory / p).read_bytes() for p in paths]

    def range(self, file: int, offset: int, length: int) -> memoryview:
        data = self._files[file]
        assert 0 <= offset <= offset + length <= len(data)
        return memoryview(data)[offset : offset + length]


def load(run: RunStore, ref: VersionRef) -> Version:
    """A version by its documents in ``blobs/``."""
    version = run.load_version(ref)
    assert version is not None
    return version


def parts_of(run: RunStore, target: Version, delta: DeltaRef) -> list[DeltaPart]:
    """The parts of a delta, verified, in shard order."""
    documents = [run.read_blob(digest) for digest in delta.parts]
    parts = [decode_delta_part(data) for data in documents if data is not None]
    assert len(parts) == len(delta.parts)
    return list(assemble_deltas(delta, target.layout_digest, target.layout, parts))


def rebuild(
    run: RunStore, target: Version, delta: DeltaRef, base: Version | None, directory: Path | None
) -> dict[int, bytes]:
    """Every shard that a delta's frames make; each must have the digest that the parts sign."""
    files = Files(directory, [] if base is None else [e.path for e in base.layout.files])
    found: dict[int, bytes] = {}
    for part in parts_of(run, target, delta):
        shard = part.first_shard
        for blob in part.blobs:
            data = run.read_blob(blob.digest)
            assert data is not None
            at = 0
            for shards, size in blob.frames:
                extents = [target.layout.extent(s) for s in range(shard, shard + shards)]
                made = decode_frame(data[at : at + size], sum(e.length for e in extents), files)
                start = 0
                for extent in extents:
                    found[extent.shard] = bytes(made[start : start + extent.length])
                    start += extent.length
                shard, at = shard + shards, at + size
            assert at == len(data)
    for number, data in found.items():
        assert blake3(data).hexdigest() == target.digests[number]
    return found


def not_in_base(target: Version, base: Version | None) -> set[int]:
    """The shards whose digests the base has nowhere."""
    known = frozenset(() if base is None else base.digests)
    return {shard for shard, digest in enumerate(target.digests) if digest not in known}

"""Versions and heads made in memory, and published to stores: what contract tests serve."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast.keys import Ed25519Signer
from shardcast.protocol.delta import DeltaBlob, DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import encode_key, seal
from shardcast.protocol.head import DeltaRef, Head, OpenRef, VersionRef, encode_head
from shardcast.protocol.layout import FileEntry, Layout, encode_layout, encode_part, split_parts
from shardcast.protocol.manifest import encode_manifest
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.store import Store
from shardcast.store.stored import Durability

RUN = "policy"
KIB = 1024
SHARD = 256 * KIB


def signer(seed: int = 1) -> Ed25519Signer:
    return Ed25519Signer(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass(frozen=True)
class MadeVersion:
    """A version as bytes. `shards` are digests in order; `blobs` is every blob by digest."""

    ref: VersionRef
    layout: str
    parts: list[str]
    shards: list[str]
    files: Mapping[str, bytes]
    blobs: dict[str, bytes] = field(repr=False)

    @property
    def documents(self) -> list[str]:
        return [self.layout, *self.parts, self.ref.manifest]


def make_version(
    number: int = 1,
    files: Mapping[str, bytes] | None = None,
    *,
    run: str = RUN,
    deltas: Sequence[bytes] = (),
) -> MadeVersion:
    """A version of the given files; `deltas` are bytes of self-contained delta blobs."""
    files = files if files is not None else {"model.safetensors": noise(3 * SHARD + 77, number)}
    layout = Layout(
        run=run,
        version=number,
        step=number * 10,
        lineage="test",
        created_at=1_700_000_000_000,
        shard_bytes=SHARD,
        metadata={},
        files=[FileEntry(path=path, bytes=len(data)) for path, data in files.items()],
    )
    blobs: dict[str, bytes] = {}

    def add(data: bytes) -> str:
        blobs[digest_of(data)] = data
        return digest_of(data)

    layout_digest = add(encode_layout(layout))
    contents = list(files.values())
    shards = [add(contents[e.file][e.offset : e.offset + e.length]) for e in layout.extents()]
    parts = [add(encode_part(layout_digest, first, d)) for first, d in split_parts(shards)]
    manifest = add(encode_manifest(layout_digest, parts))
    refs = []
    if deltas:
        part = DeltaPart(
            layout=layout_digest,
            base=None,
            codec="test/1",
            first_shard=0,
            blobs=[
                DeltaBlob(digest=add(data), bytes=len(data), frames=[(1, len(data))])
                for data in deltas
            ],
        )
        total = sum(map(len, deltas))
        digest = add(encode_delta_part(part))
        refs = [DeltaRef(base=None, base_version=None, parts=[digest], bytes=total)]
    ref = VersionRef(
        version=number,
        step=layout.step,
        manifest=manifest,
        bytes=layout.total_bytes,
        deltas=refs,
    )
    return MadeVersion(ref, layout_digest, parts, shards, files, blobs)


def make_head(
    *versions: MadeVersion,
    sequence: int | None = None,
    key: int = 1,
    run: str = RUN,
    expires_in_ms: int = 3_600_000,
    opened: OpenRef | None = None,
    withdrawn: Sequence[int] = (),
) -> bytes:
    """A signed head that lists versions, newest first."""
    now = time.time_ns() // 1_000_000
    refs = sorted((v.ref for v in versions), key=lambda ref: ref.version, reverse=True)
    head = Head(
        run=run,
        sequence=sequence if sequence is not None else now,
        issued_at=min(now, now + expires_in_ms),
        expires_at=now + expires_in_ms,
        keys=[encode_key(signer(key).public_key)],
        version=next((ref.version for ref in refs if ref.version not in withdrawn), None),
        versions=refs,
        open=opened,
        withdrawn=list(withdrawn),
        hold=False,
    )
    return seal(encode_head(head), [signer(key)])


def publish(
    store: Path,
    source: Path,
    files: Mapping[str, bytes],
    *,
    run: str = RUN,
    key: int = 1,
    take_over: bool = False,
) -> str:
    """Publish files into a local store as a publisher does; return the manifest's digest."""
    source.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    opened = Store(store)
    try:
        options = PublishOptions(
            source=source, durability=Durability.NONE, threads=1, take_over=take_over
        )
        done = publish_directory(
            options,
            opened.run(run, create=True),
            [signer(key)],
            lambda: time.time_ns() // 1_000_000,
        )
    finally:
        opened.close()
    return done.ref.manifest

"""Deltas for a run in memory: frames by the codec itself, documents by hand, spoiled as a test likes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shardcast.codec.encode import encode_frame
from shardcast.codec.spans import OldFile, file_spans, header_bytes, pieces_between, read_tensors
from shardcast.errors import MalformedError
from shardcast.protocol.delta import DeltaBlob, DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import DeltaRef, VersionRef
from shardcast.protocol.layout import Layout, decode_layout
from shardcast.protocol.manifest import decode_manifest
from tests.fakes import KIB, FakeRun

Files = Mapping[str, bytes]
Spoil = Callable[[int, bytes], bytes]
"""Makes another frame of frame number n."""


class FilesReader:
    """A base in memory."""

    def __init__(self, files: Files) -> None:
        self._files = list(files.values())

    def range(self, file: int, offset: int, length: int) -> memoryview:
        found = memoryview(self._files[file])[offset : offset + length]
        if len(found) != length:
            raise MalformedError("no such range")
        return found


@dataclass
class MadeDelta:
    """A delta as a head lists it, and what it is made of."""

    ref: DeltaRef
    parts: list[str] = field(default_factory=list)
    blobs: list[str] = field(default_factory=list)
    bytes: int = 0


def checkpoint(seed: int = 1, size: int = 700 * KIB) -> dict[str, bytes]:
    """A safetensors file of bf16, one of bytes, a text: 7 shards of 256 KiB and less."""
    rng = random.Random(seed)
    elements = size // 2
    values = bytes(
        byte for _ in range(elements) for byte in (rng.randrange(256), rng.randrange(0x38, 0x3F))
    )
    header = json.dumps(
        {"weight": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}
    ).encode()
    return {
        "model-00001-of-00002.safetensors": struct.pack("<Q", len(header)) + header + values,
        "model-00002-of-00002.safetensors": rng.randbytes(size + 1),
        "config.json": b'{"model_type": "test"}',
        "empty.txt": b"",
    }


def stepped(files: Files, seed: int, share: float = 0.01) -> dict[str, bytes]:
    """The same with some bytes changed: a training step."""
    rng = random.Random(seed)
    new: dict[str, bytes] = {}
    for path, data in files.items():
        changed = bytearray(data)
        if path.endswith(".safetensors"):
            first = header_bytes(data[:8]) or 0
            first = first if first < len(data) else 0
            for _ in range(int(len(data) * share)):
                changed[rng.randrange(first // 2, len(data) // 2) * 2] ^= rng.choice((1, 1, 1, 3))
        new[path] = bytes(changed)
    return new


def layout_of(run: FakeRun, ref: VersionRef) -> tuple[str, Layout]:
    digest = decode_manifest(run.blobs[ref.manifest]).layout
    return digest, decode_layout(run.blobs[digest])


def make_delta(
    run: FakeRun,
    ref: VersionRef,
    base: VersionRef | None,
    *,
    spoil: Spoil = lambda number, frame: frame,
    frame_shards: int = 2,
    blob_frames: int = 2,
    codec: str = "scf/1",
    shards: Sequence[int] | None = None,
) -> MadeDelta:
    """Make a delta between two versions of a run; its parts and blobs are served from then on."""
    layout_digest, layout = layout_of(run, ref)
    frames = _frames(run, ref, base, layout, frame_shards, shards)
    blobs: list[DeltaBlob] = []
    for start in range(0, len(frames), blob_frames):
        group = [
            (count, spoil(start + n, data))
            for n, (count, data) in enumerate(frames[start : start + blob_frames])
        ]
        data = b"".join(frame for _, frame in group)
        run.blobs[digest_of(data)] = data
        blobs.append(
            DeltaBlob(
                digest=digest_of(data),
                bytes=len(data),
                frames=[(count, len(frame)) for count, frame in group],
            )
        )
    part = encode_delta_part(
        DeltaPart(
            layout=layout_digest,
            base=None if base is None else base.manifest,
            codec=codec,
            first_shard=0,
            blobs=blobs,
        )
    )
    run.blobs[digest_of(part)] = part
    weight = sum(blob.bytes for blob in blobs)
    made = DeltaRef(
        base=None if base is None else base.manifest,
        base_version=None if base is None else base.version,
        parts=[digest_of(part)],
        bytes=weight + len(part),
    )
    return MadeDelta(made, [digest_of(part)], [blob.digest for blob in blobs], weight + len(part))


def _frames(
    run: FakeRun,
    ref: VersionRef,
    base: VersionRef | None,
    layout: Layout,
    frame_shards: int,
    shards: Sequence[int] | None,
) -> list[tuple[int, bytes]]:
    new = run.files[ref.version]
    old: Files = {} if base is None else run.files[base.version]
    old_numbers = {path: OldFile(n, len(data)) for n, (path, data) in enumerate(old.items())}
    old_tensors = {
        tensor.name: tensor
        for n, data in enumerate(old.values())
        for tensor in read_tensors(data[: header_bytes(data[:8]) or 0], n, len(data))
    }
    spans = [
        file_spans(
            len(data),
            read_tensors(data[: header_bytes(data[:8]) or 0], n, len(data)),
            old_numbers.get(path),
            old_tensors,
        )
        for n, (path, data) in enumerate(new.items())
    ]
    extents = list(layout.extents())
    frames: list[tuple[int, bytes]] = []
    for first in range(0, len(extents), frame_shards):
        group = extents[first : first + frame_shards]
        data = b"".join(new[e.path][e.offset : e.offset + e.length] for e in group)
        pieces = [
            piece
            for e in group
            for piece in pieces_between(spans[e.file], e.offset, e.offset + e.length)
        ]
        frames.append((len(group), encode_frame(memoryview(data), pieces, FilesReader(old))))
    return frames


def publish(
    run: FakeRun, files: Files, *bases: int | None, keep: int = 16, **options: object
) -> tuple[VersionRef, list[MadeDelta]]:
    """Publish a version with deltas from other versions (None: a compressed copy)."""
    number = max(run.files, default=0) + 1
    ref = run.add_version(number, files)
    listed = [] if run.head is None else run.head.versions
    known = {old.version: old for old in listed}
    made = [
        make_delta(run, ref, None if base is None else known[base], **options)  # type: ignore[arg-type]
        for base in bases
    ]
    ref = msgspec.structs.replace(ref, deltas=[delta.ref for delta in made])
    run.amend(version=number, versions=[ref, *listed][:keep])
    return ref, made

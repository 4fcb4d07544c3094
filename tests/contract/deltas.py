"""Deltas between made versions, as a publisher makes them: what contract tests of deltas serve."""

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shardcast.codec.encode import encode_frame
from shardcast.deltas import BaseMap, MadeFrame, Packer, Tensors, frame_runs, run_bytes
from shardcast.errors import MalformedError
from shardcast.protocol.delta import DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import DeltaRef
from shardcast.protocol.layout import Layout, decode_layout
from tests.contract.made import MadeVersion


def changed(data: bytes, seed: int, *, share: float = 0.004) -> bytes:
    """The same bytes with a few of them different, here and there."""
    rng = random.Random(seed)
    new = bytearray(data)
    for at in rng.sample(range(len(data)), max(1, int(len(data) * share))):
        new[at] ^= 1
    return bytes(new)


class _Files:
    def __init__(self, version: MadeVersion | None) -> None:
        self._files = [] if version is None else list(version.files.values())

    def range(self, file: int, offset: int, length: int) -> memoryview:
        if not 0 <= file < len(self._files) or offset + length > len(self._files[file]):
            raise MalformedError("no such bytes")
        return memoryview(self._files[file])[offset : offset + length]


def layout_of(version: MadeVersion) -> Layout:
    return decode_layout(version.blobs[version.layout])


def content(version: MadeVersion, shards: range) -> bytes:
    """The bytes of consecutive shards."""
    files, layout = list(version.files.values()), layout_of(version)
    extents = (layout.extent(shard) for shard in shards)
    return b"".join(files[e.file][e.offset : e.offset + e.length] for e in extents)


def frames(old: MadeVersion | None, new: MadeVersion, runs: Sequence[range]) -> list[MadeFrame]:
    """A frame for each run of shards."""
    layout = layout_of(new)
    base = None if old is None else Tensors(layout_of(old), [[] for _ in old.files])
    found = BaseMap(Tensors(layout, [[] for _ in new.files]), base)
    made = []
    for run in runs:
        data = encode_frame(memoryview(content(new, run)), found.pieces(run), _Files(old))
        made.append(MadeFrame(run, data, run_bytes(layout, run)))
    return made


def with_delta(
    new: MadeVersion,
    old: MadeVersion | None,
    *,
    runs: Sequence[range] | None = None,
    like: MadeVersion | None = None,
    codec: str | None = None,
) -> MadeVersion:
    """A version that lists a delta, too.

    Args:
        new: The version.
        old: Its base, None for a compressed copy.
        runs: The shards that it rebuilds: a frame and a blob for each run. None: all.
        like: The bytes that the frames give, where they are not those of ``new``.
        codec: Another name for the frame format.
    """
    base = None if old is None else old.ref.manifest
    parts: list[DeltaPart] = []
    blobs: dict[str, bytes] = {}
    for frame in frames(old, like or new, runs or frame_runs(layout_of(new))):
        packer = Packer(new.layout, base)
        blobs.update((*packer.add(frame), *packer.finish()))
        parts += packer.parts()
    if codec is not None:
        parts = [msgspec.structs.replace(part, codec=codec) for part in parts]
    encoded = [encode_delta_part(part) for part in parts]
    ref = DeltaRef(
        base=base,
        base_version=None if old is None else old.ref.version,
        parts=[digest_of(part) for part in encoded],
        bytes=sum(map(len, (*blobs.values(), *encoded))),
    )
    return replace(
        new,
        ref=msgspec.structs.replace(new.ref, deltas=[*new.ref.deltas, ref]),
        blobs={**new.blobs, **blobs, **{digest_of(part): part for part in encoded}},
    )


def delta_blobs(version: MadeVersion) -> list[str]:
    """Digests of the delta blobs, in shard order."""
    known = {*version.documents, *version.shards}
    parts = {digest for delta in version.ref.deltas for digest in delta.parts}
    return [digest for digest in version.blobs if digest not in known | parts]

"""Deltas as a publisher makes them: which shards go into one frame, which frames into one blob.

Pure. A frame is tried for every run of consecutive shards up to 16 MiB. Left out are shards whose digest
the base has anywhere, since readers copy those, and frames that are no smaller than the shards
themselves. Frames come in shard order and are packed into blobs of about 2 MiB; blobs whose shards
follow each other are listed in one part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardcast.codec.encode import Piece
from shardcast.codec.frame import MAX_FRAME_BYTES
from shardcast.codec.spans import OldFile, Span, Tensor, file_spans, pieces_between
from shardcast.protocol.delta import CODEC, DeltaBlob, DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import DeltaRef
from shardcast.protocol.layout import Layout
from shardcast.protocol.limits import MAX_PART_SHARDS
from shardcast.protocol.manifest import Version

BLOB_BYTES: Final = 2 << 20
"""A blob is cut when it has reached this: pulled in parallel, decoded as it arrives."""

LEAST_BLOB_BYTES: Final = 64 << 10
"""A blob may be cut so early where readers wait for it: an open version."""

MAX_PART_BLOBS: Final = 4096
"""A part that lists so many blobs is about half a megabyte."""

MAX_PARTS: Final = 64
"""A head lists the parts of every delta of every version, and every worker polls it."""

BRIDGED_FRAMES: Final = 8
"""A gap of so many frames that equal the base is bridged: that costs less than another part."""


def frame_runs(layout: Layout) -> list[range]:
    """Return all shards as runs of consecutive ones, each at most as long as a frame may be."""
    runs: list[range] = []
    first = length = 0
    for extent in layout.extents():
        full = length + extent.length > MAX_FRAME_BYTES
        if full or extent.shard - first >= MAX_PART_SHARDS:
            runs.append(range(first, extent.shard))
            first, length = extent.shard, 0
        length += extent.length
    if length:
        runs.append(range(first, layout.shard_count))
    return runs


def run_bytes(layout: Layout, run: range) -> int:
    """Return how many bytes the shards of a run have."""
    return sum(layout.extent(shard).length for shard in run)


@dataclass(frozen=True, slots=True)
class Tensors:
    """A version's layout, and the tensors of each of its files, in file order."""

    layout: Layout
    files: Sequence[Sequence[Tensor]]


class BaseMap:
    """Where the base has the predecessors of a target's bytes.

    Args:
        target: The version to rebuild.
        base: The version to start from; None: nothing.
    """

    def __init__(self, target: Tensors, base: Tensors | None) -> None:
        self._layout = target.layout
        self._base = None if base is None else base.layout
        old: dict[str, OldFile] = {}
        old_tensors: dict[str, Tensor] = {}
        if base is not None:
            for number, entry in enumerate(base.layout.files):
                old[entry.path] = OldFile(number, entry.bytes)
                old_tensors |= {tensor.name: tensor for tensor in base.files[number]}
        self._old = old
        self._spans: list[list[Span]] = [
            file_spans(entry.bytes, target.files[number], old.get(entry.path), old_tensors)
            for number, entry in enumerate(target.layout.files)
        ]

    def pieces(self, run: range) -> list[Piece]:
        """Return the pieces of the shards of a run, in order."""
        pieces: list[Piece] = []
        for file, start, stop in self._stretches(run):
            pieces += pieces_between(self._spans[file], start, stop)
        return pieces

    def needs(self, run: range) -> set[int]:
        """Return the shards of the base that a run's pieces start from."""
        if self._base is None:
            return set()
        needed: set[int] = set()
        size = self._base.shard_bytes
        for piece in self.pieces(run):
            if piece.base is not None and piece.length:
                first = self._base.file_shards(piece.base.file).start
                start, stop = piece.base.offset, piece.base.offset + piece.length
                needed.update(range(first + start // size, first + (stop - 1) // size + 1))
        return needed

    def in_place(self, shard: int) -> bool:
        """Say whether a shard's pieces lie at the same place of the file of the same path."""
        extent = self._layout.extent(shard)
        old = self._old.get(extent.path)
        if old is None:
            return False
        at = extent.offset
        for piece in self.pieces(range(shard, shard + 1)):
            base = piece.base
            if base is None or (base.file, base.offset) != (old.file, at):
                return False
            at += piece.length
        return True

    def _stretches(self, run: range) -> Iterator[tuple[int, int, int]]:
        """Yield file, start and stop of what a run covers: neighbours in one file as one."""
        file = start = stop = -1
        for shard in run:
            extent = self._layout.extent(shard)
            if extent.file != file:
                if file >= 0:
                    yield file, start, stop
                file, start = extent.file, extent.offset
            stop = extent.offset + extent.length
        if file >= 0:
            yield file, start, stop


def runs_to_encode(
    run: range, wanted: Collection[int], bridgeable: Callable[[int], bool]
) -> list[range]:
    """Return the runs within ``run`` to make frames of: from wanted shard to wanted shard.

    Shards between them that need not be rebuilt stay in the frame if they cost it nothing.

    Args:
        run: Consecutive shards.
        wanted: Those of them to rebuild.
        bridgeable: Says of another one whether a frame tells it in no bytes.
    """
    found: list[range] = []
    for shard in run:
        if shard not in wanted:
            continue
        last = found[-1] if found else None
        if last is not None and all(bridgeable(s) for s in range(last.stop, shard)):
            found[-1] = range(last.start, shard + 1)
        else:
            found.append(range(shard, shard + 1))
    return found


@dataclass(frozen=True, slots=True)
class MadeFrame:
    """A frame: the shards that it rebuilds, its bytes, what a reader saves by it."""

    shards: range
    data: bytes
    saved: int

    @property
    def bridge(self) -> bool:
        """Whether it only tells what the base has in the same place, so that a part goes on."""
        return self.saved == 0


@dataclass(slots=True)
class _OpenPart:
    """A part that grows: blobs that are whole, and the frames of the next one.

    Of its blobs the first ``told`` have been told of; they rebuild the shards before ``told_stop``.
    """

    first_shard: int
    stop: int
    blobs: list[DeltaBlob] = field(default_factory=list)
    frames: list[MadeFrame] = field(default_factory=list)
    saved: int = 0
    told: int = 0
    told_stop: int = 0


class Packer:
    """Packs frames, given in shard order, into blobs and parts.

    Args:
        layout: Digest of the target's layout.
        base: Manifest of the base, None without.
    """

    def __init__(self, layout: str, base: str | None) -> None:
        self._layout = layout
        self._base = base
        self._parts: list[_OpenPart] = []
        self._bridges: list[MadeFrame] = []

    def add(self, frame: MadeFrame) -> Iterator[tuple[str, bytes]]:
        """Take the next frame; yield the blobs that are whole now: digest and bytes."""
        if frame.bridge:
            self._bridges.append(frame)
            return
        bridges, self._bridges = self._bridges, []
        if self._parts and len(bridges) <= BRIDGED_FRAMES:
            ends = [self._parts[-1].stop, *(bridge.shards.stop for bridge in bridges)]
            starts = [*(bridge.shards.start for bridge in bridges), frame.shards.start]
            if bridges and ends == starts:
                for bridge in bridges:
                    yield from self._append(bridge)
        yield from self._append(frame)

    def _append(self, frame: MadeFrame) -> Iterator[tuple[str, bytes]]:
        part = self._parts[-1] if self._parts else None
        if part is None or part.stop != frame.shards.start or len(part.blobs) >= MAX_PART_BLOBS:
            yield from self.finish()
            start = frame.shards.start
            part = _OpenPart(start, start, told_stop=start)
            self._parts.append(part)
        part.frames.append(frame)
        part.stop = frame.shards.stop
        part.saved += frame.saved
        if sum(len(one.data) for one in part.frames) >= BLOB_BYTES:
            yield _cut(part)

    def finish(self) -> Iterator[tuple[str, bytes]]:
        """Yield the blob that is not full, if there is one."""
        if self._parts and self._parts[-1].frames:
            yield _cut(self._parts[-1])

    def cut(self) -> Iterator[tuple[str, bytes]]:
        """Yield the blob that is not full, if it is worth a request already."""
        part = self._parts[-1] if self._parts else None
        if part is not None and sum(len(one.data) for one in part.frames) >= LEAST_BLOB_BYTES:
            yield _cut(part)

    def fresh(self, kept: Collection[str]) -> list[DeltaPart]:
        """Return parts that nobody was told of, of the blobs that are kept; in no wise the last ones."""
        found: list[DeltaPart] = []
        for part in self._parts:
            blobs = list(itertools.takewhile(lambda b: b.digest in kept, part.blobs[part.told :]))
            if blobs:
                found.append(self._part(part.told_stop, blobs))
                part.told += len(blobs)
                part.told_stop = found[-1].shards.stop
        return found

    def untold(self) -> int | None:
        """Return the first shard of what ``fresh`` has not returned yet, None if there is nothing."""
        left = (p.told_stop for p in self._parts if p.told < len(p.blobs) or p.frames)
        return min(left, default=None)

    def parts(self) -> list[DeltaPart]:
        """Return the parts, once ``finish`` has been called: those worth most, in shard order."""
        best = sorted(self._parts, key=lambda part: part.saved, reverse=True)[:MAX_PARTS]
        best.sort(key=lambda part: part.first_shard)
        return [self._part(part.first_shard, part.blobs) for part in best]

    def _part(self, first_shard: int, blobs: list[DeltaBlob]) -> DeltaPart:
        return DeltaPart(
            layout=self._layout,
            base=self._base,
            codec=CODEC,
            first_shard=first_shard,
            blobs=blobs,
        )


def _cut(part: _OpenPart) -> tuple[str, bytes]:
    data = b"".join(frame.data for frame in part.frames)
    digest = digest_of(data)
    frames = [(len(frame.shards), len(frame.data)) for frame in part.frames]
    part.blobs.append(DeltaBlob(digest=digest, bytes=len(data), frames=frames))
    part.frames = []
    return digest, data


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that was made.

    Attributes:
        ref: What a head says of it.
        parts: Its parts as bytes, by digest.
        blobs: Digests of its blobs, with their lengths.
        rebuilt: Shards that its frames rebuild and the base has not.
        same: Shards that the base has.
        plain: Shards that must be fetched as they are, since no frame is cheaper.
        travels: Bytes of blobs and parts.
        total: Bytes of the version.
    """

    ref: DeltaRef
    parts: Mapping[str, bytes]
    blobs: Mapping[str, int]
    rebuilt: int
    same: int
    plain: int
    travels: int
    total: int

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than the version a holder of the base fetches."""
        return self.total / max(self.ref.bytes, 1)


def describe(target: Version, base: Version | None, parts: Sequence[DeltaPart]) -> Delta:
    """Return what the parts of a delta of a complete version amount to."""
    layout = target.layout
    lengths: dict[str, int] = {}
    known = frozenset(() if base is None else base.digests)
    rebuilt = {target.digests[shard] for part in parts for shard in part.shards} - known
    same = sum(digest in known for digest in target.digests)
    for shard, digest in enumerate(target.digests):
        if digest is not None and digest not in known and digest not in rebuilt:
            lengths[digest] = layout.extent(shard).length
    plain = sum(digest in lengths for digest in target.digests)
    encoded = {digest_of(data): data for data in map(encode_delta_part, parts)}
    blobs = {blob.digest: blob.bytes for part in parts for blob in part.blobs}
    travels = sum(blobs.values()) + sum(len(data) for data in encoded.values())
    ref = DeltaRef(
        base=None if base is None else base.manifest,
        base_version=None if base is None else base.number,
        parts=list(encoded),
        bytes=travels + sum(lengths.values()),
    )
    return Delta(
        ref=ref,
        parts=encoded,
        blobs=blobs,
        rebuilt=len(target.digests) - same - plain,
        same=same,
        plain=plain,
        travels=travels,
        total=layout.total_bytes,
    )

"""What the deltas of a version are made of, as one source serves them. Nothing is kept.

The documents of a delta are small. Which elements it changes shows only against the base: so
``inspect_tensors`` reads the delta's blobs and about one copy of the base, piece by piece. Every blob
is verified by its digest, and so is every shard that a frame rebuilds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shardcast.cancel import Cancel
from shardcast.codec.decode import decode_frame
from shardcast.codec.spans import Tensor, header_bytes, read_tensors
from shardcast.config import NetConfig
from shardcast.deltas import Tensors
from shardcast.errors import IntegrityError, MalformedError, NotFoundError, ShardcastError
from shardcast.fetch import BlobSource, MemorySink, Transfer
from shardcast.frames import checked_shards
from shardcast.protocol.delta import (
    CODECS,
    DeltaBlob,
    DeltaPart,
    FrameAt,
    assemble_deltas,
    decode_delta_part,
)
from shardcast.protocol.head import DeltaRef, VersionRef
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MIB
from shardcast.protocol.manifest import Version
from shardcast.sharing import Stopping, share_out
from shardcast.tensor_changes import Changes, Tally

THREADS: Final = 4
_CACHED_BYTES: Final = 64 * MIB
"""Shards that are kept in memory: neighbouring frames share the one between them."""


@dataclass(frozen=True, slots=True)
class InspectedDelta:
    """A delta: its entry in the head, its parts, or why they could not be had."""

    ref: DeltaRef
    parts: tuple[DeltaPart, ...]
    problem: str | None

    @property
    def codecs(self) -> tuple[str, ...]:
        """The frame formats of its parts."""
        return tuple(sorted({part.codec for part in self.parts}))

    @property
    def blobs(self) -> int:
        """How many blobs it has."""
        return sum(len(part.blobs) for part in self.parts)

    @property
    def frames(self) -> int:
        """How many frames its blobs hold."""
        return sum(len(blob.frames) for part in self.parts for blob in part.blobs)

    @property
    def blob_bytes(self) -> int:
        """What its blobs weigh."""
        return sum(blob.bytes for part in self.parts for blob in part.blobs)

    @property
    def shards(self) -> int:
        """How many shards its frames rebuild."""
        return sum(len(part.shards) for part in self.parts)


def inspect_deltas(
    source: BlobSource, run: str, ref: VersionRef, version: Version
) -> tuple[InspectedDelta, ...]:
    """Fetch and check the documents of a version's deltas."""
    found: list[InspectedDelta] = []
    for delta in ref.deltas:
        try:
            parts = [
                decode_delta_part(_fetch(source, run, digest, None, MAX_DOCUMENT_BYTES))
                for digest in delta.parts
            ]
            assembled = assemble_deltas(delta, version.layout_digest, version.layout, parts)
            found.append(InspectedDelta(delta, assembled, None))
        except ShardcastError as error:
            found.append(InspectedDelta(delta, (), str(error)))
    return tuple(found)


def cheapest(deltas: Sequence[InspectedDelta], bases: Sequence[str]) -> InspectedDelta:
    """Return the delta of fewest bytes that can be looked into.

    Raises:
        NotFoundError: If there is none.
    """
    usable = [
        delta
        for delta in deltas
        if delta.problem is None and delta.ref.base in bases and set(delta.codecs) <= CODECS
    ]
    if not usable:
        raise NotFoundError("the version has no delta whose base the head retains")
    return min(usable, key=lambda delta: delta.ref.bytes)


def inspect_tensors(
    url: str,
    run: str,
    target: Version,
    base: Version,
    delta: InspectedDelta,
    *,
    config: NetConfig | None = None,
    begin: Callable[[int], None] = lambda total: None,
    progress: Callable[[int], None] = lambda count: None,
) -> Changes:
    """Look tensor by tensor at what a delta changes, and what it costs.

    Args:
        url: The source.
        run: The run.
        target: The version that the delta leads to.
        base: The version that it starts from.
        delta: The delta.
        config: Bounds of the network.
        begin: Told how many bytes of the target there are.
        progress: Told of how many the changes are known, from several threads.

    Raises:
        NetworkError: If something does not come.
        IntegrityError: If a frame does not rebuild its shards.
        MalformedError: If a frame is none.
    """
    with contextlib.closing(BlobSource(url, config or NetConfig())) as source:
        old, new = _Remote(source, run, base), _Remote(source, run, target)
        tally = Tally(_tensors(new), _tensors(old))
        begin(target.layout.total_bytes)

        def work(_tool: None, job: _Job, stopping: Stopping) -> None:
            for shards, data, frame in job.look(source, run, new, old, stopping):
                if data is None:
                    tally.leave_out(shards)
                else:
                    tally.add(shards, data, frame, old)
                extents = map(target.layout.extent, shards)
                progress(sum(extent.length for extent in extents))

        share_out(
            _jobs(target, delta.parts),
            work,
            threads=THREADS,
            tool=contextlib.nullcontext,
            name="inspect",
        )
    return tally.changes()


class _Remote:
    """The bytes of a version, fetched shard by shard and verified. Thread-safe."""

    def __init__(self, source: BlobSource, run: str, version: Version) -> None:
        self.version = version
        self._source = source
        self._run = run
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, bytes] = OrderedDict()

    def shard(self, shard: int) -> bytes:
        """Return a shard's bytes."""
        with self._lock:
            found = self._cache.get(shard)
            if found is not None:
                self._cache.move_to_end(shard)
                return found
        digest, extent = self.version.digests[shard], self.version.layout.extent(shard)
        if digest is None:
            raise MalformedError(f"no part names shard {shard} of version {self.version.number}")
        data = _fetch(self._source, self._run, digest, extent.length, extent.length)
        with self._lock:
            self._cache[shard] = data
            while len(self._cache) > 1 and sum(map(len, self._cache.values())) > _CACHED_BYTES:
                self._cache.popitem(last=False)
        return data

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of file number ``file``."""
        layout = self.version.layout
        if not 0 <= file < len(layout.files) or offset + length > layout.files[file].bytes:
            raise MalformedError(f"version {layout.version} has no byte {offset} of file {file}")
        data, first, size = bytearray(), layout.file_shards(file).start, layout.shard_bytes
        while len(data) < length:
            at = offset + len(data)
            skip = at % size
            data += self.shard(first + at // size)[skip : skip + length - len(data)]
        return memoryview(data)


_Look = tuple[range, memoryview | None, bytes | None]


@dataclass(frozen=True, slots=True)
class _Job:
    """Consecutive shards: a blob that rebuilds them, or none."""

    shards: range
    blob: DeltaBlob | None = None
    frames: tuple[FrameAt, ...] = ()

    def look(
        self, source: BlobSource, run: str, new: _Remote, old: _Remote, stopping: Stopping
    ) -> Iterator[_Look]:
        """Yield the shards, a few at a time: their bytes (None: the base has them), their frame."""
        if self.blob is None:
            yield from self._plain(new, old)
        else:
            data = _fetch(source, run, self.blob.digest, self.blob.bytes, self.blob.bytes)
            yield from self._rebuilt(data, new.version, old, stopping)

    def _plain(self, new: _Remote, old: _Remote) -> Iterator[_Look]:
        known = frozenset(old.version.digests)
        for shard in self.shards:
            one = range(shard, shard + 1)
            if new.version.digests[shard] in known:
                yield one, None, None
            else:
                yield one, memoryview(new.shard(shard)), None

    def _rebuilt(
        self, blob: bytes, target: Version, old: _Remote, stopping: Stopping
    ) -> Iterator[_Look]:
        digest = "" if self.blob is None else self.blob.digest
        for frame in self.frames:
            if stopping():
                return
            encoded = blob[frame.offset : frame.offset + frame.length]
            extents = [target.layout.extent(shard) for shard in frame.shards]
            data = memoryview(decode_frame(encoded, sum(e.length for e in extents), old))
            for extent, piece in checked_shards(data, extents, target, frame.shards):
                if piece is None:
                    raise IntegrityError(
                        f"a frame of blob {digest} gives other bytes for shard {extent.shard} of "
                        f"version {target.number} than were signed"
                    )
            yield frame.shards, data, encoded


def _jobs(target: Version, parts: Sequence[DeltaPart]) -> Iterator[_Job]:
    """Yield the blobs of a delta, and the shards that none of them rebuilds."""
    shard = 0
    for part in parts:
        if part.first_shard > shard:
            yield _Job(range(shard, part.first_shard))
        shard = part.first_shard
        for blob, frames in part.placed():
            shards = range(shard, frames[-1].shards.stop)
            yield _Job(shards, blob, frames)
            shard = shards.stop
    if shard < target.layout.shard_count:
        yield _Job(range(shard, target.layout.shard_count))


def _tensors(remote: _Remote) -> Tensors:
    """Read where the tensors of a version lie, by the shards that hold the headers."""
    layout = remote.version.layout
    files: list[list[Tensor]] = []
    for file, entry in enumerate(layout.files):
        length = None
        if entry.path.endswith(".safetensors") and entry.bytes >= 8:
            length = header_bytes(bytes(remote.range(file, 0, 8)))
        if length is None or length > entry.bytes:
            files.append([])
        else:
            header = bytes(remote.range(file, 0, length))
            files.append(read_tensors(header, file, entry.bytes))
    return Tensors(layout, files)


def _fetch(source: BlobSource, run: str, digest: str, length: int | None, limit: int) -> bytes:
    sink = MemorySink()
    source.fetch(Transfer(run, digest, length, sink, limit=limit), Cancel())
    return bytes(sink.data)

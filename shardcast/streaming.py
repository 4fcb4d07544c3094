"""A version that is announced while it is made: what of it is ready, and when that is worth a head.

Pure. Shards come in any order; those that follow each other are listed in one part. The parts of an open
version say less at a time than those it closes with, which are cut as ever: a version that streamed
has the same manifest as one that did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardcast.hashing import ShardHash
from shardcast.protocol.delta import DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import OpenDeltaRef, OpenRef
from shardcast.protocol.layout import Layout, encode_layout, encode_part
from shardcast.protocol.limits import MAX_PART_SHARDS

MAX_OPEN_PARTS: Final = 512
"""Parts, and delta parts, that a head lists of an open version: 34 kB each, and every worker polls it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often an open version is announced.

    Attributes:
        first_s: A publication that is done, or about to be, after so long is announced once.
        every_s: Least time between two heads.
        steps: Heads at most: each lists at least such a share of the version.
        least_upload_bytes: What is sent to a remote origin streams from the start on, if it is so much.
    """

    first_s: float = 0.25
    every_s: float = 0.25
    steps: int = 64
    least_upload_bytes: int = 64 << 20

    def uploading(self, total_bytes: int) -> Pace | None:
        """Return the pace for what must cross a link: nobody knows how long that takes."""
        return replace(self, first_s=0.0) if total_bytes >= self.least_upload_bytes else None

    def opens(self, elapsed_s: float, done_bytes: int, total_bytes: int) -> bool:
        """Say whether a version is to be announced open, after so long and so much of it."""
        if elapsed_s < self.first_s:
            return False
        left = total_bytes - done_bytes
        left_s = elapsed_s * left / done_bytes if done_bytes else math.inf
        return left_s >= self.first_s

    def grows(self, since_s: float, fresh_bytes: int, total_bytes: int) -> bool:
        """Say whether another head is due, so long after the last one, with so much to tell."""
        return since_s >= self.every_s and fresh_bytes * self.steps >= total_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive shards from ``first`` on that are ready."""

    first: int
    hashes: tuple[ShardHash, ...]


class Growing:
    """Which shards are ready and not listed yet. Not thread-safe.

    Attributes:
        done_bytes: Bytes of the shards that are ready.
        fresh_bytes: Of those, bytes of shards that nobody was told of.
    """

    def __init__(self, layout: Layout) -> None:
        self.done_bytes = 0
        self.fresh_bytes = 0
        self._layout = layout
        self._fresh: dict[int, ShardHash] = {}

    def add(self, shard: int, found: ShardHash) -> None:
        """A shard is ready."""
        length = self._layout.extent(shard).length
        self._fresh[shard] = found
        self.done_bytes += length
        self.fresh_bytes += length

    def take(self, most_bytes: int | None = None, before: int | None = None) -> list[Piece]:
        """Return what nobody was told of, in shard order, each piece a part at most.

        Args:
            most_bytes: Stop once it is so much.
            before: Only shards before this one; None: any.
        """
        pieces: list[tuple[int, list[ShardHash]]] = []
        taken = 0
        for shard in sorted(self._fresh):
            if (most_bytes is not None and taken >= most_bytes) or (
                before is not None and shard >= before
            ):
                break
            last = pieces[-1] if pieces else None
            if last is None or last[0] + len(last[1]) != shard or len(last[1]) >= MAX_PART_SHARDS:
                last = (shard, [])
                pieces.append(last)
            last[1].append(self._fresh.pop(shard))
            taken += self._layout.extent(shard).length
        self.fresh_bytes -= taken
        return [Piece(first, tuple(hashes)) for first, hashes in pieces]


class Opened:
    """What a head says of an open version: its layout, the parts so far, one delta that comes.

    Attributes:
        layout_digest: Digest of the layout.
    """

    def __init__(self, layout: Layout, base: tuple[str, int] | None) -> None:
        """Say that nothing is ready.

        Args:
            layout: The version's layout.
            base: Manifest and number of the version that a delta will start from; None: none comes.
        """
        self._layout = layout
        self._layout_data = encode_layout(layout)
        self.layout_digest = digest_of(self._layout_data)
        self._base = base
        self._parts: list[str] = []
        self._delta_parts: list[str] = []

    def layout_document(self) -> tuple[str, bytes]:
        """Return the layout's digest and bytes."""
        return self.layout_digest, self._layout_data

    def list_pieces(self, pieces: Sequence[Piece]) -> Mapping[str, bytes]:
        """List further shards; return the parts to keep before the head that names them."""
        documents: dict[str, bytes] = {}
        for piece in pieces:
            digests = [found.digest for found in piece.hashes]
            data = encode_part(self.layout_digest, piece.first, digests)
            if len(self._parts) < MAX_OPEN_PARTS:
                documents[digest_of(data)] = data
                self._parts.append(digest_of(data))
        return documents

    def list_delta_parts(self, parts: Sequence[DeltaPart]) -> Mapping[str, bytes]:
        """List further parts of the delta; return them to keep before the head that names them."""
        documents: dict[str, bytes] = {}
        for part in parts if self._base is not None else ():
            data = encode_delta_part(part)
            if len(self._delta_parts) < MAX_OPEN_PARTS:
                documents[digest_of(data)] = data
                self._delta_parts.append(digest_of(data))
        return documents

    def without_delta(self) -> None:
        """Say that no delta comes that is worth it: who waits for one need not wait any more."""
        self._base = None

    def ref(self) -> OpenRef:
        """Return the head's entry."""
        deltas = []
        if self._base is not None:
            manifest, number = self._base
            deltas = [
                OpenDeltaRef(base=manifest, base_version=number, parts=list(self._delta_parts))
            ]
        return OpenRef(
            version=self._layout.version,
            step=self._layout.step,
            layout=self.layout_digest,
            parts=list(self._parts),
            deltas=deltas,
        )

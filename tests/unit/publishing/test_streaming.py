"""What of a version is told while it is made: which pieces, and when (pure)."""

from __future__ import annotations

import math

import pytest

from shardcast.hashing import ShardHash
from shardcast.protocol.delta import DeltaBlob, DeltaPart
from shardcast.protocol.digest import digest_of
from shardcast.protocol.layout import FileEntry, Layout, decode_part
from shardcast.protocol.limits import MAX_PART_SHARDS
from shardcast.streaming import MAX_OPEN_PARTS, Growing, Opened, Pace

KIB = 1024
SHARD = 256 * KIB


def layout(shards: int) -> Layout:
    return Layout(
        run="run",
        version=7,
        step=70,
        lineage="one",
        created_at=1,
        shard_bytes=SHARD,
        metadata={},
        files=[FileEntry(path="model", bytes=shards * SHARD - 1)],
    )


def found(shard: int) -> ShardHash:
    return ShardHash(digest_of(b"%d" % shard), shard.to_bytes(16, "big"))


@pytest.mark.parametrize(
    ("elapsed_s", "done", "opens"),
    [
        (0.1, 0, False),
        (0.3, 0, True),  # nothing is ready: nobody knows how long it takes
        (0.3, 10, True),
        (0.3, 60, False),  # 0.2 s are left
        (10.0, 99, False),
        (100.0, 99, True),  # a second is left
    ],
)
def test_a_version_is_opened_if_it_takes_longer_than_a_moment(
    elapsed_s: float, done: int, opens: bool
) -> None:
    assert Pace(first_s=0.25).opens(elapsed_s, done, 100) is opens


@pytest.mark.parametrize(
    ("since_s", "fresh", "grows"),
    [(0.1, 100, False), (0.25, 100, True), (0.25, 15, False), (99, 15, False), (99, 16, True)],
)
def test_heads_are_bounded_in_rate_and_in_number(since_s: float, fresh: int, grows: bool) -> None:
    assert Pace(every_s=0.25, steps=64).grows(since_s, fresh, 1024) is grows


def test_an_unhurried_pace_waits_for_ever() -> None:
    assert not Pace(first_s=math.inf).opens(1e9, 0, 100)


def test_consecutive_shards_are_one_piece_and_are_told_once() -> None:
    growing = Growing(layout(8))
    for shard in (5, 0, 1, 4, 7):
        growing.add(shard, found(shard))
    assert growing.fresh_bytes == 5 * SHARD - 1
    pieces = growing.take()
    assert [(p.first, len(p.hashes)) for p in pieces] == [(0, 2), (4, 2), (7, 1)]
    assert pieces[1].hashes == (found(4), found(5))
    assert growing.take() == []
    growing.add(2, found(2))
    assert [(p.first, len(p.hashes)) for p in growing.take()] == [(2, 1)]
    assert growing.fresh_bytes == 0
    assert growing.done_bytes == 6 * SHARD - 1


def test_no_more_is_taken_than_was_asked_for() -> None:
    growing = Growing(layout(8))
    for shard in range(8):
        growing.add(shard, found(shard))
    assert [(p.first, len(p.hashes)) for p in growing.take(2 * SHARD)] == [(0, 2)]
    assert [(p.first, len(p.hashes)) for p in growing.take(1)] == [(2, 1)]
    assert growing.fresh_bytes == 5 * SHARD - 1
    assert [(p.first, len(p.hashes)) for p in growing.take()] == [(3, 5)]


def test_a_piece_is_never_more_than_a_part_may_name() -> None:
    growing = Growing(layout(MAX_PART_SHARDS + 2))
    for shard in range(MAX_PART_SHARDS + 2):
        growing.add(shard, found(shard))
    pieces = growing.take()
    assert [(p.first, len(p.hashes)) for p in pieces] == [
        (0, MAX_PART_SHARDS),
        (MAX_PART_SHARDS, 2),
    ]


def delta_part(first: int) -> DeltaPart:
    return DeltaPart(
        layout="0" * 64,
        base="a" * 64,
        codec="scf/1",
        first_shard=first,
        blobs=[DeltaBlob(digest="b" * 64, bytes=1, frames=[(1, 1)])],
    )


def test_an_open_version_lists_more_and_more_of_itself() -> None:
    opened, growing = Opened(layout(4), ("a" * 64, 6)), Growing(layout(4))
    first = opened.ref()
    assert (first.version, first.step, first.parts) == (7, 70, [])
    assert first.layout == opened.layout_document()[0] == digest_of(opened.layout_document()[1])
    assert [(d.base, d.base_version, d.parts) for d in first.deltas] == [("a" * 64, 6, [])]
    growing.add(1, found(1))
    documents = opened.list_pieces(growing.take())
    (digest,) = documents
    assert digest_of(documents[digest]) == digest
    part = decode_part(documents[digest])
    assert (part.layout, part.first_shard) == (first.layout, 1)
    assert part.shard_digests == (found(1).digest,)
    delta = opened.list_delta_parts([delta_part(0)])
    growing.add(0, found(0))
    more = opened.list_pieces(growing.take())
    assert opened.ref().parts == [digest, *more]
    assert opened.ref().deltas[0].parts == list(delta)
    opened.without_delta()
    assert opened.ref().deltas == []
    assert opened.list_delta_parts([delta_part(1)]) == {}


def test_a_version_without_a_base_promises_no_delta() -> None:
    assert Opened(layout(1), None).ref().deltas == []


def test_a_head_stays_small_however_the_shards_come() -> None:
    count = 2 * MAX_OPEN_PARTS + 10
    opened, growing = Opened(layout(count), ("a" * 64, 6)), Growing(layout(count))
    for shard in range(0, count, 2):
        growing.add(shard, found(shard))
    assert len(opened.list_pieces(growing.take())) == MAX_OPEN_PARTS
    parts = [delta_part(shard) for shard in range(count)]
    assert len(opened.list_delta_parts(parts)) == MAX_OPEN_PARTS
    assert len(opened.ref().parts) == len(opened.ref().deltas[0].parts) == MAX_OPEN_PARTS

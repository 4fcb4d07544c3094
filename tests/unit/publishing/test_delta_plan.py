"""Which shards go into which frame, blob and part: pure."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from shardcast.codec.elements import ElementType
from shardcast.codec.spans import Tensor
from shardcast.deltas import (
    BLOB_BYTES,
    BRIDGED_FRAMES,
    MAX_PART_BLOBS,
    MAX_PARTS,
    BaseMap,
    MadeFrame,
    Packer,
    Tensors,
    describe,
    frame_runs,
    run_bytes,
    runs_to_encode,
)
from shardcast.protocol.delta import DeltaBlob, DeltaPart, assemble_deltas, decode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.layout import Layout
from shardcast.protocol.limits import MAX_PART_SHARDS
from shardcast.protocol.manifest import Version
from tests.unit.protocol.facts import A, B, layout

MIB = 1 << 20
KIB_256 = 256 * 1024


# --- frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "shard_bytes", "runs"),
    [
        ([("a", 40 * MIB)], 256 * 1024, [64, 64, 32]),
        ([("a", 40 * MIB)], 16 * MIB, [1, 1, 1]),
        ([("a", 20 * MIB), ("b", 20 * MIB)], 8 * MIB, [2, 2, 2]),  # 8+8, 4+8, 8+4: it spans files
        ([("a", 0), ("b", 1), ("c", 0)], KIB_256, [1]),
        ([("a", 0)], KIB_256, []),
        ([(f"f{n}", 1) for n in range(5000)], KIB_256, [MAX_PART_SHARDS, 5000 - MAX_PART_SHARDS]),
    ],
)
def test_a_frame_takes_consecutive_shards_up_to_16_mib(
    files: list[tuple[str, int]], shard_bytes: int, runs: list[int]
) -> None:
    of = layout(files, shard_bytes=shard_bytes)
    found = frame_runs(of)
    assert [len(run) for run in found] == runs
    assert [shard for run in found for shard in run] == list(range(of.shard_count))
    assert all(run_bytes(of, run) <= 16 * MIB for run in found)


@pytest.mark.parametrize(
    ("wanted", "bridgeable", "runs"),
    [
        ([], [], []),
        ([2], [], [range(2, 3)]),
        ([0, 1, 4], [], [range(2), range(4, 5)]),
        ([0, 1, 4], [2, 3], [range(5)]),
        ([0, 1, 4], [2], [range(2), range(4, 5)]),
        ([1, 3, 5], [0, 2, 6], [range(1, 4), range(5, 6)]),
    ],
)
def test_frames_reach_from_wanted_to_wanted_shard_where_the_rest_is_free(
    wanted: Collection[int], bridgeable: Collection[int], runs: list[range]
) -> None:
    assert runs_to_encode(range(7), wanted, lambda shard: shard in bridgeable) == runs


# --- where the base has it --------------------------------------------------------------------


def bf16(name: str, file: int, offset: int, length: int) -> Tensor:
    return Tensor(name, "BF16", (length // 2,), file, offset, length)


def test_a_run_s_pieces_follow_its_tensors_through_the_files_of_the_base() -> None:
    new = layout([("a", KIB_256 + 8), ("b", KIB_256)])
    old = layout([("b", 2 * KIB_256), ("a", 8)])
    moved = BaseMap(
        Tensors(new, [[bf16("x", 0, 8, KIB_256)], []]),
        Tensors(old, [[bf16("x", 0, KIB_256, KIB_256)], []]),
    )
    pieces = moved.pieces(range(2))  # file a: header, and x
    assert [(p.length, p.type) for p in pieces] == [
        (8, ElementType.BYTES),
        (KIB_256, ElementType.BFLOAT16),
    ]
    assert [(p.base.file, p.base.offset) for p in pieces if p.base] == [(1, 0), (0, KIB_256)]
    assert moved.needs(range(2)) == {1, 2}  # of b its second shard, and a's only one
    assert moved.needs(range(2, 3)) == {0}
    assert [moved.in_place(shard) for shard in range(3)] == [False, False, True]


def test_a_file_without_a_predecessor_starts_from_nothing() -> None:
    target = Tensors(layout([("new", 100)]), [[]])
    for base in (None, Tensors(layout([("other", 100)]), [[]])):
        bare = BaseMap(target, base)
        assert [piece.base for piece in bare.pieces(range(1))] == [None]
        assert bare.needs(range(1)) == set()
        assert not bare.in_place(0)


def test_a_file_that_grew_is_in_place_as_far_as_the_old_one_reached() -> None:
    grown = BaseMap(
        Tensors(layout([("a", 2 * KIB_256)]), [[]]), Tensors(layout([("a", KIB_256)]), [[]])
    )
    assert [grown.in_place(shard) for shard in range(2)] == [True, False]


# --- blobs and parts --------------------------------------------------------------------------


def pack(frames: list[MadeFrame]) -> tuple[list[DeltaPart], dict[str, bytes]]:
    packer = Packer(A, B)
    blobs = {digest: data for frame in frames for digest, data in packer.add(frame)}
    blobs |= dict(packer.finish())
    return packer.parts(), blobs


def frame(first: int, count: int, size: int, saved: int = 10) -> MadeFrame:
    return MadeFrame(range(first, first + count), bytes([first % 251]) * size, saved)


def test_blobs_hold_whole_frames_and_are_cut_at_2_mib() -> None:
    parts, blobs = pack([frame(n, 1, MIB) for n in range(5)] + [frame(5, 1, 5 * MIB)])
    assert len(parts) == 1
    assert [blob.bytes for blob in parts[0].blobs] == [2 * MIB, 2 * MIB, 6 * MIB]
    assert [len(blob.frames) for blob in parts[0].blobs] == [2, 2, 2]
    assert parts[0].shards == range(6)
    assert {digest: len(data) for digest, data in blobs.items()} == {
        blob.digest: blob.bytes for blob in parts[0].blobs
    }
    assert all(digest_of(data) == digest for digest, data in blobs.items())


def test_a_gap_begins_another_part_and_another_blob() -> None:
    parts, _ = pack([frame(0, 2, 100), frame(2, 1, 100), frame(7, 1, 100)])
    assert [part.shards for part in parts] == [range(3), range(7, 8)]
    assert [[blob.frames for blob in part.blobs] for part in parts] == [
        [[(2, 100), (1, 100)]],
        [[(1, 100)]],
    ]


def test_short_gaps_of_what_the_base_has_are_bridged() -> None:
    def with_gap(length: int) -> list[range]:
        bridges = [frame(1 + n, 1, 20, saved=0) for n in range(length)]
        parts, _ = pack([frame(0, 1, 100), *bridges, frame(1 + length, 1, 100)])
        return [part.shards for part in parts]

    assert with_gap(BRIDGED_FRAMES) == [range(BRIDGED_FRAMES + 2)]
    assert with_gap(BRIDGED_FRAMES + 1) == [range(1), range(BRIDGED_FRAMES + 2, BRIDGED_FRAMES + 3)]


def test_what_equals_the_base_before_and_after_all_frames_is_left_out() -> None:
    parts, blobs = pack(
        [frame(0, 1, 9, saved=0), frame(1, 1, 100), frame(2, 1, 9, saved=0), frame(9, 1, 9, 0)]
    )
    assert [part.shards for part in parts] == [range(1, 2)]
    assert [len(data) for data in blobs.values()] == [100]
    assert pack([frame(0, 1, 9, saved=0)]) == ([], {})


def test_bridges_that_do_not_reach_join_nothing() -> None:
    parts, _ = pack([frame(0, 1, 100), frame(2, 1, 9, saved=0), frame(3, 1, 100)])
    assert [part.shards for part in parts] == [range(1), range(3, 4)]


def test_a_part_lists_so_many_blobs_and_a_delta_so_many_parts() -> None:
    packer = Packer(A, None)
    big = bytes(BLOB_BYTES)
    for n in range(MAX_PART_BLOBS + 1):
        for _ in packer.add(MadeFrame(range(n, n + 1), big, 1)):
            pass
    assert [len(part.blobs) for part in packer.parts()] == [MAX_PART_BLOBS, 1]

    parts, _ = pack([frame(2 * n, 1, 10, saved=1 + n) for n in range(MAX_PARTS + 3)])
    assert [part.first_shard for part in parts] == [2 * n for n in range(3, MAX_PARTS + 3)]


# --- what a head says of it -------------------------------------------------------------------


def version(of: Layout, digests: list[str], manifest: str = A) -> Version:
    return Version(of, "1" * 64, tuple(digests), manifest, (manifest,))


def test_the_price_of_a_delta_counts_everything_that_a_holder_of_the_base_fetches() -> None:
    of = layout([("a", 5 * KIB_256)], version=2)
    one, two, three, four, old = (str(n) * 64 for n in range(1, 6))
    target = version(of, [one, two, old, three, four])
    base = version(layout([("a", KIB_256)]), [old], manifest=B)
    part = DeltaPart(
        layout="1" * 64,
        base=B,
        codec="scf/1",
        first_shard=0,
        blobs=[DeltaBlob(digest=A, bytes=70, frames=[(3, 70)])],
    )
    delta = describe(target, base, [part])
    (document,) = delta.parts.values()
    assert (delta.rebuilt, delta.same, delta.plain) == (2, 1, 2)
    assert delta.travels == 70 + len(document)
    assert delta.ref.bytes == delta.travels + 2 * KIB_256
    assert (delta.ref.base, delta.ref.base_version) == (B, 1)
    assert assemble_deltas(delta.ref, "1" * 64, of, [decode_delta_part(document)]) == (part,)
    assert delta.ratio == 5 * KIB_256 / delta.ref.bytes


def test_a_version_that_is_all_in_the_base_costs_nothing() -> None:
    of = layout([("a", 3)], version=2)
    delta = describe(version(of, [A]), version(layout(), [A], manifest=B), [])
    assert (delta.ref.parts, delta.ref.bytes) == ([], 0)

"""Files, shards and parts."""

import base64
from typing import Any

import msgspec
import pytest

from shardcast.errors import LimitError, MalformedError, UnsafePathError
from shardcast.protocol.layout import (
    Extent,
    choose_shard_bytes,
    decode_layout,
    decode_part,
    encode_layout,
    encode_part,
    split_parts,
)
from shardcast.protocol.limits import MAX_BYTES, MAX_SHARDS
from tests.unit.protocol.facts import A, B, layout

KIB = 1024
MIB = 1024 * KIB
S = 256 * KIB


def test_shards_are_numbered_through_the_files() -> None:
    tree = layout([("empty", 0), ("a", 2 * S + 1), ("none", 0), ("b", S), ("c", 1), ("end", 0)])
    assert tree.total_bytes == 3 * S + 2
    assert tree.shard_count == 5
    assert [tree.file_shards(i) for i in range(6)] == [
        range(0),
        range(3),
        range(3, 3),
        range(3, 4),
        range(4, 5),
        range(5, 5),
    ]
    assert list(tree.extents()) == [
        Extent(shard=0, file=1, path="a", offset=0, length=S),
        Extent(shard=1, file=1, path="a", offset=S, length=S),
        Extent(shard=2, file=1, path="a", offset=2 * S, length=1),
        Extent(shard=3, file=3, path="b", offset=0, length=S),
        Extent(shard=4, file=4, path="c", offset=0, length=1),
    ]
    for shard in (-1, 5):
        with pytest.raises(IndexError):
            tree.extent(shard)


def test_a_version_of_empty_files_has_no_shard() -> None:
    tree = decode_layout(encode_layout(layout([("a", 0), ("b", 0)])))
    assert (tree.shard_count, tree.total_bytes, list(tree.extents())) == (0, 0, [])


def test_layout_round_trip() -> None:
    tree = layout([("größe/a", 5)], metadata={"ß": "\0 \U0001f600"}, lineage="ö", step=2**53)
    assert decode_layout(encode_layout(tree)) == tree


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        ({"shard_bytes": 3 * S}, MalformedError, "not a power of two"),
        ({"shard_bytes": S // 2}, MalformedError, "shard_bytes"),
        ({"shard_bytes": 32 * MIB}, MalformedError, "shard_bytes"),
        ({"metadata": {"k": "ä" * 32768}}, LimitError, "metadata of 65537 bytes"),
        ({"metadata": {str(i): "" for i in range(257)}}, MalformedError, "metadata"),
        ({"files": []}, MalformedError, "files"),
        ({"files": [("a", MAX_BYTES), ("b", 1)]}, LimitError, "in all are over"),
        ({"files": [("a", MAX_SHARDS * S + 1)]}, LimitError, "4194305 shards"),
        ({"files": [("a", -1)]}, MalformedError, "bytes|shards"),
        ({"files": [("../a", 1)]}, UnsafePathError, "component"),
        ({"files": [("a", 1), ("A", 1)]}, UnsafePathError, "differ only in case"),
        ({"files": [("a", 1), ("a/b", 1)]}, UnsafePathError, "both a file and a directory"),
        ({"lineage": "x" * 257}, MalformedError, "lineage"),
        ({"version": 0}, MalformedError, "version"),
        ({"run": "runs"}, MalformedError, "reserved"),
    ],
)
def test_what_a_layout_may_not_say(
    members: dict[str, Any], kind: type[MalformedError], message: str
) -> None:
    files = members.pop("files", [("f", 1)])
    tree = layout(files, **members)
    with pytest.raises(kind, match=message):
        encode_layout(tree)
    with pytest.raises(kind, match=message):
        decode_layout(msgspec.json.encode(tree))


def test_largest_layout() -> None:
    tree = layout([("a", MAX_SHARDS * S)])
    assert decode_layout(encode_layout(tree)).shard_count == MAX_SHARDS
    with pytest.raises(LimitError, match="is over the limit"):
        encode_layout(layout([(f"{'x' * 250}/{i:06}", 1) for i in range(65000)]))
    many = [(f"d{i % 7}/{i:05}", i) for i in range(65536)]
    assert decode_layout(encode_layout(layout(many))).total_bytes == sum(range(65536))


def test_a_layout_whose_sums_overflow_64_bits() -> None:
    with pytest.raises(LimitError):
        encode_layout(layout([(f"{i}", MAX_BYTES) for i in range(4096)]))


def test_part_round_trip() -> None:
    part = decode_part(encode_part(A, 7, [A, B]))
    assert part.layout == A
    assert part.shards == range(7, 9)
    assert part.shard_digests == (A, B)


@pytest.mark.parametrize(
    ("first", "digests", "message"),
    [
        (0, "", "0 digests"),
        (0, base64.b64encode(bytes(32 * 4097)).decode(), "4097 digests"),
        (0, base64.b64encode(bytes(31)).decode(), "not a multiple of 32"),
        (0, "?", "not padded standard base64"),
        (MAX_SHARDS - 1, base64.b64encode(bytes(64)).decode(), "shard 4194304 is over"),
        (MAX_SHARDS, base64.b64encode(bytes(32)).decode(), "first_shard"),
        (-1, base64.b64encode(bytes(32)).decode(), "first_shard"),
    ],
)
def test_what_a_part_may_not_say(first: int, digests: str, message: str) -> None:
    document = {"format": "shardcast.part/1", "layout": A, "first_shard": first, "digests": digests}
    with pytest.raises(MalformedError, match=message):
        decode_part(msgspec.json.encode(document))


def test_a_part_that_readers_refuse_is_not_written() -> None:
    with pytest.raises(MalformedError, match="digest is not"):
        encode_part(A, 0, ["x"])
    with pytest.raises(MalformedError, match="layout"):
        encode_part("x", 0, [A])
    with pytest.raises(LimitError, match="0 digests"):
        encode_part(A, 0, [])


def test_parts_of_a_version() -> None:
    digests = [f"{i:064x}" for i in range(8193)]
    split = list(split_parts(digests))
    assert [first for first, _ in split] == [0, 4096, 8192]
    assert [digest for _, some in split for digest in some] == digests
    assert list(split_parts([])) == []


@pytest.mark.parametrize(
    ("total", "size"),
    [
        (0, S),
        (1, S),
        (64 * S, S),
        (64 * 2 * S - 1, S),
        (64 * 2 * S, 2 * S),
        (1000**3, 8 * MIB),
        (64 * 16 * MIB, 16 * MIB),
        (62 * 1000**3, 16 * MIB),
        (10**15, 16 * MIB),
    ],
)
def test_shard_size(total: int, size: int) -> None:
    assert choose_shard_bytes(total) == size


@pytest.mark.parametrize(
    ("previous", "kept"),
    [(S, False), (2 * S, True), (8 * S, True), (32 * S, True), (64 * S, False)],
)
def test_shard_size_is_kept_within_a_factor_of_four(previous: int, kept: bool) -> None:
    assert choose_shard_bytes(64 * 8 * S, previous) == (previous if kept else 8 * S)

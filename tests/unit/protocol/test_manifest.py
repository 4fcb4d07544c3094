"""Documents that are valid alone and do not belong together (mix and match)."""

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest

from shardcast.errors import MalformedError, MixAndMatchError, WrongRunError
from shardcast.protocol.digest import digest_of
from shardcast.protocol.layout import Extent, Layout, Part, decode_part, encode_part
from shardcast.protocol.manifest import (
    Manifest,
    Version,
    assemble,
    assemble_open,
    bound_parts,
    contradicts,
    decode_manifest,
    encode_manifest,
)
from tests.unit.protocol.facts import KIB_256, A, B, C, D, layout, open_ref, ref

S = KIB_256
E, F = "e" * 64, "f" * 64
THREE = layout([("a", 2 * S), ("b", S)], step=7)


def part(first: int, *digests: str, of: str = A) -> Part:
    return decode_part(encode_part(of, first, digests))


def put_together(
    parts: Sequence[Part], tree: Layout = THREE, run: str = "demo", **members: int | None
) -> Version:
    entry = ref(1, D, **{"step": 7, "bytes": tree.total_bytes, **members})
    names = [digest_of(str(i).encode()) for i in range(len(parts))]
    return assemble(entry, run, Manifest(layout=A, parts=names), tree, parts)


def test_a_complete_version() -> None:
    version = put_together([part(0, B, C), part(2, B)])
    assert version.complete
    assert version.number == 1
    assert version.digests == (B, C, B)
    assert version.manifest == D
    assert version.layout_digest == A
    assert version.documents == (D, A, digest_of(b"0"), digest_of(b"1"))
    assert version.shards_of() == {
        B: Extent(shard=0, file=0, path="a", offset=0, length=S),
        C: Extent(shard=1, file=0, path="a", offset=S, length=S),
    }


def test_a_version_without_shards() -> None:
    assert put_together([], layout([("a", 0)], step=7)).digests == ()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, B, C)], "name 2 shards, the layout has 3"),
        ([], "name 0 shards"),
        ([part(0, B), part(2, C)], "shards 2 to 2 where 1 of 3"),
        ([part(0, B, C), part(1, C, D)], "shards 1 to 2 where 2 of 3"),
        ([part(2, B), part(0, B, C)], "shards 2 to 2 where 0 of 3"),
        ([part(0, B, C), part(2, B, D)], "shards 2 to 3 where 2 of 3"),
        ([part(0, B, C, D, of=E)], "belongs to layout e"),
    ],
    ids=["gap_at_end", "none", "gap", "overlap", "order", "beyond", "other_layout"],
)
def test_mix_and_match_of_parts(parts: list[Part], message: str) -> None:
    with pytest.raises(MixAndMatchError, match=message):
        put_together(parts)


WHOLE = [part(0, B, C, D)]


def test_mix_and_match_of_head_and_layout() -> None:
    assert put_together(WHOLE).complete
    with pytest.raises(MixAndMatchError, match="head says 5 bytes"):
        put_together(WHOLE, bytes=5)
    with pytest.raises(MixAndMatchError, match="head says step 8, the layout 7"):
        put_together(WHOLE, step=8)
    with pytest.raises(MixAndMatchError, match="head says step None"):
        put_together(WHOLE, step=None)
    with pytest.raises(MixAndMatchError, match="layout is of version 2"):
        put_together(WHOLE, layout([("a", 3 * S)], step=7, version=2))


def test_layout_of_the_wrong_run() -> None:
    with pytest.raises(WrongRunError, match="layout is of run 'demo'"):
        put_together(WHOLE, run="other")
    with pytest.raises(WrongRunError):
        assemble_open(open_ref(1, A, step=7), "other", THREE, [])


def test_one_digest_for_two_lengths() -> None:
    """Or a short file's bytes would be taken for a long one's without being hashed as such."""
    tree = layout([("a", S), ("b", 1), ("c", 0), ("d", 1)], step=7)
    assert put_together([part(0, B, C, C)], tree).complete
    with pytest.raises(MixAndMatchError, match="for 262144 and for 1 bytes"):
        put_together([part(0, B, B, C)], tree)
    with pytest.raises(MixAndMatchError, match="for 262144 and for 1 bytes"):
        assemble_open(open_ref(1, A, step=7), "demo", tree, [part(2, B), part(0, B)])


def test_an_open_version_in_any_order_and_with_gaps() -> None:
    entry = open_ref(1, A, step=7, parts=[E, F])
    version = assemble_open(entry, "demo", THREE, [part(2, B)])
    assert version.digests == (None, None, B)
    assert not version.complete
    assert version.documents == (A, E, F)
    assert list(version.shards_of()) == [B]
    both = assemble_open(entry, "demo", THREE, [part(2, B), part(0, C, D)])
    assert both.digests == (C, D, B)
    assert not both.complete


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, B, C), part(1, C)], "two parts name shard 1"),
        ([part(0, B), part(0, B)], "two parts name shard 0"),
        ([part(2, B, C)], "names shard 3"),
        ([part(0, B, of=E)], "belongs to layout e"),
    ],
)
def test_mix_and_match_of_open_parts(parts: list[Part], message: str) -> None:
    with pytest.raises(MixAndMatchError, match=message):
        assemble_open(open_ref(1, A, step=7), "demo", THREE, parts)


def test_open_version_of_another_number() -> None:
    with pytest.raises(MixAndMatchError, match="layout is of version 1"):
        assemble_open(open_ref(2, A, step=7), "demo", THREE, [])


def test_endless_data_in_small_parts() -> None:
    bound_parts(THREE, [B, C, D])
    bound_parts(THREE, [])
    with pytest.raises(MixAndMatchError, match="4 parts, 4 of them different, for 3 shards"):
        bound_parts(THREE, [B, C, D, E])
    with pytest.raises(MixAndMatchError, match="2 parts, 1 of them different"):
        bound_parts(THREE, [B, B])


def test_manifest_round_trip() -> None:
    assert decode_manifest(encode_manifest(A, [B, C])) == Manifest(layout=A, parts=[B, C])


def test_what_a_manifest_may_not_say() -> None:
    with pytest.raises(MalformedError, match="a part is listed twice"):
        encode_manifest(A, [B, B])
    twice = {"format": "shardcast.manifest/1", "layout": A, "parts": [B, B]}
    with pytest.raises(MalformedError, match="a part is listed twice"):
        decode_manifest(msgspec.json.encode(twice))
    with pytest.raises(MalformedError, match="parts"):
        encode_manifest(A, [f"{i:064x}" for i in range(65537)])


@pytest.mark.parametrize(
    ("change", "contradiction"),
    [
        ({}, False),
        ({"layout_digest": D}, True),
        ({"manifest": E}, True),
        ({"manifest": None}, False),  # open: its digests come one by one
    ],
)
def test_what_cannot_both_be_one_version(
    change: dict[str, str | None], contradiction: bool
) -> None:
    version = put_together([part(0, B, C), part(2, B)])
    other: Version = dataclasses.replace(version, **change)  # type: ignore[arg-type]
    assert contradicts(version, other) is contradicts(other, version) is contradiction

"""Delta parts."""

from typing import Any

import msgspec
import pytest

from shardcast.errors import LimitError, MalformedError, MixAndMatchError
from shardcast.protocol.delta import (
    DeltaBlob,
    DeltaPart,
    FrameAt,
    assemble_deltas,
    decode_delta_part,
    encode_delta_part,
)
from shardcast.protocol.head import DeltaRef, OpenDeltaRef
from shardcast.protocol.limits import MAX_DELTA_BLOB_BYTES, MAX_SHARDS
from tests.unit.protocol.facts import KIB_256, A, B, C, layout


def delta(**members: Any) -> DeltaPart:
    given: dict[str, Any] = {
        "base": B,
        "codec": "zstd",
        "first_shard": 3,
        "blobs": [DeltaBlob(digest=C, bytes=5, frames=[(2, 1), (1, 4)])],
        **members,
    }
    return DeltaPart(layout=A, **given)


@pytest.mark.parametrize("base", [B, None])
def test_round_trip(base: str | None) -> None:
    part = decode_delta_part(encode_delta_part(delta(base=base)))
    assert part == delta(base=base)
    assert part.shards == range(3, 6)


def test_frames_follow_each_other_in_blobs_and_shards() -> None:
    other = DeltaBlob(digest=B, bytes=9, frames=[(3, 9)])
    part = delta(blobs=[*delta().blobs, other])
    (first, two), (second, one) = part.placed()
    assert (first.digest, second.digest) == (C, B)
    assert two == (FrameAt(0, 1, range(3, 5)), FrameAt(1, 4, range(5, 6)))
    assert one == (FrameAt(0, 9, range(6, 9)),)


def blob(size: int, *frames: tuple[int, int]) -> list[DeltaBlob]:
    return [DeltaBlob(digest=C, bytes=size, frames=list(frames))]


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        ({"blobs": []}, MalformedError, "blobs"),
        ({"blobs": blob(5)}, MalformedError, "frames"),
        ({"blobs": blob(5, (1, 4))}, MalformedError, "take 4 bytes of 5"),
        ({"blobs": blob(5, (1, 5), (1, 5))}, MalformedError, "take 10 bytes of 5"),
        ({"blobs": blob(0, (1, 0))}, MalformedError, "bytes|frames"),
        ({"blobs": blob(5, (0, 5))}, MalformedError, "frames"),
        ({"blobs": blob(5, (4097, 5))}, MalformedError, "frames"),
        (
            {"blobs": blob(MAX_DELTA_BLOB_BYTES + 1, (1, MAX_DELTA_BLOB_BYTES + 1))},
            MalformedError,
            "b",
        ),
        ({"first_shard": MAX_SHARDS - 1, "blobs": blob(5, (2, 5))}, LimitError, "4194304 is over"),
        ({"codec": ""}, MalformedError, "codec"),
        ({"codec": "../x\n"}, MalformedError, "codec"),
        ({"base": "x"}, MalformedError, "base"),
    ],
)
def test_what_a_delta_part_may_not_say(
    members: dict[str, Any], kind: type[MalformedError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        encode_delta_part(delta(**members))
    with pytest.raises(kind, match=message):
        decode_delta_part(msgspec.json.encode(delta(**members)))


@pytest.mark.parametrize("frame", [[1], [1, 5, 5], [1.0, 5], [True, 5], "15", None, {"0": 1}])
def test_frames_are_pairs(frame: object) -> None:
    document = msgspec.json.decode(encode_delta_part(delta()))
    document["blobs"][0]["frames"] = [frame]
    with pytest.raises(MalformedError, match="frames"):
        decode_delta_part(msgspec.json.encode(document))


# --- the parts of one delta together ----------------------------------------------------------


def part_of(first: int, *frames: tuple[int, int], base: str | None = B, of: str = A) -> DeltaPart:
    size = sum(taken for _, taken in frames)
    blobs = [DeltaBlob(digest=C, bytes=size, frames=list(frames))]
    return DeltaPart(layout=of, base=base, codec="scf/1", first_shard=first, blobs=blobs)


def ref_to(base: str | None = B, size: int = 9) -> DeltaRef:
    number = None if base is None else 1
    return DeltaRef(base=base, base_version=number, parts=[C], bytes=size)


TARGET = layout([("f", 4 * KIB_256)], version=2)


def test_parts_may_come_in_any_order_with_gaps() -> None:
    first, second = part_of(0, (1, 4)), part_of(2, (2, 5))
    assert assemble_deltas(ref_to(), A, TARGET, [second, first]) == (first, second)
    assert assemble_deltas(ref_to(), A, TARGET, []) == ()


def test_a_delta_of_an_open_version_has_no_size_yet() -> None:
    ref = OpenDeltaRef(base=B, base_version=1, parts=[C])
    assert assemble_deltas(ref, A, TARGET, [part_of(0, (1, 99))]) == (part_of(0, (1, 99)),)


@pytest.mark.parametrize(
    ("ref", "parts", "message"),
    [
        (ref_to(), [part_of(0, (1, 4), of=C)], "belongs to layout c"),
        (ref_to(), [part_of(0, (1, 4), base=C)], "has base c"),
        (ref_to(), [part_of(0, (1, 4), base=None)], "has base None"),
        (ref_to(None), [part_of(0, (1, 4))], "not None"),
        (ref_to(), [part_of(3, (2, 4))], "names shard 4; the version has 4"),
        (ref_to(), [part_of(1, (2, 4)), part_of(0, (2, 4))], "two parts name shard 1"),
        (ref_to(), [part_of(0, (1, 5)), part_of(1, (1, 5))], "weigh 10 bytes, the head says 9"),
    ],
)
def test_parts_that_do_not_belong_together(
    ref: DeltaRef, parts: list[DeltaPart], message: str
) -> None:
    with pytest.raises(MixAndMatchError, match=message):
        assemble_deltas(ref, A, TARGET, parts)

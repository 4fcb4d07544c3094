"""Delta parts."""

from typing import Any

import msgspec
import pytest

from shardcast.errors import LimitError, MalformedError
from shardcast.protocol.delta import DeltaBlob, DeltaPart, decode_delta_part, encode_delta_part
from shardcast.protocol.limits import MAX_DELTA_BLOB_BYTES, MAX_SHARDS
from tests.unit.protocol.facts import A, B, C


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

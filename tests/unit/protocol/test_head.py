"""What a head may say."""

from typing import Any

import msgspec
import pytest

from shardcast.errors import ClockError, MalformedError
from shardcast.protocol.head import OpenDeltaRef, decode_head, encode_head, next_sequence
from tests.unit.protocol.facts import (
    DAY_MS,
    NEW,
    NOW,
    OLD,
    A,
    B,
    C,
    delta_ref,
    head,
    open_ref,
    ref,
)


def test_round_trip_and_lookup() -> None:
    written = head(
        version=2,
        versions=[ref(3, B), ref(2, A, deltas=[delta_ref(None, None), delta_ref(C, 1)])],
        open=open_ref(4, deltas=[OpenDeltaRef(base=A, base_version=2, parts=[])]),
        withdrawn=[3, 1],
        hold=True,
    )
    read = decode_head(encode_head(written))
    assert read == written
    assert read.ref(3) == ref(3, B)
    assert read.ref(1) is None
    newest = read.newest()
    assert newest is not None
    assert newest.version == 2
    assert head().newest() is None
    assert read.raw_keys() == frozenset([OLD.public_key])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"expires_at": NOW - 1}, "expires_at is before issued_at"),
        ({"versions": [ref(1, A), ref(2, B)]}, "newest first"),
        ({"versions": [ref(1, A), ref(1, B)]}, "newest first"),
        ({"versions": [ref(2, A), ref(1, A)]}, "one manifest"),
        ({"version": 1}, "version 1 is not among"),
        ({"version": 1, "versions": [ref(1)], "withdrawn": [1]}, "version 1 is withdrawn"),
        ({"versions": [ref(2)], "open": open_ref(2)}, "open version 2 is not above 2"),
        ({"versions": [ref(2, deltas=[delta_ref(C, None)])]}, "disagree"),
        ({"versions": [ref(2, deltas=[delta_ref(None, 1)])]}, "disagree"),
        ({"versions": [ref(2, deltas=[delta_ref(C, 2)])]}, "has base 2"),
        ({"versions": [ref(2, deltas=[delta_ref(C, 1)] * 2)]}, "two deltas of one base"),
        ({"versions": [ref(2, A, deltas=[delta_ref(C, 1)]), ref(1, B)]}, "is not version 1"),
        ({"open": open_ref(2, deltas=[delta_ref(C, 3)])}, "has base 3"),
        ({"keys": []}, "keys"),
        ({"keys": [OLD.text] * 2}, "a key is listed twice"),
        ({"keys": ["AAAA"]}, "key has 3 bytes"),
        ({"keys": [OLD.text] * 9}, "keys|twice"),
        ({"run": "status"}, "reserved"),
        ({"withdrawn": [0]}, "withdrawn"),
    ],
)
def test_contradictions(members: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        encode_head(head(**members))
    data = msgspec.json.encode(head(**members))
    with pytest.raises(MalformedError, match=message):
        decode_head(data)


def test_what_is_no_contradiction() -> None:
    for members in (
        {"expires_at": NOW},
        {"versions": [ref(2)], "withdrawn": [2, 2, 9]},
        {"open": open_ref(1)},
        {"versions": [ref(2, deltas=[delta_ref(B, 1)]), ref(1, B)]},
        {"keys": [OLD.text, NEW.text]},
    ):
        assert decode_head(encode_head(head(**members))) == head(**members)


def test_sequence_grows_and_follows_the_clock() -> None:
    assert next_sequence(None, NOW) == NOW
    assert next_sequence(None, 0) == 1
    assert next_sequence(NOW - 5, NOW) == NOW
    assert next_sequence(NOW, NOW) == NOW + 1
    assert next_sequence(NOW + 1000, NOW) == NOW + 1001
    assert next_sequence(NOW + DAY_MS, NOW) == NOW + DAY_MS + 1
    with pytest.raises(ClockError, match="more than a day ahead"):
        next_sequence(NOW + DAY_MS + 1, NOW)

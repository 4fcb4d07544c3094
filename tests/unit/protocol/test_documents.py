"""Strict and bounded: what no decoder lets through, whatever the document."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shardcast.errors import LimitError, MalformedError, ShardcastError
from shardcast.protocol.delta import decode_delta_part
from shardcast.protocol.documents import check_run, decode, encode
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head, encode_head
from shardcast.protocol.layout import decode_layout, decode_part, encode_layout
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_HEAD_BYTES
from shardcast.protocol.manifest import decode_manifest
from shardcast.protocol.trust import decode_state
from tests.unit.protocol.facts import head, layout, ref, with_members, without

VECTORS = Path(__file__).parents[2] / "vectors"
DECODERS: dict[str, Callable[[bytes], object]] = {
    "delta.json": decode_delta_part,
    "head.json": decode_head,
    "head.envelope.json": open_unverified,
    "layout.json": decode_layout,
    "manifest.json": decode_manifest,
    "part-0.json": decode_part,
    "trust.json": decode_state,
}
every_decoder = pytest.mark.parametrize("name", DECODERS)


def vector(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


@every_decoder
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"0",
        b"{}",
        b"{",
        b'"format"',
        b"\xef\xbb\xbf{}",
        b"[" * 200_000,
        b'{"x":' * 200_000,
        b'{"format":' + b"[" * 200_000,
        b"9" * 200_000,
        b'{"format":["shardcast.head/1"]}',
        b'{"format":{"a":1}}',
        b"\xff\xfe",
        b"\x00",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_garbage(name: str, data: bytes) -> None:
    with pytest.raises(MalformedError):
        DECODERS[name](data)


@every_decoder
@pytest.mark.parametrize(
    "raw",
    [b"NaN", b"Infinity", b"-", b"01", b"1e", b"[" * 100_000, b'"\xff"', b'"\\ud800"', b"'a'"],
    ids=repr,
)
def test_a_member_that_is_ignored_must_still_be_json(name: str, raw: bytes) -> None:
    data = vector(name)
    with pytest.raises(MalformedError):
        DECODERS[name](data[:-1] + b',"more":' + raw + b"}")


@every_decoder
@pytest.mark.parametrize(
    "raw", [b"1e999", b"9" * 5000, b"[[[{}]]]", b'"\\u0000"', b"true"], ids=len
)
def test_a_member_of_the_future_is_ignored(name: str, raw: bytes) -> None:
    data = vector(name)
    assert DECODERS[name](data[:-1] + b',"more":' + raw + b"}") == DECODERS[name](data)


@every_decoder
def test_trailing_bytes(name: str) -> None:
    for tail in (b"x", b"{}", b"\x00", b","):
        with pytest.raises(MalformedError):
            DECODERS[name](vector(name) + tail)


@every_decoder
def test_format_is_required_and_exact(name: str) -> None:
    data = vector(name)
    if name == "head.envelope.json":
        return
    with pytest.raises(MalformedError, match="format"):
        DECODERS[name](without(data, "format"))
    for other in ("shardcast.head/2", "SHARDCAST.HEAD/1", "", None, 1, ["shardcast.head/1"]):
        with pytest.raises(MalformedError, match="format"):
            DECODERS[name](with_members(data, format=other))


@every_decoder
def test_no_document_passes_for_another(name: str) -> None:
    for other in DECODERS:
        if other != name:
            with pytest.raises(MalformedError):
                DECODERS[name](vector(other))


@every_decoder
def test_oversized(name: str) -> None:
    limit = MAX_HEAD_BYTES if name.startswith("head") else MAX_DOCUMENT_BYTES
    data = vector(name)
    padded = data + b" " * (limit - len(data))
    assert DECODERS[name](padded) == DECODERS[name](data)
    with pytest.raises(LimitError, match=f"{limit + 1} bytes is over the limit of {limit}"):
        DECODERS[name](padded + b" ")


def test_of_two_members_of_one_name_the_last_counts() -> None:
    data = vector("manifest.json")
    twice = data[:-1] + b',"layout":"' + b"f" * 64 + b'"}'
    assert decode_manifest(twice).layout == "f" * 64


def test_integers_are_integers() -> None:
    data = vector("head.json")
    for wrong in (True, 1.0, "1", None, 2**53 + 1, 0, -1, 10**400, [1]):
        with pytest.raises(MalformedError):
            decode_head(with_members(data, sequence=wrong))
    assert decode_head(with_members(data, sequence=2**53)).sequence == 2**53


def test_booleans_are_booleans() -> None:
    for wrong in (0, 1, "true", None):
        with pytest.raises(MalformedError):
            decode_head(with_members(vector("head.json"), hold=wrong))


def test_a_refusal_does_not_quote_megabytes_or_control_characters() -> None:
    with pytest.raises(MalformedError) as caught:
        decode_head(with_members(vector("head.json"), format="\x1b[2J" * 100_000))
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_what_readers_refuse_is_not_written() -> None:
    with pytest.raises(MalformedError, match="versions"):
        encode_head(head(versions=[ref(n, f"{n:064x}") for n in range(100, 0, -1)]))
    with pytest.raises(MalformedError, match="cannot be written"):
        encode_layout(layout(metadata={"name": "\ud800"}))
    with pytest.raises(MalformedError, match="sequence"):
        encode_head(head(sequence=2**70))
    with pytest.raises(LimitError, match="over the limit of 10"):
        encode(ref(1), limit=10)


def test_a_plain_struct_is_a_document_too() -> None:
    class Plain(msgspec.Struct):
        a: int

    assert encode(Plain(a=1)) == b'{"a":1}'
    assert decode(b'{"a":2}', Plain, limit=10, what="plain").a == 2
    with pytest.raises(MalformedError, match="plain is malformed"):
        decode(b'{"a":""}', Plain, limit=10, what="plain")


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-d", "x" * 64, "default"])
def test_run_names(name: str) -> None:
    assert check_run(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "-a", "_a", "A", "a/b", "a\n", "a b", "x" * 65, "ä", "runs", "status", "a\0"],
)
def test_what_may_not_name_a_run(name: str) -> None:
    with pytest.raises(MalformedError):
        check_run(name)
    with pytest.raises(ShardcastError):
        decode_head(with_members(vector("head.json"), run=name))
    with pytest.raises(ShardcastError):
        decode_layout(with_members(vector("layout.json"), run=name))
    with pytest.raises(ShardcastError):
        decode_state(with_members(vector("trust.json"), run=name))

"""No input makes a decoder do anything but return a value or raise a named error."""

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.errors import ShardcastError
from shardcast.protocol.delta import decode_delta_part, encode_delta_part
from shardcast.protocol.digest import pack_digests, parse_digest, unpack_digests
from shardcast.protocol.documents import check_run
from shardcast.protocol.envelope import decode_base64, decode_key, open_unverified, seal
from shardcast.protocol.head import decode_head, encode_head
from shardcast.protocol.layout import (
    decode_layout,
    decode_part,
    encode_layout,
    encode_part,
    split_parts,
)
from shardcast.protocol.manifest import decode_manifest, encode_manifest
from shardcast.protocol.paths import check_path
from shardcast.protocol.trust import accept, begin, decode_state, encode_state
from shardcast.protocol.wire import (
    etag_in,
    parse_blob_name,
    parse_content_range,
    parse_depth,
    parse_node,
    parse_range,
    parse_retry_after,
    parse_wait,
)
from tests.property.documents import json_values, mutated, near_valid, scrambled, vector
from tests.unit.protocol.facts import NOW, OLD, STRANGER

DECODERS: Final[dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes] | None]]] = {
    "delta.json": (decode_delta_part, encode_delta_part),
    "head.json": (decode_head, encode_head),
    "head-open.json": (decode_head, encode_head),
    "head.envelope.json": (open_unverified, None),
    "layout.json": (decode_layout, encode_layout),
    "manifest.json": (decode_manifest, lambda m: encode_manifest(m.layout, m.parts)),
    "part-2.json": (
        decode_part,
        lambda part: encode_part(part.layout, part.first_shard, part.shard_digests),
    ),
    "trust.json": (decode_state, encode_state),
}
every_decoder = pytest.mark.parametrize("name", DECODERS)


def survives(name: str, data: bytes) -> None:
    """Decode; what is accepted must also be written, and read as the same."""
    decode, encode = DECODERS[name]
    value, refusal = None, ""
    try:
        value = decode(data)
    except ShardcastError as error:
        refusal = str(error)
    assert len(refusal) < 5000
    if not refusal and encode is not None:
        assert decode(encode(value)) == value


@every_decoder
@given(data=st.binary(max_size=300))
def test_random_bytes(name: str, data: bytes) -> None:
    survives(name, data)


@every_decoder
@given(value=json_values)
def test_random_json(name: str, value: Any) -> None:
    survives(name, json.dumps(value).encode())


@every_decoder
@given(draw=st.data())
@settings(max_examples=300)
def test_near_valid_json(name: str, draw: st.DataObject) -> None:
    survives(name, draw.draw(near_valid(name)))


@every_decoder
@given(draw=st.data())
def test_near_valid_bytes(name: str, draw: st.DataObject) -> None:
    survives(name, draw.draw(scrambled(name)))


@given(head=mutated(vector("head-open.json")), signer=st.sampled_from([OLD, STRANGER]))
@settings(max_examples=300)
def test_signed_near_valid_heads(head: dict[str, Any], signer: Any) -> None:
    """Also a publisher gone mad cannot make a reader fail in an unnamed way."""
    data = seal(json.dumps(head).encode(), [signer])
    for state in (begin("demo", pinned=[OLD.public_key]), begin("demo", first_use=True)):
        try:
            accepted = accept(state, data, NOW)
        except ShardcastError:
            continue
        assert decode_state(encode_state(accepted.state)) == accepted.state
        assert not accept(accepted.state, data, NOW).changed


@given(envelope=near_valid("head.envelope.json"))
def test_near_valid_envelopes_never_change_what_was_signed(envelope: bytes) -> None:
    genuine = decode_head((json.dumps(vector("head.json"))).encode())
    try:
        accepted = accept(begin("demo", pinned=[OLD.public_key]), envelope, NOW)
    except ShardcastError:
        return
    assert accepted.head == genuine


text_or_none = st.none() | st.text(max_size=40)


@given(text=st.text(max_size=80), other=text_or_none)
@settings(max_examples=300)
def test_text_parsers(text: str, other: str | None) -> None:
    for parse in (
        check_path,
        check_run,
        parse_digest,
        decode_key,
        lambda t: decode_base64(t, what="x"),
        parse_depth,
        lambda t: parse_wait(t, other),
        lambda t: parse_range(t, 1000),
    ):
        with contextlib.suppress(ShardcastError):
            parse(text)
    parse_content_range(text)
    parse_blob_name(text)
    parse_node(text)
    etag_in(text, '"x"')
    seconds = parse_retry_after(text, 0.0)
    assert seconds is None or 0 <= seconds <= 60


day = st.sampled_from(["Thu", "Mon", "X", ""])
clock = st.tuples(
    *[st.integers(-5, 99999)] * 5, st.sampled_from(["GMT", "-0000", "+9999", "UT", ""])
)


@given(day=day, clock=clock, month=st.sampled_from(["Jan", "Feb", "Foo"]))
def test_dates(day: str, clock: tuple[Any, ...], month: str) -> None:
    date, year, hour, minute, second, zone = clock
    header = f"{day}, {date} {month} {year} {hour}:{minute}:{second} {zone}"
    seconds = parse_retry_after(header, 1e9)
    assert seconds is None or 0 <= seconds <= 60


@given(packed=st.binary(max_size=300))
def test_packed_digests(packed: bytes) -> None:
    try:
        digests = unpack_digests(packed)
    except ShardcastError:
        assert len(packed) % 32
        return
    assert pack_digests(digests) == packed


digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(layout=digests, names=st.lists(digests, max_size=30))
def test_parts_and_manifest_round_trip(layout: str, names: list[str]) -> None:
    parts = [decode_part(encode_part(layout, first, some)) for first, some in split_parts(names)]
    assert [digest for part in parts for digest in part.shard_digests] == names
    assert all(part.layout == layout for part in parts)
    unique = list(dict.fromkeys(names))
    manifest = decode_manifest(encode_manifest(layout, unique))
    assert (manifest.layout, manifest.parts) == (layout, unique)

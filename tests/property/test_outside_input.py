"""What comes from outside the documents: heads of responses, chunks, journals, configuration, status.

Random bytes, and valid ones after small crimes: only the declared errors, in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import json
import struct
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtest.streams import StreamServer
from relay.admission import client_named, client_of, forwarded_client, is_in
from relay.catalog import Kind, parse_document
from relay.config import split_listen
from relay.handlers import find_route
from relay.upload import decode_any
from shardcast.asyncget import HttpSession
from shardcast.cli.settings import Known, read_config
from shardcast.cli.status import lines
from shardcast.cli.units import parse_size, parse_time
from shardcast.config import NetConfig
from shardcast.connection import parse_endpoint, parse_head
from shardcast.errors import (
    LimitError,
    MalformedError,
    NetworkError,
    UsageError,
)
from shardcast.protocol.documents import decode
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.store.journal import MAGIC, parse_journal
from shardcast.store.records import StoredState
from tests.property.documents import HOSTILE, VECTORS, json_values, mutated


@st.composite
def spoiled(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes after one to four small crimes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 8))
        data[at : at + cut] = draw(
            st.binary(max_size=8)
            | st.sampled_from([b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"9" * 20, b"-1", b"\xff"])
        )
    return bytes(data)


# --- responses ----------------------------------------------------------------------------------

RESPONSE: Final = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/20\r\n"
    b'ETag: "blake3-00"\r\nConnection: keep-alive\r\nRetry-After: 3\r\nVia: 1.1 a'
)


@given(data=st.binary(max_size=300) | spoiled(RESPONSE))
@settings(max_examples=500)
def test_heads_of_responses(data: bytes) -> None:
    try:
        head = parse_head(data)
    except NetworkError:
        return
    assert 100 <= head.status < 600
    assert head.length is None or 0 <= head.length < 10**16
    assert all("\r" not in value and "\n" not in value for value in head.headers.values())


CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nX: y\r\n\r\n"
PLAIN: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world"


@given(said=st.lists(st.binary(max_size=200) | spoiled(CHUNKED) | spoiled(PLAIN), max_size=12))
@settings(max_examples=20)
def test_whole_answers(said: list[bytes]) -> None:
    """A server that says anything, and then closes: an answer within its limit, or a named error."""
    asyncio.run(_ask_all(said))


async def _ask_all(said: list[bytes]) -> None:
    rest = list(said)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(rest.pop() if rest else b"")
            await writer.drain()
        writer.close()

    server = StreamServer(answer)
    endpoint = parse_endpoint(await server.start())
    session = HttpSession(NetConfig())
    try:
        for _ in said:
            try:
                found = await session.get(endpoint, "/x", limit=64, timeout_s=10)
            except (NetworkError, LimitError):
                continue
            assert len(found.body) <= 64
    finally:
        await session.close()
        await server.close()


# --- the store ----------------------------------------------------------------------------------

LAYOUT: Final = "ab" * 32


def journal(records: list[tuple[int, bytes]]) -> bytes:
    """A journal as docs of the module say, written here once more."""
    data = MAGIC + bytes.fromhex(LAYOUT)
    for shard, digest in records:
        number = struct.pack("<I", shard)
        data += number + struct.pack("<I", xxhash.xxh32_intdigest(number + digest)) + digest
    return data


JOURNAL: Final = journal([(n, bytes([n + 1]) * 16) for n in range(5)] + [(2, bytes(16))])


@given(data=st.binary(max_size=300) | spoiled(JOURNAL), shards=st.integers(0, 6))
@settings(max_examples=300)
def test_journals(data: bytes, shards: int) -> None:
    found = parse_journal(data, LAYOUT, shards)
    if found is not None:
        assert set(found) <= set(range(shards))
        assert all(len(digest) == 16 and any(digest) for digest in found.values())
        if data[40:] and len(data) == len(JOURNAL):  # a record that is believed was written
            assert all(digest == bytes([shard + 1]) * 16 for shard, digest in found.items())


STORED: Final = {
    "format": "shardcast.stored/1",
    "run": "demo",
    "version": 57,
    "layout": LAYOUT,
    "manifest": None,
    "parts": [LAYOUT],
}


@given(
    data=st.binary(max_size=300)
    | spoiled(json.dumps(STORED).encode())
    | mutated(STORED).map(lambda value: json.dumps(value).encode())
)
@settings(max_examples=300)
def test_stored_states(data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        state = decode(data, StoredState, limit=MAX_DOCUMENT_BYTES, what="stored state")
        assert state.version > 0


# --- what a relay is sent -----------------------------------------------------------------------

DOCUMENTS: Final = ["layout.json", "part-2.json", "manifest.json", "delta.json", "head.json"]


@pytest.mark.parametrize("name", DOCUMENTS)
@given(draw=st.data())
def test_uploaded_documents(name: str, draw: st.DataObject) -> None:
    data = draw.draw(st.binary(max_size=200) | spoiled((VECTORS / name).read_bytes()))
    with contextlib.suppress(MalformedError):
        decode_any(data)
    for kind in Kind:
        with contextlib.suppress(MalformedError):
            parse_document(kind, data)


@given(path=st.text(max_size=60) | spoiled(b"/v1/demo/blobs/" + b"0" * 64 + b".bin").map(
    lambda data: data.decode("latin-1")
))  # fmt: skip
@settings(max_examples=300)
def test_paths_of_requests(path: str) -> None:
    with contextlib.suppress(MalformedError):
        route = find_route(path)
        assert route is None or route.methods


addresses = (
    st.text(max_size=40)
    | st.ip_addresses().map(str)
    | st.sampled_from(["::ffff:1.2.3.4", "fe80::1%eth0", "1.2.3.4%x", "[::1]", "::1%", "%", ""])
)


def bare(client: str) -> str:
    """The address of an IPv6 client, which is a network; any other client as it is."""
    try:
        return str(ipaddress.IPv6Network(client).network_address)
    except ValueError:
        return client


@example(address="/", values=["10.0.0.1/", "1.2.3.4/5"])
@given(
    address=addresses, values=st.lists(st.lists(addresses, max_size=4).map(",".join), max_size=3)
)
@settings(max_examples=300)
def test_addresses_of_clients(address: str, values: list[str]) -> None:
    trusted = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("2001:db8::/32")]
    named = client_named(address)
    assert client_named(bare(named)) == named
    assert client_of((address, 1)) == client_named(address)
    is_in(address, trusted)
    found = forwarded_client(values, trusted)
    assert found is None or not is_in(bare(found), trusted)


# --- the command line ---------------------------------------------------------------------------

CONFIG: Final = b"""
quota = "200GB"
parent = ["http://a", "http://b"]
[relay]
keep = 3
quiet-start = true
"""
KNOWN: Final = {
    "relay": {
        "quota": Known("quota", False, False),
        "parent": Known("parent", True, False),
        "keep": Known("keep", False, False),
        "quiet-start": Known("quiet_start", False, True),
    }
}


@given(data=st.binary(max_size=200) | spoiled(CONFIG))
@settings(max_examples=300)
def test_configuration_files(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(data)
    with contextlib.suppress(UsageError, MalformedError):
        values = read_config(path, KNOWN)
        assert set(values) == {"relay"}


def test_deep_configuration_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("quota = " + "[" * 20_000)
    with pytest.raises(MalformedError):
        read_config(path, KNOWN)


@given(text=st.text(max_size=40), url=st.text(max_size=60))
def test_options(text: str, url: str) -> None:
    for parse in (parse_size, parse_time, split_listen, parse_endpoint):
        for given_text in (text, url, f"http://{url}", f"{text}:80", f"1{text}"):
            with contextlib.suppress(UsageError):
                parse(given_text)


STATUS: Final[dict[str, Any]] = {
    "software": "shardcast/1",
    "node": "0" * 32,
    "role": "relay",
    "depth": 1,
    "uptime_s": 5.0,
    "draining": False,
    "ready": True,
    "connections": 3,
    "runs": {
        "demo": {
            "problem": "x",
            "head": {
                "sequence": 5,
                "issued_at": 1,
                "expires_at": 2,
                "version": 57,
                "open": 58,
                "hold": True,
                "withdrawn": [55],
            },
            "complete": 57,
            "versions": [
                {
                    "version": 57,
                    "step": 1,
                    "manifest": "a" * 64,
                    "bytes": 5,
                    "shards": 7,
                    "present": 6,
                    "complete": False,
                    "damaged": None,
                    "problem": None,
                }
            ],
        }
    },
    "parents": [
        {"url": "http://a", "live": True, "node": "0", "depth": 0, "bytes_per_s": 5.0, "banned": {}}
    ],
    "siblings": [{"url": "http://b", "live": True, "node": "0"}],
    "children": [
        {"address": "::1", "node": None, "agent": "x", "run": "demo", "requests": 5, "seen_s": 1.0}
    ],
    "scrub": {"rate_bytes_per_s": 5, "bytes": 5, "damaged": 1, "passes": 1, "last_pass_s": 2.0},
    "fills": [{"run": "demo", "digest": "a" * 64, "bytes": 5, "total": 7, "source": "http://a"}],
}


def as_received(document: Any) -> dict[str, Any] | None:
    """What of a document a client takes in; None for what is no JSON object to it."""
    try:
        return msgspec.json.decode(json.dumps(document).encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError):
        return None


def shown(document: Any) -> None:
    received = as_received(document)
    if received is not None:
        assert "\n".join(lines(received, "http://relay", 1e12))


@given(
    document=mutated(STATUS)
    | st.dictionaries(st.sampled_from(sorted(STATUS)), json_values, max_size=8)
)
@settings(max_examples=300)
def test_status_of_a_stranger(document: dict[str, Any]) -> None:
    """A relay may answer anything; a person still gets lines."""
    shown(document)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_status_with_anything_anywhere(value: Any) -> None:
    for place in places(STATUS):
        document = copy.deepcopy(STATUS)
        *way, last = place
        holder: Any = document
        for key in way:
            holder = holder[key]
        holder[last] = value
        shown(document)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything in a JSON value."""
    found = []
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((*way, key))
        if isinstance(value[key], dict | list):
            found += places(value[key], (*way, key))
    return found

"""HTTP-level garbage against an origin: no crash, no hang, no 500, and the connection in step.

Each case sends raw bytes and then a sentinel request on the same connection. What comes back is
parsed strictly: whole answers, statuses that the case allows, the sentinel answered only where the
bytes before it were a request of a certain length. Afterwards the origin serves the right bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from shardcast.protocol.digest import digest_of
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, noise, publish
from tests.contract.relays import config, limits, running, wait_head
from tests.contract.wire_client import Wire, http

TOKEN = "a-token-for-tests-only"
AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()
SENTINEL = b"GET /v1/runs HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SENTINEL_ANSWER = b'{"runs":["policy"]'
BOUND_S = 20.0


@dataclass(frozen=True)
class Said:
    """One answer on the wire."""

    status: int
    headers: dict[str, str]
    body: bytes


_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d) [ -~]+\Z")


def answers(data: bytes, methods: Sequence[str] = ()) -> list[Said]:
    """Take apart everything that a server said. Anything but whole answers fails."""
    found: list[Said] = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        assert end, f"a head without an end: {data[:200]!r}"
        line, *fields = head.split(b"\r\n")
        match = _STATUS_LINE.match(line)
        assert match, f"no status line: {line[:200]!r}"
        headers: dict[str, str] = {}
        for text in fields:
            name, colon, value = text.decode("latin-1").partition(": ")
            assert colon, text
            assert name.lower() not in headers, f"twice: {name}"
            headers[name.lower()] = value
        status = int(match[1])
        method = methods[len(found)] if len(found) < len(methods) else "GET"
        length = 0 if method == "HEAD" or status in (100, 304) else int(headers["content-length"])
        assert len(rest) >= length, f"a body of {len(rest)} bytes instead of {length}"
        if status != 100:
            found.append(Said(status, headers, rest[:length]))
        data = rest[length:]
    return found


@dataclass
class Origin:
    url: str
    shards: list[str]

    def blob(self, number: int = 0) -> bytes:
        return f"/v1/{RUN}/blobs/{self.shards[number]}.bin".encode()

    async def say(self, *pieces: bytes) -> bytes:
        """Send bytes, and return all that the server says until it closes."""
        async with Wire(self.url) as wire, asyncio.timeout(BOUND_S):
            try:
                for piece in pieces:
                    await wire.send(piece)
            except (ConnectionError, OSError):
                pass  # it has closed already; what it said may still be read
            return await wire.rest()

    async def sound(self) -> None:
        """It serves the right bytes, as if nothing had happened."""
        for digest in self.shards:
            answer = await http(self.url, f"/v1/{RUN}/blobs/{digest}.bin")
            assert (answer.status, digest_of(answer.body)) == (200, digest)
        assert (await http(self.url, "/readyz")).status == 200


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a refused request is thrown away for a moment only."""
    monkeypatch.setattr("relay.server._LINGER_S", 1.0)


@pytest_asyncio.fixture
async def origin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Origin]:
    """An origin that takes publications; at the end it is sound and has logged no error."""
    async with serving(tmp_path, caplog, 10.0) as served:
        yield served


@pytest_asyncio.fixture
async def hasty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Origin]:
    """One that soon loses patience with a request that does not go on."""
    async with serving(tmp_path, caplog, 0.3) as served:
        yield served


@asynccontextmanager
async def serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, patience_s: float
) -> AsyncIterator[Origin]:
    store = tmp_path / "store"
    files = {"a.safetensors": noise(SHARD + 77), "config.json": b"{}"}
    await asyncio.to_thread(publish, store, tmp_path / "checkpoint", files)
    (tmp_path / "token").write_text(TOKEN)
    opened = Store(store)
    stored = opened.run(RUN).stored(1)
    assert stored is not None
    shards = [digest for digest in stored.version.digests if digest is not None]
    opened.close()
    caplog.set_level(logging.INFO)
    settings = config(
        store,
        publish_token_file=tmp_path / "token",
        limits=limits(
            header_timeout_s=patience_s, idle_timeout_s=patience_s, body_timeout_s=patience_s
        ),
    )
    async with running(settings) as url:
        await wait_head(url)
        served = Origin(url, shards)
        yield served
        await served.sound()
    bad = [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]
    assert not bad, [record.getMessage() for record in bad]


def request(line: str, *fields: str, body: bytes = b"") -> bytes:
    return "\r\n".join([line, "Host: x", *fields, "", ""]).encode("latin-1") + body


def post(*fields: str, body: bytes = b"", auth: bool = True) -> bytes:
    """A question which digests are missing."""
    fields = (f"Authorization: Bearer {TOKEN}", *fields) if auth else fields
    return request(f"POST /v1/{RUN}/missing HTTP/1.1", *fields, body=body)


ASKED = b'{"digests":[]}'

# What is malformed as HTTP, or of a length that two parsers could read in two ways: 400, and then
# nothing more on this connection.
MALFORMED = {
    "length and coding": post("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding and length": post("Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\n"),
    "two lengths": post("Content-Length: 4", "Content-Length: 5", body=b"abcd"),
    "the same length twice": post("Content-Length: 4", "Content-Length: 4", body=b"abcd"),
    "a list of lengths": post("Content-Length: 4, 4", body=b"abcd"),
    "a plus": post("Content-Length: +4", body=b"abcd"),
    "a minus": post("Content-Length: -4", body=b"abcd"),
    "a space": post("Content-Length: 1 4", body=ASKED),
    "hexadecimal": post("Content-Length: 0xe", body=ASKED),
    "an underscore": post("Content-Length: 1_4", body=ASKED),
    "no number": post("Content-Length: ", body=b""),
    "a number of another script": post("Content-Length: \u00b2", body=b"ab"),
    "a huge length": post("Content-Length: 99999999999999999999999", body=b"abcd"),
    "a coding after chunked": post("Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "xchunked": post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "a vertical tab": post("Transfer-Encoding:\x0bchunked", body=b"0\r\n\r\n"),
    "chunked twice": post(*["Transfer-Encoding: chunked"] * 2, body=b"0\r\n\r\n"),
    "chunks in 1.0": post("Transfer-Encoding: chunked", body=b"0\r\n\r\n").replace(b"1.1", b"1.0"),
    "a folded header": request("GET /healthz HTTP/1.1", "X: a\r\n b"),
    "a folded length": post("Content-Length:\r\n 14", body=ASKED),
    "bare LF": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "bare CR": b"GET /healthz HTTP/1.1\rHost: x\r\r",
    "CR in a value": request("GET /healthz HTTP/1.1", "X: a\rb"),
    "LF in a value": request("GET /healthz HTTP/1.1", "X: a\nTransfer-Encoding: chunked"),
    "NUL in a value": request("GET /healthz HTTP/1.1", "X: a\0b"),
    "NUL in a name": request("GET /healthz HTTP/1.1", "X\0Y: a"),
    "NUL in the path": request("GET /health\0z HTTP/1.1"),
    "a space before the colon": post("Content-Length : 14", body=ASKED),
    "a space before the name": b"GET /healthz HTTP/1.1\r\n Host: x\r\n\r\n",
    "no colon": request("GET /healthz HTTP/1.1", "Nonsense"),
    "no name": request("GET /healthz HTTP/1.1", ": y"),
    "a name that is no token": request("GET /healthz HTTP/1.1", "X(Y): z"),
    "no Host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two Hosts": request("GET /healthz HTTP/1.1", "Host: y"),
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/1.2": request("GET /healthz HTTP/1.2"),
    "HTTP/2.0": request("GET /healthz HTTP/2.0"),
    "HTTP/11": request("GET /healthz HTTP/11"),
    "http/1.1": request("GET /healthz http/1.1"),
    "HTTP/2 with its preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4] + [0] * 5),
    "a TLS client": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "SSH": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "a PROXY line": b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n" + request("GET /healthz HTTP/1.1"),
    "SOCKS": b"\x05\x01\x00",
    "a method of 5,000 letters": request("A" * 5000 + " /healthz HTTP/1.1"),
    "a method with a control": request("GE\x01T /healthz HTTP/1.1"),
    "a method nobody knows": request("FROBNICATE /healthz HTTP/1.1"),
    "a method in lower case": request("get /healthz HTTP/1.1"),
    "a method that is no token": request("{} /healthz HTTP/1.1"),
    "no method": request("/healthz HTTP/1.1"),
    "a path of 20,000 letters": request(f"GET /{'a' * 20_000} HTTP/1.1"),
    "a query of 20,000 letters": request(f"GET /v1/{RUN}/head?after={'1' * 20_000} HTTP/1.1"),
    "a raw letter in the path": b"GET /v1/\xc3\xa9/head HTTP/1.1\r\nHost: x\r\n\r\n",
    "raw bytes in the path": b"GET /v1/\xff\xfe/head HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path without a slash": request("GET healthz HTTP/1.1"),
    "no path": request("GET  HTTP/1.1"),
    "a space in the path": request("GET /health z HTTP/1.1"),
    "tabs": request("GET\t/healthz\tHTTP/1.1"),
    "a scheme without a name": request("GET ://healthz HTTP/1.1"),
    "an address without its end": request("GET http://[::1/healthz HTTP/1.1"),
    "a port that is none": request("GET http://x:999999/healthz HTTP/1.1"),
    "1,000 headers": request("GET /healthz HTTP/1.1", *["A: b"] * 1000),
    "headers without an end": request("GET /healthz HTTP/1.1")[:-2] + b"A: b\r\n" * 50_000,
    "a header of a megabyte": request("GET /healthz HTTP/1.1", f"A: {'b' * 1_000_000}"),
    "a name of a megabyte": request("GET /healthz HTTP/1.1", f"{'b' * 1_000_000}: A"),
    "a chunk that is no number": post(
        "Transfer-Encoding: chunked", body=b"zz\r\nhello\r\n0\r\n\r\n"
    ),
    "a length in a trailer": post(
        "Transfer-Encoding: chunked", body=b"5\r\nhello\r\n0\r\nContent-Length: 9\r\n\r\n"
    ),
    "a chunk below nothing": post("Transfer-Encoding: chunked", body=b"-1\r\nhello\r\n0\r\n\r\n"),
    "a chunk without end": post(
        "Transfer-Encoding: chunked", body=b"f" * 20 + b"\r\nx\r\n0\r\n\r\n"
    ),
    "a chunk that goes on": post("Transfer-Encoding: chunked", body=b"5\r\nhelloXX0\r\n\r\n"),
    "LF after a chunk's size": post("Transfer-Encoding: chunked", body=b"5;a\nhello\r\n0\r\n\r\n"),
    "a NUL in a chunk's size": post(
        "Transfer-Encoding: chunked", body=b"5\0\r\nhello\r\n0\r\n\r\n"
    ),
    "a space after a chunk's size": post(
        "Transfer-Encoding: chunked", body=b"5 \r\nhello\r\n0\r\n\r\n"
    ),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_malformed_ends_the_connection(origin: Origin, data: bytes) -> None:
    """Nothing after it is taken for a request, also when it comes in one piece with it."""
    said = answers(await origin.say(data + SENTINEL))
    assert [answer.status for answer in said][-1:] in ([400], [])
    assert len(said) <= 1
    assert all(SENTINEL_ANSWER not in answer.body for answer in said)
    if said:
        assert len(said[0].body) < 400


@dataclass(frozen=True)
class Odd:
    """A request that is strange and clear: the next one on its connection is answered."""

    data: bytes
    statuses: tuple[int, ...]
    next: bool = True


HEAD = f"/v1/{RUN}/head"
ODD = {
    "a body on GET": Odd(
        request("GET /healthz HTTP/1.1", "Content-Length: 5", body=b"hello"), (200,)
    ),
    "chunks on GET": Odd(
        request(
            "GET /healthz HTTP/1.1", "Transfer-Encoding: chunked", body=b"5\r\nhello\r\n0\r\n\r\n"
        ),
        (200,),
    ),
    "a trailer": Odd(
        request(
            "GET /healthz HTTP/1.1",
            "Transfer-Encoding: chunked",
            body=b"5\r\nhello\r\n0\r\nX: y\r\n\r\n",
        ),
        (200,),
    ),
    "a request within a body": Odd(
        request("GET /healthz HTTP/1.1", f"Content-Length: {len(SENTINEL)}", body=SENTINEL), (200,)
    ),
    "a request within a chunk": Odd(
        request(
            "GET /healthz HTTP/1.1",
            "Transfer-Encoding: chunked",
            body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(SENTINEL), SENTINEL),
        ),
        (200,),
    ),
    "empty lines before": Odd(b"\r\n\r\n" + request("GET /healthz HTTP/1.1"), (200,)),
    "absolute form of another host": Odd(request("GET http://other/healthz HTTP/1.1"), (200,)),
    "absolute form with a user": Odd(request("GET http://u:p@x/healthz HTTP/1.1"), (200,)),
    "two slashes": Odd(request("GET //healthz HTTP/1.1"), (404,)),
    "a host as the path": Odd(request("GET //evil.example/healthz HTTP/1.1"), (404,)),
    "a bracket": Odd(request("GET //[/healthz HTTP/1.1"), (404,)),
    "an asterisk": Odd(request("OPTIONS * HTTP/1.1"), (404,)),
    "a fragment": Odd(request("GET /healthz#part HTTP/1.1"), (200, 404)),
    "a parameter": Odd(request("GET /healthz;a=b HTTP/1.1"), (404,)),
    "dots": Odd(request(f"GET /v1/{RUN}/../../../../etc/passwd HTTP/1.1"), (404,)),
    "dots below the blobs": Odd(request(f"GET /v1/{RUN}/blobs/../head HTTP/1.1"), (404,)),
    "coded dots": Odd(
        request(f"GET /v1/{RUN}/blobs/%2e%2e%2f%2e%2e%2fhead.json HTTP/1.1"), (400, 404)
    ),
    "dots coded twice": Odd(request("GET /v1/%252e%252e/head HTTP/1.1"), (400,)),
    "dots in UTF-8 that is too long": Odd(request("GET /v1/%c0%ae%c0%ae/head HTTP/1.1"), (400,)),
    "a backslash": Odd(request("GET /v1/..\\..\\head HTTP/1.1"), (400, 404)),
    "a coded letter": Odd(request("GET /v1/%70olicy/head HTTP/1.1"), (400,)),
    "a coded name": Odd(request(f"GET /v1/{RUN}/%68ead HTTP/1.1"), (404,)),
    "no hexadecimal": Odd(request("GET /v1/%zz/head HTTP/1.1"), (400,)),
    "a coded NUL": Odd(request("GET /v1/%00/head HTTP/1.1"), (400,)),
    "coded bytes that are no text": Odd(request("GET /v1/%ff%fe/head HTTP/1.1"), (400,)),
    "a path of 8,000 letters": Odd(request(f"GET /{'a' * 8000} HTTP/1.1"), (404,)),
    "300 slashes": Odd(request(f"GET {'/' * 300} HTTP/1.1"), (404,)),
    "after that is no number": Odd(request(f"GET {HEAD}?after=x&wait=25 HTTP/1.1"), (400,)),
    "after below nothing": Odd(request(f"GET {HEAD}?after=-1&wait=25 HTTP/1.1"), (400,)),
    "after that is too large": Odd(
        request(f"GET {HEAD}?after={'9' * 17}&wait=25 HTTP/1.1"), (400,)
    ),
    "after as a float": Odd(request(f"GET {HEAD}?after=1e3&wait=25 HTTP/1.1"), (400,)),
    "after with a plus": Odd(request(f"GET {HEAD}?after=+1&wait=25 HTTP/1.1"), (400,)),
    "after with a NUL": Odd(request(f"GET {HEAD}?after=%00&wait=25 HTTP/1.1"), (400,)),
    "after in another script": Odd(request(f"GET {HEAD}?after=%D9%A1&wait=25 HTTP/1.1"), (400,)),
    "after as a surrogate": Odd(request(f"GET {HEAD}?after=%ed%a0%80&wait=25 HTTP/1.1"), (400,)),
    "after that is empty": Odd(request(f"GET {HEAD}?after=&wait=25 HTTP/1.1"), (400,)),
    "after twice": Odd(request(f"GET {HEAD}?after=1&after=2&wait=0 HTTP/1.1"), (200,)),
    "wait as NaN": Odd(request(f"GET {HEAD}?after=1&wait=nan HTTP/1.1"), (400,)),
    "wait for ever": Odd(request(f"GET {HEAD}?after=1&wait=1e99 HTTP/1.1"), (400,)),
    "wait alone": Odd(request(f"GET {HEAD}?wait=25 HTTP/1.1"), (200,)),
    "a semicolon": Odd(request(f"GET {HEAD}?after=1;wait=25 HTTP/1.1"), (400,)),
    "1,500 parameters": Odd(
        request(f"GET {HEAD}?{'&'.join(f'a{n}' for n in range(1500))} HTTP/1.1"), (200,)
    ),
    "TRACE": Odd(request("TRACE /healthz HTTP/1.1"), (405,)),
    "M-SEARCH": Odd(request("M-SEARCH /healthz HTTP/1.1"), (405,)),
    "DELETE": Odd(request(f"DELETE {HEAD} HTTP/1.1"), (405,)),
    "PATCH with a body": Odd(
        request(f"PATCH {HEAD} HTTP/1.1", "Content-Length: 5", body=b"hello"), (405,)
    ),
    "CONNECT": Odd(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", (404,), False),
    "an upgrade to HTTP/2": Odd(
        request(
            "GET /healthz HTTP/1.1",
            "Connection: Upgrade, HTTP2-Settings",
            "Upgrade: h2c",
            "HTTP2-Settings: AAMAAABkAAQAAP__",
        ),
        (200,),
        False,
    ),
    "an upgrade to WebSocket": Odd(
        request(
            "GET /healthz HTTP/1.1",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        ),
        (200,),
        False,
    ),
    "an upgrade of a publication": Odd(
        post("Connection: Upgrade", "Upgrade: x", "Content-Length: 14", body=ASKED), (200,), False
    ),
    "an expectation of a reader": Odd(
        request("GET /healthz HTTP/1.1", "Expect: 100-continue"), (200,)
    ),
    "an expectation nobody knows": Odd(
        post("Expect: the-worst", "Content-Length: 14", body=ASKED), (200, 417)
    ),
    "a permission that is not waited for": Odd(
        post("Expect: 100-continue", "Content-Length: 14", body=ASKED), (200,)
    ),
    "a coding nobody knows": Odd(
        post("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), (501,), False
    ),
    "compressed": Odd(post("Content-Encoding: gzip", "Content-Length: 14", body=ASKED), (200,)),
    "compressed with a bomb": Odd(
        post("Content-Encoding: gzip", "Content-Length: 18", body=b"\x1f\x8b\x08" + bytes(15)),
        (400,),
    ),
    "100 headers": Odd(request("GET /healthz HTTP/1.1", *["A: b"] * 100), (200,)),
    "HTTP/1.0, and more behind it": Odd(request("GET /healthz HTTP/1.0"), (200, 400), False),
    "another Connection": Odd(request("GET /healthz HTTP/1.1", "Connection: x, y,,"), (200,)),
    "bytes in a value": Odd(request("GET /healthz HTTP/1.1", "X: \xff\xfe\x80"), (200,)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_what_is_odd_is_answered_and_so_is_the_next_request(origin: Origin, odd: Odd) -> None:
    said = answers(await origin.say(odd.data + SENTINEL))
    assert said[0].status in odd.statuses, said[0]
    assert len(said[0].body) < 4000
    if odd.next:
        assert len(said) == 2, said
        assert said[1].body.startswith(SENTINEL_ANSWER)
    else:
        assert all(SENTINEL_ANSWER not in answer.body for answer in said)


RANGES = [
    ("bytes=0-0,2-3", 200),
    ("bytes=0-0, 0-0, 0-0", 200),
    ("bytes=" + ",".join(["0-"] * 1000), 200),
    ("bytes=" + ",".join(f"{n}-{n}" for n in range(1000)), 200),
    ("bytes=5-2", 200),
    ("bytes=--5", 200),
    ("bytes=-", 200),
    ("bytes=", 200),
    ("bytes=0", 200),
    ("bytes=a-b", 200),
    ("bytes=0x0-0x5", 200),
    ("bytes=+1-2", 200),
    ("bytes=1-2x", 200),
    ("bytes= 1-2", 200),
    ("bytes=1 - 2", 200),
    ("bytes:1-2", 200),
    ("items=0-5", 200),
    ("bytes=\u00b2-", 200),
    ("bytes=0-99999999999999999999", 206),
    ("bytes=0-18446744073709551615", 206),
    ("bytes=0-9007199254740992", 206),
    ("bytes=-9007199254740992", 206),
    (f"bytes={SHARD}-", 416),
    ("bytes=9007199254740992-", 416),
    ("bytes=-0", 416),
    ("bytes=0-0\x00", 400),
]


@pytest.mark.parametrize(("value", "status"), RANGES)
async def test_ranges(origin: Origin, value: str, status: int) -> None:
    data = request(f"GET {origin.blob().decode()} HTTP/1.1", f"Range: {value}") + SENTINEL
    said = answers(await origin.say(data))
    assert said[0].status == status
    if status in (200, 206):
        assert digest_of(said[0].body) == origin.shards[0]  # all of it, once
    if status != 400:
        assert said[1].body.startswith(SENTINEL_ANSWER)


async def test_two_range_headers_give_the_whole_or_one(origin: Origin) -> None:
    fields = ("Range: bytes=0-0", "Range: bytes=1-1")
    said = answers(
        await origin.say(
            request(f"GET {origin.blob().decode()} HTTP/1.1", *fields, "Connection: close")
        )
    )
    assert said[0].status in (200, 206)
    assert int(said[0].headers["content-length"]) in (1, SHARD)


# --- the pieces in which it comes ---------------------------------------------------------------


async def test_a_head_byte_by_byte(origin: Origin) -> None:
    data = request(f"GET {origin.blob().decode()} HTTP/1.1", "Range: bytes=1-4") + SENTINEL
    said = answers(await origin.say(*(data[n : n + 1] for n in range(len(data)))))
    assert [answer.status for answer in said] == [206, 200]
    assert said[1].body.startswith(SENTINEL_ANSWER)


@pytest.mark.parametrize("seed", range(3))
async def test_requests_cut_anywhere(origin: Origin, seed: int) -> None:
    """Pipelined requests, also with bodies, in pieces that have nothing to do with them."""
    rng = random.Random(seed)
    kinds = [
        (request("GET /healthz HTTP/1.1"), "GET", 200),
        (request(f"HEAD {origin.blob().decode()} HTTP/1.1"), "HEAD", 200),
        (request(f"GET {origin.blob(1).decode()} HTTP/1.1"), "GET", 200),
        (request(f"GET {origin.blob().decode()} HTTP/1.1", "Range: bytes=7-9"), "GET", 206),
        (post("Content-Length: 14", body=ASKED), "POST", 200),
        (post("Transfer-Encoding: chunked", body=b"e\r\n%s\r\n0\r\n\r\n" % ASKED), "POST", 200),
        (post("Content-Length: 14", body=ASKED, auth=False), "POST", 401),
        (request("GET /nothing HTTP/1.1", "Content-Length: 3", body=b"abc"), "GET", 404),
    ]
    chosen = [rng.choice(kinds) for _ in range(60)]
    data = b"".join(part for part, _, _ in chosen) + SENTINEL
    pieces = []
    while data:
        cut = rng.choice([1, 2, 7, 60, 300, 2000])
        pieces.append(data[:cut])
        data = data[cut:]
    said = answers(await origin.say(*pieces), [method for _, method, _ in chosen])
    assert [answer.status for answer in said] == [status for _, _, status in chosen] + [200]
    assert said[-1].body.startswith(SENTINEL_ANSWER)


async def test_thousands_of_pipelined_requests_are_read_as_they_are_answered(
    origin: Origin,
) -> None:
    """A client that sends and does not read is not read either: nothing piles up."""
    data = request("GET /v1/status HTTP/1.1")
    sent = 0
    async with Wire(origin.url) as wire:
        wire.writer.transport.set_write_buffer_limits(high=64 * 1024)
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                wire.writer.write(data * 1000)
                await asyncio.wait_for(wire.writer.drain(), 2)
                sent += 1000 * len(data)
    assert sent < 64 << 20  # what socket buffers hold
    await origin.sound()


# --- publishing ---------------------------------------------------------------------------------

DIGEST = "0" * 64
BLOB = f"/v1/{RUN}/blobs/{DIGEST}.bin"
PUBLISHING = {
    "no body": (f"PUT {BLOB}", [], b"", (400, 409, 411, 422)),
    "another digest": (f"PUT {BLOB}", ["Content-Length: 5"], b"hello", (409, 422)),
    "a document of another digest": (f"PUT {BLOB}", ["Content-Length: 2"], b"{}", (409, 422)),
    "a range": (
        f"PUT {BLOB}",
        ["Content-Length: 5", "Content-Range: bytes 0-4/10"],
        b"hello",
        (400, 409, 422),
    ),
    "deep JSON": (
        f"POST /v1/{RUN}/missing",
        ["Content-Length: 200000"],
        b"[" * 200_000,
        (400,),
    ),
    "deep objects": (
        f"POST /v1/{RUN}/missing",
        ["Content-Length: 600000"],
        b'{"a":' * 120_000,
        (400,),
    ),
    "no JSON": (f"POST /v1/{RUN}/missing", ["Content-Length: 4"], b"\xff\xfe\0\0", (400,)),
    "another type": (f"POST /v1/{RUN}/missing", ["Content-Length: 13"], b'{"digests":5}', (400,)),
    "paths as digests": (
        f"POST /v1/{RUN}/missing",
        ["Content-Length: 31"],
        b'{"digests":["../../etc/passwd"]}'[:31],
        (400,),
    ),
    "a head without a condition": (f"PUT {HEAD}", ["Content-Length: 2"], b"{}", (428,)),
    "a head that is none": (
        f"PUT {HEAD}",
        ["Content-Length: 2", "If-None-Match: *"],
        b"{}",
        (400, 412, 422),
    ),
    "a condition that is none": (
        f"PUT {HEAD}",
        ["Content-Length: 2", "If-Match: \xff\xfe, W/, *x"],
        b"{}",
        (412,),
    ),
    "a run that is none": ("PUT /v1/UPPER/head", ["Content-Length: 2"], b"{}", (400,)),
    "a run nobody knows": ("POST /v1/other/missing", ["Content-Length: 14"], ASKED, (200, 403)),
    "an endpoint to read": ("PUT /v1/runs", ["Content-Length: 2"], b"{}", (405,)),
    "a long token": (
        f"POST /v1/{RUN}/missing",
        ["Content-Length: 14", "X: y"],
        ASKED,
        (200,),
    ),
}


@pytest.mark.parametrize(
    ("line", "fields", "body", "statuses"), PUBLISHING.values(), ids=PUBLISHING
)
async def test_publishing_garbage(
    origin: Origin, line: str, fields: list[str], body: bytes, statuses: tuple[int, ...]
) -> None:
    auth = f"Authorization: Bearer {TOKEN}"
    said = answers(
        await origin.say(request(f"{line} HTTP/1.1", auth, *fields, body=body) + SENTINEL)
    )
    assert said[0].status in statuses, said[0]
    assert said[1].body.startswith(SENTINEL_ANSWER)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer  {TOKEN} {TOKEN}",
        "Bearer \xff\xfe",
        "Bearer " + "x" * 7000,
        f"Bearer\t{TOKEN}",
    ],
)
async def test_wrong_tokens(origin: Origin, value: str) -> None:
    data = post(f"Authorization: {value}", "Content-Length: 14", body=ASKED, auth=False)
    said = answers(await origin.say(data + SENTINEL))
    assert said[0].status == 401
    assert said[1].body.startswith(SENTINEL_ANSWER)


async def test_a_body_over_its_limit_is_not_read(hasty: Origin) -> None:
    data = post("Content-Length: 1000000000000", body=b"x" * 100_000)
    said = answers(await hasty.say(data))
    assert [answer.status for answer in said] == [413]


async def test_endless_chunks_are_cut(origin: Origin) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    said = answers(
        await origin.say(post("Transfer-Encoding: chunked"), *[chunk] * 200)
    )  # 13 MB of a question that may have 4 MiB
    assert [answer.status for answer in said] in ([413], [])


# --- valid requests, mutated --------------------------------------------------------------------


INSERTED = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n\r\n"),
    *(b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"%00", b"..", b"/", b"?", b"#", b"%2f", b"\xff", b"\xc3\xa9"),
    *(b"%d" % number for number in (0, 2**31, 2**63, 2**64, 10**30)),
)


def spell_wrong(rng: random.Random, data: bytes) -> bytes:
    """One or two other letters, so that it mostly stays HTTP."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        at, letter = rng.randrange(len(spoiled)), rng.randrange(0x21, 0x7F)
        if spoiled[at] not in b"\r\n ":
            spoiled[at : at + rng.randint(0, 1)] = bytes([letter])
    return bytes(spoiled)


def mangle(rng: random.Random, data: bytes) -> bytes:
    """One to four crimes against bytes."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(spoiled))
        match rng.randrange(5):
            case 0:
                del spoiled[at : at + rng.randint(1, 8)]
            case 1:
                spoiled[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                spoiled[at] ^= 1 << rng.randrange(8)
            case 3:
                spoiled[at:at] = spoiled[at : at + rng.randint(1, 40)] * rng.randint(1, 3)
            case _:
                spoiled[at:at] = rng.choice(INSERTED)
    return bytes(spoiled)


@pytest.mark.parametrize("seed", range(4))
async def test_mutated_requests(hasty: Origin, seed: int) -> None:
    rng = random.Random(seed)
    blob = hasty.blob().decode()
    valid = [
        request(f"GET {blob} HTTP/1.1", "Range: bytes=1-4", f'If-Range: "blake3-{hasty.shards[0]}"'),
        request(f"GET {HEAD}?after=1&wait=0 HTTP/1.1", "Shardcast-Node: 0123456789abcdef"),
        request(f"GET {blob} HTTP/1.1", 'If-None-Match: "x"', "Shardcast-Sibling: 0123456789abcdef"),
        request("GET /v1/status HTTP/1.1", "Via: 1.1 a, 1.1 b", "X-Forwarded-For: 192.0.2.1"),
        post("Content-Length: 14", body=ASKED),
        post("Transfer-Encoding: chunked", "Expect: 100-continue", body=b"e\r\n%s\r\n0\r\n\r\n" % ASKED),
        request(f"PUT {BLOB} HTTP/1.1", AUTH.decode().strip(), "Content-Length: 5", body=b"hello"),
        request(f"PUT {HEAD} HTTP/1.1", AUTH.decode().strip(), 'If-Match: "x"', "Content-Length: 2", body=b"{}"),
    ]  # fmt: skip
    met: Counter[bytes] = Counter()
    pending = [rng.choice([spell_wrong, mangle])(rng, rng.choice(valid)) for _ in range(250)]

    async def send() -> None:
        while pending:
            data = pending.pop()
            said = await hasty.say(data + SENTINEL)
            assert b" 500 " not in said.split(b"\r\n", 1)[0], data
            assert b"Traceback" not in said
            statuses = re.findall(rb"HTTP/1\.[01] (\d\d\d) ", said)
            met.update(statuses)
            assert all(status[:1] in b"24" or status in (b"304", b"100") for status in statuses), (
                data
            )

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(send())
    assert {b"200", b"400", b"401", b"404"} <= met.keys()


@pytest.mark.parametrize("seed", range(2))
async def test_random_bytes(hasty: Origin, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        said = await hasty.say(rng.randbytes(rng.randint(1, 3000)))
        assert {answer.status for answer in answers(said)} <= {400}

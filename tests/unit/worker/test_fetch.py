"""One blob from one server: every fault on the wire that docs/PROTOCOL.md rules out.

The server sends exact bytes; what is expected follows from RFC 9110 (ranges, validators) and
RFC 9112 (framing), not from what the client does.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pytest
from blake3 import blake3
from xxhash import xxh3_128

from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.config import NetConfig
from shardcast.errors import (
    DiskFullError,
    IntegrityError,
    LimitError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    StallError,
    UsageError,
)
from shardcast.fetch import BlobSource, Fetched, MemorySink, Transfer
from tests.fakes import (
    Action,
    Close,
    Gone,
    Handler,
    Request,
    Reset,
    ScriptedServer,
    Unaccepting,
    drip,
    response,
)
from tests.unit.worker.conftest import QUICK, serving, some_bytes, trusting, with_config

DATA = some_bytes(300_000)
DIGEST = blake3(DATA).hexdigest()
ETAG = f'"blake3-{DIGEST}"'


class Got:
    """A transfer and where its bytes went."""

    def __init__(self, length: int | None = len(DATA), limit: int = 1 << 20) -> None:
        self.sink = MemorySink()
        self.transfer = Transfer("policy", DIGEST, length, self.sink, limit=limit)

    def fetch(self, server: ScriptedServer, cancel: Cancel | None = None) -> None:
        source = BlobSource(server.url, QUICK)
        try:
            self.fetched = source.fetch(self.transfer, cancel or Cancel())
        finally:
            source.close()

    @property
    def data(self) -> bytes:
        return bytes(self.sink.data)


def fetch_once(url: str, transfer: Transfer, config: NetConfig = QUICK) -> Fetched:
    with BlobSource(url, config) as source:
        return source.fetch(transfer, Cancel())


def whole(request: Request) -> list[Action]:
    return [response(200, DATA, {"ETag": ETAG, "Accept-Ranges": "bytes"})]


def rest(request: Request, **wrong: str) -> list[Action]:
    start = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
    headers = {"ETag": ETAG, "Content-Range": f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"}
    return [response(206, DATA[start:], headers)]


def cut_after(count: int) -> Callable[[Request], list[Action]]:
    head = response(200, b"", {"ETag": ETAG}, length=len(DATA))
    return lambda request: [head, DATA[:count], Close()]


def in_turn(*handlers: Handler) -> Handler:
    left = list(handlers)

    def handle(request: Request) -> Iterable[Action]:
        handler = left.pop(0) if len(left) > 1 else left[0]
        return handler(request)

    return handle


_E = TypeVar("_E", bound=ShardcastError)


def fails(
    handler: Handler, kind: type[_E], match: str | None = None, *, got: Got | None = None
) -> _E:
    """Fetch from a server that behaves so; return the error, which must name the server."""
    with ScriptedServer(handler) as server:
        return fails_at(server, kind, match, got=got)


def fails_at(
    server: ScriptedServer, kind: type[_E], match: str | None = None, *, got: Got | None = None
) -> _E:
    """Fetch from a server; return the error, which must name it."""
    with pytest.raises(kind, match=match) as caught:
        (got or Got()).fetch(server)
    assert caught.value.source == server.url
    return caught.value


# --- what is right ----------------------------------------------------------------------------


def test_a_whole_blob_arrives_with_the_hashes_of_other_implementations() -> None:
    got = Got()
    with ScriptedServer(whole) as server:
        got.fetch(server)
    assert got.data == DATA
    assert got.transfer.xxh3 == xxh3_128(DATA).digest()
    assert got.fetched.bytes == len(DATA)
    assert not got.fetched.from_fill
    assert server.requests[0].target == f"/v1/policy/blobs/{DIGEST}.bin"
    assert server.requests[0].headers["accept-encoding"] == "identity"
    assert server.requests[0].headers["host"] == f"127.0.0.1:{server.port}"
    assert "range" not in server.requests[0].headers


def test_a_document_takes_its_length_from_the_answer() -> None:
    got = Got(length=None)
    with ScriptedServer(whole) as server:
        got.fetch(server)
    assert got.transfer.total == len(DATA)
    assert got.data == DATA


def test_an_empty_blob_arrives() -> None:
    sink = MemorySink()
    transfer = Transfer("policy", blake3(b"").hexdigest(), None, sink)
    with ScriptedServer(lambda request: [response(200)]) as server:
        fetch_once(server.url, transfer)
    assert transfer.total == 0


def test_a_fill_is_marked_so_that_it_is_not_rated() -> None:
    got = Got()
    fill = response(200, DATA, {"shardcast-source": "fill"})
    with ScriptedServer(lambda request: [fill]) as server:
        got.fetch(server)
    assert got.fetched.from_fill


def test_head_and_body_may_come_in_pieces_of_any_size() -> None:
    got = Got()
    data = response(200, DATA, {"ETag": ETAG})
    pieces = [data[:1], data[1:20], data[20:55], data[55:56], data[56:99], data[99:]]
    with ScriptedServer(lambda request: pieces) as server:
        got.fetch(server)
    assert got.data == DATA


def test_a_base_url_may_have_a_path() -> None:
    got = Got()
    with ScriptedServer(whole) as server:
        fetch_once(server.url + "/mirror/", got.transfer)
    assert server.requests[0].target == f"/mirror/v1/policy/blobs/{DIGEST}.bin"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6() -> None:
    got = Got()
    with ScriptedServer(whole, host="::1") as server:
        got.fetch(server)
    assert server.requests[0].headers["host"] == f"[::1]:{server.port}"
    assert got.data == DATA


def test_a_name_with_a_dead_first_address_is_reached_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got = Got()
    with ScriptedServer(whole) as server, Unaccepting() as hole:
        dead = int(hole.url.rsplit(":", 1)[1])

        def lookup(*args: object, **kwargs: object) -> list[tuple[object, ...]]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.1", port)) for port in (dead, server.port)]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        fetch_once("http://relay.example", got.transfer)
    assert got.data == DATA


# --- connections ------------------------------------------------------------------------------


def test_a_connection_is_used_again() -> None:
    with ScriptedServer(whole) as server:
        source = BlobSource(server.url, QUICK)
        for _ in range(3):
            source.fetch(Got().transfer, Cancel())
        source.close()
    assert server.connections == 1
    assert len(server.requests) == 3


@pytest.mark.parametrize("header", [{"Connection": "close"}, {}])
def test_a_connection_that_the_server_closed_is_replaced_without_an_error(
    header: dict[str, str],
) -> None:
    answer = response(200, DATA, header)
    with ScriptedServer(lambda request: [answer, Close()]) as server:
        source = BlobSource(server.url, QUICK)
        for _ in range(3):
            source.fetch(Got().transfer, Cancel())
        source.close()
    assert server.connections == 3


def test_a_kept_connection_that_dies_under_the_request_is_replaced() -> None:
    """The server closes an idle connection just as the next request is on its way."""
    asked = threading.Event()

    def handler(request: Request) -> Iterable[Action]:
        if request.connection == 1 and asked.is_set():
            return [Reset()]
        asked.set()
        return whole(request)

    with ScriptedServer(handler) as server:
        source = BlobSource(server.url, QUICK)
        source.fetch(Got().transfer, Cancel())
        source.fetch(Got().transfer, Cancel())
        source.close()
    assert server.connections == 2


def test_a_fresh_connection_that_is_closed_at_once_is_an_error() -> None:
    with ScriptedServer(lambda request: [Close()]) as server:
        fails_at(server, NetworkError, "before an answer")
        assert server.connections == 1


def test_an_error_page_leaves_the_connection_usable() -> None:
    with ScriptedServer(in_turn(lambda r: [response(404, b"not here")], whole)) as server:
        source = BlobSource(server.url, QUICK)
        got = Got()
        with pytest.raises(SourceStatusError):
            source.fetch(got.transfer, Cancel())
        source.fetch(got.transfer, Cancel())
        source.close()
    assert server.connections == 1


def test_bytes_beyond_the_body_are_not_taken_for_the_next_answer() -> None:
    sent = response(200, DATA) + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
    with ScriptedServer(lambda request: [sent]) as server:
        source = BlobSource(server.url, QUICK)
        for _ in range(2):
            got = Got()
            source.fetch(got.transfer, Cancel())
            assert got.data == DATA
        source.close()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NetworkError, match=r"cannot connect to 127\.0\.0\.1"):
        fetch_once(f"http://127.0.0.1:{port}", Got().transfer)


def test_a_connection_that_is_never_accepted_is_a_stall() -> None:
    config = with_config(connect_timeout_s=0.2)
    with Unaccepting() as hole, pytest.raises(StallError, match="not accepted"):
        fetch_once(hole.url, Got().transfer, config)


def test_a_name_that_does_not_resolve_is_named() -> None:
    source = BlobSource("http://no-such-host.invalid", QUICK)
    with pytest.raises(NetworkError, match=r"no-such-host\.invalid"):
        source.fetch(Got().transfer, Cancel())


def test_a_resolver_that_hangs_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def lookup(host: str, *args: object, flags: int = 0, **kwargs: object) -> list[object]:
        if not flags:
            release.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "no")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    try:
        with pytest.raises(StallError, match="not resolved within"):
            BlobSource("http://slow.example", with_config(connect_timeout_s=0.1)).fetch(
                Got().transfer, Cancel()
            )
    finally:
        release.set()


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "relay:8470", "http://", "http://u:p@x", "http://x/?q", "http://x#f", "http://a b",
     "http://x:99999", "http://x:port", "http://[::1"],
)  # fmt: skip
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        BlobSource(url, QUICK)


# --- truncation (faults 1 and 2) --------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, len(DATA) // 2, len(DATA) - 1])
def test_a_body_that_ends_early_is_truncated_and_continued(count: int) -> None:
    got = Got()
    with ScriptedServer(in_turn(cut_after(count), rest if count else whole)) as server:
        fails_at(server, NetworkError, f"after {count} of {len(DATA)} bytes", got=got)
        assert got.transfer.offset == count
        got.fetch(server)
    assert got.data == DATA
    assert got.transfer.received == len(DATA)
    if count:
        assert server.requests[1].headers["range"] == f"bytes={count}-"
        assert server.requests[1].headers["if-range"] == ETAG


def test_a_reset_in_the_middle_is_truncated() -> None:
    got = Got()
    head = response(200, b"", length=len(DATA))
    fails(lambda request: [head, DATA[:1000], Reset()], NetworkError, got=got)
    assert got.transfer.xxh3 == b""


def test_a_truncated_blob_is_continued_at_another_source() -> None:
    got = Got()
    with ScriptedServer(cut_after(1000)) as first, ScriptedServer(rest) as second:
        with pytest.raises(NetworkError):
            got.fetch(first)
        got.fetch(second)
        assert got.transfer.sources == (first.url, second.url)
    assert got.transfer.stitched
    assert got.data == DATA


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 300000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
    ],
)
def test_a_body_without_a_length_is_refused(answer: bytes) -> None:
    fails(lambda request: [answer, Close()], NetworkError, "without a Content-Length")


@pytest.mark.parametrize(
    "answer",
    [
        b"hello\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 100_000,
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10,
    ],
)
def test_what_is_not_one_clear_answer_is_refused(answer: bytes) -> None:
    fails(lambda request: [answer, Close()], NetworkError)


def test_interim_answers_are_passed_over() -> None:
    got = Got()
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    with ScriptedServer(lambda request: [hints + hints + response(200, DATA)]) as server:
        got.fetch(server)
    assert got.data == DATA


# --- wrong bytes (faults 5 and 9) -------------------------------------------------------------


def flipped(at: int) -> bytes:
    data = bytearray(DATA)
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize("at", [0, 150_000, len(DATA) - 1])
def test_one_flipped_bit_is_noticed_and_the_source_named(at: int) -> None:
    got = Got()
    fails(
        lambda request: [response(200, flipped(at), {"ETag": ETAG})],
        IntegrityError,
        DIGEST,
        got=got,
    )
    assert not got.transfer.stitched
    assert got.transfer.xxh3 == b""


def test_wrong_bytes_of_two_sources_name_both() -> None:
    got = Got()
    wrong: list[Action] = [response(200, b"", length=len(DATA)), bytes(1000), Close()]
    with ScriptedServer(lambda request: wrong) as first, ScriptedServer(rest) as second:
        with pytest.raises(NetworkError):
            got.fetch(first)
        with pytest.raises(IntegrityError, match=f"stitched from {first.url}, {second.url}"):
            got.fetch(second)
        assert got.transfer.stitched
        got.transfer.restart()
        second.handler = whole
        got.fetch(second)
    assert got.data == DATA


def test_a_page_of_another_length_is_refused() -> None:
    page = response(200, b"<html>login</html>", {"Content-Type": "text/html"})
    fails(lambda request: [page], NetworkError, "18 bytes instead of 300000")


def test_a_page_of_exactly_the_right_length_is_wrong() -> None:
    page = b"<html>" + b" " * (len(DATA) - 6)
    fails(lambda request: [response(200, page)], IntegrityError)


def test_a_longer_body_is_refused() -> None:
    fails(
        lambda request: [response(200, DATA + b"x")], NetworkError, "300001 bytes instead of 300000"
    )


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP"])
def test_a_coding_added_on_the_way_is_refused(coding: str) -> None:
    answer = response(200, DATA, {"Content-Encoding": coding})
    fails(lambda request: [answer], NetworkError, "Content-Encoding")


def test_endless_data_is_refused_before_it_is_read() -> None:
    fails(
        lambda request: [response(200, b"", length=1 << 40), Gone()],
        LimitError,
        "over the limit",
        got=Got(length=None),
    )


def test_a_blob_that_is_declared_too_large_is_refused_before_any_request() -> None:
    with pytest.raises(LimitError):
        Transfer("policy", DIGEST, 1 << 30, MemorySink(), limit=1 << 24)


# --- ranges and validators (faults 6, 7, 8) ---------------------------------------------------


def begun(count: int = 1000) -> Got:
    got = Got()
    got.transfer.total = len(DATA)
    got.transfer.receive("http://elsewhere", memoryview(DATA)[:count])
    return got


def test_a_200_to_a_range_means_from_the_start() -> None:
    got = begun()
    with ScriptedServer(whole) as server:
        got.fetch(server)
        assert got.transfer.sources == (server.url,)
    assert got.data == DATA


def part(
    first: int = 1000,
    last: int = len(DATA) - 1,
    total: str = str(len(DATA)),
    *,
    etag: str | None = ETAG,
    body: bytes | None = None,
    content_range: str | None = None,
    length: int | None = None,
) -> bytes:
    headers = {"Content-Range": content_range or f"bytes {first}-{last}/{total}"}
    if content_range == "":
        del headers["Content-Range"]
    if etag is not None:
        headers["ETag"] = etag
    return response(206, DATA[first : last + 1] if body is None else body, headers, length=length)


@pytest.mark.parametrize(
    "answer",
    [
        part(first=999),
        part(first=1001),
        part(first=0),
        part(last=len(DATA) - 2),
        part(total="*"),
        part(total="300001"),
        part(content_range="", body=DATA[1000:]),
        part(content_range="bytes 1000-299999"),
        part(content_range="bytes */300000"),
        part(content_range="items 1000-299999/300000"),
        part(content_range="bytes 299999-1000/300000"),
        part(length=5, body=DATA[1000:1005]),
        part(etag=None),
        part(etag=f"W/{ETAG}"),
        part(etag='"other"'),
        part(etag=f'"blake3-{"0" * 64}"'),
        response(
            206,
            b"--x\r\nContent-Range: bytes 1000-299999/300000\r\n\r\n",
            {"Content-Type": "multipart/byteranges; boundary=x", "ETag": ETAG},
        ),
    ],
)
def test_a_part_that_is_not_exactly_the_one_asked_for_is_refused(answer: bytes) -> None:
    got = begun()
    with ScriptedServer(in_turn(lambda request: [answer, Close()], whole)) as server:
        source = BlobSource(server.url, QUICK)
        with pytest.raises(NetworkError, match=DIGEST):
            source.fetch(got.transfer, Cancel())
        assert got.transfer.offset == 1000
        assert got.transfer.sources == ("http://elsewhere",)
        # This server is asked for whole blobs from now on.
        source.fetch(got.transfer, Cancel())
        source.close()
        assert "range" not in server.requests[1].headers
    assert got.data == DATA


def test_a_part_that_nobody_asked_for_is_refused() -> None:
    fails(lambda request: [part(first=0)], NetworkError, "whole was asked for")


def test_a_whole_answer_that_says_it_is_another_blob_is_refused_unread() -> None:
    other = {"ETag": f'"blake3-{"0" * 64}"'}
    fails(lambda request: [response(200, DATA, other)], NetworkError, "ETag")


@pytest.mark.parametrize("etag", ['"5f3e-61a"', 'W/"5f3e"', "garbage", f"W/{ETAG}"])
def test_any_other_etag_is_fine_for_a_whole_blob(etag: str) -> None:
    got = Got()
    with ScriptedServer(lambda request: [response(200, DATA, {"ETag": etag})]) as server:
        got.fetch(server)
    assert got.data == DATA


def test_a_416_inside_the_file_means_from_the_start() -> None:
    got = begun()
    refusal = response(416, b"", {"Content-Range": f"bytes */{len(DATA)}"})
    with ScriptedServer(in_turn(lambda request: [refusal], whole)) as server:
        source = BlobSource(server.url, QUICK)
        with pytest.raises(SourceStatusError) as caught:
            source.fetch(got.transfer, Cancel())
        assert caught.value.status == 416
        assert got.transfer.offset == 0
        source.fetch(got.transfer, Cancel())
        source.close()
    assert got.data == DATA


# --- other statuses (faults 10 and 11) --------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "seconds"),
    [({}, None), ({"Retry-After": "7"}, 7.0), ({"Retry-After": "junk"}, None),
     ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, 0.0),
     ({"Retry-After": "Fri, 31 Dec 2199 23:59:59 GMT"}, 60.0)],
)  # fmt: skip
@pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 502, 503, 504])
def test_a_status_is_told_with_what_the_server_asks_for(
    status: int, header: dict[str, str], seconds: float | None
) -> None:
    caught = fails(
        lambda request: [response(status, b"no", header)], SourceStatusError, f"answers {status}"
    )
    assert caught.status == status
    assert caught.retry_after == seconds


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_named_and_not_followed(status: int) -> None:
    answer = response(status, b"", {"Location": "http://elsewhere/blob"})
    with ScriptedServer(lambda request: [answer]) as server:
        fails_at(server, NetworkError, "redirects .* to 'http://elsewhere/blob'")
        assert len(server.requests) == 1


def test_a_status_without_a_length_costs_the_connection_not_the_client() -> None:
    answer = b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    fails(lambda request: [answer, Gone()], SourceStatusError)


# --- slowness (fault 12) ----------------------------------------------------------------------


def test_a_drip_is_a_stall() -> None:
    got = Got()
    head = response(200, b"", length=len(DATA))
    fails(
        lambda request: chain([head], drip(DATA[:2000])),
        StallError,
        "less than 20000 bytes/s",
        got=got,
    )
    assert 0 < got.transfer.offset < 2000


def test_a_drip_in_the_head_is_a_stall() -> None:
    fails(lambda request: drip(response(200, DATA), 0.05), StallError, "answer")


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_silence_at_a_fixed_offset_is_a_stall(count: int) -> None:
    got = Got()
    begin: list[Action] = [response(200, b"", length=len(DATA)), DATA[:count], Gone()]
    fails(lambda request: begin, StallError, got=got)
    assert got.transfer.offset == count


def test_an_error_page_that_does_not_end_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However patient the worker is with bodies; the connection is not used again."""
    monkeypatch.setattr("shardcast.fetch._DRAIN_S", 0.1)

    def page(request: Request) -> Iterable[Action]:
        if server.connections == 1:
            return [response(503, b"x", length=100), Gone()]
        return drip(response(503, bytes(500)))

    with (
        ScriptedServer(page) as server,
        BlobSource(server.url, with_config(read_timeout_s=600, header_timeout_s=600)) as source,
    ):
        for _ in range(2):
            with pytest.raises(SourceStatusError, match="503"):
                source.fetch(Transfer("policy", DIGEST, len(DATA), MemorySink()), Cancel())
        assert server.connections == 2


def test_silence_before_the_head_is_a_stall() -> None:
    fails(lambda request: [Gone()], StallError)


def test_a_slow_disk_is_not_held_against_the_source() -> None:
    class SlowSink(MemorySink):
        waited = 0.0

        def write(self, offset: int, data: memoryview) -> None:
            began = time.monotonic()
            threading.Event().wait(0.2)
            self.waited += time.monotonic() - began
            super().write(offset, data)

    sink = SlowSink()
    data = some_bytes(700_000)
    transfer = Transfer("policy", blake3(data).hexdigest(), len(data), sink, limit=1 << 20)
    with ScriptedServer(lambda request: [response(200, data)]) as server:
        config = with_config(minimum_rate_bytes_per_s=1e6)
        began = time.monotonic()
        fetched = fetch_once(server.url, transfer, config)
        took = time.monotonic() - began
    assert bytes(sink.data) == data
    assert fetched.seconds <= took - sink.waited


def test_a_full_disk_is_told_as_it_is() -> None:
    class FullSink(MemorySink):
        def write(self, offset: int, data: memoryview) -> None:
            raise DiskFullError("no space")

    transfer = Transfer("policy", DIGEST, len(DATA), FullSink(), limit=1 << 20)
    with ScriptedServer(whole) as server, pytest.raises(DiskFullError):
        fetch_once(server.url, transfer)


# --- cancellation -----------------------------------------------------------------------------


def cancelled_during(handler: Handler, certificate: Path | None = None) -> Got:
    """Cancel as soon as the server has got the request, over TLS perhaps."""
    got, cancel, caught = Got(), Cancel(), list[Exception]()
    offered = None if certificate is None else serving(certificate)
    known = None if certificate is None else trusting(certificate)
    with ScriptedServer(handler, tls=offered) as server:
        config = with_config(read_timeout_s=30, header_timeout_s=30)
        source = BlobSource(server.url, config, tls=known)

        def fetch() -> None:
            try:
                source.fetch(got.transfer, cancel)
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        server.wait_for(lambda: bool(server.requests))
        cancel.cancel()
        thread.join(10)
        assert not thread.is_alive()
        source.close()
    assert isinstance(caught[0], TransferCancelledError)
    return got


def test_cancelling_ends_a_read_of_the_head_at_once() -> None:
    cancelled_during(lambda request: [Gone()])


def test_cancelling_ends_a_read_of_the_body_at_once() -> None:
    got = cancelled_during(lambda request: [response(200, DATA[:9], length=len(DATA)), Gone()])
    assert got.transfer.xxh3 == b""


def test_cancelling_ends_a_connect_at_once() -> None:
    cancel, caught = Cancel(), list[Exception]()
    with Unaccepting() as hole:
        source = BlobSource(hole.url, with_config(connect_timeout_s=60))
        entered = threading.Event()

        def fetch() -> None:
            entered.set()
            try:
                source.fetch(Got().transfer, cancel)
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert entered.wait(10)
        cancel.cancel()
        thread.join(10)
        assert not thread.is_alive()
    assert isinstance(caught[0], TransferCancelledError)


def test_closing_a_source_ends_what_is_in_flight() -> None:
    caught: list[Exception] = []
    with ScriptedServer(lambda request: [Gone()]) as server:
        source = BlobSource(server.url, with_config(read_timeout_s=30, header_timeout_s=30))

        def fetch() -> None:
            try:
                source.fetch(Got().transfer, Cancel())
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        server.wait_for(lambda: bool(server.requests))
        source.close()
        thread.join(10)
        assert not thread.is_alive()
    assert isinstance(caught[0], TransferCancelledError)
    with pytest.raises(TransferCancelledError):
        source.fetch(Got().transfer, Cancel())


def test_a_cancelled_fetch_does_nothing(cancel: Cancel) -> None:
    cancel.cancel()
    with ScriptedServer(whole) as server:
        with pytest.raises(TransferCancelledError):
            Got().fetch(server, cancel)
        assert not server.requests


# --- TLS --------------------------------------------------------------------------------------


def test_https_with_a_trusted_certificate(certificate: Path) -> None:
    known = trusting(certificate)
    with ScriptedServer(whole, tls=serving(certificate)) as server:
        source = BlobSource(server.url, QUICK, tls=known)
        for _ in range(2):
            got = Got()
            source.fetch(got.transfer, Cancel())
            assert got.data == DATA
        source.close()
        assert server.connections == 1


def test_a_certificate_that_is_not_trusted_is_named(certificate: Path) -> None:
    with ScriptedServer(whole, tls=serving(certificate)) as server:
        fails_at(server, NetworkError, r"certificate of 127\.0\.0\.1 is not trusted")


def test_a_certificate_for_another_name_is_named(certificate: Path) -> None:
    known = trusting(certificate)
    with ScriptedServer(whole, tls=serving(certificate), host="127.0.0.2") as server:
        source = BlobSource(server.url, QUICK, tls=known)
        with pytest.raises(NetworkError, match="is not trusted"):
            source.fetch(Got().transfer, Cancel())


def test_plain_http_behind_https_is_an_error_that_says_so() -> None:
    with ScriptedServer(lambda request: [b"no TLS here\r\n", Close()]) as server:
        url = server.url.replace("http", "https")
        with pytest.raises(NetworkError, match="TLS"):
            fetch_once(url, Got().transfer)


def test_a_tls_handshake_that_never_ends_is_a_stall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StallError, match="handshake"):
            fetch_once(url, Got().transfer, with_config(connect_timeout_s=0.2))


def test_a_read_over_tls_can_be_cancelled(certificate: Path) -> None:
    begin = response(200, DATA[:20_000], length=len(DATA))
    cancelled_during(lambda request: [begin, Gone()], certificate)

"""The control plane: what is asked of a source, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from loadtest.streams import StreamServer
from shardcast.errors import (
    LimitError,
    MalformedError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    StallError,
)
from shardcast.upstream import (
    HeadAnswer,
    Upstream,
    open_session,
)
from tests.fakes import (
    Action,
    Close,
    Gone,
    Request,
    Reset,
    ScriptedServer,
    Unaccepting,
    drip,
    response,
)
from tests.unit.worker.conftest import QUICK, serving, trusting, with_config

Answers = Callable[[Request], Iterable[Action]]


@pytest.fixture
async def ask() -> AsyncIterator[Callable[[ScriptedServer], Upstream]]:
    async with open_session(QUICK) as session:
        yield lambda server: Upstream(server.url, session, QUICK)


Ask = Callable[[ScriptedServer], Upstream]


def chunks(body: bytes, coding: str = "chunked") -> bytes:
    return f"HTTP/1.1 200 OK\r\nTransfer-Encoding: {coding}\r\n\r\n".encode() + body


async def test_a_head_comes_verbatim_with_depth_and_node(ask: Ask) -> None:
    headers = {"Shardcast-Depth": "2", "Shardcast-Node": "a" * 32}
    with ScriptedServer(lambda r: [response(200, b" any bytes\n", headers)]) as server:
        answer = await ask(server).head("policy")
        assert answer == HeadAnswer(b" any bytes\n", 2, "a" * 32, server.url)
        assert server.requests[0].target == "/v1/policy/head"
        assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_a_long_poll_says_after_and_wait(ask: Ask) -> None:
    with ScriptedServer(lambda r: [response(200, b"{}")]) as server:
        answer = await ask(server).head("policy", after=17, wait_s=5)
        assert server.requests[0].target == "/v1/policy/head?after=17&wait=5"
    assert (answer.depth, answer.node) == (0, None)


@pytest.mark.parametrize(
    ("answer", "kind", "match"),
    [
        (response(404), SourceStatusError, "answers 404"),
        (response(503, headers={"Retry-After": "3"}), SourceStatusError, "answers 503"),
        (response(304), NetworkError, "304"),
        (response(302, headers={"Location": "http://x/"}), NetworkError, "redirects"),
        (response(200, b"x", {"Content-Encoding": "gzip"}), NetworkError, "Content-Encoding"),
        (response(200, bytes((1 << 20) + 1)), LimitError, "over its limit"),
        (response(200, b"{}", {"Shardcast-Depth": "many"}), MalformedError, "Depth"),
        (response(200, b"{}", {"Shardcast-Depth": "17"}), MalformedError, "Depth"),
        (response(200, b"{", length=5), NetworkError, "within its answer"),
        (b"what?\r\n\r\n", NetworkError, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n", NetworkError, "within its answer"),
        (b"", NetworkError, "before an answer"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 9, NetworkError, "interim"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", NetworkError, "too long"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", NetworkError, "too long"),
        (chunks(b"zz\r\nabc\r\n"), NetworkError, "malformed chunk"),
        (chunks(b"-1\r\nabc\r\n"), NetworkError, "malformed chunk"),
        (chunks(b"3\r\nabcd\r\n0\r\n\r\n"), NetworkError, "malformed chunk"),
        (chunks(b"ffffffff\r\n"), LimitError, "over its limit"),
        (chunks(b"3\r\nab"), NetworkError, "within its answer"),
        (chunks(b"0\r\n" + b"a: b\r\n" * 100 + b"\r\n"), NetworkError, "do not end"),
        (chunks(b"3" * 70_000), NetworkError, "endless line"),
        (chunks(b"0\r\n\r\n", "gzip, chunked"), NetworkError, "unclear"),
        (chunks(b"0\r\n\r\n", "chunked\r\nContent-Length: 3"), NetworkError, "unclear"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes((1 << 20) + 1), LimitError, "over its limit"),
    ],
)
async def test_what_is_no_head_is_refused_and_names_the_source(
    ask: Ask, answer: bytes, kind: type[ShardcastError], match: str
) -> None:
    with ScriptedServer(lambda r: [answer, Close()]) as server:
        with pytest.raises(kind, match=match) as caught:
            await ask(server).head("policy")
        assert caught.value.source == server.url


@pytest.mark.parametrize(
    "answer",
    [
        response(200, b"hello world"),
        response(200, b"hello world", length=-1),
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + response(200, b"hello world"),
        chunks(b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nTrailer: x\r\n\r\n"),
    ],
    ids=["length", "until the end", "interim", "chunked"],
)
async def test_bodies_end_in_every_way_of_http(ask: Ask, answer: bytes) -> None:
    with ScriptedServer(lambda r: [answer, Close()]) as server:
        upstream = ask(server)
        for _ in range(2):
            assert (await upstream.head("policy")).envelope == b"hello world"


@pytest.mark.parametrize("ending", [[], [Close()]], ids=["kept", "closed"])
async def test_connections_are_kept_and_replaced(ask: Ask, ending: list[Action]) -> None:
    with ScriptedServer(lambda r: [response(200, b"{}"), *ending]) as server:
        upstream = ask(server)
        for _ in range(3):
            await upstream.head("policy")
        assert server.connections == (3 if ending else 1)


async def test_a_kept_connection_that_dies_under_the_request_is_replaced(ask: Ask) -> None:
    def handler(request: Request) -> Iterable[Action]:
        first = request.connection == 1 and len(server.requests) > 1
        return [Reset()] if first else [response(200, b"{}")]

    with ScriptedServer(handler) as server:
        upstream = ask(server)
        await upstream.head("policy")
        await upstream.head("policy")
        assert server.connections == 2


async def test_a_request_that_is_cancelled_closes_its_connection(ask: Ask) -> None:
    with ScriptedServer(lambda r: [Gone()]) as server:
        upstream = ask(server)
        asking = asyncio.ensure_future(upstream.head("policy", after=1, wait_s=25))
        await asyncio.to_thread(server.wait_for, lambda: bool(server.requests))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(server.wait_for, lambda: server.open_connections == 0)


async def test_a_certificate_that_is_not_trusted_is_named(certificate: Path) -> None:
    with ScriptedServer(lambda r: [response(200, b"{}")], tls=serving(certificate)) as server:
        async with open_session(QUICK) as session:
            with pytest.raises(NetworkError, match="is not trusted"):
                await Upstream(server.url, session, QUICK).head("policy")
        async with open_session(QUICK, tls=trusting(certificate)) as session:
            assert (await Upstream(server.url, session, QUICK).head("policy")).envelope == b"{}"


async def test_a_connection_that_is_never_accepted_is_a_stall() -> None:
    config = with_config(connect_timeout_s=0.2)
    with Unaccepting() as hole:
        async with open_session(config) as session:
            with pytest.raises(StallError, match="no connection"):
                await Upstream(hole.url, session, config).head("policy")


async def test_retry_after_is_told(ask: Ask) -> None:
    with (
        ScriptedServer(lambda r: [response(503, headers={"Retry-After": "3"})]) as server,
        pytest.raises(SourceStatusError) as caught,
    ):
        await ask(server).head("policy")
    assert caught.value.retry_after == 3.0


@pytest.mark.parametrize(
    "answers",
    [lambda r: [Gone()], lambda r: drip(response(200, b"x" * 500))],
    ids=["silence", "drip"],
)
async def test_a_head_that_does_not_come_in_time_is_a_stall(ask: Ask, answers: Answers) -> None:
    with ScriptedServer(answers) as server, pytest.raises(StallError):
        await ask(server).head("policy")


async def test_nobody_listens() -> None:
    async with open_session(QUICK) as session:
        with pytest.raises(NetworkError):
            await Upstream("http://127.0.0.1:1", session, QUICK).head("policy")


async def test_json_for_people(ask: Ask) -> None:
    bodies = {
        "/v1/runs": b'{"runs": ["a", "b"]}',
        "/v1/status": b'{"node": "x"}',
        "/v1/a/peers": b'{"peers": []}',
    }
    with ScriptedServer(lambda r: [response(200, bodies[r.target])]) as server:
        upstream = ask(server)
        assert await upstream.runs() == ["a", "b"]
        assert await upstream.status() == {"node": "x"}
        assert await upstream.peers("a") == {"peers": []}


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b'{"runs": 1}', b'{"runs": [1]}'])
async def test_json_that_is_none(ask: Ask, body: bytes) -> None:
    with ScriptedServer(lambda r: [response(200, body)]) as server, pytest.raises(MalformedError):
        await ask(server).runs()


async def test_connections_to_a_server_are_bounded_and_reused() -> None:
    opened = here = peak = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, here, peak
        opened += 1
        here += 1
        peak = max(peak, here)
        while True:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                here -= 1
                writer.close()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    server = StreamServer(answer)
    url = await server.start()
    async with open_session(QUICK, most=4) as session:
        upstreams = [Upstream(url, session, QUICK) for _ in range(40)]
        answers = await asyncio.gather(*(upstream.status() for upstream in upstreams))
        assert answers == [{}] * 40
        assert peak <= 4
        before = opened
        await upstreams[0].status()
        assert opened == before
        with Unaccepting() as dead:  # it holds up nobody else
            hopeless = asyncio.gather(
                *(Upstream(dead.url, session, QUICK).status() for _ in range(10)),
                return_exceptions=True,
            )
            assert await upstreams[0].status() == {}
            hopeless.cancel()
            await asyncio.gather(hopeless, return_exceptions=True)
    await server.close()


async def test_a_connection_that_is_in_use_when_its_session_closes_is_closed_after_its_request() -> (
    None
):
    asked, go, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        left.set()

    server = StreamServer(answer)
    url = await server.start()
    async with open_session(QUICK) as session:
        task = asyncio.create_task(Upstream(url, session, QUICK).status())
        await asyncio.wait_for(asked.wait(), 10)
    go.set()
    assert await task == {}
    await asyncio.wait_for(left.wait(), 10)
    await server.close()

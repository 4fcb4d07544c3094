"""The control plane: what is asked of a source, what is refused, and the long polls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

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
    HeadWatcher,
    Upstream,
    UpstreamState,
    WaitSlots,
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


# --- one source -------------------------------------------------------------------------------


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


# --- watching ---------------------------------------------------------------------------------


@dataclass
class FakeSource:
    """A head source in simulated time: sequences are bodies."""

    url: str
    clock: FakeClock
    sequence: int = 0
    waits: bool = True
    depth: int = 1
    error: ShardcastError | None = None
    asked: list[tuple[float, int | None]] = field(default_factory=list)

    async def head(self, run: str, *, after: int | None = None, wait_s: int = 0) -> HeadAnswer:
        self.asked.append((self.clock.now, after))
        if self.error is not None:
            raise self.error
        begun, depth = self.clock.now, self.depth
        while (
            self.waits
            and self.depth == depth
            and after is not None
            and self.sequence <= after
            and self.clock.now < begun + wait_s
            and self.error is None
        ):
            await self.clock.sleep(0.01)
        if self.error is not None:
            raise self.error
        return HeadAnswer(b"%d" % self.sequence, self.depth, "node", self.url)


class FakeClock:
    """Time that goes on when everybody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + seconds, future))
        await future

    async def run_until(self, end: float) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            self.sleepers = [(at, f) for at, f in self.sleepers if not f.done()]
            due = min((at for at, _ in self.sleepers), default=end)
            if due > end:
                self.now = end
                return
            self.now = max(self.now, due)
            for at, future in self.sleepers:
                if at <= self.now and not future.done():
                    future.set_result(None)


class Watch:
    """A watcher over fake sources, and what it handed on."""

    def __init__(
        self, clock: FakeClock, *sources: FakeSource, slots: WaitSlots | None = None
    ) -> None:
        self.heads: list[tuple[float, str, bytes]] = []
        self.changes: list[tuple[str, UpstreamState]] = []
        self.refuse: set[str] = set()
        self.clock = clock
        self.watcher = HeadWatcher(
            "policy",
            sources,
            with_config(head_wait_s=25, head_poll_s=2.0, backoff_first_s=0.25, backoff_cap_s=10.0),
            self._on_head,
            on_change=lambda url, state: self.changes.append((url, state)),
            slots=slots,
            rng=random.Random(1),
            clock=clock,
            sleep=clock.sleep,
        )

    async def _on_head(self, answer: HeadAnswer) -> int | None:
        self.heads.append((self.clock.now, answer.url, answer.envelope))
        return None if answer.url in self.refuse else int(answer.envelope)

    async def until(self, end: float) -> None:
        task = asyncio.ensure_future(self.watcher.watch())
        await self.clock.run_until(end)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_new_head_is_handed_on_at_once_from_whoever_has_it_first() -> None:
    clock = FakeClock()
    a, b = FakeSource("a", clock, 1), FakeSource("b", clock, 1)
    watch = Watch(clock, a, b)
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(5)
    b.sequence = 2
    await clock.run_until(5.1)
    assert [(url, body) for now, url, body in watch.heads if now >= 5] == [("b", b"2")]
    a.sequence = 2
    await clock.run_until(5.2)
    assert (5 < watch.heads[-1][0] < 5.2, watch.heads[-1][1:]) == (True, ("a", b"2"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    states = watch.watcher.states
    assert all(states[url].live and states[url].depth == 1 for url in "ab")


async def test_a_source_of_ever_other_heads_that_are_not_new_is_not_asked_all_the_time() -> None:
    """It answers long polls at once, with old heads in turn: each one differs from the last."""

    @dataclass
    class Turning(FakeSource):
        async def head(self, run: str, *, after: int | None = None, wait_s: int = 0) -> HeadAnswer:
            self.asked.append((self.clock.now, after))
            await self.clock.sleep(0.001)
            return HeadAnswer(b"%d" % (3 + len(self.asked) % 2), 1, "node", self.url)

    clock = FakeClock()
    good, turning = FakeSource("a", clock, 9), Turning("b", clock)
    await Watch(clock, good, turning).until(60)
    assert len(turning.asked) < 70  # a second or two each; without pauses 60,000


async def test_a_server_that_waits_is_asked_once_per_wait() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 7)
    watch = Watch(clock, source)
    await watch.until(100)
    assert len(source.asked) in (5, 6)  # at once, then every 25 s
    assert [after for _, after in source.asked] == [None] + [7] * (len(source.asked) - 1)
    assert len(watch.heads) == 1
    assert watch.watcher.states["a"].waits


async def test_a_server_that_tells_of_a_new_depth_is_waited_for_again() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 7)
    watch = Watch(clock, source)
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(5)
    source.depth = 4
    await clock.run_until(5.1)
    assert watch.watcher.states["a"].depth == 4
    await clock.run_until(5.5)
    source.sequence = 8
    await clock.run_until(5.6)  # it was waited for again by now
    assert watch.heads[-1][2] == b"8"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_server_that_does_not_wait_is_polled_every_two_seconds() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 7, waits=False)
    watch = Watch(clock, source)
    await watch.until(100)
    assert 45 <= len(source.asked) <= 60
    assert watch.watcher.states["a"].waits is False


async def test_failures_back_off_and_heal_within_seconds() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 1, error=NetworkError("down"))
    watch = Watch(clock, source)
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(600)
    assert 60 < len(source.asked) < 250
    before = watch.watcher.states["a"]
    assert (before.live, before.error) == (False, source.error)
    source.error = None
    await clock.run_until(610.1)
    after = watch.watcher.states["a"]
    assert (after.live, after.error) == (True, None)
    assert watch.changes[-1][1].live
    assert watch.heads
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_retry_after_is_honoured() -> None:
    clock = FakeClock()
    error = SourceStatusError("busy", status=503, retry_after=0.3)
    source = FakeSource("a", clock, error=error)
    await Watch(clock, source).until(100)
    times = [now for now, _ in source.asked]
    assert min(later - now for now, later in pairwise(times)) > 0.3 - 1e-6


async def test_a_run_that_is_not_known_yet_is_polled_and_counts_as_live() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, error=SourceStatusError("no", status=404))
    watch = Watch(clock, source)
    await watch.until(60)
    assert 30 <= len(source.asked) <= 70
    assert watch.watcher.states["a"].live


async def test_a_refused_head_is_judged_again_but_in_no_hurry() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 1)
    watch = Watch(clock, source)
    watch.refuse = {"a"}
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(60)
    assert 5 < len(source.asked) <= 31
    watch.refuse = set()  # a clock was set right
    await clock.run_until(80)
    count = len(source.asked)
    await clock.run_until(99)
    assert len(source.asked) <= count + 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_refresh_asks_everyone_now() -> None:
    clock = FakeClock()
    a = FakeSource("a", clock, 3)
    b = FakeSource("b", clock, error=NetworkError("down"))
    watch = Watch(clock, a, b)
    await watch.watcher.refresh()
    assert [after for _, after in a.asked] == [None]
    assert watch.heads == [(0.0, "a", b"3")]
    a.sequence = 4
    await watch.watcher.refresh()
    assert [after for _, after in a.asked] == [None, None]
    assert len(watch.heads) == 2


async def test_of_many_watchers_some_wait_and_the_others_poll() -> None:
    """Each request that waits takes a connection: with few descriptors not every run has one."""
    clock, slots = FakeClock(), WaitSlots(2)
    sources = [FakeSource("a", clock, 1) for _ in range(5)]
    watches = [Watch(clock, source, slots=slots) for source in sources]
    tasks = [asyncio.ensure_future(watch.watcher.watch()) for watch in watches]
    await clock.run_until(20)
    waiting = [source for source in sources if len(source.asked) == 2]
    polling = [source for source in sources if source not in waiting]
    assert len(waiting) == 2
    for source in polling:
        assert all(1.7 < b - a < 2.3 for (a, _), (b, _) in pairwise(source.asked[1:]))
        assert all(after is None for _, after in source.asked)
        source.sequence = 2
    await clock.run_until(22.5)
    assert all(
        watch.heads[-1][2] == b"2"
        for watch, s in zip(watches, sources, strict=True)
        if s in polling
    )
    tasks[sources.index(waiting[0])].cancel()  # its slot becomes free
    await clock.run_until(30)
    assert sum(source.asked[-1][1] is not None for source in polling) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(slots.take("a") for _ in range(2))


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

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
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
    server.close()
    await server.wait_closed()

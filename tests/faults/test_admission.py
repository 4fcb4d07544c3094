"""Clients that take more than they should, and others that must not notice.

A client is a source address: the tests come from several of 127/8.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.config import RelayConfig
from shardcast.protocol.digest import digest_of
from tests.contract.made import RUN, SHARD, MadeVersion, make_version, noise, publish
from tests.contract.relays import config, limits, running, status_of, wait_head
from tests.contract.wire_client import PATIENCE_S, Answer, Wire, eventually, http

ATTACKER, HEALTHY = "127.0.0.66", "127.0.0.77"
FILES = {"model": noise(8 * SHARD)}
VERSION: MadeVersion = make_version(1, FILES)
FAR = 10**15
"""A sequence that no head reaches: whoever waits for it waits."""


def path_of(number: int) -> str:
    return f"/v1/{RUN}/blobs/{VERSION.shards[number]}.bin"


@asynccontextmanager
async def origin(tmp_path: Path, **options: Any) -> AsyncIterator[str]:
    """An origin with eight shards."""
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", FILES)
    settings: RelayConfig = config(tmp_path / "s", **options)
    async with running(settings) as url:
        await wait_head(url)
        yield url


async def get(url: str, path: str, source: str, **headers: str) -> Answer:
    async with Wire(url, source=source) as wire:
        await wire.ask(path, headers={name.replace("_", "-"): v for name, v in headers.items()})
        return await wire.answer()


async def everything(url: str, source: str) -> None:
    """A healthy client gets the head and every shard, without being turned away once."""
    async with Wire(url, source=source) as wire:
        for path in ["/readyz", f"/v1/{RUN}/head", *map(path_of, range(len(VERSION.shards)))]:
            await wire.ask(path)
            answer = await wire.answer()
            assert (answer.status, answer.whole) == (200, True), (path, answer)
            if "blobs" in path:
                assert f"{digest_of(answer.body)}.bin" in path


async def metric(url: str, name: str) -> float:
    text = (await http(url, "/metrics")).body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a refused request is thrown away for a moment only."""
    monkeypatch.setattr("relay.server._LINGER_S", 1.0)


# --- too slow -----------------------------------------------------------------------------------


async def drip(wire: Wire, data: bytes) -> bytes:
    """Send a byte every now and then, for ever, until the server has enough of it."""

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                for at in range(len(data)):
                    await wire.send(data[at : at + 1])
                    await asyncio.sleep(0.02)

    sending = asyncio.create_task(send())
    try:
        return await wire.rest()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_head_that_drips_is_cut(tmp_path: Path) -> None:
    async with origin(tmp_path, limits=limits(header_timeout_s=0.3)) as url:
        async with Wire(url, source=ATTACKER) as wire:
            await wire.send(b"GET /healthz HTTP/1.1\r\n")
            assert await drip(wire, b"X-A: b\r\n") == b""
        async with Wire(url, source=ATTACKER) as wire:  # not a byte
            assert await wire.rest() == b""
        await everything(url, HEALTHY)


async def test_a_second_head_that_drips_is_cut(tmp_path: Path) -> None:
    async with (
        origin(tmp_path, limits=limits(idle_timeout_s=0.3)) as url,
        Wire(url, source=ATTACKER) as wire,
    ):
        await wire.ask("/healthz")
        assert (await wire.answer()).status == 200
        await wire.send(b"GET /healthz HTTP/1.1\r\n")
        assert await drip(wire, b"X-A: b\r\n") == b""


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_body_that_drips_is_cut(tmp_path: Path, method: str) -> None:
    """Also one that is never silent: it must bring a least rate."""
    (tmp_path / "token").write_text("a-token-for-tests-only")
    settings = {
        "publish_token_file": tmp_path / "token",
        "limits": limits(body_timeout_s=0.3, body_rate_bytes_per_s=100_000),
    }
    async with origin(tmp_path, **settings) as url, Wire(url) as wire:
        await wire.send(
            f"{method} /v1/{RUN}/blobs/{'0' * 64}.bin HTTP/1.1\r\nHost: x\r\n"
            "Authorization: Bearer a-token-for-tests-only\r\nContent-Length: 1000000\r\n\r\n"
            "{".encode()
        )
        said = await drip(wire, b" ")
        assert said.split(b" ")[1] == (b"408" if method == "PUT" else b"404")


# --- too many requests --------------------------------------------------------------------------


async def test_requests_over_the_rate_are_429_and_cost_nobody_else(tmp_path: Path) -> None:
    tight = limits(requests_per_s_per_client=0.001, request_burst_per_client=12)
    async with origin(tmp_path, limits=tight) as url:
        async with Wire(url, source=ATTACKER) as wire:
            statuses = []
            for _ in range(13):
                await wire.ask(path_of(0), headers={"Range": "bytes=0-0"})
                answer = await wire.answer()
                statuses.append(answer.status)
            assert statuses == [206] * 12 + [429]
            await wire.ask(path_of(0))
            answer = await wire.answer()
            assert answer.status == 429
            assert int(answer["Retry-After"]) >= 900
            assert json.loads(answer.body)["error"] == "rate"
            assert answer["Cache-Control"] == "no-store"
            await wire.ask("/healthz")  # whoever watches the relay hears the truth
            assert (await wire.answer()).status == 200
        # Another connection of the same address changes nothing.
        assert (await get(url, path_of(0), ATTACKER)).status == 429
        await everything(url, HEALTHY)
        assert await metric(url, 'shardcast_refused_requests_total{reason="rate"}') == 3


async def test_requests_at_once_are_bounded_by_client(tmp_path: Path) -> None:
    tight = limits(max_requests_per_client=3, max_waits_per_client=3)
    async with origin(tmp_path, limits=tight) as url, AsyncExitStack() as stack:
        for _ in range(3):
            wire = await stack.enter_async_context(Wire(url, source=ATTACKER))
            await wire.ask(f"/v1/{RUN}/head?after={FAR}&wait=25")
        await eventually(lambda: _waiting(url, 3))
        answer = await get(url, path_of(0), ATTACKER)
        assert answer.status == 503
        assert int(answer["Retry-After"]) >= 1
        await everything(url, HEALTHY)


async def _waiting(url: str, count: int) -> bool:
    return bool((await status_of(url))["waiting"] == count)


async def test_who_waits_too_much_is_answered_at_once(tmp_path: Path) -> None:
    """A client sees from an early answer that it should poll; it is no error."""
    async with (
        origin(tmp_path, limits=limits(max_waits_per_client=2)) as url,
        AsyncExitStack() as stack,
    ):
        for _ in range(2):
            wire = await stack.enter_async_context(Wire(url, source=ATTACKER))
            await wire.ask(f"/v1/{RUN}/head?after={FAR}&wait=25")
        await eventually(lambda: _waiting(url, 2))
        answer = await get(url, f"/v1/{RUN}/head?after={FAR}&wait=25", ATTACKER)
        assert answer.status == 200
        assert answer.body == (await http(url, f"/v1/{RUN}/head")).body
        assert await metric(url, "shardcast_unwaited_requests_total") == 1
        other = await stack.enter_async_context(Wire(url, source=HEALTHY))
        await other.ask(f"/v1/{RUN}/head?after={FAR}&wait=25")
        await eventually(lambda: _waiting(url, 3))


async def test_whoever_leaves_is_counted_no_longer(tmp_path: Path) -> None:
    async with origin(tmp_path) as url:
        async with AsyncExitStack() as stack:
            for number in range(20):
                wire = await stack.enter_async_context(Wire(url, source=f"127.0.0.{100 + number}"))
                await wire.ask(f"/v1/{RUN}/head?after={FAR}&wait=25")
            await eventually(lambda: _waiting(url, 20))

        async def nobody() -> bool:
            status = await status_of(url)  # itself a request on a connection
            return (status["waiting"], status["requests"], status["connections"]) == (0, 1, 1)

        await eventually(nobody)


# --- too many connections -----------------------------------------------------------------------


async def test_greedy_addresses_leave_connections_for_others(tmp_path: Path) -> None:
    async with (
        origin(tmp_path, limits=limits(max_connections=40, refused_connections=20)) as url,
        AsyncExitStack() as stack,
    ):
        held: Counter[str] = Counter()
        refused = 0
        for number in range(120):
            source = f"127.0.0.{60 + number % 3}"
            wire = await stack.enter_async_context(Wire(url, source=source))
            try:
                await wire.ask("/healthz")
                answer = await wire.answer()
            except (ConnectionError, asyncio.IncompleteReadError):
                refused += 1  # without an answer, from some number on
                continue
            held[source] += answer.status == 200
            if answer.status != 200:
                assert answer.status == 503
                assert int(answer["Retry-After"]) >= 1
                assert answer["Connection"] == "close"
                refused += 1
        assert refused == 120 - sum(held.values())
        assert set(held.values()) <= {11, 12}  # 2 / (2 * 3 + 1) of 40 each
        assert sum(held.values()) <= 35
        await asyncio.gather(*(everything(url, f"127.0.0.{90 + n}") for n in range(5)))
        assert await metric(url, "shardcast_refused_connections_total") == refused


async def test_idle_connections_make_room_for_a_new_client(tmp_path: Path) -> None:
    async with origin(tmp_path, limits=limits(max_connections=6)) as url, AsyncExitStack() as stack:
        wires = []
        for number in range(6):
            wire = await stack.enter_async_context(Wire(url, source=f"127.0.0.{60 + number}"))
            await wire.ask("/healthz")
            assert (await wire.answer()).status == 200
            wires.append(wire)

        async def let_in() -> bool:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                return (await get(url, f"/v1/{RUN}/head", HEALTHY)).status == 200
            return False

        await eventually(let_in)
        assert await wires[0].rest() == b""  # the one that was idle longest
        await wires[5].ask("/healthz")
        assert (await wires[5].answer()).status == 200


# --- too many bytes -----------------------------------------------------------------------------


async def read_shards(url: str, source: str, numbers: list[int], count: Counter[str]) -> None:
    async with Wire(url, source=source) as wire:
        for number in numbers:
            await wire.ask(path_of(number))
            status, headers = await wire.head()
            assert status == 200
            left, body = int(headers["content-length"][0]), b""
            while left:
                piece = await wire.reader.read(min(left, 1 << 16))
                assert piece
                body += piece
                left -= len(piece)
                count[source] += len(piece)
            assert digest_of(body) == VERSION.shards[number]


async def test_health_is_told_to_everyone_but_not_at_any_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = limits(requests_per_s_per_client=0.001, request_burst_per_client=3)
    async with origin(tmp_path, limits=few) as url, Wire(url, source=ATTACKER) as greedy:
        for _ in range(4):  # the last one is over the rate: held back a moment, not refused
            await greedy.ask("/healthz")
            assert (await greedy.answer()).status == 200
        monkeypatch.setattr("relay.server._REFUSAL_S", PATIENCE_S * 10)
        await greedy.ask("/healthz")
        waiting = asyncio.ensure_future(greedy.answer())
        assert (await get(url, "/healthz", HEALTHY)).status == 200
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_clients_share_the_rate_and_not_connections(tmp_path: Path) -> None:
    """Thirty connections of one address get no more than the one of another."""
    async with origin(tmp_path, limit_rate_bytes_per_s=2 << 20) as url:
        count: Counter[str] = Counter()
        greedy = [
            asyncio.create_task(read_shards(url, ATTACKER, [*range(8)] * 50, count))
            for _ in range(30)
        ]
        await eventually(lambda: count[ATTACKER] > SHARD)
        before = count[ATTACKER]
        await read_shards(url, HEALTHY, [0, 1, 2, 3], count)
        # What lies in the buffers of thirty connections comes on top.
        assert count[ATTACKER] - before < 1.2 * count[HEALTHY] + 30 * (64 << 10)
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_a_client_has_its_own_rate(tmp_path: Path) -> None:
    """The limited one is far behind while the others finish."""
    async with origin(tmp_path, limit_rate_client_bytes_per_s=1 << 20) as url:
        count: Counter[str] = Counter()
        greedy = [
            asyncio.create_task(read_shards(url, ATTACKER, [*range(8)] * 50, count))
            for _ in range(10)
        ]
        others = [f"127.0.0.{100 + n}" for n in range(6)]
        await asyncio.gather(*(read_shards(url, other, [0, 1, 2, 3], count) for other in others))
        for other in others:
            assert count[other] == 4 * SHARD
        assert count[ATTACKER] < 3 * 4 * SHARD + 10 * (64 << 10)
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_readers_that_take_nothing_use_up_nothing(tmp_path: Path) -> None:
    """Under a limit for all: what is booked for a reader is what it proves to take."""
    async with origin(tmp_path, limit_rate_bytes_per_s=4 << 20) as url, AsyncExitStack() as stack:
        for number in range(60):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.bind((f"127.0.0.{100 + number % 50}", 0))
            host, _, port = url.removeprefix("http://").partition(":")
            await asyncio.to_thread(sock.connect, (host, int(port)))
            sock.sendall(f"GET {path_of(number % 8)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await everything(url, HEALTHY)
        assert await metric(url, "shardcast_sent_bytes_total") <= len(FILES["model"]) + 60 * SHARD


# --- behind a proxy -----------------------------------------------------------------------------


async def test_a_trusted_proxy_names_its_clients(tmp_path: Path) -> None:
    proxy = "127.0.0.80"
    tight = limits(
        requests_per_s_per_client=0.001, request_burst_per_client=2, max_connections_per_client=1
    )
    async with origin(tmp_path, limits=tight, trusted_proxies=(f"{proxy}/32",)) as url:
        async with Wire(url, source=proxy) as one, Wire(url, source=proxy) as two:  # not limited

            async def ask(wire: Wire, client: str) -> int:
                await wire.ask(path_of(0), "HEAD", {"X-Forwarded-For": client})
                return (await wire.answer(method="HEAD")).status

            assert [await ask(one, "192.0.2.1") for _ in range(3)] == [200, 200, 429]
            assert await ask(two, "192.0.2.1") == 429
            assert await ask(two, "192.0.2.2") == 200
            assert await ask(two, "192.0.2.1, 192.0.2.3") == 200
        # Who is not trusted may write what it likes.
        async with Wire(url, source=ATTACKER) as wire:
            statuses = []
            for number in range(3):
                await wire.ask(path_of(0), "HEAD", {"X-Forwarded-For": f"192.0.2.{number}"})
                statuses.append((await wire.answer(method="HEAD")).status)
            assert statuses == [200, 200, 429]


# --- all at once --------------------------------------------------------------------------------


@pytest.mark.fault(13)
async def test_a_flood_from_many_addresses_leaves_nothing_behind(tmp_path: Path) -> None:
    """Thousands of requests, good and bad, at once: all are answered or refused, none is lost."""
    settings = {
        "limits": limits(
            max_connections=300, refused_connections=50, request_burst_per_client=40,
            requests_per_s_per_client=1.0,
        )
    }  # fmt: skip
    async with origin(tmp_path, **settings) as url:
        outcome: Counter[int] = Counter()

        async def attack(number: int) -> None:
            source = f"127.0.2.{1 + number % 20}"
            paths = [path_of(number % 8), f"/v1/{RUN}/head?after={FAR}&wait=0", "/v1/x/head", "//"]
            try:
                async with Wire(url, source=source) as wire:
                    for path in paths:
                        await wire.ask(path)
                        outcome[(await wire.answer()).status] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                outcome[0] += 1

        async with asyncio.timeout(6 * PATIENCE_S):
            healthy = asyncio.gather(*(everything(url, f"127.0.0.{100 + n}") for n in range(3)))
            await asyncio.gather(*(attack(number) for number in range(600)))
            await healthy
        assert set(outcome) <= {0, 200, 404, 429, 503}
        assert outcome[200]
        assert outcome[429]
        await everything(url, "127.0.0.99")
        status = await status_of(url)
        assert status["max_connections"] == 300
        assert not status["fills"]

"""Uploading: an origin that drips, says nothing or is busy ends no publication too late or too soon."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import chain
from pathlib import Path

import pytest

from shardcast import origin_client
from shardcast.errors import ClockError, NetworkError, RefusedError
from shardcast.origin_client import Body, Deadline, OriginClient
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import Signer
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from shardcast.uploader import publish_remote
from tests.fakes import Action, Gone, Request, ScriptedServer, Until, drip, response

DATA = b"x" * 1000
DIGEST = digest_of(DATA)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it slept between its tries: without sleeping."""
    slept: list[float] = []
    monkeypatch.setattr("shardcast.origin_client.time.sleep", slept.append)
    monkeypatch.setattr(origin_client, "IDLE_TIMEOUT_S", 0.3)
    return slept


def client(server: ScriptedServer) -> OriginClient:
    return OriginClient(server.url, "policy", "token")


def put(server: ScriptedServer, body: Body | None = None) -> None:
    client(server).put_blob(DIGEST, body or Body(len(DATA), DATA))


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: [Gone()],
        lambda request: drip(response(201), 0.02),
        lambda request: chain([response(201, length=5000)], drip(b"x" * 5000, 0.02)),
    ],
    ids=["silence", "a drip in the head", "a drip in the body"],
)
def test_an_answer_that_does_not_end_is_given_up(answer: object, pauses: list[float]) -> None:
    with ScriptedServer(answer) as server:  # type: ignore[arg-type]
        with pytest.raises(NetworkError, match=r"failed 2 times.*(took over|timed out)"):
            put(server)
        assert len(server.requests) == origin_client.SILENT_ATTEMPTS
    assert len(pauses) == origin_client.SILENT_ATTEMPTS - 1


def test_an_origin_that_takes_a_body_too_slowly_is_given_up(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing more after the head: what the kernel does not take waits."""
    monkeypatch.setattr(origin_client, "MINIMUM_RATE_BYTES_PER_S", 1e12)
    path = tmp_path / "shard"
    path.write_bytes(bytes(64 << 20))
    never = threading.Event()
    with ScriptedServer(lambda request: [Until(never)]) as server:
        with pytest.raises(NetworkError, match="failed 2 times"):
            put(server, Body(64 << 20, path=path))
        assert len(server.requests) == origin_client.SILENT_ATTEMPTS
        never.set()


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_origin_is_asked_again(status: int, pauses: list[float]) -> None:
    def answer(request: Request) -> Iterable[Action]:
        if len(server.requests) < 3:
            return [response(status, headers={"Retry-After": "7", "Connection": "close"})]
        return [response(201, headers={"Connection": "close"})]

    with ScriptedServer(answer) as server:
        put(server)
        assert len(server.requests) == 3
    assert all(7.0 <= pause < 8.0 for pause in pauses)
    assert len(set(pauses)) == 2  # who were told the same come back at different times


def test_retry_after_may_be_a_date_and_is_capped(pauses: list[float]) -> None:
    dates = [datetime.now(UTC) + timedelta(seconds=20), datetime.now(UTC) + timedelta(hours=1)]
    texts = [format_datetime(date, usegmt=True) for date in dates]

    def answer(request: Request) -> Iterable[Action]:
        number = len(server.requests) - 1
        headers = {"Connection": "close"}
        if number < 2:
            return [response(503, headers={**headers, "Retry-After": texts[number]})]
        return [response(201, headers=headers)]

    with ScriptedServer(answer) as server:
        put(server)
    assert 15.0 <= pauses[0] <= 22.0
    assert 30.0 <= pauses[1] <= 31.0


def test_the_system_asks_whether_a_silent_origin_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections: list[socket.socket] = []
    connect = http.client.HTTPConnection.connect

    def keep(connection: http.client.HTTPConnection) -> None:
        connect(connection)
        connections.append(connection.sock)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", keep)
    with ScriptedServer(lambda request: [response(404)]) as server:
        origin = client(server)
        assert origin.head() is None
        (connection,) = connections
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silent = [
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert silent == [15, 5, 4]
        origin.close()


def test_pauses_grow_with_full_jitter(pauses: list[float]) -> None:
    close = {"Connection": "close"}
    with ScriptedServer(lambda request: [response(500, headers=close)]) as server:
        for _ in range(12):
            with pytest.raises(NetworkError, match="500"):
                put(server)
    rounds = [pauses[n : n + 5] for n in range(0, len(pauses), 5)]
    for n, cap in enumerate([0.25, 0.5, 1.0, 2.0, 4.0]):
        column = [one[n] for one in rounds]
        assert max(column) <= cap
        assert max(column) > cap / 2
        assert min(column) < cap / 2


def test_what_is_refused_is_not_asked_again(pauses: list[float]) -> None:
    close = {"Connection": "close"}
    with ScriptedServer(lambda request: [response(403, headers=close)]) as server:
        with pytest.raises(RefusedError):
            put(server)
        assert len(server.requests) == 1
    assert pauses == []


def test_a_deadline_ends_what_an_origin_does_not_answer_and_names_it() -> None:
    """Whatever the single timeouts are; and nothing is asked any more once it is over."""
    deadline = Deadline.after(0.3)
    with ScriptedServer(lambda request: [Gone()]) as server:
        one = OriginClient(server.url, "policy", "token", deadline)
        with pytest.raises(
            NetworkError, match=r"did not take it within 0\.3 s.*next try"
        ) as caught:
            one.put_blob(DIGEST, Body(len(DATA), DATA))
        assert server.url in caught.value.message
        with pytest.raises(NetworkError, match=r"did not take it within 0\.3 s"):
            OriginClient(server.url, "policy", "token", deadline).head()
        assert len(server.requests) == 1


def test_a_clock_that_is_ahead_of_the_origins_publishes_nothing(
    tmp_path: Path, checkpoint: Path, signer: Signer
) -> None:
    def answer(request: Request) -> Iterable[Action]:
        date = format_datetime(datetime.now(UTC) - timedelta(hours=25), usegmt=True)
        return [response(404, headers={"Date": date, "Connection": "close"})]

    with ScriptedServer(answer) as server:
        with pytest.raises(ClockError, match=r"25\.0 hours ahead of the origin's.*Nothing was"):
            publish_remote(
                PublishOptions(source=checkpoint),
                RunStore(tmp_path / "memory", "policy"),
                lambda: client(server),
                [signer],
                lambda: time.time_ns() // 1_000_000,
            )
        assert len(server.requests) == 1

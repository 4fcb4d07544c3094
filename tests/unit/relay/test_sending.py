"""Little of a response lies in the kernel, apart from those of a few readers that proved fast."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import pytest
from aiohttp import web

from relay.sending import QUEUED_BYTES, FastLane, queue_at_most
from shardcast.protocol.limits import MIB


@dataclass
class Transport:
    sock: socket.socket | None

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.sock if name == "socket" else None


@dataclass
class Connection:
    fast: bool = False


@dataclass
class Request:
    """As much of a request as sending looks at."""

    protocol: Connection
    transport: Transport | None

    @property
    def queue(self) -> int:
        assert self.transport is not None
        assert self.transport.sock is not None
        return self.transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


Make = Callable[[bool], Request]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes requests on sockets, as a connection that was fast the last time or not."""
    with ExitStack() as stack:

        def made(fast: bool) -> Request:
            sock = stack.enter_context(socket.socket())
            queue_at_most(sock, QUEUED_BYTES)
            return Request(Connection(fast), Transport(sock))

        yield made


def sent(lane: FastLane, request: Request, count: int) -> int:
    """Send in no time at all; return the bound while it was sent."""
    with lane.sending(cast(web.BaseRequest, request), count):
        return request.queue


def test_the_first_response_is_bounded_and_the_next_of_a_fast_reader_is_not(make: Make) -> None:
    lane, request = FastLane(), make(False)
    assert sent(lane, request, 8 * MIB) == QUEUED_BYTES
    assert request.protocol.fast
    assert sent(lane, request, 8 * MIB) > 1 << 30
    assert request.queue == QUEUED_BYTES  # not between two responses


def test_small_responses_say_nothing(make: Make) -> None:
    lane, request = FastLane(), make(False)
    sent(lane, request, 1000)
    assert not request.protocol.fast


def test_a_slow_response_ends_it(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    lane, request, now = FastLane(), make(True), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with lane.sending(cast(web.BaseRequest, request), 8 * MIB):
        now[0] += 10.0
    assert not request.protocol.fast


def test_only_a_few_at_once_and_places_come_back(make: Make) -> None:
    lane, requests = FastLane(2), [make(True) for _ in range(3)]
    with (
        lane.sending(cast(web.BaseRequest, requests[0]), 1),
        lane.sending(cast(web.BaseRequest, requests[1]), 1),
    ):
        assert sent(lane, requests[2], 1) == QUEUED_BYTES
    with pytest.raises(ConnectionError), lane.sending(cast(web.BaseRequest, requests[2]), 1):
        raise ConnectionResetError
    assert sent(lane, requests[2], 1) > 1 << 30


def test_a_client_that_is_gone_is_nobodys_error() -> None:
    lane = FastLane()
    gone: Any = Request(Connection(fast=True), None)
    with lane.sending(gone, 8 * MIB):
        pass
    closed = socket.socket()
    closed.close()
    with lane.sending(cast(web.BaseRequest, Request(Connection(True), Transport(closed))), 1):
        pass

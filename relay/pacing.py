"""How fast bytes leave: in all, for one client, and who is next.

Under a limit for all, clients share it, not connections: whoever opens a hundred gets no more
than whoever opens one. Under a limit for each client its own connections share that.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shardcast.protocol.limits import KIB, MIB

LEAST_PIECE_BYTES: Final = 16 * KIB
FIRST_PIECE_BYTES: Final = 64 * KIB
"""What is booked for a reader of whom nothing is known: one that turns out to take a kilobyte a
second must not have used up what others could have had."""
_MOST_PIECE_BYTES: Final = 4 * MIB
_PIECE_S: Final = 0.05
_BURST_S: Final = 0.05
MOST_IDLE: Final = 8192
"""Clients with a debt that are remembered; over that the one longest away begins anew."""


class _Bucket:
    """Bytes at a rate: free while what was taken so far has been paid for. Pure."""

    __slots__ = ("_rate", "free_at")

    def __init__(self, rate_bytes_per_s: float, now: float) -> None:
        self._rate = rate_bytes_per_s
        self.free_at = now

    def take(self, count: int, now: float) -> None:
        self.free_at = max(self.free_at, now - _BURST_S) + count / self._rate


@dataclass(slots=True)
class _Client:
    name: str
    bucket: _Bucket | None
    finish: float = 0.0
    waiting: deque[Turn] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Turn:
    """A wish to send ``count`` bytes. ``granted`` is called when its time has come."""

    count: int
    granted: Callable[[], None]
    given_up: bool = False


class FairQueue:
    """Decides who may send next. Pure: time is passed in.

    Start-time fair queueing (Goyal, Vin and Cheng 1996) over clients: each client's next piece
    has as its start the end of the one before, in bytes, or the present virtual time; the
    smallest start is next. Within a client first come, first served.
    """

    def __init__(self, total: int | None, per_client: int | None, now: float) -> None:
        """Let ``total`` bytes a second pass in all and ``per_client`` for each; None: no limit."""
        self._total = None if total is None else _Bucket(total, now)
        self._per_client = per_client
        self._virtual = self._last_finish = 0.0
        self._clients: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()  # of these, who waits for nothing
        self._ready: list[tuple[float, int, _Client]] = []  # by virtual start
        self._blocked: list[tuple[float, int, _Client]] = []  # by the time their bucket is free
        self._number = itertools.count()

    @property
    def remembered(self) -> int:
        """How many clients are known at the moment."""
        return len(self._clients)

    def add(self, client: str, turn: Turn, now: float) -> None:
        """Queue a wish."""
        if not self._ready and (self._total is None or self._total.free_at <= now):
            self._virtual = self._last_finish  # nobody is served: nobody has a lead
        self._forget(now)
        known = self._clients.get(client)
        if known is None:
            bucket = None if self._per_client is None else _Bucket(self._per_client, now)
            known = self._clients[client] = _Client(client, bucket)
        self._idle.pop(client, None)
        known.waiting.append(turn)
        if len(known.waiting) == 1:
            self._queue(known, now)

    def grant(self, now: float) -> float | None:
        """Grant what may be sent now; return when to look again, None if nobody waits."""
        while True:
            while self._blocked and self._blocked[0][0] <= now:
                self._make_ready(heapq.heappop(self._blocked)[2])
            if not self._ready:
                return self._blocked[0][0] if self._blocked else None
            if self._total is not None and self._total.free_at > now:
                return self._total.free_at
            start, _number, client = heapq.heappop(self._ready)
            turn = client.waiting.popleft()
            if not turn.given_up:
                self._virtual = max(self._virtual, start)
                client.finish = start + turn.count
                self._last_finish = max(self._last_finish, client.finish)
                if self._total is not None:
                    self._total.take(turn.count, now)
                if client.bucket is not None:
                    client.bucket.take(turn.count, now)
            if client.waiting:
                self._queue(client, now)
            else:
                self._idle[client.name] = client
            if not turn.given_up:
                turn.granted()

    def _queue(self, client: _Client, now: float) -> None:
        if client.bucket is not None and client.bucket.free_at > now:
            heapq.heappush(self._blocked, (client.bucket.free_at, next(self._number), client))
        else:
            self._make_ready(client)

    def _make_ready(self, client: _Client) -> None:
        start = max(self._virtual, client.finish)
        heapq.heappush(self._ready, (start, next(self._number), client))

    def _forget(self, now: float) -> None:
        """Forget clients that wait for nothing and owe nothing; of too many, those that owe."""
        while self._idle:
            client = next(iter(self._idle.values()))
            paid = client.bucket is None or client.bucket.free_at <= now
            if len(self._idle) <= MOST_IDLE and not (paid and client.finish <= self._virtual):
                return
            del self._idle[client.name], self._clients[client.name]


class Pacer:
    """Makes responses wait for their turn. Used on one event loop."""

    def __init__(
        self, total: int | None, per_client: int | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._queue = FairQueue(total, per_client, loop.time())
        rates = [rate for rate in (total, per_client) if rate is not None]
        self._most = _MOST_PIECE_BYTES if not rates else _piece(min(rates))
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def limiting(
        cls, total: int | None, per_client: int | None, loop: asyncio.AbstractEventLoop
    ) -> Pacer | None:
        """Return a pacer for these limits, None where there is none."""
        return None if total is None and per_client is None else cls(total, per_client, loop)

    def stream(self, client: str) -> Stream:
        """Return what one response to a client asks."""
        return Stream(self, client, min(FIRST_PIECE_BYTES, self._most))

    def piece_at(self, rate: float) -> int:
        """Return how much to book at once for a reader that takes ``rate`` bytes a second."""
        return min(self._most, _piece(rate))

    async def take(self, client: str, count: int) -> None:
        """Wait until ``count`` bytes may be sent to a client. A cancelled wait costs nothing."""
        granted: asyncio.Future[None] = self._loop.create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        turn = Turn(count, grant)
        self._queue.add(client, turn, self._loop.time())
        self._look()
        try:
            await granted
        except asyncio.CancelledError:
            turn.given_up = True
            raise

    def _look(self) -> None:
        due = self._queue.grant(self._loop.time())
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._again)

    def _again(self) -> None:
        self._timer = None
        self._look()


class Stream:
    """One response: small pieces at first, larger ones as its reader proves to take them."""

    def __init__(self, pacer: Pacer, client: str, first: int) -> None:
        self._pacer = pacer
        self._client = client
        self.piece_bytes = first

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent."""
        await self._pacer.take(self._client, count)

    def sent(self, count: int, seconds: float) -> None:
        """Learn how long the reader took for a piece."""
        self.piece_bytes = min(
            2 * self.piece_bytes, self._pacer.piece_at(count / max(seconds, 1e-6))
        )


def _piece(rate: float) -> int:
    return max(LEAST_PIECE_BYTES, min(_MOST_PIECE_BYTES, int(rate * _PIECE_S)))

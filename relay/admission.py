"""Who is let in, and how fast bytes may leave."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import Callable

from relay.config import Limits
from shardcast.protocol.limits import KIB, MIB

_BURST_S = 0.05
_SPARE_DESCRIPTORS = 64
"""For listeners, fills and libraries; and a quarter of all for the versions in the store."""


class TokenBucket:
    """Bytes leave at ``rate`` per second, first come first served.

    Every taker books the time its bytes need behind those booked before it and sleeps until its
    turn, so no queue has to be kept and nobody starves.
    """

    def __init__(self, rate_bytes_per_s: int, clock: Callable[[], float]) -> None:
        self._rate = rate_bytes_per_s
        self._clock = clock
        self._booked = clock()

    @property
    def piece_bytes(self) -> int:
        """How much to take at once, so that many takers advance together."""
        return max(16 * KIB, min(4 * MIB, self._rate // 20))

    def book(self, count: int) -> float:
        """Book ``count`` bytes; return the seconds to wait before sending them."""
        now = self._clock()
        self._booked = max(self._booked, now - _BURST_S) + count / self._rate
        return max(0.0, self._booked - now)

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent. A cancelled wait has spent its bytes."""
        wait = self.book(count)
        if wait > 0:
            await asyncio.sleep(wait)


class Admission:
    """Counts connections in all and by client address."""

    def __init__(self, limits: Limits, descriptors: int | None = None) -> None:
        """Count from zero.

        Args:
            limits: Bounds.
            descriptors: How many file descriptors there are; None means asking the system.
        """
        spread = _spread(_descriptors() if descriptors is None else descriptors)
        self._total = 0
        self._refused = 0
        self._by_client: Counter[str] = Counter()
        self._most = min(limits.max_connections, spread[0])
        self._most_refused = min(limits.refused_connections, spread[1])
        # One address never takes all there are, however few descriptors there may be.
        self._most_per_client = min(limits.max_connections_per_client, self._most - self._most // 8)

    @property
    def connections(self) -> int:
        """How many connections are open, refused ones not counted."""
        return self._total

    @property
    def most(self) -> int:
        """How many connections are let in."""
        return self._most

    def enter(self, client: str) -> bool:
        """Count a new connection; False if it is one too many (then it is not counted)."""
        if self._total >= self._most or self._by_client[client] >= self._most_per_client:
            if not self._by_client[client]:
                del self._by_client[client]
            return False
        self._total += 1
        self._by_client[client] += 1
        return True

    def leave(self, client: str) -> None:
        """Forget a connection that was let in."""
        self._total -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def refuse(self) -> bool:
        """Count a connection that will be told so; False if it should just be closed."""
        if self._refused >= self._most_refused:
            return False
        self._refused += 1
        return True

    def refused_left(self) -> None:
        """Forget a connection that was refused."""
        self._refused -= 1


def raise_descriptor_limit() -> None:
    """Take all file descriptors that the system grants without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _descriptors() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _spread(descriptors: int) -> tuple[int, int]:
    """Return how many connections can be let in, and how many more can be refused politely.

    Each connection takes a descriptor, and another one while a blob is sent over it.
    """
    left = descriptors - _SPARE_DESCRIPTORS - descriptors // 4
    refused = max(2, left // 8)
    return max(16, (left - refused) // 2), refused

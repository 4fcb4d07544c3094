"""Who is let in: connections, requests and waiting of one client and of all.

A client is an IPv4 address or an IPv6 network of 64 bits (what one subscriber gets). Behind a
proxy that is trusted it is the address that the proxy names. Nothing here grows with the number
of clients that ever came: what is counted is open at the moment, and rates are remembered of a
bounded number of clients.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from relay.config import Limits
from relay.descriptors import Budget

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MOST_REMEMBERED: Final = 8192
"""Clients whose request rate is remembered; over that the one longest away begins anew."""
_IPV6_CLIENT_BITS: Final = 64
_MOST_FORWARDED: Final = 16
"""Addresses of X-Forwarded-For that are looked at: no chain of trusted proxies is longer."""


def client_of(peer: object) -> str:
    """Return who a connection's peer (as ``getpeername`` gives it) is, or ``""``. Pure."""
    return client_named(str(peer[0])) if isinstance(peer, tuple) and peer else ""


def client_named(address: str) -> str:
    """Return which client has an address; the text itself if it is none."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.IPv6Network((found, _IPV6_CLIENT_BITS), strict=False))
    return str(found)


def is_in(address: str, networks: Iterable[Network]) -> bool:
    """Say whether an address lies in one of the networks. What is no address lies in none."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)


def forwarded_client(values: Sequence[str], trusted: Sequence[Network]) -> str | None:
    """Return the client that trusted proxies name in X-Forwarded-For, None where they name none.

    Each proxy appends whom it got the request from, so the list is read from its end, up to the
    first address that is no trusted proxy: what stands before it anyone may have written.
    """
    entries = [entry.strip() for value in values for entry in value.split(",")]
    for entry in reversed(entries[-_MOST_FORWARDED:]):
        address = entry.removeprefix("[").partition("]")[0] if "[" in entry else entry
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return None
        if not is_in(address, trusted):
            return client_named(address)
    return None


class Quota:
    """Places that clients share; no number of greedy ones keeps another one out.

    A client gets a place while it holds fewer than twice as many as are free (dynamic thresholds,
    Choudhury and Hahne 1998): k greedy clients hold 2 / (2 k + 1) of all each, and half as much
    as one of them stays free.
    """

    def __init__(self, most: int, most_per_client: int) -> None:
        self.most = most
        self._most_per_client = most_per_client
        self._taken = 0
        self._by_client: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return self._taken

    @property
    def clients(self) -> int:
        """How many clients have one."""
        return len(self._by_client)

    def held(self, client: str) -> int:
        """Return how many places a client has."""
        return self._by_client.get(client, 0)

    def enter(self, client: str, *, limited: bool = True) -> bool:
        """Take a place; False if there is none for this client.

        Args:
            client: Who.
            limited: False for who stands for many clients: only the total counts.
        """
        held, free = self._by_client.get(client, 0), self.most - self._taken
        if free <= 0 or (limited and held >= min(self._most_per_client, 2 * free)):
            return False
        self._taken += 1
        self._by_client[client] += 1
        return True

    def leave(self, client: str) -> None:
        """Give a place back."""
        self._taken -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class RequestRate:
    """How many requests a second each client may send, and how many at once after a rest.

    The generic cell rate algorithm: one number a client, the time at which it has used up what it
    sent so far. Bounded: the client longest away is forgotten first.
    """

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._interval_s = 1.0 / per_s
        self._ahead_s = (burst - 1 + 1e-6) * self._interval_s  # sums of floats are not exact
        self._clock = clock
        self._used_until: OrderedDict[str, float] = OrderedDict()

    @property
    def remembered(self) -> int:
        """How many clients are remembered."""
        return len(self._used_until)

    def ask(self, client: str) -> float:
        """Count a request and return 0; or, if it is one too many, the seconds until it is not."""
        now = self._clock()
        used = max(self._used_until.get(client, now), now)
        if used - now > self._ahead_s:
            return used - now - self._ahead_s
        self._used_until[client] = used + self._interval_s
        self._used_until.move_to_end(client)
        while len(self._used_until) > MOST_REMEMBERED:
            self._used_until.popitem(last=False)
        return 0.0


class Admission:
    """What is counted of clients.

    Attributes:
        connections: Open ones, refused ones not counted.
        requests: Being answered.
        waits: Requests that wait for a head.
        rate: Requests a second.
    """

    def __init__(
        self,
        limits: Limits,
        budget: Budget,
        clock: Callable[[], float],
        trusted: Sequence[str] = (),
    ) -> None:
        """Count from zero.

        Args:
            limits: Bounds.
            budget: What the descriptors of this process allow.
            clock: Monotonic seconds.
            trusted: Networks of proxies that are believed whom they name.
        """
        most = min(limits.max_connections, budget.connections)
        self.connections = Quota(most, limits.max_connections_per_client)
        self.requests = Quota(
            min(limits.max_requests, most), min(limits.max_requests_per_client, most)
        )
        # Half at most: waiting costs nothing but places, and whoever waits wants bytes in the end.
        waits = max(1, most // 2)
        self.waits = Quota(min(limits.max_waits, waits), min(limits.max_waits_per_client, waits))
        self.rate = RequestRate(
            limits.requests_per_s_per_client, limits.request_burst_per_client, clock
        )
        self._refused = 0
        self._most_refused = min(limits.refused_connections, budget.refused)
        self._trusted = tuple(ipaddress.ip_network(text, strict=False) for text in trusted)

    def refuse(self) -> bool:
        """Count a connection that will be told so; False if it should just be closed."""
        if self._refused >= self._most_refused:
            return False
        self._refused += 1
        return True

    def refused_left(self) -> None:
        """Forget a connection that was refused."""
        self._refused -= 1

    def is_proxy(self, client: str) -> bool:
        """Say whether a connection's client is a proxy that is trusted."""
        return bool(self._trusted) and is_in(client.partition("/")[0], self._trusted)

    def behind(self, proxy: str, forwarded: Sequence[str]) -> str:
        """Return the client for whom a trusted proxy asks; the proxy itself if it names none."""
        return forwarded_client(forwarded, self._trusted) or proxy

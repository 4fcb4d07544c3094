"""Who has been here lately: for status, bounded, forgotten after a few minutes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardcast.protocol.wire import NODE_HEADER, parse_node

if TYPE_CHECKING:
    from aiohttp import web

    from relay.handlers import Route

MOST: Final = 1000
FORGET_S: Final = 300.0


@dataclass
class _Client:
    address: str
    node: str | None
    agent: str
    requests: int = 0
    seen: float = 0.0
    run: str | None = None


class Clients:
    """Recent clients by address and node id (relays send theirs)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: OrderedDict[tuple[str, str | None], _Client] = OrderedDict()

    def saw(self, request: web.BaseRequest, route: Route) -> None:
        """Note a request."""
        if route.run is None:
            return
        node = parse_node(request.headers.get(NODE_HEADER))
        key = (request.remote or "", node)
        client = self._clients.get(key)
        if client is None:
            agent = request.headers.get("User-Agent", "")[:80]
            client = self._clients[key] = _Client(key[0], node, agent)
            if len(self._clients) > MOST:
                self._clients.popitem(last=False)
        client.requests += 1
        client.seen = self._clock()
        client.run = route.run
        self._clients.move_to_end(key)

    def report(self) -> list[dict[str, object]]:
        """Return who was here, latest first."""
        now = self._clock()
        while self._clients and now - next(iter(self._clients.values())).seen > FORGET_S:
            self._clients.popitem(last=False)
        return [
            {
                "address": client.address,
                "node": client.node,
                "agent": client.agent,
                "run": client.run,
                "requests": client.requests,
                "seen_s": round(now - client.seen, 1),
            }
            for client in reversed(self._clients.values())
        ]

"""Siblings: relays of one level that fetch each blob once between them.

For each blob, rendezvous hashing over node ids names one owner among the live siblings and this
relay. The owner reads from a parent, the others from the owner. Node ids are persisted and learnt
from the siblings' answers, so that all agree whatever URLs they know each other by.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from shardcast.asyncget import HttpSession
from shardcast.connection import parse_endpoint
from shardcast.errors import ShardcastError
from shardcast.protocol.wire import NODE_HEADER, parse_node

log = logging.getLogger("relay.siblings")

POLL_S: Final = 1.0
POLL_FIRST_S: Final = 0.25
"""At the start, until all were seen once."""
SETTLE_S: Final = 2.0
"""How long prefetching waits for siblings at the start: what is fetched alone is fetched twice."""
ANSWER_S: Final = 2.0
ANSWER_BYTES: Final = 64 * 1024
"""An answer of ``/healthz`` is a line; more is another kind of server."""
SUSPECT_S: Final = 5.0
"""How long a sibling that failed a request is not asked for blobs."""


def owner_of(digest: str, nodes: Collection[str]) -> str:
    """Return the node that owns a blob: the highest hash of node and blob together.

    Rendezvous hashing (Thaler and Ravishankar 1996): when a node comes or goes, only its own
    blobs change hands.
    """
    return max(nodes, key=lambda node: (_score(node, digest), node))


def _score(node: str, digest: str) -> bytes:
    return hashlib.blake2b(f"{node}/{digest}".encode("ascii"), digest_size=16).digest()


@dataclass
class _Sibling:
    node: str | None = None
    live: bool = False
    suspect_until: float = 0.0


class Siblings:
    """Who the siblings are and which of them are alive. Thread-safe to read.

    Args:
        urls: Their base URLs (this relay's own may be among them).
        node: This relay's node id.
        clock: Monotonic seconds.
    """

    def __init__(
        self, urls: Collection[str], node: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._clock = clock
        self._siblings = {url.rstrip("/"): _Sibling() for url in urls}
        self._all_live = asyncio.Event()

    @property
    def urls(self) -> list[str]:
        """Their base URLs."""
        return list(self._siblings)

    def live(self) -> dict[str, str]:
        """Return the URL of each live sibling by its node id."""
        now = self._clock()
        return {
            s.node: url
            for url, s in self._siblings.items()
            if s.node is not None and s.node != self._node and s.live and s.suspect_until <= now
        }

    def owner(self, digest: str) -> str | None:
        """Return the URL of the sibling that owns a blob, or None: this relay does."""
        live = self.live()
        return live.get(owner_of(digest, [self._node, *live]))

    def is_live(self, url: str) -> bool:
        """Say whether a sibling answers."""
        sibling = self._siblings.get(url)
        return sibling is not None and sibling.live

    def suspect(self, url: str) -> None:
        """A request to a sibling failed: leave it alone for a moment."""
        sibling = self._siblings.get(url)
        if sibling is not None:
            sibling.suspect_until = self._clock() + SUSPECT_S

    def saw(self, url: str, node: str | None, *, live: bool) -> None:
        """Take in what a poll found."""
        sibling = self._siblings.get(url)
        if sibling is None:
            return
        if node is not None:
            sibling.node = node
        if live != sibling.live:
            log.info("sibling %s is %s", url, "live" if live else "gone")
            if live:
                sibling.suspect_until = 0.0
        sibling.live = live

    def report(self) -> list[dict[str, object]]:
        """Return what is known of each, for status."""
        return [{"url": url, "node": s.node, "live": s.live} for url, s in self._siblings.items()]

    async def settled(self) -> None:
        """Wait until every sibling is live, for a moment at most: levels start together."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._all_live.wait()

    async def watch(self, session: HttpSession) -> None:
        """Keep asking all of them until cancelled."""
        began = self._clock()
        while True:
            await asyncio.gather(*(self._ask(session, url) for url in self._siblings))
            if all(sibling.live for sibling in self._siblings.values()):
                self._all_live.set()
            early = not self._all_live.is_set() and self._clock() - began < SETTLE_S
            await asyncio.sleep(POLL_FIRST_S if early else POLL_S)

    async def _ask(self, session: HttpSession, url: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await session.get(
                    parse_endpoint(url), "/healthz", limit=ANSWER_BYTES, timeout_s=ANSWER_S
                )
        except (ShardcastError, TimeoutError):
            self.saw(url, None, live=False)
            return
        node = parse_node(answer.headers.get(NODE_HEADER.lower()))
        self.saw(url, node, live=answer.status == 200 and node is not None)

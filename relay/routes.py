"""Routes: which servers a fill asks, in which order, and what is believed of them, run by run.

A wrong blob that came whole from one server bans that server for that run; other runs go on asking
it. What it sends is verified anyway: the ban saves the time, and names it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from relay.config import RelayConfig
from relay.fill import Choice, Fill
from relay.metrics import Metrics
from relay.parents import Parents
from relay.siblings import Siblings
from shardcast.errors import NetworkError, SourceStatusError, StallError
from shardcast.fetch import BlobSource, Fetched
from shardcast.protocol.limits import KIB
from shardcast.protocol.wire import NODE_HEADER, SIBLING_HEADER
from shardcast.selector import Selector

log = logging.getLogger("relay.routes")

ROUNDS: Final = 6
"""How often one fill asks all its sources before it fails."""
PAUSE_CAP_S: Final = 3.0
OWNER_PATIENCE_S: Final = 1.5
"""How long a fill waits for an owner that lives but does not know the blob yet: siblings hear of
a run or version at different moments, and an owner looks for unknown ones once a second."""
OWNER_PAUSE_S: Final = 0.15
OWNER_IGNORANT_S: Final = 10.0
"""An owner that did not learn of a blob within that is not asked for so long, for that run."""


@dataclass(frozen=True, slots=True)
class Ban:
    """Why a server is left alone for a run.

    Attributes:
        run: The run.
        url: The server.
        until: When the ban ends (monotonic).
        reason: What it did.
    """

    run: str
    url: str
    until: float
    reason: str


class Sources:
    """All servers that blobs come from, and the route of each fill through them. Thread-safe."""

    def __init__(
        self,
        config: RelayConfig,
        node: str,
        parents: Parents,
        siblings: Siblings | None,
        metrics: Metrics | None = None,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parents = parents
        self.siblings = siblings
        self.clock = clock
        self.config = config
        self.rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        me = {NODE_HEADER: node}
        aside = {**me, SIBLING_HEADER: node}
        # A sibling is near and only saves the parent work: no long patience with it.
        brisk = replace(
            config.net,
            connect_timeout_s=min(2.0, config.net.connect_timeout_s),
            read_timeout_s=min(5.0, config.net.read_timeout_s),
            header_timeout_s=min(5.0, config.net.header_timeout_s),
            minimum_rate_bytes_per_s=max(256.0 * KIB, config.net.minimum_rate_bytes_per_s),
            rate_window_s=min(3.0, config.net.rate_window_s),
        )
        self.direct = {url: BlobSource(url, config.net, headers=me) for url in parents.urls}
        self.aside = {url: BlobSource(url, brisk, headers=aside) for url in parents.urls}
        urls = siblings.urls if siblings is not None else []
        self.lateral = {url: BlobSource(url, brisk, headers=aside) for url in urls}
        self._metrics = metrics
        self._selectors: dict[str, Selector[str]] = {}
        self._ignorant: dict[tuple[str, str], float] = {}
        self._bans: dict[tuple[str, str], Ban] = {}

    def selector(self, run: str) -> Selector[str]:
        """Return what is believed of the parents and siblings for one run."""
        found = self._selectors.get(run)
        if found is None:
            keys = {**self.direct, **self.lateral}
            found = Selector(
                keys,
                clock=self.clock,
                rng=self.rng,
                # No longer than the pauses of a route: else a fill gives up what it has before
                # its only parent may be asked for the rest.
                rest_first_s=self.config.net.backoff_first_s * 2,
                rest_cap_s=self.config.net.backoff_cap_s,
            )
            found = self._selectors.setdefault(run, found)
        return found

    def route(
        self, run: str, digest: str, *, document: bool, for_sibling: bool, rounds: int = ROUNDS
    ) -> SourceRoute:
        """Return the order of sources for one fill.

        Args:
            run: The run.
            digest: The blob.
            document: Documents come straight from the parent: they are small, and all wait.
            for_sibling: A sibling asks for it, so it must come from a parent.
            rounds: How often all sources are asked.
        """
        owner = None
        if self.siblings is not None and not document and not for_sibling:
            owner = self.siblings.owner(digest)
            if owner is not None and self._ignorant.get((run, owner), 0.0) > self.clock():
                owner = None
        return SourceRoute(self, run, owner, aside=not for_sibling, rounds=rounds)

    def ignorant(self, run: str, owner: str) -> None:
        """Note that a sibling does not follow a run: it is not asked for it for a while."""
        log.info("run %s: sibling %s does not know what it owns: not asked for now", run, owner)
        self._ignorant[run, owner] = self.clock() + OWNER_IGNORANT_S

    def rate(self, url: str) -> float | None:
        """Return the best known bandwidth of a parent, bytes per second."""
        rates = [s.rating(url).bandwidth for s in list(self._selectors.values())]
        return max((rate for rate in rates if rate is not None), default=None)

    def ban(self, run: str, url: str, reason: str) -> None:
        """Leave a server alone for a run, for a while."""
        seconds = self.config.net.ban_s
        log.error("run %s: %s is not asked for %.0f s: %s", run, url, seconds, reason)
        if self._metrics is not None:
            self._metrics.bans.inc()
        self.selector(run).banned(url, seconds)
        self._bans[run, url] = Ban(run, url, self.clock() + seconds, reason)

    def bans(self, url: str) -> list[Ban]:
        """Return for which runs a server is left alone now, and why."""
        now = self.clock()
        return [
            ban
            for ban in list(self._bans.values())
            if ban.url == url and ban.until > now and self.selector(ban.run).rating(url).banned
        ]

    def alive(self, url: str) -> None:
        """Note that a parent answers again: it is asked at once."""
        for selector in list(self._selectors.values()):
            selector.alive(url)

    def leads_up(self, fill: Fill) -> bool:
        """Say whether it makes sense to wait for the server that a fill waits for."""
        url, lateral = fill.source, fill.lateral
        if url is None:
            return True
        if lateral and self.siblings is not None and url in self.lateral:
            return self.siblings.is_live(url)
        return lateral or url in self.parents.nearer

    def close(self) -> None:
        """End everything in flight and close all connections. Blocks for a moment."""
        for source in (*self.direct.values(), *self.aside.values(), *self.lateral.values()):
            source.close()


class SourceRoute:
    """The route of one fill: the owner among the siblings, then parents, round after round.

    Its clock starts with the first question: until then the fill waits for a thread.
    """

    def __init__(
        self, sources: Sources, run: str, owner: str | None, *, aside: bool, rounds: int = ROUNDS
    ) -> None:
        self._sources = sources
        self._run = run
        self._selector = sources.selector(run)
        self._owner = owner
        self._owner_until = float("inf")
        self._owner_pause = False
        self._aside = aside
        self._tried: set[str] = set()
        self._rounds = 0
        self._most_rounds = rounds
        self._started: float | None = None
        self._received = 0

    @property
    def lateral(self) -> bool:
        """Whether it goes on at a sibling."""
        return self._owner is not None

    def next(self, received: int) -> Choice | float | None:
        """Return a source, or seconds to wait, or None."""
        sources = self._sources
        if self._started is None or received > self._received:
            self._rounds, self._started = 0, sources.clock()
        self._received = received
        if self._owner is not None:
            if self._owner_pause:
                self._owner_pause = False
                return sources.rng.uniform(OWNER_PAUSE_S / 2, OWNER_PAUSE_S)
            owner, self._owner = self._owner, None
            if not self._selector.rating(owner).banned:
                self._selector.started(owner)
                return Choice(sources.lateral[owner], lateral=True)
        nearer = sources.parents.nearer
        distant = [url for url in sources.direct if url not in nearer]
        siblings = [url for url in sources.lateral if url not in sources.direct]
        url = self._selector.pick([*self._tried, *distant, *siblings])
        if url is not None:
            self._tried.add(url)
            self._selector.started(url)
            return Choice(sources.direct[url], lateral=False)
        if self._aside:
            for url in distant:
                if url not in self._tried and not self._selector.rating(url).banned:
                    self._tried.add(url)
                    self._selector.started(url)
                    return Choice(sources.aside[url], lateral=True)
        return self._pause()

    def _pause(self) -> float | None:
        sources = self._sources
        self._rounds += 1
        now = sources.clock()
        spent = now - (now if self._started is None else self._started)
        if self._rounds >= self._most_rounds or spent > sources.config.limits.fill_deadline_s:
            return None
        asked = sources.parents.nearer if sources.parents.nearer else sources.direct
        if all(self._selector.rating(url).banned for url in asked):
            return None
        if not sources.parents.nearer and self._rounds > 1:
            return None
        self._tried.clear()
        cap = min(sources.config.net.backoff_first_s * 2.0**self._rounds, PAUSE_CAP_S)
        return sources.rng.uniform(0.0, cap)

    def renew(self) -> None:
        """Ask all sources again for as many rounds; its time goes on."""
        self._rounds = 0
        self._tried.clear()

    def succeeded(self, choice: Choice, fetched: Fetched) -> None:
        """Rate the source."""
        self._selector.succeeded(
            choice.source.url, fetched.bytes, fetched.seconds, rate=not fetched.from_fill
        )

    def failed(self, choice: Choice, error: NetworkError) -> None:
        """Try another; a source that merely has not got the blob yet is not to blame."""
        url = choice.source.url
        if isinstance(error, SourceStatusError) and error.status in (404, 429, 503):
            longest = min(self._sources.config.net.retry_after_cap_s, PAUSE_CAP_S)
            rest = 0.0 if error.status == 404 else min(error.retry_after or 0.2, longest)
            self._selector.dropped(url, rest_s=0.0 if choice.lateral else rest)
            if error.status == 404 and url in self._sources.lateral:
                self._unknown_to(url)
            return
        self._selector.failed(url)
        if choice.lateral and self._sources.siblings is not None:
            self._sources.siblings.suspect(url)
        if isinstance(error, StallError):
            log.warning("%s is too slow or silent: %s", url, error)

    def _unknown_to(self, owner: str) -> None:
        """Ask the owner again in a moment: the parent would send the blob twice."""
        now = self._sources.clock()
        self._owner_until = min(self._owner_until, now + OWNER_PATIENCE_S)
        if now < self._owner_until:
            self._owner, self._owner_pause = owner, True
        else:
            self._sources.ignorant(self._run, owner)

    def wrong(self, choice: Choice, *, stitched: bool) -> None:
        """Ban who is certainly to blame."""
        url = choice.source.url
        if stitched:
            self._selector.dropped(url)
            return
        self._selector.failed(url)
        self._sources.ban(self._run, url, "it sent a wrong blob")

    def dropped(self, choice: Choice) -> None:
        """Nothing is known."""
        self._selector.dropped(choice.source.url)

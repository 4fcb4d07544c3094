"""Parents: how far they are from the origin, which of them may be asked, and in which order.

Loop rule: a relay's depth is the smallest depth among its live parents plus one, and it fills
only from parents of a strictly smaller depth than its own. Every other parent (one that is
deeper, not live, or not heard of yet) is asked as a sibling would be: for what it has on disk or
is fetching from its own parent. So no ring of relays can wait for itself.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from relay.config import RelayConfig
from relay.fill import Choice
from relay.siblings import Siblings
from shardcast.errors import NetworkError, SourceStatusError, StallError
from shardcast.fetch import BlobSource, Fetched
from shardcast.protocol.limits import KIB, MAX_DEPTH
from shardcast.protocol.wire import NODE_HEADER, SIBLING_HEADER
from shardcast.selector import Selector
from shardcast.upstream import HeadWatcher

log = logging.getLogger("relay.parents")

ROUNDS: Final = 6
"""How often one fill asks all its sources before it fails."""
PAUSE_CAP_S: Final = 3.0
OWNER_PATIENCE_S: Final = 1.5
"""How long a fill waits for an owner that lives but does not know the blob yet: siblings hear of
a run or version at different moments, and an owner looks for unknown ones once a second."""
OWNER_PAUSE_S: Final = 0.15
OWNER_IGNORANT_S: Final = 10.0
"""An owner that did not learn of a blob within that is not asked for so long, for that run."""


class Parents:
    """The relay's place in the tree. ``update`` runs on the event loop, the rest anywhere."""

    def __init__(self, config: RelayConfig, node: str) -> None:
        self.urls = [url.rstrip("/") for url in config.parents]
        self.watchers: dict[str, HeadWatcher] = {}
        self.depth = MAX_DEPTH if self.urls else 0
        self.nearer: frozenset[str] = frozenset()
        self._node = node
        self._told: str | None = None

    def report(self) -> list[dict[str, object]]:
        """Return what is known of each parent, for status."""
        found = []
        for url in self.urls:
            depth, live, node, error = self._known(url)
            found.append(
                {
                    "url": url,
                    "live": live,
                    "depth": depth,
                    "node": node,
                    "used": url in self.nearer,
                    "error": error,
                }
            )
        return found

    def live(self) -> bool:
        """Say whether a parent nearer to the origin answers."""
        return bool(self.nearer)

    def update(self) -> bool:
        """Look at what the parents said last; return whether this relay's place changed."""
        known = {url: self._known(url) for url in self.urls}
        depths = {
            url: depth
            for url, (depth, live, node, _error) in known.items()
            if live and depth is not None and depth < MAX_DEPTH and node != self._node
        }
        depth = min(min(depths.values(), default=MAX_DEPTH) + 1, MAX_DEPTH)
        nearer = frozenset(url for url, far in depths.items() if far < depth)
        changed = depth != self.depth or nearer != self.nearer
        self.depth, self.nearer = depth, nearer
        if changed:
            self._tell()
        return changed

    def _tell(self) -> None:
        if self.nearer:
            text = f"depth {self.depth}, filling from {', '.join(sorted(self.nearer))}"
            level = logging.INFO
        else:
            text = (
                "no parent leads to an origin (dead, deeper than 16, or a loop of parents): "
                "serving what is here"
            )
            level = logging.WARNING
        if text != self._told:
            self._told = text
            log.log(level, "%s", text)

    def _known(self, url: str) -> tuple[int | None, bool, str | None, str | None]:
        depth: int | None = None
        live, node, error = False, None, None
        for watcher in list(self.watchers.values()):
            state = watcher.states.get(url)
            if state is None:
                continue
            live = live or state.live
            node = state.node or node
            error = str(state.error) if state.error is not None and not state.live else error
            if state.live and state.depth is not None:
                depth = state.depth if depth is None else min(depth, state.depth)
        return depth, live, node, None if live else error


class Sources:
    """All servers that blobs come from, and the route of each fill through them. Thread-safe."""

    def __init__(
        self,
        config: RelayConfig,
        node: str,
        parents: Parents,
        siblings: Siblings | None,
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
        self._selectors: dict[str, Selector[str]] = {}
        self._ignorant: dict[tuple[str, str], float] = {}

    def selector(self, run: str) -> Selector[str]:
        """Return what is believed of the parents and siblings for one run."""
        found = self._selectors.get(run)
        if found is None:
            keys = {**self.direct, **self.lateral}
            found = Selector(keys, clock=self.clock, rng=self.rng)
            found = self._selectors.setdefault(run, found)
        return found

    def route(self, run: str, digest: str, *, document: bool, for_sibling: bool) -> SourceRoute:
        """Return the order of sources for one fill.

        Args:
            run: The run.
            digest: The blob.
            document: Documents come straight from the parent: they are small, and all wait.
            for_sibling: A sibling asks for it, so it must come from a parent.
        """
        owner = None
        if self.siblings is not None and not document and not for_sibling:
            owner = self.siblings.owner(digest)
            if owner is not None and self._ignorant.get((run, owner), 0.0) > self.clock():
                owner = None
        return SourceRoute(self, run, owner, aside=not for_sibling)

    def ignorant(self, run: str, owner: str) -> None:
        """Note that a sibling does not follow a run: it is not asked for it for a while."""
        log.info("run %s: sibling %s does not know what it owns: not asked for now", run, owner)
        self._ignorant[run, owner] = self.clock() + OWNER_IGNORANT_S

    def rate(self, url: str) -> float | None:
        """Return the best known bandwidth of a parent, bytes per second."""
        rates = [s.rating(url).bandwidth for s in list(self._selectors.values())]
        return max((rate for rate in rates if rate is not None), default=None)

    def banned(self, url: str) -> bool:
        """Say whether a parent is left alone, for some run, because it sent a wrong blob."""
        return any(s.rating(url).banned for s in list(self._selectors.values()))

    def close(self) -> None:
        """End everything in flight and close all connections. Blocks for a moment."""
        for source in (*self.direct.values(), *self.aside.values(), *self.lateral.values()):
            source.close()


class SourceRoute:
    """The route of one fill: the owner among the siblings, then parents, round after round.

    Attributes:
        lateral: Whether it begins at a sibling.
    """

    def __init__(self, sources: Sources, run: str, owner: str | None, *, aside: bool) -> None:
        self.lateral = owner is not None
        self._sources = sources
        self._run = run
        self._selector = sources.selector(run)
        self._owner = owner
        self._owner_until = float("inf")
        self._owner_pause = False
        self._aside = aside
        self._tried: set[str] = set()
        self._rounds = 0
        self._started = sources.clock()
        self._received = 0

    def next(self, received: int) -> Choice | float | None:
        """Return a source, or seconds to wait, or None."""
        sources = self._sources
        if received > self._received:
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
        url = self._selector.pick([*self._tried, *distant, *sources.lateral])
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
        spent = sources.clock() - self._started
        if self._rounds >= ROUNDS or spent > sources.config.limits.fill_deadline_s:
            return None
        asked = sources.parents.nearer if sources.parents.nearer else sources.direct
        if all(self._selector.rating(url).banned for url in asked):
            return None
        if not sources.parents.nearer and self._rounds > 1:
            return None
        self._tried.clear()
        cap = min(sources.config.net.backoff_first_s * 2.0**self._rounds, PAUSE_CAP_S)
        return sources.rng.uniform(cap / 2, cap)

    def succeeded(self, choice: Choice, fetched: Fetched) -> None:
        """Rate the source."""
        self._selector.succeeded(
            choice.source.url, fetched.bytes, fetched.seconds, rate=not fetched.from_fill
        )

    def failed(self, choice: Choice, error: NetworkError) -> None:
        """Try another; a source that merely has not got the blob yet is not to blame."""
        url = choice.source.url
        if isinstance(error, SourceStatusError) and error.status in (404, 429, 503):
            rest = 0.0 if error.status == 404 else min(error.retry_after or 0.2, PAUSE_CAP_S)
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
        seconds = self._sources.config.net.ban_s
        log.error("%s sent a wrong blob: not asked again for %.0f s for this run", url, seconds)
        self._selector.failed(url)
        self._selector.banned(url, seconds)

    def dropped(self, choice: Choice) -> None:
        """Nothing is known."""
        self._selector.dropped(choice.source.url)

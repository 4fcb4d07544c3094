"""Parents: how far they are from the origin, and which of them may be asked.

Loop rule: a relay's depth is the smallest depth among its live parents plus one, and it fills
only from parents of a strictly smaller depth than its own. Every other parent (one that is
deeper, not live, or not heard of yet) is asked as a sibling would be: for what it has on disk or
is fetching from its own parent. So no ring of relays can wait for itself.

Each relay also tells the nodes between the origin and itself. A parent that gets its heads through
this relay leads to no origin, whatever its depth: so the depths of a ring that has lost its origin
do not count up, each relay sees at once that there is none (as BGP does, RFC 4271 section 9.1.2).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from relay.config import RelayConfig
from shardcast.protocol.limits import MAX_DEPTH
from shardcast.watcher import HeadWatcher, UpstreamState

log = logging.getLogger("relay.parents")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a relay stands in its tree, as it tells its children.

    Attributes:
        depth: Hops to the origin; 16: none is known.
        path: Node ids from the origin's side down to this relay.
    """

    depth: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """What all runs together tell of one parent."""

    live: bool = False
    loops: bool = False
    depth: int | None = None
    path: tuple[str, ...] = ()
    node: str | None = None
    error: str | None = None


class Parents:
    """The relay's place in the tree. ``update`` runs on the event loop, the rest anywhere.

    Attributes:
        urls: Base URLs, without a slash at the end.
        watchers: Who watches the heads of each run.
        place: Where this relay stands.
        nearer: URLs of the parents that are nearer to the origin.
    """

    def __init__(self, config: RelayConfig, node: str) -> None:
        self.urls = [url.rstrip("/") for url in config.parents]
        self.watchers: dict[str, HeadWatcher] = {}
        self.place = Place(MAX_DEPTH if self.urls else 0, (node,))
        self.nearer: frozenset[str] = frozenset()
        self._node = node
        self._told: str | None = None
        self._assumed = False

    def assume(self, place: Place) -> None:
        """Stand where the relay before stood, until every parent was heard of, or one is live."""
        self.place = place
        self._assumed = True

    @property
    def depth(self) -> int:
        """Hops to the origin."""
        return self.place.depth

    def report(self) -> list[dict[str, object]]:
        """Return what is known of each parent, for status."""
        found: list[dict[str, object]] = []
        for url in self.urls:
            known = self._known(url)
            found.append(
                {
                    "url": url,
                    "live": known.live,
                    "depth": known.depth,
                    "node": known.node,
                    "used": url in self.nearer,
                    "loop": known.loops,
                    "error": known.error,
                }
            )
        return found

    def live(self) -> bool:
        """Say whether a parent nearer to the origin answers."""
        return bool(self.nearer)

    def update(self) -> bool:
        """Look at what the parents said last; return whether this relay's place changed."""
        usable: dict[str, tuple[int, tuple[str, ...]]] = {}
        for url in self.urls:
            known = self._known(url)
            if known.live and known.depth is not None and known.depth < MAX_DEPTH:
                usable[url] = known.depth, known.path
        if self._assumed and not usable and not all(map(self._heard_of, self.urls)):
            return False
        self._assumed = False
        near = min((depth for depth, _path in usable.values()), default=MAX_DEPTH)
        depth = min(near + 1, MAX_DEPTH)
        nearer = frozenset(url for url, (far, _path) in usable.items() if far < depth)
        above = next((path for far, path in usable.values() if far == near), ())
        place = Place(depth, (*above, self._node)[-MAX_DEPTH:])
        changed = place != self.place or nearer != self.nearer
        self.place, self.nearer = place, nearer
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

    def _known(self, url: str) -> _Known:
        states = [
            state
            for watcher in list(self.watchers.values())
            if (state := watcher.states.get(url)) is not None
        ]
        live = any(state.live for state in states)
        errors = [str(s.error) for s in states if s.error is not None and not s.live]
        nearest = min(
            (state for state in states if self._leads_up(state)),
            key=lambda state: state.depth or 0,
            default=None,
        )
        return _Known(
            live=live,
            loops=nearest is None and any(self._is_mine(state) for state in states),
            depth=None if nearest is None else nearest.depth,
            path=() if nearest is None else nearest.path,
            node=next((state.node for state in states if state.node), None),
            error=None if live or not errors else errors[-1],
        )

    def _heard_of(self, url: str) -> bool:
        known = self._known(url)
        return known.live or known.error is not None

    def _leads_up(self, state: UpstreamState) -> bool:
        return state.live and state.depth is not None and not self._is_mine(state)

    def _is_mine(self, state: UpstreamState) -> bool:
        """Say whether a parent is this relay, or gets its heads through it."""
        return state.node == self._node or self._node in state.path

"""What a worker has spent since it last reached a version, and whether a newer one is worth a switch.

The rule is pure (``protocol.plan.worth_switching``); this counts what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardcast.plan_work import Tally
from shardcast.protocol.plan import worth_switching
from shardcast.protocol.route import Route
from shardcast.pulling import FetchPool
from shardcast.ways import Wanted


@dataclass(frozen=True, slots=True)
class _Flight:
    """A version on its way."""

    wanted: Wanted
    tally: Tally
    pools: Sequence[FetchPool]

    @property
    def unverified_bytes(self) -> int:
        """Bytes of shards that are half here: no newer version can use them."""
        return self.pools[-1].unverified_bytes if self.pools else 0

    @property
    def carried_bytes(self) -> int:
        """What the network carried for it so far."""
        received = sum(pool.received_bytes for pool in self.pools) + self.unverified_bytes
        return max(self.tally.fetched_bytes, received)


class Effort:
    """Counts for one worker. One version is on its way at a time; any thread may ask."""

    def __init__(self, ahead: Callable[[Wanted], Route]) -> None:
        """Count from nothing.

        Args:
            ahead: Returns the cheapest route to a version, with what is on disk now.
        """
        self._ahead = ahead
        self._spent_bytes = 0
        self._wasted_bytes = 0
        self._flight: _Flight | None = None

    @property
    def under_way(self) -> bool:
        """Whether shards of a version are being fetched."""
        return self._flight is not None

    @contextmanager
    def on(self, wanted: Wanted, tally: Tally, pools: Sequence[FetchPool]) -> Iterator[None]:
        """Count what a version costs while the block runs; reaching it starts the count anew.

        Args:
            wanted: The version.
            tally: Its counts.
            pools: What fetches it, as they are opened.
        """
        self._flight = flight = _Flight(wanted, tally, pools)
        try:
            yield
        except BaseException:
            self._flight = None
            self._spent_bytes += flight.carried_bytes
            raise
        self._flight = None
        self._spent_bytes = self._wasted_bytes = 0

    def switch_to(self, newer: Wanted) -> bool:
        """Decide whether to drop the version on its way for a newer one; if so, count the waste.

        Never where the cheapest route to the newer one leads over it: what is half here would come
        again, and nothing would be gained.

        Raises:
            StateError: If what is remembered of a version on disk is damaged.
        """
        flight = self._flight
        if flight is None:
            return False  # it was reached, or failed, meanwhile
        route = self._ahead(newer)
        if route.leads_over(flight.wanted.version.number):
            return False
        left = max(self._ahead(flight.wanted).bytes - flight.unverified_bytes, 0)
        fresh = route.bytes
        worth = worth_switching(
            left,
            fresh,
            wasted_bytes=self._wasted_bytes,
            spent_bytes=self._spent_bytes + flight.carried_bytes,
        )
        if worth:
            self._wasted_bytes += max(fresh - left, 0)
        return worth

"""What a worker has spent since it last reached a version, and whether a newer one is worth a switch.

The rule is pure (``protocol.plan.worth_switching``); this counts what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardcast.plan_work import Tally
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Holding, plan_version, worth_switching
from shardcast.pulling import FetchPool
from shardcast.store.run import RunStore


@dataclass(frozen=True, slots=True)
class _Flight:
    """A version on its way."""

    version: Version
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

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._spent_bytes = 0
        self._wasted_bytes = 0
        self._flight: _Flight | None = None

    @property
    def under_way(self) -> bool:
        """Whether shards of a version are being fetched."""
        return self._flight is not None

    @contextmanager
    def on(self, version: Version, tally: Tally, pools: Sequence[FetchPool]) -> Iterator[None]:
        """Count what a version costs while the block runs; reaching it starts the count anew.

        Args:
            version: The version.
            tally: Its counts.
            pools: What fetches it, as they are opened.
        """
        self._flight = flight = _Flight(version, tally, pools)
        try:
            yield
        except BaseException:
            self._flight = None
            self._spent_bytes += flight.carried_bytes
            raise
        self._flight = None
        self._spent_bytes = self._wasted_bytes = 0

    def switch_to(self, newer: Version) -> bool:
        """Decide whether to drop the version on its way for a newer one; if so, count the waste.

        Raises:
            StateError: If what is remembered of a version on disk is damaged.
        """
        flight = self._flight
        if flight is None:
            return False  # it was reached, or failed, meanwhile
        left = max(self._bytes_for(flight.version) - flight.unverified_bytes, 0)
        fresh = self._bytes_for(newer)
        worth = worth_switching(
            left,
            fresh,
            wasted_bytes=self._wasted_bytes,
            spent_bytes=self._spent_bytes + flight.carried_bytes,
        )
        if worth:
            self._wasted_bytes += max(fresh - left, 0)
        return worth

    def _bytes_for(self, wanted: Version) -> int:
        """Return what the network must still carry for a version, with what is on disk now."""
        done: frozenset[int] = frozenset()
        others: list[Holding] = []
        for number in [*self._store.committed(), *self._store.staged()]:
            stored = self._store.stored(number)
            if stored is None:
                continue
            if number == wanted.number:
                done = stored.present()
            else:
                others.append(Holding(stored.version, stored.present()))
        return plan_version(wanted, done, others).fetch_bytes

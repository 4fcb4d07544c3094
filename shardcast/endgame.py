"""The end of a pull: which request lags, by how much, and what a second one may cost. Pure.

When threads and sources are idle, a request that is silent, or would last much longer than
another source would need, is raced by a second one for the rest of its blob. Whichever is whole
first wins, and the other is cancelled at once: its bytes came twice. The budget bounds them before
they come, so the share that is promised is never exceeded; where it does not suffice, the slow
request is cancelled first and its blob continued elsewhere, which costs no byte and gains less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardcast.config import NetConfig
from shardcast.flights import Flight
from shardcast.selector import Rating

_PACE_S: Final = 0.5
"""Over how long the recent rate of a request is measured at least."""

_SOON_S: Final = 0.1
"""Bytes are not believed to have come in less: threads look no more often."""


class HedgeBudget:
    """Bytes that may come twice: a share of those that are pulled.

    Attributes:
        pulled: Bytes of all blobs so far.
        wasted: Bytes that came twice.
        reserved: Bytes that may yet, by races that go on.
    """

    def __init__(self, share: float) -> None:
        """Begin with nothing pulled, so nothing to waste."""
        self._share = share
        self.pulled = 0
        self.wasted = 0
        self.reserved = 0

    def take(self, most: int) -> bool:
        """Reserve the most that a race can waste, if there is room for it."""
        if self.wasted + self.reserved + most > self._share * self.pulled:
            return False
        self.reserved += most
        return True

    def settle(self, reserved: int, wasted: int) -> None:
        """A race is over: give back what it had reserved, count what it wasted."""
        self.reserved -= reserved
        self.wasted += wasted


def too_slow(ratings: Mapping[str, Rating], size: int, left: int, config: NetConfig) -> set[str]:
    """Return the sources that would still be at one blob when all others have brought the rest.

    A request there would only be overtaken. Sources that are about as fast as the best one are
    never too slow, nor are those that were never measured.

    Args:
        ratings: What is believed of each source.
        size: Bytes of the blob.
        left: Bytes of all that is not here yet, this blob included.
        config: Bounds.
    """
    live = {url: r for url, r in ratings.items() if not r.failures and not r.banned}
    best = max((rating.expected for rating in live.values()), default=0.0)
    slow = {
        url: rating
        for url, rating in live.items()
        if rating.expected * config.overtake_factor < best
    }
    if not slow:
        return set()
    rest_s = left / sum(rating.expected for rating in live.values())
    return {
        url
        for url, rating in slow.items()
        if size * (rating.in_flight + 1) / rating.expected > rest_s + config.hedge_s
    }


def look(flight: Flight, now: float) -> bool:
    """Note how far a flight is; return whether it has come on since it was last looked at."""
    transfer = flight.transfer
    if transfer is None:
        return False
    offset = transfer.offset
    if offset < flight.seen_offset:  # it began anew
        flight.start_offset = flight.seen_offset = flight.mark_offset = 0
        flight.mark_at = now
    if offset <= flight.start_offset:
        flight.first_at = flight.mark_at = now
    elif now - flight.mark_at >= _PACE_S:
        flight.recent = (offset - flight.mark_offset) / (now - flight.mark_at)
        flight.mark_offset, flight.mark_at = offset, now
    if offset <= flight.seen_offset:
        return False
    flight.seen_offset, flight.seen_at = offset, now
    return True


def pace(flight: Flight, now: float) -> float:
    """Return the bytes per second of a flight: those of a moment ago, else since they began."""
    return flight.recent or max(flight.got, 0) / max(now - flight.first_at, _SOON_S)


def silence(flight: Flight, now: float, config: NetConfig) -> float | None:
    """Return for how long a flight has brought nothing, None while that is no wonder."""
    silent = now - flight.seen_at
    return silent if silent >= config.silent_s else None


def lag(flight: Flight, there: float, now: float, config: NetConfig) -> float | None:
    """Return by how many seconds a flight is too slow, None if that is not known.

    Args:
        flight: The flight.
        there: Bytes per second that another source would give, 0 where that was never measured.
        now: The time.
        config: Bounds.
    """
    silent = silence(flight, now, config)
    if silent is not None:
        return silent
    transfer = flight.transfer
    if transfer is None or transfer.total is None or flight.got <= 0 or there <= 0:
        return None
    left = transfer.total - transfer.offset
    return left / pace(flight, now) - config.overtake_factor * left / there

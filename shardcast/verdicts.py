"""What a source's answers say about it: what the selector learns, and whom a message names. Pure.

404, 429 and 503 are about one blob, and say nothing bad of their source unless nothing else comes
from it. A wrong blob that came whole from one source bans it for this run; one that several had a
part in bans nobody. A request that was cancelled because another was faster is no failure: its
source counts for as fast as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from shardcast.config import NetConfig
from shardcast.errors import (
    IntegrityError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    said_of,
)
from shardcast.fetch import Fetched
from shardcast.flights import Flight, Notice
from shardcast.selector import Selector

BUSY: Final = frozenset({429, 503})
"""Statuses of a source that is well, and has no time now."""

_BUSY_IN_ROW: Final = 3
"""So many refusals in a row concern the source, not the blob."""

_BUSY_REST_S: Final = 1.0
"""Longest rest of a source that is busy and does not say for how long."""


class Verdicts:
    """Judges the sources of one pull. Not thread-safe: the schedule's owner holds a lock."""

    def __init__(
        self,
        sources: Sequence[str],
        selector: Selector[str],
        config: NetConfig,
        clock: Callable[[], float],
        rng: random.Random,
        notify: Callable[[Notice], None],
    ) -> None:
        self._sources = tuple(sources)
        self._selector = selector
        self._config = config
        self._clock = clock
        self._rng = rng
        self._notify = notify
        self._errors: dict[str, ShardcastError] = {}
        self._busy: dict[str, int] = {}
        self._wrong_at: dict[str, float] = {}  # first wrong blob since the last good one
        self._hopeless: set[str] = set()

    @property
    def hopeless(self) -> bool:
        """Whether every source sent a wrong blob, was banned, and sent a wrong one again."""
        return self._hopeless.issuperset(self._sources)

    # --- verdicts ---------------------------------------------------------------------------

    def good(self, source: str, fetched: Fetched) -> None:
        """It brought a right blob, or the last piece of one."""
        self._selector.succeeded(source, fetched.bytes, fetched.seconds, rate=not fetched.from_fill)
        self._busy.pop(source, None)
        self._wrong_at.pop(source, None)
        self._hopeless.discard(source)

    def failed(self, source: str, error: ShardcastError) -> None:
        """It did not answer as it should."""
        self._errors[source] = error
        status = error.status if isinstance(error, SourceStatusError) else 0
        if status == 404:
            self._selector.dropped(source)
        elif status in BUSY:
            self._busy[source] = self._busy.get(source, 0) + 1
            rest = 0.0
            if self._busy[source] >= _BUSY_IN_ROW:
                longest = min(_BUSY_REST_S, self._config.backoff_cap_s)
                rest = (retry_after(error, self._config) or 0.0) + self._rng.uniform(0.0, longest)
            self._selector.dropped(source, rest_s=rest)
        else:
            self._selector.failed(source, retry_after=retry_after(error, self._config))
        self._notify(Notice(source, error))

    def wrong(
        self,
        source: str,
        error: IntegrityError,
        *,
        asked_at: float,
        stitched: bool,
        fatal: bool = True,
    ) -> None:
        """It sent a wrong blob, or (``stitched``) the last part of one.

        Args:
            source: The source.
            error: What was wrong.
            asked_at: When the request began.
            stitched: Other answers had a part in it.
            fatal: The pull cannot do without the blob.
        """
        self._errors[source] = error
        if stitched:
            self._selector.dropped(source)
            self._notify(Notice(source, error))
            return
        self._selector.failed(source)
        # One flipped bit at the only source ends nothing: it is asked once more.
        if fatal and asked_at > self._wrong_at.setdefault(source, self._clock()):
            self._hopeless.add(source)
        self.ban(source, error)

    def ban(self, source: str, error: IntegrityError) -> None:
        """Leave it alone for a while: its bytes were certainly wrong."""
        self._selector.banned(source, self._config.ban_s)
        self._notify(Notice(source, error, banned=True))

    def beaten(self, flight: Flight) -> None:
        """A request was cancelled because another was, or would be, faster."""
        elapsed = self._clock() - flight.started
        if flight.got <= 0 and elapsed >= self._config.silent_s:
            self._selector.failed(flight.source)
            return
        if flight.got > 0 and elapsed >= self._config.lag_s:
            self._selector.slower(flight.source, flight.got / elapsed)
        self._selector.dropped(flight.source)

    # --- last words -------------------------------------------------------------------------

    def all_wrong(self, name: str, error: IntegrityError) -> IntegrityError:
        """Return the end of a pull whose sources all send wrong bytes."""
        return IntegrityError(
            f"every source sends wrong bytes, also for {name}: {self.each()}", source=error.source
        )

    def starved(self, names: Sequence[str]) -> ShardcastError:
        """Return the end of a pull that gained nothing for too long."""
        what = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        message = (
            f"no source delivered {what} for {self._config.give_up_after_s:g} s: {self.each()}"
        )
        wrong = [error for error in self._errors.values() if isinstance(error, IntegrityError)]
        if wrong and len(wrong) == len(self._errors):
            return IntegrityError(message, source=wrong[0].source)
        return NetworkError(message, source=next(iter(self._errors), None))

    def each(self) -> str:
        """Return each source and its last failure."""
        return "; ".join(
            said_of(url, self._errors[url]) if url in self._errors else f"{url}: not asked"
            for url in self._sources
        )


def retry_after(error: ShardcastError, config: NetConfig) -> float | None:
    """Return the seconds that a source asked for, capped; None where it did not."""
    seconds = error.retry_after if isinstance(error, SourceStatusError) else None
    return None if seconds is None else min(seconds, config.retry_after_cap_s)

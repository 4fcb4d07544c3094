"""Which blob to ask which source for, and what to do when that goes wrong: pure.

Every method is a synchronous change of state; threads do what ``next`` returns. Clock and random
numbers come from outside, so that tests can play an hour of faults in a millisecond.

- A failed transfer keeps what it has and is continued elsewhere. One that several sources had a
  part in and that is wrong is fetched again from one, and bans nobody; a wrong blob that came
  whole from one source bans that source.
- 404, 429 and 503 are about one blob at one source: the blob is tried elsewhere, and there again
  after a pause with full jitter (at least Retry-After). Everything else counts against the source.
- End game: a transfer that would last much longer than starting over elsewhere is continued
  elsewhere while connections are idle. It is cancelled first, so no byte is fetched twice and
  no two sources ever write to one place.
- The pull fails when nothing at all was gained for ``give_up_after_s``; at once when every source
  sent a wrong blob, was banned, and sent a wrong one again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.config import NetConfig
from shardcast.errors import (
    IntegrityError,
    MalformedError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
)
from shardcast.fetch import Fetched, Transfer
from shardcast.selector import Selector

_LOOK_AHEAD: Final = 64
"""How many waiting blobs are looked at for one that may start now."""

_POLL_S: Final = 0.1
"""How often an idle thread looks whether a transfer lags."""

_OVERTAKES: Final = 3
"""Most times that one blob is taken from a source that is merely slow."""

_PATIENCE: Final = 10
"""Received but unverified bytes keep a pull alive for this many times ``give_up_after_s``."""

_SOURCE_FAULTS: Final = (NetworkError, IntegrityError, MalformedError)

_BUSY: Final = frozenset({429, 503})
_BUSY_IN_ROW: Final = 3
"""So many refusals in a row concern the source, not the blob."""

_BUSY_REST_S: Final = 1.0
"""Longest rest of a source that is busy and does not say for how long."""


@dataclass(slots=True, eq=False)
class Job:
    """A blob to get.

    Attributes:
        transfer: How far it is.
        name: What it is, for messages.
        tries: Failures so far, by source.
        avoid_until: When a source may be asked for it again.
        whole: It must come from one source, since a stitched one was wrong.
        overtakes: How often it was taken from a slow source.
        best: Most bytes it ever had.
    """

    transfer: Transfer
    name: str
    tries: dict[str, int] = field(default_factory=dict)
    avoid_until: dict[str, float] = field(default_factory=dict)
    whole: bool = False
    overtakes: int = 0
    best: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A job on its way from a source."""

    job: Job
    source: str
    cancel: Cancel
    started: float
    start_offset: int
    seen_offset: int
    seen_at: float
    overtaken: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to start now: look again after so many seconds, or when something changed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Every job is done, or ``error`` says why not."""

    error: ShardcastError | None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person may want to know: which source failed, and how."""

    source: str
    error: ShardcastError
    banned: bool = False


class Schedule:
    """The state of one pull's network work. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        sources: Iterable[str],
        selector: Selector[str],
        config: NetConfig,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        notify: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        self._sources = tuple(sources)
        self._selector = selector
        self._config = config
        self._clock = clock
        self._rng = rng
        self._notify = notify
        self._waiting: deque[Job] = deque()
        self._flights: list[Flight] = []
        self._open = True
        self._busy: dict[str, int] = {}
        self._errors: dict[str, ShardcastError] = {}
        self._wrong_at: dict[str, float] = {}  # first wrong blob since the last good one
        self._hopeless: set[str] = set()
        self._error: ShardcastError | None = None
        self._verified_at = self._gained_at = clock()

    # --- work -------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a job; after ``abort`` there is nothing to do for it."""
        if self._error is not None:
            return
        if not self._waiting and not self._flights:
            self._verified_at = self._gained_at = self._clock()
        self._waiting.append(job)

    def close(self) -> None:
        """No more jobs will come."""
        self._open = False

    def abort(self, error: ShardcastError) -> None:
        """Stop with an error that is nobody's on the network (a full disk, a cancellation)."""
        self._error = self._error or error
        self._waiting.clear()
        for flight in self._flights:
            flight.cancel.cancel()

    @property
    def unfinished(self) -> int:
        """How many jobs are not done."""
        return len(self._waiting) + len(self._flights)

    @property
    def in_flight(self) -> int:
        """Bytes that transfers in flight and waiting have received."""
        jobs = [flight.job for flight in self._flights] + list(self._waiting)
        return sum(job.transfer.offset for job in jobs)

    def next(self) -> Flight | Wait | Finished:
        """Decide what a thread that is free does now.

        A ``Flight`` must be performed and reported by ``succeeded`` or ``failed``.
        """
        now = self._clock()
        if self._error is None and self._waiting:
            flight = self._start(now)
            if flight is not None:
                return flight
        if not self._waiting and not self._flights and (not self._open or self._error):
            return Finished(self._error)
        if self._starved(now):
            self.abort(self._failure())
            return Finished(self._error) if not self._flights else Wait(_POLL_S)
        if not self._waiting and self._flights:
            self._overtake(now)
        return Wait(_POLL_S if self._flights or self._waiting else 1.0)

    def _start(self, now: float) -> Flight | None:
        for position in range(min(len(self._waiting), _LOOK_AHEAD)):
            job = self._waiting[position]
            avoid = {url for url, until in job.avoid_until.items() if until > now}
            source = self._selector.pick(exclude=avoid)
            if source is None:
                if not avoid:
                    return None
                continue
            del self._waiting[position]
            transfer = job.transfer
            if job.whole and transfer.sources not in ((), (source,)):
                transfer.restart()
            self._selector.started(source)
            flight = Flight(
                job=job,
                source=source,
                cancel=Cancel(),
                started=now,
                start_offset=transfer.offset,
                seen_offset=transfer.offset,
                seen_at=now,
            )
            self._flights.append(flight)
            return flight
        return None

    # --- outcomes ---------------------------------------------------------------------------

    def succeeded(self, flight: Flight, fetched: Fetched) -> None:
        """The blob is complete and its digest is right."""
        self._flights.remove(flight)
        self._selector.succeeded(
            flight.source, fetched.bytes, fetched.seconds, rate=not fetched.from_fill
        )
        self._busy.pop(flight.source, None)
        self._wrong_at.pop(flight.source, None)
        self._hopeless.discard(flight.source)
        self._verified_at = self._gained_at = self._clock()

    def failed(self, flight: Flight, error: ShardcastError) -> None:
        """The flight ended otherwise. Errors that no source is to blame for end the pull."""
        self._flights.remove(flight)
        job, source, now = flight.job, flight.source, self._clock()
        if self._error is not None:
            self._selector.dropped(source)
            return
        if flight.overtaken and isinstance(error, TransferCancelledError):
            if flight.silent:
                self._selector.failed(source)
            else:
                self._selector.dropped(source)
            self._requeue(job)
            return
        if not isinstance(error, _SOURCE_FAULTS):
            self._selector.dropped(source)
            self.abort(error)
            return
        self._errors[source] = error
        if isinstance(error, IntegrityError):
            self._wrong(flight, error)
        else:
            self._blame(flight, error, now)
            if job.transfer.offset > job.best:
                job.best = job.transfer.offset
                if now - self._verified_at < _PATIENCE * self._config.give_up_after_s:
                    self._gained_at = now
        self._pause(job, source, error, now)
        self._requeue(job)

    def _wrong(self, flight: Flight, error: IntegrityError) -> None:
        job, source = flight.job, flight.source
        stitched = job.transfer.stitched
        job.transfer.restart()
        if stitched:
            job.whole = True
            self._selector.dropped(source)
        else:
            self._selector.failed(source)
            self._selector.banned(source, self._config.ban_s)
            # One flipped bit at the only source ends nothing: it is asked once more.
            if flight.started > self._wrong_at.setdefault(source, self._clock()):
                self._hopeless.add(source)
        # Wrong bytes were no gain; what others are receiving is.
        others = [f.seen_at for f in self._flights if f.seen_offset > f.start_offset]
        self._gained_at = max(self._verified_at, *others) if others else self._verified_at
        self._notify(Notice(source, error, banned=not stitched))
        if self._hopeless.issuperset(self._sources):
            self.abort(self._all_wrong(job, error))

    def _all_wrong(self, job: Job, error: IntegrityError) -> IntegrityError:
        each = "; ".join(f"{url}: {self._errors[url].message}" for url in self._sources)
        return IntegrityError(
            f"every source sends wrong bytes, also for {job.name}: {each}", source=error.source
        )

    def _blame(self, flight: Flight, error: ShardcastError, now: float) -> None:
        source = flight.source
        status = error.status if isinstance(error, SourceStatusError) else 0
        if status == 404:
            self._selector.dropped(source)
        elif status in _BUSY:
            self._busy[source] = self._busy.get(source, 0) + 1
            rest = 0.0
            if self._busy[source] >= _BUSY_IN_ROW:
                longest = min(_BUSY_REST_S, self._config.backoff_cap_s)
                rest = self._retry_after(error) or self._rng.uniform(0.0, longest)
            self._selector.dropped(source, rest_s=rest)
        else:
            self._selector.failed(source, retry_after=self._retry_after(error))
        self._notify(Notice(source, error))

    def _pause(self, job: Job, source: str, error: ShardcastError, now: float) -> None:
        tries = job.tries[source] = job.tries.get(source, 0) + 1
        cap = min(self._config.backoff_first_s * 2.0 ** min(tries, 16), self._config.backoff_cap_s)
        pause = max(self._rng.uniform(0.0, cap), self._retry_after(error) or 0.0)
        job.avoid_until[source] = now + pause

    def _retry_after(self, error: ShardcastError) -> float | None:
        seconds = error.retry_after if isinstance(error, SourceStatusError) else None
        return None if seconds is None else min(seconds, self._config.retry_after_cap_s)

    def _requeue(self, job: Job) -> None:
        if self._error is None:
            self._waiting.appendleft(job)

    # --- end game and giving up -------------------------------------------------------------

    def _overtake(self, now: float) -> None:
        """Cancel the one transfer that lags most behind what another source would need."""
        worst: tuple[float, Flight] | None = None
        for flight in self._flights:
            lag = self._lag(flight, now)
            if lag is not None and (worst is None or lag > worst[0]):
                worst = (lag, flight)
        if worst is None:
            return
        flight = worst[1]
        job = flight.job
        elapsed = max(now - flight.started, 1e-3)
        got = job.transfer.offset - flight.start_offset
        if got:
            self._selector.slower(flight.source, got / elapsed)
        flight.silent = not got
        job.overtakes += 1
        job.avoid_until[flight.source] = now + self._config.read_timeout_s
        flight.overtaken = True
        flight.cancel.cancel()

    def _lag(self, flight: Flight, now: float) -> float | None:
        """Return by how many seconds a flight is too slow, None if it may go on."""
        job = flight.job
        if flight.overtaken or job.overtakes >= _OVERTAKES:
            return None
        elapsed = now - flight.started
        there = self._best_elsewhere(flight)
        if there is None or elapsed < self._config.lag_s:
            return None
        offset, total = job.transfer.offset, job.transfer.total
        got = offset - flight.start_offset
        if got <= 0:
            return elapsed if elapsed >= self._config.silent_s else None
        if total is None or there <= 0:
            return None
        here_s = (total - offset) * elapsed / got
        there_s = (total - offset) / there
        lag = here_s - self._config.overtake_factor * there_s
        return lag if lag > self._config.lag_s else None

    def _best_elsewhere(self, flight: Flight) -> float | None:
        """Return the rate of the best other source that works; 0 where none was measured yet."""
        best: float | None = None
        now = self._clock()
        for source in self._sources:
            if source == flight.source or flight.job.avoid_until.get(source, 0.0) > now:
                continue
            rating = self._selector.rating(source)
            if rating.failures or rating.banned:
                continue
            best = max(best or 0.0, self._selector.expected_rate(source) or 0.0)
        return best

    def _starved(self, now: float) -> bool:
        for flight in self._flights:
            offset = flight.job.transfer.offset
            if offset > flight.seen_offset:
                flight.seen_offset, flight.seen_at = offset, now
                self._gained_at = max(self._gained_at, now)
        return bool(
            self._error is None
            and (self._waiting or self._flights)
            and now - self._gained_at > self._config.give_up_after_s
        )

    def _failure(self) -> ShardcastError:
        jobs = list(self._waiting) + [flight.job for flight in self._flights]
        what = jobs[0].name + (f" and {len(jobs) - 1} more" if len(jobs) > 1 else "")
        each = "; ".join(
            f"{url}: {self._errors[url].message if url in self._errors else 'not asked'}"
            for url in self._sources
        )
        message = f"no source delivered {what} for {self._config.give_up_after_s:g} s: {each}"
        wrong = [error for error in self._errors.values() if isinstance(error, IntegrityError)]
        if wrong and len(wrong) == len(self._errors):
            return IntegrityError(message, source=wrong[0].source)
        return NetworkError(message, source=next(iter(self._errors), None))

"""Which blob to ask which source for, and what to do when that goes wrong: pure.

Every method is a synchronous change of state; threads do what ``next`` returns. Clock and random
numbers come from outside, so that tests can play an hour of faults in a millisecond.

- A failed transfer keeps what it has and is continued elsewhere. One that several sources or
  answers had a part in and that is wrong is fetched again in one answer, and bans nobody; a wrong
  blob that came whole in one answer bans its source.
- 404, 429 and 503 are about one blob at one source: the blob is tried elsewhere, and there again
  after a pause with full jitter (at least Retry-After). Everything else counts against the source.
- End game (endgame.py): while a thread and a source are idle, a request that lags is raced by a
  second one, into memory, so that no two sources ever write to one place; the loser is cancelled.
  Bytes that come twice have a budget. Without it the slow request is cancelled first, and its blob
  continued elsewhere, so that no byte is fetched twice.
- The pull fails when nothing at all was gained for ``give_up_after_s``; at once when every source
  sent a wrong blob, was banned, and sent a wrong one again.
- It fails at once when no source that lives has a blob whose version left the head (absence.py).
- An optional blob never makes it fail by itself: it is given up before (optional.py).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from shardcast import endgame, optional
from shardcast.absence import Absence
from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.config import NetConfig
from shardcast.endgame import HedgeBudget
from shardcast.errors import (
    GoneError,
    IntegrityError,
    MalformedError,
    NetworkError,
    ShardcastError,
)
from shardcast.fetch import Branch, Fetched
from shardcast.flights import Finished, Flight, Job, Notice, Wait
from shardcast.selector import Rating, Selector
from shardcast.verdicts import Verdicts, retry_after

__all__ = ["Finished", "Flight", "Job", "Notice", "Schedule", "Wait"]

_LOOK_AHEAD: Final = 64
"""How many waiting blobs are looked at for one that may start now."""

_POLL_S: Final = 0.1
"""How often an idle thread looks whether a transfer lags."""

_HEDGES: Final = 2
"""Most second requests at a time: each keeps up to a shard in memory."""

_REFUSALS: Final = 2
"""A source that failed with one blob so often is not expected to bring it soon."""

_PATIENCE: Final = 10
"""Received but unverified bytes keep a pull alive for this many times ``give_up_after_s``."""

_SOURCE_FAULTS: Final = (NetworkError, IntegrityError, MalformedError)


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
        resumes: Callable[[str], bool] = lambda source: True,
        listed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin without jobs.

        Args:
            sources: URLs.
            selector: What is known of them; its keys are the URLs.
            config: Bounds.
            clock: Monotonic seconds.
            rng: For pauses.
            notify: Called when a source fails.
            resumes: Whether a source sends the rest of a blob, as far as is known.
            listed: Whether sources that have not got a blob may come to have it.
        """
        self._sources = tuple(sources)
        self._selector = selector
        self._config = config
        self._clock = clock
        self._rng = rng
        self._resumes = resumes
        self._listed = listed
        self._absence = Absence()
        self.budget = HedgeBudget(config.hedge_share)
        self._waiting: deque[Job] = deque()
        self._flights: list[Flight] = []
        self._done_bytes = 0
        self._open = True
        self._verdicts = Verdicts(self._sources, selector, config, clock, rng, notify)
        self._error: ShardcastError | None = None
        self._lost: list[Job] = []
        self._put_off: set[Job] = set()
        self._verified_at = self._gained_at = clock()

    # --- work -------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a job; after ``abort`` there is nothing to do for it."""
        if self._error is not None:
            return
        if not self._waiting and not self._flights:
            self._verified_at = self._gained_at = self._clock()
        job.bytes = job.transfer.total or 0
        self.budget.pulled += job.bytes
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

    def take_lost(self) -> list[Job]:
        """Return the optional jobs that were given up since this was last called."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def stopped(self) -> bool:
        """Whether an error has ended it."""
        return self._error is not None

    @property
    def unfinished(self) -> int:
        """How many jobs are not done."""
        return len(self._jobs())

    @property
    def in_flight(self) -> int:
        """Bytes that transfers in flight and waiting have received."""
        return sum(job.transfer.offset for job in self._jobs())

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *dict.fromkeys(flight.job for flight in self._flights)]

    def next(self) -> Flight | Wait | Finished:
        """Decide what a thread that is free does now.

        A ``Flight`` must be performed and reported by ``succeeded`` or ``failed``; one that is a
        ``hedge`` also by ``branched`` before, and by ``late`` if its bytes were of no use.
        """
        now = self._clock()
        for flight in self._flights:
            if endgame.look(flight, now):
                self._gained_at = max(self._gained_at, now)
        if self._absence and self._error is None and not self._listed():
            self._give_up_gone()
        if self._put_off:
            self._lose_put_off(now)
        if self._error is None and self._waiting:
            begun = self._start(now)
            if begun is not None:
                return begun
        if not self._waiting and not self._flights and (not self._open or self._error):
            return Finished(self._error)
        if self._starved(now) and not self._lose_starved(now):
            self.abort(self._verdicts.starved([job.name for job in self._jobs()]))
            return Finished(self._error) if not self._flights else Wait(_POLL_S)
        if self._error is None and self._flights:
            hedge = self._end_game(now)
            if hedge is not None:
                return hedge
        return Wait(_POLL_S if self._flights or self._waiting else 1.0)

    def _start(self, now: float) -> Flight | None:
        for position in range(min(len(self._waiting), _LOOK_AHEAD)):
            job = self._waiting[position]
            avoid = _avoided(job, now)
            source = self._selector.pick(exclude=avoid | self._too_slow(job))
            if source is None:
                if not avoid:
                    return None
                continue
            del self._waiting[position]
            if job.whole and job.transfer.offset:
                job.transfer.restart()
            job.main = self._begin(Flight(job, source, Cancel(), now, None))
            job.main.begin(job.transfer, now)
            return job.main
        return None

    def _too_slow(self, job: Job) -> set[str]:
        left = self.budget.pulled - self._done_bytes
        left -= sum(flight.job.transfer.offset for flight in self._flights if not flight.hedge)
        size = max(job.bytes - job.transfer.offset, 0)
        # One that keeps refusing this very blob is no reason not to ask a slow one for it.
        ratings = self._selector.ratings()
        able = {url: r for url, r in ratings.items() if job.tries.get(url, 0) < _REFUSALS}
        return endgame.too_slow(able, size, left, self._config)

    def _begin(self, flight: Flight) -> Flight:
        flight.first_at = flight.seen_at = flight.mark_at = flight.started
        self._selector.started(flight.source)
        self._flights.append(flight)
        return flight

    # --- outcomes ---------------------------------------------------------------------------

    def branched(self, flight: Flight, branch: Branch) -> None:
        """A hedge has a transfer of its own now."""
        flight.begin(branch, self._clock())

    def succeeded(self, flight: Flight, fetched: Fetched) -> None:
        """The blob is complete and its digest is right. Whoever raced it is cancelled."""
        job = flight.job
        job.done = True
        self._put_off.discard(job)
        self._absence.forget(job)
        self._done_bytes += job.bytes if job.lost is None else 0
        rival = job.main if flight.hedge else job.hedge
        self._ended(flight, won=True)
        self._verdicts.good(flight.source, fetched)
        if not flight.hedge:
            self._convict(job)
        if rival is not None:
            rival.overtaken = True
            rival.cancel.cancel()
        self._verified_at = self._gained_at = self._clock()

    def late(self, flight: Flight, fetched: Fetched) -> None:
        """A hedge brought the right bytes, but they are of no use any more."""
        self._ended(flight)
        self._verdicts.good(flight.source, fetched)
        self._requeue(flight.job)

    def failed(self, flight: Flight, error: ShardcastError) -> None:
        """The flight ended otherwise. Errors that no source is to blame for end the pull."""
        job, source, now = flight.job, flight.source, self._clock()
        # Another request may have brought the blob a moment ago, and not said so yet.
        raced = flight.hedge or flight.overtaken or job.done or job.hedge is not None
        self._ended(flight)
        if self._error is not None:
            self._selector.dropped(source)
            return
        if raced and isinstance(error, TransferCancelledError):
            self._verdicts.beaten(flight)
            if flight.hedge:  # not there again at once, whatever the reason
                job.avoid_until[source] = now + self._config.read_timeout_s
        elif not isinstance(error, _SOURCE_FAULTS):
            self._selector.dropped(source)
            self.abort(error)
        else:
            if isinstance(error, IntegrityError):
                self._wrong(flight, error)
            else:
                self._verdicts.failed(source, error)
                self._gain(job, now)
            self._absence.note(job, source, error)
            self._pause(job, source, error, now)
            self._count_fault(flight, error, now)
        self._requeue(job)

    def _count_fault(self, flight: Flight, error: ShardcastError, now: float) -> None:
        """Give up an optional job whose sources keep failing because of it."""
        job, source = flight.job, flight.source
        if not job.optional or job.done or job.lost is not None:
            return
        if flight.got > 0 or job.failing_since is None:
            job.failing_since = now
        failures = self._selector.rating(source).failures
        more = optional.fault(error, failures, answered=flight.got > 0)
        job.faults[source] = job.faults.get(source, 0) + more
        job.put_off = error if optional.is_answer(error) else None
        if optional.is_lost(job.faults, self._selector.ratings()):
            self._lose(job, error)
        elif job.put_off is not None:
            self._put_off.add(job)
        else:
            self._put_off.discard(job)

    def _give_up_gone(self) -> None:
        """Go on without optional jobs that nobody has any more; fail for any other."""
        for job, error in self._absence.complete(self._selector.ratings()):
            if not job.optional:
                message = f"no head lists {job.name} any more, and {self._verdicts.each()}"
                self.abort(GoneError(message, source=error.source))
                return
            if job.lost is None:
                self._lose(job, error)

    def _lose_put_off(self, now: float) -> None:
        """Give up optional jobs that all sources have put off for as long as doing without takes."""
        ratings = self._selector.ratings()
        costs = [job.instead for job in self._put_off]
        known = None if None in costs else sum(cost or 0 for cost in costs)
        seconds = optional.patience(known, ratings.values(), self._config)
        for job in list(self._put_off):
            waited = now - (now if job.failing_since is None else job.failing_since)
            if waited > seconds and job.put_off is not None and not _hoped_for(job, ratings):
                self._lose(job, job.put_off)

    def _lose(self, job: Job, error: ShardcastError) -> None:
        job.lost = error
        self._put_off.discard(job)
        self._absence.forget(job)
        self._done_bytes += job.bytes
        self._lost.append(job)
        if job in self._waiting:
            self._waiting.remove(job)
        for flight in (job.main, job.hedge):
            if flight is not None:
                flight.overtaken = True
                flight.cancel.cancel()

    def _lose_starved(self, now: float) -> bool:
        """Go on without the optional jobs that were to blame; False if there are none."""
        guilty = [job for job in self._jobs() if any(job.faults.values()) and job.lost is None]
        for job in guilty:
            self._lose(job, self._verdicts.starved([job.name]))
        if guilty:
            self._verified_at = self._gained_at = now
        return bool(guilty)

    def _ended(self, flight: Flight, *, won: bool = False) -> None:
        """Take a flight off; count what came twice once both requests of a race have ended."""
        job = flight.job
        self._flights.remove(flight)
        if flight.hedge:
            job.hedge = None
            if won:
                job.won = flight
            elif flight.transfer is not None:
                self.budget.settle(flight.reserved, flight.transfer.received)
            else:
                self.budget.settle(flight.reserved, 0)
        else:
            job.main = None
        if job.won is not None and job.main is None:
            self.budget.settle(job.won.reserved, job.transfer.twice)
            job.won = None

    def _gain(self, job: Job, now: float) -> None:
        if job.transfer.offset > job.best:
            job.best = job.transfer.offset
            if now - self._verified_at < _PATIENCE * self._config.give_up_after_s:
                self._gained_at = now

    def _wrong(self, flight: Flight, error: IntegrityError) -> None:
        job, source, transfer = flight.job, flight.source, flight.transfer
        stitched = transfer is not None and transfer.stitched
        if not flight.hedge:
            with suppress(TransferCancelledError):  # a hedge has just brought it
                job.transfer.restart()
            if job.hedge is not None and not job.hedge.whole:  # it goes on from the wrong bytes
                job.hedge.overtaken = True
                job.hedge.cancel.cancel()
        elif stitched and isinstance(transfer, Branch):
            job.suspects[source] = (transfer.parent_generation, error)
            if job.done:
                self._convict(job)
        job.whole = job.whole or stitched
        # Wrong bytes were no gain; what others are receiving is.
        others = [f.seen_at for f in self._flights if f.seen_offset > f.start_offset]
        self._gained_at = max(self._verified_at, *others) if others else self._verified_at
        self._verdicts.wrong(
            source, error, asked_at=flight.started, stitched=stitched, fatal=not job.optional
        )
        if self._verdicts.hopeless:
            self.abort(self._verdicts.all_wrong(job.name, error))

    def _convict(self, job: Job) -> None:
        """Ban whose hedge went on from these very bytes, now proven good, and was wrong."""
        if job.transfer.beaten_at is not None:
            return  # another hedge brought it
        for source, (generation, error) in job.suspects.items():
            if generation == job.transfer.generation and source not in job.transfer.sources:
                self._verdicts.ban(source, error)

    def _pause(self, job: Job, source: str, error: ShardcastError, now: float) -> None:
        tries = job.tries[source] = job.tries.get(source, 0) + 1
        cap = min(self._config.backoff_first_s * 2.0 ** min(tries, 16), self._config.backoff_cap_s)
        pause = (retry_after(error, self._config) or 0.0) + self._rng.uniform(0.0, cap)
        job.avoid_until[source] = now + pause

    def _requeue(self, job: Job) -> None:
        gone = job.done or job.lost is not None
        if self._error is None and not gone and job.main is None and job.hedge is None:
            self._waiting.appendleft(job)

    # --- end game and giving up -------------------------------------------------------------

    def _end_game(self, now: float) -> Flight | None:
        """Race the one request that lags most, or take its blob from it; return the hedge."""
        worst: tuple[float, Flight, str] | None = None
        for flight in self._flights:
            job = flight.job
            if flight.overtaken or (job.hedge is not None and not flight.hedge):
                continue
            busy = {other.source for other in (job.main, job.hedge) if other is not None}
            source = self._selector.best(exclude=busy | _avoided(job, now))
            if source is None:
                continue
            there = self._selector.expected_rate(source) or 0.0
            lag = endgame.lag(flight, there, now, self._config)
            if lag is not None and (worst is None or lag > worst[0]):
                worst = (lag, flight, source)
        if worst is None:
            return None
        lag, flight, source = worst
        elapsed = now - flight.started
        if not flight.hedge and min(lag, elapsed) > self._config.hedge_s:
            hedge = self._hedge(flight, source, now)
            if hedge is not None:
                return hedge
        if min(lag, elapsed) > self._config.lag_s:
            self._overtake(flight, now)
        return None

    def _hedge(self, flight: Flight, source: str, now: float) -> Flight | None:
        job = flight.job
        transfer = job.transfer
        hedges = sum(other.hedge for other in self._flights)
        if transfer.total is None or hedges >= _HEDGES:
            return None
        whole = job.whole or not self._resumes(source)
        most = transfer.total if whole else transfer.total - transfer.offset
        if not self.budget.take(most):
            return None
        self._seen_slow(flight, now)
        job.hedge = Flight(job, source, Cancel(), now, None, hedge=True, whole=whole, reserved=most)
        return self._begin(job.hedge)

    def _overtake(self, flight: Flight, now: float) -> None:
        """Cancel a request that lags, so that its blob can be continued elsewhere."""
        self._seen_slow(flight, now)
        flight.job.avoid_until[flight.source] = now + self._config.read_timeout_s
        flight.overtaken = True
        flight.cancel.cancel()

    def _seen_slow(self, flight: Flight, now: float) -> None:
        if flight.got > 0:
            self._selector.slower(flight.source, endgame.pace(flight, now))

    def _starved(self, now: float) -> bool:
        return bool(
            self._error is None
            and (self._waiting or self._flights)
            and now - self._gained_at > self._config.give_up_after_s
        )


def _hoped_for(job: Job, ratings: Mapping[str, Rating]) -> bool:
    """Say whether a job comes on, or a source has not been asked for it yet."""
    if any(flight is not None and flight.got > 0 for flight in (job.main, job.hedge)):
        return True
    return any(optional.is_alive(ratings[url]) and not job.tries.get(url) for url in ratings)


def _avoided(job: Job, now: float) -> set[str]:
    return {url for url, until in job.avoid_until.items() if until > now}

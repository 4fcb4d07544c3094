"""Which source to ask next: SHARDCAST's sampling by success rate and bandwidth, done right.

Each source has two moving averages: how often it succeeds, and the bandwidth it gave to all of
our requests together. From them follows what the *next* request can expect there,

    expected = success x bandwidth / (requests in flight + 1),

and a source is drawn with a probability in proportion to (expected / (requests in flight + 1))^2.
In proportion to ``expected`` alone, slow sources would get few requests but hold each as much
longer: with fixed threads every source would occupy the same number of them. The square makes a
source at a tenth of the others' rate cost about a tenth of a fair share; the second division
keeps chance from leaving a good source idle (simulated: 4 threads on 4 equal sources lose 9 %
of the rate with it and 21 % without).

Rules that the original lacks: a failure never raises an estimate; a source that was never
measured counts as good as the best one, so it is tried early and no probe file is needed; after a
failure a source rests, longer with each further one; a source that failed twice in a row is dead:
it gets single probes, and no sooner than many other requests were served, so it costs under 1 % of
them. What the control plane sees (heads are asked of every source all the time) spares even those:
a source that gave no head is doubted as a dead one until it is seen alive, and is probed at once
then. Estimates heal with time, also the bandwidth of one that nobody asks because it was slow. A
banned source is asked only where no other source is alive, one request at a
time and with the rests of a dead one: what it sends is verified anyway, and a flipped bit at the
only source must not end a pull. If that one request gives good bytes, the ban is over.

Pure: clock and random numbers come from outside. How it does against the original rule is
simulated in tests/simulation.py; docs/adr/0012 has the figures.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

SUCCESS_WEIGHT: Final = 0.2
"""Weight of the newest outcome: five outcomes back counts a third."""

RATE_WEIGHT: Final = 0.3
"""Weight of the newest rate: a change of bandwidth is believed after about five blobs."""

HEAL_S: Final = 30.0
"""Time constant with which a bad success rate is forgotten."""

RATE_HEAL_S: Final = 30.0
"""Time constant with which the bandwidth of a source that is not asked is believed to be as good
as the best one's again: 10 s later it is drawn for about one request in forty, and measured."""

TRUSTED_S: Final = 10.0
"""A source that gave good bytes so recently is not doubted for a head that did not come."""

RATED_BYTES: Final = 64 * 1024
"""Smaller blobs measure the round trip, not the bandwidth."""

REST_FIRST_S: Final = 1.0
REST_CAP_S: Final = 10.0
"""Longest rest after failures: a source that recovers is found within seconds."""

DEAD_AFTER: Final = 2
"""Failures in a row after which a source counts as dead."""

PROBE_SHARE: Final = 150
"""A dead source is probed no sooner than after this many requests to live ones."""

_UNKNOWN: Final = 1e12
"""Bytes per second of a source while none was ever measured: anything is possible."""

_FLOOR: Final = 1e-3
"""No success rate is lower: a source can always come back."""


@dataclass(slots=True)
class _Source:
    success: float = 1.0
    judged_at: float = 0.0
    bandwidth: float | None = None
    used_at: float = 0.0  # when its last request ended
    delivered_at: float = -math.inf
    in_flight: int = 0
    failures: int = 0
    rest_until: float = 0.0
    probe_at_pick: int = 0
    banned_until: float = 0.0
    on_trial: bool = False  # the request in flight began while it was banned

    def banned(self, now: float) -> bool:
        return self.banned_until > now


@dataclass(frozen=True, slots=True)
class Rating:
    """What is believed of a source, for reports and tests.

    Attributes:
        success: Share of requests expected to succeed now, 0 to 1.
        bandwidth: Bytes per second over all requests to it, None before the first measurement.
        expected: Bytes per second of good bytes that it can give in all, as believed now: healed
            by the time since it was last asked, and the best one's where it was never measured.
        in_flight: Requests going on.
        failures: Failures in a row.
        banned: Whether it is banned now.
    """

    success: float
    bandwidth: float | None
    expected: float
    in_flight: int
    failures: int
    banned: bool


class Selector(Generic[Key]):
    """Draws sources and learns from what happened. Thread-safe.

    Every ``started`` is followed by exactly one of ``succeeded``, ``failed`` and ``dropped``.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        *,
        clock: Callable[[], float],
        rng: random.Random,
        limit: int | None = None,
        rest_first_s: float = REST_FIRST_S,
        rest_cap_s: float = REST_CAP_S,
    ) -> None:
        """Begin without estimates.

        Args:
            keys: The sources.
            clock: Monotonic seconds.
            rng: Random numbers.
            limit: Most requests in flight to one source, None for any number.
            rest_first_s: Longest rest after a first failure; it doubles with each further one.
            rest_cap_s: Longest rest of all.
        """
        self._clock = clock
        self._rng = rng
        self._limit = limit
        self._rest_first_s = rest_first_s
        self._rest_cap_s = rest_cap_s
        self._lock = threading.Lock()
        self._picks = 0
        now = clock()
        self._sources: dict[Key, _Source] = {
            key: _Source(judged_at=now, used_at=now) for key in keys
        }

    def pick(self, exclude: Collection[Key] = ()) -> Key | None:
        """Draw a source, or None if none may be asked now. The caller says ``started``."""
        with self._lock:
            now = self._clock()
            free = {
                key: source
                for key, source in self._sources.items()
                if key not in exclude and self._free(source, now)
            }
            alive = [k for k, s in free.items() if s.failures < DEAD_AFTER and not s.banned(now)]
            dead = [k for k, s in free.items() if s.failures >= DEAD_AFTER and not s.banned(now)]
            due = [k for k in dead if self._picks >= free[k].probe_at_pick]
            others_live = any(
                s.failures < DEAD_AFTER and not s.banned(now)
                for k, s in self._sources.items()
                if k not in exclude
            )
            if others_live and due:
                return self._rng.choice(due)
            if others_live and not alive:
                return None  # live ones are only busy or resting: wait for them
            keys = alive or dead or [k for k, s in free.items() if s.banned(now)]
            if not keys:
                return None
            weights = [self._weight(free[key], now) for key in keys]
            return self._rng.choices(keys, weights)[0]

    def _free(self, source: _Source, now: float) -> bool:
        if source.rest_until > now:
            return False
        if source.failures >= DEAD_AFTER or source.banned(now):
            return source.in_flight == 0
        return self._limit is None or source.in_flight < self._limit

    def best(self, exclude: Collection[Key] = ()) -> Key | None:
        """Return the source to ask when it matters most (a hedge): alive, free, the fastest.

        None if there is none. The caller says ``started``.
        """
        with self._lock:
            now = self._clock()
            good = [
                (self._expected(source, now), self._rng.random(), key)
                for key, source in self._sources.items()
                if key not in exclude
                and not source.failures
                and not source.banned(now)
                and self._free(source, now)
            ]
            return max(good, key=lambda rated: rated[:2])[2] if good else None

    def _weight(self, source: _Source, now: float) -> float:
        return (self._expected(source, now) / (source.in_flight + 1)) ** 2

    def _expected(self, source: _Source, now: float) -> float:
        """Return what the next request can expect: its share of what the source can give."""
        return self._in_all(source, now) / (source.in_flight + 1)

    def _best_known(self) -> float:
        return max((s.bandwidth for s in self._sources.values() if s.bandwidth), default=_UNKNOWN)

    def _in_all(self, source: _Source, now: float) -> float:
        best = self._best_known()
        bandwidth = best if source.bandwidth is None else source.bandwidth
        if not source.in_flight:  # else its rate is just being measured
            age = max(now - source.used_at, 0.0)
            bandwidth += (best - bandwidth) * (1.0 - math.exp(-age / RATE_HEAL_S))
        return max(self._success(source, now) * bandwidth, 1e-9)

    def _success(self, source: _Source, now: float) -> float:
        """Return the success rate, healed by the time since the last outcome."""
        age = max(now - source.judged_at, 0.0)
        return max(1.0 - (1.0 - source.success) * math.exp(-age / HEAL_S), _FLOOR)

    def expected_rate(self, key: Key) -> float | None:
        """Return bytes per second that one more request can expect, None if not known."""
        with self._lock:
            source = self._sources[key]
            if source.bandwidth is None:
                return None
            return self._expected(source, self._clock())

    def started(self, key: Key) -> None:
        """A request to ``key`` begins."""
        with self._lock:
            source = self._sources[key]
            source.in_flight += 1
            source.on_trial = source.banned(self._clock())
            self._picks += 1

    def succeeded(self, key: Key, size: int, seconds: float, *, rate: bool = True) -> None:
        """A request gave ``size`` good bytes.

        Args:
            key: The source.
            size: Bytes.
            seconds: From the request to the last byte.
            rate: Whether the time says something about the source (not while it fetched the
                blob itself).
        """
        with self._lock:
            now, source = self._clock(), self._sources[key]
            healed = self._success(source, now)
            source.success = healed + SUCCESS_WEIGHT * (1.0 - healed)
            source.judged_at = source.used_at = source.delivered_at = now
            source.failures = 0
            source.rest_until = 0.0
            if source.on_trial:
                source.banned_until = now
            if rate and size >= RATED_BYTES and seconds > 0:
                measured = size / seconds * max(source.in_flight, 1)
                old = source.bandwidth
                source.bandwidth = measured if old is None else old + RATE_WEIGHT * (measured - old)
            source.in_flight = max(source.in_flight - 1, 0)

    def failed(self, key: Key, *, retry_after: float | None = None) -> None:
        """A request failed: the source rests, with full jitter, and longer each time.

        Args:
            key: The source.
            retry_after: Seconds that it asked for; it is left alone for at least as long.
        """
        with self._lock:
            now, source = self._clock(), self._sources[key]
            before = source.success
            source.success = min(self._success(source, now) * (1 - SUCCESS_WEIGHT), before)
            source.judged_at = source.used_at = now
            source.failures += 1
            doublings = min(source.failures - 1, 16)
            cap = min(self._rest_first_s * 2.0**doublings, self._rest_cap_s)
            rest = (retry_after or 0.0) + self._rng.uniform(0.0, cap)
            source.rest_until = max(source.rest_until, now + rest)
            source.probe_at_pick = self._picks + PROBE_SHARE
            source.in_flight = max(source.in_flight - 1, 0)

    def dropped(self, key: Key, *, rest_s: float = 0.0) -> None:
        """A request ended without a verdict on the source: cancelled, or it had not got it yet.

        Args:
            key: The source.
            rest_s: Leave it alone for so long (a 503 or 429 of a healthy server).
        """
        with self._lock:
            now, source = self._clock(), self._sources[key]
            source.in_flight = max(source.in_flight - 1, 0)
            source.used_at = now
            if rest_s > 0:
                source.rest_until = max(source.rest_until, now + rest_s)

    def slower(self, key: Key, bytes_per_s: float) -> None:
        """A request in flight was seen to run at no more than ``bytes_per_s``: lower the estimate.

        Never raises it.
        """
        with self._lock:
            source = self._sources[key]
            seen = min(bytes_per_s * max(source.in_flight, 1), self._best_known())
            if source.bandwidth is None or seen < source.bandwidth:
                source.bandwidth = max(seen, 1.0)
                source.used_at = self._clock()

    def banned(self, key: Key, seconds: float) -> None:
        """Leave the source alone while there is any other: it gave wrong bytes."""
        with self._lock:
            source = self._sources[key]
            source.banned_until = max(source.banned_until, self._clock() + seconds)

    def doubt(self, key: Key) -> None:
        """The source did not answer something else, or not yet: treat it as a dead one.

        It is probed as one that failed, and at once when it is seen ``alive``. One that gave good
        bytes a moment ago is not doubted.
        """
        with self._lock:
            now, source = self._clock(), self._sources[key]
            if source.failures < DEAD_AFTER and now - source.delivered_at > TRUSTED_S:
                source.failures = DEAD_AFTER
                source.probe_at_pick = self._picks + PROBE_SHARE

    def alive(self, key: Key) -> None:
        """The source was seen to be alive (it answered something else): probe it now."""
        with self._lock:
            source = self._sources[key]
            if source.failures:
                source.probe_at_pick = 0
                source.rest_until = min(source.rest_until, self._clock())

    def next_retry_s(self) -> float | None:
        """Return in how many seconds the first resting source may be asked again.

        0 if one rests no longer (it may be at its limit), None if there is no source at all.
        """
        with self._lock:
            now = self._clock()
            times = [source.rest_until - now for source in self._sources.values()]
            return max(min(times), 0.0) if times else None

    def rating(self, key: Key) -> Rating:
        """Return what is believed of a source."""
        with self._lock:
            return self._rating(self._sources[key], self._clock())

    def ratings(self) -> dict[Key, Rating]:
        """Return what is believed of each source."""
        with self._lock:
            now = self._clock()
            return {key: self._rating(source, now) for key, source in self._sources.items()}

    def _rating(self, source: _Source, now: float) -> Rating:
        return Rating(
            success=self._success(source, now),
            bandwidth=source.bandwidth,
            expected=self._in_all(source, now),
            in_flight=source.in_flight,
            failures=source.failures,
            banned=source.banned(now),
        )

"""A whole pull in virtual time: ours (the real Selector and Schedule) and SHARDCAST's rule.

Sources share their rate among their requests, fail in a way of their own, and change over time; a
pull runs over them with as many threads as a worker has. An hour of faults takes milliseconds and
is the same for the same seed. ``tests/unit/worker/test_simulation.py`` holds the gates;
``python -m tests.simulation`` prints the comparison of docs/adr/0012.

The original rule is written down here from what SHARDCAST 0.3.2 does: a relay is drawn in
proportion to success rate times bandwidth; both are moving averages with weight 0.3 of the newest;
after every outcome each relay's success rate is raised by 0.01; a failure counts the request's
timeout (120) as its bandwidth in MB/s; a failed shard is tried again after 2 s, from the fifth
time on after 15 s; ten requests at a time, to any relay; no request is ever overtaken. Its first
estimates come from a probe file at every relay, and it does not start while one of them is down:
that is left out here, all relays begin equal.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from shardcast.cancel import TransferCancelledError
from shardcast.config import NetConfig
from shardcast.errors import IntegrityError, NetworkError, ShardcastError, StallError
from shardcast.fetch import Branch, Fetched, Transfer
from shardcast.schedule import Finished, Flight, Job, Schedule
from shardcast.selector import Selector

MIB: Final = 1 << 20
SHARD: Final = 16 * MIB
FAST: Final = 100.0 * MIB
_EPSILON: Final = 1e-9
_MOST_EVENTS: Final = 1_000_000

Failing = Literal["refuses", "never accepts", "stops"]


@dataclass(frozen=True)
class Model:
    """How a source behaves.

    Attributes:
        rate: Bytes per second for all its requests together.
        latency_s: From a request to its first byte.
        down: When it does not work, from and to.
        failing: What it does then: refuse connections and reset those it has; let them wait, so
            that a request ends by the connect timeout; or stop like a process under SIGSTOP, which
            accepts, says nothing, and goes on afterwards.
        rates: Other rates from a moment on.
        wrong: It sends wrong bytes.
    """

    rate: float = FAST
    latency_s: float = 0.01
    down: tuple[tuple[float, float], ...] = ()
    failing: Failing = "refuses"
    rates: tuple[tuple[float, float], ...] = ()
    wrong: bool = False

    def up(self, now: float) -> bool:
        """Whether it works."""
        return not any(begin <= now + _EPSILON < end for begin, end in self.down)

    def rate_at(self, now: float) -> float:
        """What it gives now."""
        known = [rate for begin, rate in self.rates if begin <= now + _EPSILON]
        return known[-1] if known else self.rate

    def changes(self) -> Iterable[float]:
        """When it changes."""
        return [*(time for window in self.down for time in window), *(t for t, _ in self.rates)]


ALWAYS: Final = ((0.0, float("inf")),)
DEAD: Final = Model(down=ALWAYS)
HOLE: Final = Model(down=ALWAYS, failing="never accepts")


@dataclass
class Request:
    """One request on its way."""

    source: str
    begun: float
    size: float
    flight: Flight | None = None
    shard: int = 0
    tries: int = 0
    got: float = 0.0
    open: bool = False  # its body has begun
    heard: float = 0.0  # last byte, or the beginning

    @property
    def cancelled(self) -> bool:
        """Whether its owner does not want it any more."""
        return self.flight is not None and self.flight.cancel.cancelled


class Brain(Protocol):
    """Decides what is asked where."""

    def next(self, now: float) -> Request | float | None:
        """Return a request to begin, seconds to wait, or None: all is done."""
        ...

    def feed(self, request: Request, count: float) -> None:
        """Bytes came."""
        ...

    def ended(self, request: Request, error: ShardcastError | None, now: float) -> None:
        """A request is over."""
        ...

    def tick(self, now: float) -> float:
        """Do what else is due; return when something is due again."""
        ...


@dataclass
class Outcome:
    """What a pull came to.

    Attributes:
        seconds: How long it took.
        requests: How many each source got.
        asked_at: When each source was asked, in order.
        pulled: Bytes of the version.
        twice: Bytes that came twice.
        error: Why it failed.
    """

    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    asked_at: dict[str, list[float]] = field(default_factory=dict)
    pulled: int = 0
    twice: int = 0
    error: ShardcastError | None = None

    def share(self, source: str) -> float:
        """The part of all requests that a source got."""
        return self.requests[source] / max(self.requests.total(), 1)

    def first_after(self, source: str, moment: float) -> float:
        """How long after a moment the source was asked for the first time."""
        return min((t - moment for t in self.asked_at[source] if t >= moment), default=float("inf"))


class World:
    """Sources, and the requests that go on: time only moves here."""

    def __init__(self, models: Mapping[str, Model], config: NetConfig, link: float) -> None:
        self.models = dict(models)
        self.now = 0.0
        self.requests: list[Request] = []
        self._config = config
        self._link = link
        self._changes = sorted({t for model in models.values() for t in model.changes()})

    def play(self, brain: Brain) -> Outcome:
        """Run a pull to its end."""
        outcome = Outcome(asked_at={name: [] for name in self.models})
        for _ in range(_MOST_EVENTS):
            due = brain.tick(self.now)
            wait: float | None = 0.0
            while not isinstance(step := brain.next(self.now), (float, int)):
                if step is None:
                    wait = None
                    break
                self.requests.append(step)
                outcome.requests[step.source] += 1
                outcome.asked_at[step.source].append(self.now)
            else:
                wait = float(step)
            self._drop_cancelled(brain)
            if wait is None and not self.requests:
                outcome.seconds = self.now
                return outcome
            self._advance(brain, min(due, self.now + (0.1 if wait is None else wait)))
        raise AssertionError("it never ends")

    def _drop_cancelled(self, brain: Brain) -> None:
        for request in [r for r in self.requests if r.cancelled]:
            self._end(brain, request, TransferCancelledError("cancelled"))

    def _end(self, brain: Brain, request: Request, error: ShardcastError | None) -> None:
        self.requests.remove(request)
        brain.ended(request, error, self.now)

    def _speeds(self) -> dict[int, float]:
        speeds: dict[int, float] = {}
        for name, model in self.models.items():
            mine = [r for r in self.requests if r.source == name and r.open]
            rate = model.rate_at(self.now) if model.up(self.now) else 0.0
            speeds.update({id(r): rate / len(mine) for r in mine})
        total = sum(speeds.values())
        scale = min(1.0, self._link / total) if total else 1.0
        return {key: speed * scale for key, speed in speeds.items()}

    def _deadline(self, request: Request) -> float:
        """When something happens to a request apart from its end."""
        model, config = self.models[request.source], self._config
        if request.open:
            return request.heard + config.read_timeout_s
        if model.up(self.now) or model.failing == "refuses":
            return request.begun + model.latency_s
        patience = config.connect_timeout_s
        if model.failing == "stops":
            patience = config.header_timeout_s
        return request.begun + patience

    def _advance(self, brain: Brain, until: float) -> None:
        """Go on to the next event, at most until ``until``."""
        speeds = self._speeds()
        times = [until, *(t for t in self._changes if t > self.now + _EPSILON)][:2]
        for request in self.requests:
            speed = speeds.get(id(request), 0.0)
            if speed > 0:
                times.append(self.now + (request.size - request.got) / speed)
            else:
                times.append(self._deadline(request))
        then = max(min(times), self.now + 1e-6)
        for request in self.requests:
            count = speeds.get(id(request), 0.0) * (then - self.now)
            if count:
                request.got = min(request.got + count, request.size)
                request.heard = then
                brain.feed(request, request.got)
        self.now = then
        for request in list(self.requests):
            if request in self.requests:
                self._look(brain, request)

    def _look(self, brain: Brain, request: Request) -> None:
        model, now = self.models[request.source], self.now
        if request.open and request.size - request.got < 1:
            wrong = IntegrityError("wrong", source=request.source) if model.wrong else None
            self._end(brain, request, wrong)
        elif not model.up(now) and model.failing == "refuses":
            if request.open or now + _EPSILON >= request.begun + model.latency_s:
                self._end(brain, request, NetworkError("refused", source=request.source))
        elif now + _EPSILON >= self._deadline(request):
            if request.open or not model.up(now):
                self._end(brain, request, StallError("silent", source=request.source))
            else:
                request.open, request.heard = True, now


# --- ours ---------------------------------------------------------------------------------------


class _Nowhere:
    def write(self, offset: int, data: memoryview) -> None:
        """Bytes do not matter here."""


class Ours:
    """The real selector and schedule, and what the head watcher would tell them."""

    def __init__(
        self, world: World, shards: int, size: int, seed: int, config: NetConfig, *, heads: bool
    ) -> None:
        self._world = world
        self._config = config
        self._rng = random.Random(seed)
        names = list(world.models)
        self._rng.shuffle(names)
        self.selector = Selector(
            names,
            clock=lambda: world.now,
            rng=self._rng,
            limit=config.connections_per_source,
            rest_first_s=config.backoff_first_s * 2,
            rest_cap_s=config.backoff_cap_s,
        )
        self.schedule = Schedule(
            names, self.selector, config, clock=lambda: world.now, rng=self._rng
        )
        for shard in range(shards):
            transfer = Transfer("run", "0" * 64, size, _Nowhere(), limit=size)
            self.schedule.add(Job(transfer, f"shard {shard}"))
        self.schedule.close()
        self.error: ShardcastError | None = None
        self._threads = min(config.max_connections, config.connections_per_source * len(names))
        self._heads = heads
        self._live = {name: world.models[name].up(0.0) for name in names}
        self._ask_at = dict.fromkeys(names, 0.0)
        self._failures = dict.fromkeys(names, 0)
        if heads:
            for name, live in self._live.items():
                if not live:
                    self.selector.doubt(name)

    def next(self, now: float) -> Request | float | None:
        """Ask the schedule, if a thread is free."""
        if len(self._world.requests) >= self._threads:
            return float("inf")
        step = self.schedule.next()
        if isinstance(step, Finished):
            self.error = step.error
            return None
        if not isinstance(step, Flight):
            return step.seconds
        if step.hedge:
            self.schedule.branched(step, step.job.transfer.branch(whole=step.whole))
        assert step.transfer is not None
        left = (step.transfer.total or 0) - step.transfer.offset
        return Request(step.source, now, float(left), step, heard=now)

    def feed(self, request: Request, count: float) -> None:
        """Count bytes without having them."""
        assert request.flight is not None
        transfer = request.flight.transfer
        assert transfer is not None
        offset = request.flight.start_offset + int(count)
        transfer.received += offset - transfer.offset
        transfer.offset = offset
        if request.source not in transfer.sources:
            transfer.sources = (*transfer.sources, request.source)

    def ended(self, request: Request, error: ShardcastError | None, now: float) -> None:
        """Report to the schedule as a pool does."""
        flight = request.flight
        assert flight is not None
        if error is not None:
            self.schedule.failed(flight, error)
            return
        fetched = Fetched(int(request.size), max(now - request.begun, 1e-6), from_fill=False)
        transfer = flight.transfer
        if isinstance(transfer, Branch) and not flight.job.transfer.adopt(transfer):
            self.schedule.late(flight, fetched)
        else:
            self.schedule.succeeded(flight, fetched)

    def tick(self, now: float) -> float:
        """Watch heads: a source that dies breaks its long poll, one that is back answers one."""
        if not self._heads:
            return float("inf")
        for name, model in self._world.models.items():
            if model.up(now):
                if not self._live[name] and now + _EPSILON >= self._ask_at[name]:
                    self._live[name] = True
                    self._failures[name] = 0
                    self.selector.alive(name)
            elif model.failing == "refuses" and now + _EPSILON >= self._ask_at[name]:
                self._live[name] = False
                self.selector.doubt(name)
                self._backoff(name, now)
            elif model.failing == "never accepts" and now + _EPSILON >= self._ask_at[name]:
                self._backoff(name, now + self._config.connect_timeout_s)
        due = [self._ask_at[name] for name, live in self._live.items() if not live]
        return min((moment for moment in due if moment > now), default=float("inf"))

    def _backoff(self, name: str, now: float) -> None:
        config = self._config
        self._failures[name] += 1
        doubled = config.backoff_first_s * 2.0 ** min(self._failures[name], 16)
        self._ask_at[name] = now + 1e-3 + self._rng.uniform(0.0, min(doubled, config.backoff_cap_s))


def pull(
    models: Mapping[str, Model],
    shards: int = 200,
    *,
    seed: int = 0,
    size: int = SHARD,
    link: float = float("inf"),
    heads: bool = True,
    config: NetConfig | None = None,
) -> Outcome:
    """Pull a version.

    Args:
        models: The sources.
        shards: How many shards it has.
        seed: Of everything that is random.
        size: Bytes of a shard.
        link: What the worker's own link carries.
        heads: Whether the head watcher tells which sources answer, as it does for every worker.
        config: Bounds.
    """
    settings = config or NetConfig()
    world = World(models, settings, link)
    ours = Ours(world, shards, size, seed, settings, heads=heads)
    outcome = world.play(ours)
    outcome.pulled, outcome.twice = shards * size, ours.schedule.budget.wasted
    outcome.error = ours.error
    assert ours.schedule.budget.reserved == 0 or outcome.error is not None
    return outcome


# --- the original rule --------------------------------------------------------------------------

_WEIGHT: Final = 0.3
_HEAL: Final = 0.01
_TIMEOUT: Final = 120.0
_THREADS: Final = 10
_FAST_TRIES: Final = 5


class Original:
    """SHARDCAST 0.3.2's choice of relays, retries and healing."""

    def __init__(self, world: World, shards: int, size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = list(world.models)
        self._size = size
        self._left = list(range(shards))
        self._sleeping: list[tuple[float, int, int]] = []
        self._active = 0
        self.success = dict.fromkeys(self._names, 1.0)
        self.bandwidth = dict.fromkeys(self._names, FAST / 1e6)

    def next(self, now: float) -> Request | float | None:
        """Draw a relay for the next shard, or for one whose pause is over."""
        if self._sleeping and self._sleeping[0][0] <= now + _EPSILON:
            _, shard, tries = heapq.heappop(self._sleeping)
            return self._request(now, shard, tries)
        if self._left and self._active + len(self._sleeping) < _THREADS:
            return self._request(now, self._left.pop(0), 0)
        if self._sleeping:
            return self._sleeping[0][0] - now
        return float("inf") if self._active else None

    def _request(self, now: float, shard: int, tries: int) -> Request:
        weights = [self.success[name] * self.bandwidth[name] for name in self._names]
        self._active += 1
        source = self._rng.choices(self._names, weights)[0]
        return Request(source, now, float(self._size), shard=shard, tries=tries, heard=now)

    def feed(self, request: Request, count: float) -> None:
        """Nothing is learned on the way."""

    def ended(self, request: Request, error: ShardcastError | None, now: float) -> None:
        """Update the averages, heal everyone, sleep after a failure."""
        self._active -= 1
        name = request.source
        rate = self._size / max(now - request.begun, 1e-6) / 1e6 if error is None else _TIMEOUT
        self.bandwidth[name] += _WEIGHT * (rate - self.bandwidth[name])
        self.success[name] += _WEIGHT * ((error is None) - self.success[name])
        for other in self._names:
            self.success[other] = min(1.0, self.success[other] + _HEAL)
        if error is not None:
            pause = 2.0 if request.tries < _FAST_TRIES else 15.0
            heapq.heappush(self._sleeping, (now + pause, request.shard, request.tries + 1))

    def tick(self, now: float) -> float:
        """Nothing else is done."""
        return float("inf")


def pull_original(
    models: Mapping[str, Model],
    shards: int = 200,
    *,
    seed: int = 0,
    size: int = SHARD,
    link: float = float("inf"),
) -> Outcome:
    """Pull a version by the original rule. Its requests wait up to 120 s for anything."""
    patient = NetConfig(
        connect_timeout_s=_TIMEOUT, read_timeout_s=_TIMEOUT, header_timeout_s=_TIMEOUT
    )
    world = World(models, patient, link)
    outcome = world.play(Original(world, shards, size, seed))
    outcome.pulled = shards * size
    return outcome


def four(odd: Model, **others: Model) -> dict[str, Model]:
    """Three good relays and an odd one, ``d``."""
    return {"a": Model(), "b": Model(), "c": Model(), "d": odd, **others}


def three() -> dict[str, Model]:
    """The same without the odd one."""
    return {"a": Model(), "b": Model(), "c": Model()}


def _report(seeds: Sequence[int]) -> None:
    cases = {
        "dead": DEAD,
        "never accepts": HOLE,
        "a tenth of the rate": Model(rate=FAST / 10),
        "flaps (2 s up, 2 s down)": Model(down=tuple((t, t + 2.0) for t in range(2, 400, 4))),
        "stops at 1 s for good": Model(down=((1.0, float("inf")),), failing="stops"),
    }
    print(f"{'fourth relay':28}{'shards':>7}  {'':9}{'its share':>10}{'time':>8}{'twice':>8}")
    for name, model in cases.items():
        for shards in (64, 1000):
            for who, run in (("ours", pull), ("original", pull_original)):
                done = [run(four(model), shards, seed=seed) for seed in seeds]
                left_out = [run(three(), shards, seed=seed).seconds for seed in seeds]
                share = sum(o.share("d") for o in done) / len(done)
                time = sum(o.seconds for o in done) / sum(left_out)
                twice = max(o.twice / o.pulled for o in done)
                print(f"{name:28}{shards:>7}  {who:9}{share:>10.2%}{time:>7.2f}x{twice:>8.2%}")


if __name__ == "__main__":
    _report(range(20))

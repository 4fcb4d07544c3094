"""The selector in simulated time: relays share their bandwidth among their connections."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.selector import Rating, Selector
from tests.clock import Clock

MIB = 1 << 20


def make(*keys: str, limit: int | None = None, seed: int = 1) -> tuple[Selector[str], Clock]:
    clock = Clock()
    return Selector(keys, clock=clock, rng=random.Random(seed), limit=limit), clock


@dataclass
class Request:
    key: str
    begun: float
    left: float


@dataclass
class World:
    """Relays with a rate each (0: every request fails after `fail_s`), threads that pull shards."""

    rates: dict[str, float]
    threads: int = 4
    limit: int | None = 2
    fail_s: float = 0.01
    seed: int = 1
    size: int = 16 * MIB
    picks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.selector = Selector(
            self.rates, clock=self.clock, rng=random.Random(self.seed), limit=self.limit
        )
        self.flying: list[Request] = []
        self.picks = dict.fromkeys(self.rates, 0)

    def pull(self, shards: int) -> float:
        """Pull; return the seconds it took."""
        begun, left = self.clock.now, shards
        while left or self.flying:
            while left and len(self.flying) < self.threads:
                key = self.selector.pick()
                if key is None:
                    break
                self.selector.started(key)
                self.picks[key] += 1
                self.flying.append(Request(key, self.clock.now, float(self.size)))
                left -= 1
            left += self._advance()
        return self.clock.now - begun

    def _advance(self) -> int:
        """Go on to the next end of a request; return how many shards must be pulled again."""
        if not self.flying:
            self.clock.now += max(self.selector.next_retry_s() or 0.0, 0.01)
            return 0
        loads = {key: sum(r.key == key for r in self.flying) for key in self.rates}
        speed = {key: self.rates[key] / max(loads[key], 1) for key in self.rates}
        ends = [
            r.left / speed[r.key] if speed[r.key] else r.begun + self.fail_s - self.clock.now
            for r in self.flying
        ]
        step = max(min(ends), 0.0)
        self.clock.now += step
        again, still = 0, []
        for request, end in zip(self.flying, ends, strict=True):
            request.left -= speed[request.key] * step
            if end > step + 1e-9:
                still.append(request)
            elif speed[request.key]:
                self.selector.succeeded(request.key, self.size, self.clock.now - request.begun)
            else:
                self.selector.failed(request.key)
                again += 1
        self.flying = still
        return again


FAST = 100.0 * MIB
FOUR = {"a": FAST, "b": FAST, "c": FAST, "d": FAST}


# --- shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_equal_sources_share_the_work(threads: int, seed: int) -> None:
    world = World(dict(FOUR), threads=threads, seed=seed)
    world.pull(1000)
    assert min(world.picks.values()) > 220


@pytest.mark.parametrize("threads", [4, 8])
@pytest.mark.parametrize("limit", [2, 4, None])
@pytest.mark.parametrize("seed", range(5))
def test_a_dead_source_gets_under_one_percent(threads: int, limit: int | None, seed: int) -> None:
    world = World({**FOUR, "d": 0}, threads=threads, limit=limit, seed=seed)
    world.pull(2000)
    assert 1 <= world.picks["d"] < 20


@pytest.mark.parametrize("threads", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_source_at_a_tenth_costs_no_more_than_a_tenth_of_the_time(
    threads: int, seed: int
) -> None:
    slow = World({**FOUR, "d": FAST / 10}, threads=threads, seed=seed).pull(1000)
    rates = {key: rate for key, rate in FOUR.items() if key != "d"}
    without = World(rates, threads=threads, seed=seed).pull(1000)
    assert slow <= 1.1 * without


@pytest.mark.parametrize("seed", range(5))
def test_a_black_hole_costs_few_seconds(seed: int) -> None:
    hole = World({**FOUR, "d": 0}, threads=8, fail_s=10, seed=seed).pull(1000)
    rates = {key: rate for key, rate in FOUR.items() if key != "d"}
    without = World(rates, threads=8, seed=seed).pull(1000)
    assert hole <= without + 12  # one connect timeout at its end, at the worst


@pytest.mark.parametrize("seed", range(5))
def test_a_recovered_source_is_found_within_seconds(seed: int) -> None:
    world = World({**FOUR, "d": 0}, seed=seed)
    world.pull(1000)
    before = world.picks["d"]
    world.rates["d"] = FAST
    world.pull(600)
    assert world.picks["d"] - before > 60


@pytest.mark.parametrize("seed", range(5))
def test_a_new_source_is_tried_at_once(seed: int) -> None:
    selector, _clock = make("known", "new", seed=seed)
    selector.started("known")
    selector.succeeded("known", MIB, 0.01)
    keys = [selector.pick() for _ in range(20)]
    assert "new" in keys


def test_a_source_that_became_slow_loses_its_share() -> None:
    world = World(dict(FOUR))
    world.pull(400)
    world.rates["d"] = FAST / 20
    before = world.picks["d"]
    world.pull(400)
    assert world.picks["d"] - before < 30


# --- rules ------------------------------------------------------------------------------------


OUTCOMES = ["start", "ok", "fill", "fail", "retry", "drop", "slow", "ban", "doubt", "alive"]
ENDS = {"ok", "fill", "fail", "retry", "drop"}
BAD = {"fail", "retry", "drop", "slow", "ban", "doubt"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(OUTCOMES),
            st.sampled_from("abc"),
            st.floats(0.0, 60.0),
            st.floats(0.001, 100.0),
        ),
        max_size=60,
    )
)
def test_a_failure_never_raises_an_estimate(story: list[tuple[str, str, float, float]]) -> None:
    """Whatever happened before, and of no source: neither the one that failed nor another."""
    selector, clock = make("a", "b", "c")
    flying = dict.fromkeys("abc", 0)
    acts: dict[str, Callable[[str, float], None]] = {
        "start": lambda key, value: selector.started(key),
        "ok": lambda key, value: selector.succeeded(key, MIB, value),
        "fill": lambda key, value: selector.succeeded(key, MIB, value, rate=False),
        "fail": lambda key, value: selector.failed(key),
        "retry": lambda key, value: selector.failed(key, retry_after=value),
        "drop": lambda key, value: selector.dropped(key, rest_s=value),
        "slow": lambda key, value: selector.slower(key, value * MIB),
        "ban": selector.banned,
        "doubt": lambda key, value: selector.doubt(key),
        "alive": lambda key, value: selector.alive(key),
    }
    for outcome, key, pause, value in story:
        clock.now += pause
        if outcome in ENDS | {"slow"} and not flying[key]:
            selector.started(key)
            flying[key] += 1
        before = selector.ratings()
        acts[outcome](key, value)
        flying[key] += (outcome == "start") - (outcome in ENDS)
        after = selector.ratings()
        assert {name: rating.in_flight for name, rating in after.items()} == flying
        if outcome in BAD:
            assert not any(raised(before[name], after[name]) for name in "abc"), (before, after)
        if outcome in ("fail", "retry"):
            assert after[key].success < before[key].success


def raised(was: Rating, now: Rating) -> bool:
    return (
        now.success > was.success
        or now.expected > was.expected * (1 + 1e-9)
        or (was.bandwidth is not None and (now.bandwidth or 0.0) > was.bandwidth)
    )


def test_a_failure_at_any_length_of_time_is_no_measurement() -> None:
    """The original counts the request's timeout as its bandwidth."""
    selector, clock = make("a", "b")
    selector.started("a")
    selector.succeeded("a", MIB, 1.0)
    for pause in (0.001, 1.0, 120.0):
        selector.started("a")
        clock.now += pause
        selector.failed("a")
        assert selector.rating("a").bandwidth == MIB


def test_a_doubted_source_is_left_alone_until_it_is_seen_alive() -> None:
    selector, clock = make("a", "b")
    selector.doubt("b")
    assert {selector.pick() for _ in range(100)} == {"a"}
    clock.now += 60
    assert {selector.pick() for _ in range(100)} == {"a"}
    selector.alive("b")
    assert selector.pick() == "b"  # a single probe
    selector.started("b")
    assert selector.pick() == "a"
    selector.succeeded("b", MIB, 0.01)
    assert "b" in {selector.pick() for _ in range(50)}


def test_a_doubted_source_is_probed_after_many_requests_all_the_same() -> None:
    selector, _ = make("a", "b")
    selector.doubt("b")
    for n in range(400):
        key = selector.pick()
        assert key is not None
        selector.started(key)
        if key == "b":
            assert n >= 150
            return
        selector.succeeded(key, MIB, 0.01)
        selector.doubt("b")  # again and again: that does not put it off
    raise AssertionError("never probed")


def test_doubt_is_no_verdict_on_a_source_that_delivers() -> None:
    selector, clock = make("a", "b")
    selector.started("b")
    selector.succeeded("b", MIB, 1.0)
    selector.doubt("b")
    assert selector.rating("b").failures == 0
    clock.now += 11
    selector.doubt("b")
    assert selector.rating("b").failures == 2


def test_where_all_are_doubted_they_are_asked() -> None:
    selector, _ = make("a", "b")
    selector.doubt("a")
    selector.doubt("b")
    assert selector.pick() in ("a", "b")


def test_the_best_source_is_alive_free_and_the_fastest() -> None:
    selector, _ = make("slow", "fast", "dead", "bad", limit=1)
    for key, seconds in (("slow", 10.0), ("fast", 1.0), ("dead", 0.1), ("bad", 0.1)):
        selector.started(key)
        selector.succeeded(key, MIB, seconds)
    selector.started("dead")
    selector.failed("dead")
    selector.banned("bad", 600)
    assert selector.best() == "fast"
    assert selector.best(exclude={"fast"}) == "slow"
    selector.started("fast")
    assert selector.best() == "slow"  # the other one is at its limit
    selector.started("slow")
    assert selector.best() is None


def test_a_slow_source_that_nobody_asks_is_tried_again_after_a_while() -> None:
    selector, clock = make("slow", "fast")
    for key, seconds in (("slow", 100.0), ("fast", 1.0)):
        selector.started(key)
        selector.succeeded(key, MIB, seconds)
    assert {selector.pick() for _ in range(200)} == {"fast"}
    clock.now += 20
    assert "slow" in {selector.pick() for _ in range(200)}
    selector.started("slow")  # its rate is being measured: no second one meanwhile
    clock.now += 60
    assert {selector.pick() for _ in range(200)} == {"fast"}
    selector.succeeded("slow", MIB, 100.0)
    assert {selector.pick() for _ in range(200)} == {"fast"}


def test_rests_grow_and_have_a_cap() -> None:
    rests = []
    for seed in range(200):
        selector, _clock = make("a", seed=seed)
        for _ in range(seed % 20 + 1):
            selector.started("a")
            selector.failed("a")
        rests.append((seed % 20, selector.next_retry_s() or 0.0))
    assert all(rest <= 10.0 for _, rest in rests)
    assert max(rest for failures, rest in rests if failures == 0) <= 1.0
    assert max(rest for failures, rest in rests if failures > 6) > 5.0
    assert len({round(rest, 6) for _, rest in rests}) == len(rests)  # full jitter


def test_retry_after_is_the_least_rest() -> None:
    selector, clock = make("a")
    selector.started("a")
    selector.failed("a", retry_after=7.0)
    assert (selector.next_retry_s() or 0) >= 7.0
    assert selector.pick() is None
    clock.now += 7.0 + 1.0  # and jitter, so that not all come back at once
    assert selector.pick() == "a"


def test_a_banned_source_is_left_alone_while_another_lives() -> None:
    selector, clock = make("good", "bad")
    selector.started("bad")
    selector.failed("bad")
    selector.banned("bad", 600)
    clock.now += 60
    assert {selector.pick() for _ in range(500)} == {"good"}
    assert selector.rating("bad").banned
    clock.now += 600
    assert "bad" in {selector.pick() for _ in range(500)}


def test_the_only_source_gets_its_ban_lifted_by_good_bytes() -> None:
    selector, clock = make("a", limit=4)
    for _ in range(3):
        selector.started("a")
    selector.failed("a")
    selector.banned("a", 600)
    selector.succeeded("a", MIB, 1.0)  # began before the ban: says nothing about it
    selector.dropped("a")
    assert selector.rating("a").banned
    clock.now += 60
    assert selector.pick() == "a"
    selector.started("a")
    assert selector.pick() is None  # one at a time
    selector.succeeded("a", MIB, 1.0)
    assert not selector.rating("a").banned
    for _ in range(4):
        assert selector.pick() == "a"
        selector.started("a")


def test_a_banned_source_is_better_than_none() -> None:
    selector, clock = make("bad")
    selector.started("bad")
    selector.failed("bad")
    selector.banned("bad", 600)
    assert selector.pick() is None  # it rests first
    clock.now += 2
    assert selector.pick() == "bad"
    selector.started("bad")
    assert selector.pick() is None  # one request at a time


def test_a_limit_holds_for_each_source() -> None:
    selector, _ = make("a", "b", limit=2)
    taken = []
    while (key := selector.pick()) is not None:
        selector.started(key)
        taken.append(key)
    assert sorted(taken) == ["a", "a", "b", "b"]
    selector.dropped("a")
    assert selector.pick() == "a"


def test_excluded_sources_are_not_drawn() -> None:
    selector, _ = make("a", "b")
    assert {selector.pick(exclude={"a"}) for _ in range(20)} == {"b"}
    assert selector.pick(exclude={"a", "b"}) is None


def test_fills_and_small_blobs_are_not_rated() -> None:
    selector, _ = make("a")
    for size, rate in ((MIB, False), (1000, True)):
        selector.started("a")
        selector.succeeded("a", size, 1.0, rate=rate)
        assert selector.rating("a").bandwidth is None
        assert selector.expected_rate("a") is None


def test_bandwidth_counts_all_requests_to_a_source() -> None:
    selector, _ = make("a")
    selector.started("a")
    selector.started("a")
    selector.succeeded("a", MIB, 1.0)
    assert selector.rating("a").bandwidth == 2 * MIB
    assert selector.expected_rate("a") == MIB  # one is still in flight


def test_a_dead_source_is_probed_when_it_shows_life() -> None:
    selector, clock = make("a", "b")
    for _ in range(5):
        selector.started("a")
        selector.failed("a")
    clock.now += 60
    assert {selector.pick() for _ in range(20)} == {"b"}
    selector.alive("a")
    assert selector.pick() == "a"


def test_success_forgives() -> None:
    selector, _ = make("a")
    for _ in range(5):
        selector.started("a")
        selector.failed("a")
    selector.started("a")
    selector.succeeded("a", MIB, 1.0)
    assert selector.rating("a").failures == 0
    assert selector.pick() == "a"


def test_without_sources_there_is_nothing_to_pick() -> None:
    selector, _ = make()
    assert selector.pick() is None
    assert selector.next_retry_s() is None

"""Whole pulls in virtual time, against leaving the odd source out and against the original rule."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardcast.config import NetConfig
from shardcast.errors import IntegrityError, NetworkError
from tests.simulation import (
    DEAD,
    FAST,
    HOLE,
    MIB,
    SHARD,
    Model,
    Outcome,
    four,
    pull,
    pull_original,
    three,
)

SEEDS = range(8)
REALISTIC = [64, 200, 1000, 3700]
"""Shards: the smallest version of 64 or more, and 62 GB."""


def flapping(up_s: float, down_s: float) -> Model:
    period = up_s + down_s
    return Model(down=tuple((n * period + up_s, (n + 1) * period) for n in range(1000)))


def stopped_at(moment: float, until: float = float("inf")) -> Model:
    return Model(down=((moment, until),), failing="stops")


def seeds_for(shards: int) -> range:
    """Fewer where each pull is long, and luck evens out within it."""
    return SEEDS if shards <= 200 else range(3 if shards <= 1000 else 1)


def over(seeds: range, run: Callable[[int], Outcome]) -> list[Outcome]:
    return [run(seed) for seed in seeds]


# --- shares and times -------------------------------------------------------------------------


@pytest.mark.parametrize("shards", REALISTIC)
@pytest.mark.parametrize("model", [DEAD, HOLE], ids=["refuses", "never accepts"])
def test_a_dead_source_gets_under_one_percent_of_the_requests(model: Model, shards: int) -> None:
    for seed in seeds_for(shards):
        outcome = pull(four(model), shards, seed=seed)
        assert outcome.share("d") < 0.01
        assert outcome.seconds <= 1.05 * pull(three(), shards, seed=seed).seconds


@pytest.mark.parametrize("shards", REALISTIC)
def test_without_news_of_it_a_dead_source_gets_no_more_than_its_first_requests(shards: int) -> None:
    """Where no head tells, somebody has to try: twice, and then as rarely as ever."""
    for seed in seeds_for(shards):
        outcome = pull(four(DEAD), shards, seed=seed, heads=False)
        assert outcome.requests["d"] <= 2 + 0.01 * outcome.requests.total()


@pytest.mark.parametrize("shards", REALISTIC)
@pytest.mark.parametrize("part", [10, 20, 100])
def test_a_slow_source_costs_no_time_against_leaving_it_out(part: int, shards: int) -> None:
    for seed in seeds_for(shards):
        outcome = pull(four(Model(rate=FAST / part)), shards, seed=seed)
        assert outcome.seconds <= 1.10 * pull(three(), shards, seed=seed).seconds
        assert outcome.twice < 0.02 * outcome.pulled


@pytest.mark.parametrize("link", [20 * MIB, 150 * MIB])
def test_the_same_on_a_link_that_is_narrower_than_the_sources(link: float) -> None:
    for seed in SEEDS:
        outcome = pull(four(Model(rate=FAST / 10)), 100, seed=seed, link=link)
        assert outcome.seconds <= 1.10 * pull(three(), 100, seed=seed, link=link).seconds


@pytest.mark.parametrize("shards", [64, 1000])
@pytest.mark.parametrize(
    "model", [flapping(2.0, 2.0), flapping(0.5, 0.5), flapping(10.0, 1.0)], ids=["2", "0.5", "10/1"]
)
def test_a_source_that_flaps_costs_no_time(model: Model, shards: int) -> None:
    for seed in seeds_for(shards):
        outcome = pull(four(model), shards, seed=seed)
        assert outcome.error is None
        assert outcome.seconds <= 1.10 * pull(three(), shards, seed=seed).seconds


def test_a_source_that_dies_in_the_middle_costs_no_time() -> None:
    for seed in SEEDS:
        dying = four(Model(down=((3.0, float("inf")),)))
        outcome = pull(dying, 400, seed=seed)
        assert outcome.seconds <= 1.05 * pull(three(), 400, seed=seed).seconds
        before = sum(moment <= 3.0 for moment in outcome.asked_at["d"])
        assert outcome.requests["d"] - before <= 3


def test_sources_of_any_rates_are_used_together() -> None:
    for seed in SEEDS:
        rates = [FAST, FAST / 2, FAST / 3, FAST / 5]
        models = {name: Model(rate=rate) for name, rate in zip("abcd", rates, strict=True)}
        ideal = 300 * SHARD / sum(rates)
        assert pull(models, 300, seed=seed).seconds <= 1.15 * ideal


# --- the end game -----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [64, 200])
@pytest.mark.parametrize("moment", [0.5, 2.0, 3.3])
def test_a_source_that_stops_never_keeps_the_last_shard(moment: float, shards: int) -> None:
    """It holds two shards when it stops, like a process under SIGSTOP."""
    for seed in SEEDS:
        outcome = pull(four(stopped_at(moment)), shards, seed=seed)
        left_out = pull(three(), shards, seed=seed).seconds
        # Silence is seen after 2 s; both shards are fetched again then, at full speed.
        assert outcome.seconds <= max(1.05 * left_out, moment + 2.0 + 1.0)
        assert outcome.twice <= 0.02 * outcome.pulled


@pytest.mark.parametrize("slow", [2, 3])
def test_one_fast_source_among_slow_ones_brings_the_last_shards(slow: int) -> None:
    for seed in SEEDS:
        models = {"a": Model(), **{f"slow{n}": Model(rate=FAST / 50) for n in range(slow)}}
        outcome = pull(models, 100, seed=seed)
        assert outcome.seconds <= 1.15 * pull({"a": Model()}, 100, seed=seed).seconds
        assert outcome.twice <= 0.02 * outcome.pulled


def test_a_source_that_becomes_slow_at_the_end_is_overtaken() -> None:
    for seed in SEEDS:
        models = four(Model(rates=((2.5, FAST / 100),)))
        outcome = pull(models, 72, seed=seed)
        assert outcome.seconds <= 1.3 * pull(three(), 72, seed=seed).seconds
        assert outcome.twice <= 0.02 * outcome.pulled


def test_without_second_requests_the_slow_one_is_left_all_the_same() -> None:
    """No budget: it is cancelled and its blob continued, so that no byte comes twice."""
    frugal = replace(NetConfig(), hedge_share=0.0)
    for seed in SEEDS:
        outcome = pull(four(stopped_at(2.0)), 64, seed=seed, config=frugal)
        assert outcome.twice == 0
        assert outcome.seconds <= 5.5


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1])
def test_the_budget_is_never_exceeded(share: float) -> None:
    """Sources that change their rate all the time, so that many races are begun and lost."""
    raced = 0
    for seed in range(20):
        config = replace(NetConfig(), hedge_share=share)
        models = {
            name: Model(
                rates=tuple(
                    (0.7 * n + 0.1 * index, FAST / (1 if (n + index) % 3 else 200))
                    for n in range(200)
                )
            )
            for index, name in enumerate("abcd")
        }
        outcome = pull(models, 80, seed=seed, config=config)
        assert outcome.twice <= share * outcome.pulled
        raced += outcome.twice > 0
    assert raced > 0 or share < 0.0125  # a whole shard is 1/80: below that, only the rest of one


# --- finding sources --------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["refuses", "stops"])
def test_a_source_that_recovers_is_found_within_seconds(failing: str) -> None:
    for seed in SEEDS:
        model = Model(down=((0.0, 20.0),), failing=failing)  # type: ignore[arg-type]
        outcome = pull(four(model), 1500, seed=seed, link=FAST)  # 240 s
        assert outcome.first_after("d", 20.0) < 11.0
        served = sum(20.0 <= moment < 60.0 for moment in outcome.asked_at["d"])
        assert served > 20


def test_a_source_that_was_slow_and_is_not_any_more_is_found_within_half_a_minute() -> None:
    found = []
    for seed in SEEDS:
        model = Model(rate=FAST / 50, rates=((30.0, FAST),))
        outcome = pull(four(model), 2000, seed=seed)
        late = [moment for moment in outcome.asked_at["d"] if moment > 30.0]
        found.append(late[4] - 30.0)  # the fifth request: its estimate has followed
    assert statistics.median(found) < 15
    assert max(found) < 30


def test_a_new_source_is_tried_at_once() -> None:
    for seed in SEEDS:
        assert pull(four(Model()), 64, seed=seed).first_after("d", 0.0) < 0.5


# --- what goes wrong --------------------------------------------------------------------------


def test_a_source_of_wrong_bytes_is_asked_no_more_than_its_first_requests() -> None:
    for seed in SEEDS:
        outcome = pull(four(Model(wrong=True)), 1000, seed=seed)
        assert outcome.error is None
        assert outcome.requests["d"] <= 2


def test_a_pull_without_a_working_source_ends() -> None:
    for models in ({"a": DEAD}, {"a": HOLE, "b": DEAD}):
        outcome = pull(models, 64)
        assert isinstance(outcome.error, NetworkError)
        assert 60 <= outcome.seconds < 90
        assert outcome.requests.total() < 200
    wrong = pull({"a": Model(wrong=True), "b": Model(wrong=True)}, 64)
    assert isinstance(wrong.error, IntegrityError)


# --- against the original rule ----------------------------------------------------------------


@pytest.mark.parametrize("shards", [64, 1000])
def test_the_original_rule_gives_a_dead_relay_a_seventh_of_the_requests(shards: int) -> None:
    theirs = over(range(5), lambda seed: pull_original(four(DEAD), shards, seed=seed))
    ours = over(range(5), lambda seed: pull(four(DEAD), shards, seed=seed))
    assert min(outcome.share("d") for outcome in theirs) > 0.04
    assert max(outcome.share("d") for outcome in ours) < 0.01
    assert all(o.seconds < t.seconds for o, t in zip(ours, theirs, strict=True))


def test_the_original_rule_waits_for_a_slow_relay_at_the_end() -> None:
    theirs = over(range(5), lambda seed: pull_original(four(Model(rate=FAST / 10)), 64, seed=seed))
    left_out = over(range(5), lambda seed: pull_original(three(), 64, seed=seed))
    times = [t.seconds / o.seconds for t, o in zip(theirs, left_out, strict=True)]
    assert statistics.median(times) > 1.5


def test_the_original_rule_waits_for_a_relay_that_stopped() -> None:
    theirs = pull_original(four(stopped_at(1.0)), 200)
    ours = pull(four(stopped_at(1.0)), 200)
    assert theirs.seconds > 100
    assert ours.seconds < 15

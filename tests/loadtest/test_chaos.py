"""The plan of a soak: reproducible, complete, and fair to its victims."""

from itertools import pairwise

import pytest

from loadtest.chaos import Kind, Step, lessons, plan

TARGETS = {
    Kind.KILL: ["origin", "relay", "worker"],
    Kind.RESTART: ["origin", "relay", "worker"],
    Kind.REPLACE: ["origin", "relay"],
    Kind.STALL: ["origin", "relay", "worker"],
    Kind.FLIP: ["relay", "worker"],
    Kind.DAMAGE: ["relay", "worker"],
    Kind.FILL: ["disk"],
    Kind.CLOCK: ["origin", "worker"],
    Kind.FREEZE: ["link"],
    Kind.CUT: ["link"],
}
SEEDS = range(20)


def test_a_seed_gives_the_same_plan_every_time() -> None:
    assert plan(7, TARGETS, start=1, end=200) == plan(7, TARGETS, start=1, end=200)
    assert plan(7, TARGETS, start=1, end=200) != plan(8, TARGETS, start=1, end=200)
    assert lessons(7, start=1, end=200) == lessons(7, start=1, end=200)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_minutes_hold_every_kind_of_harm_and_of_publication(seed: int) -> None:
    acts = plan(seed, TARGETS, start=10, end=130)
    assert {act.kind for act in acts} == set(Kind)
    assert all(act.target in TARGETS[act.kind] for act in acts)
    assert {lesson.step for lesson in lessons(seed, start=10, end=130)} == set(Step)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_victim_recovers_before_its_next_turn_and_all_ends_in_time(seed: int) -> None:
    acts = plan(seed, TARGETS, start=10, end=130)
    assert acts == sorted(acts, key=lambda act: act.at)
    assert all(10 <= act.at <= act.at + act.seconds <= 130 for act in acts)
    assert all(0 <= act.draw < 1 for act in acts)
    for name in {act.target for act in acts}:
        mine = [act for act in acts if act.target == name]
        assert all(before.at + before.seconds < after.at for before, after in pairwise(mine))


def test_nobody_is_forgotten() -> None:
    everyone = [f"w{n}" for n in range(18)]
    acts = plan(3, {Kind.KILL: everyone}, start=0, end=600)
    counts = [sum(act.target == name for act in acts) for name in everyone]
    assert min(counts) > 0
    assert max(counts) <= 2 * min(counts)


def test_what_nobody_can_suffer_does_not_happen() -> None:
    acts = plan(3, {Kind.KILL: ["a"], Kind.FILL: []}, start=0, end=60)
    assert {act.kind for act in acts} == {Kind.KILL}

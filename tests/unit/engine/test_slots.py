"""Who may pause, and for which version: with a clock that stands still until it is moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcast.engine.driver import Target
from shardcast.engine.slots import Slots, Suspects


class Hall:
    """Slots, a clock, and how often one became free."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.freed = 0
        self.slots = Slots(count, self.free, clock=lambda: self.now, silent_s=75.0)

    def free(self) -> None:
        self.freed += 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_so_many_may_pause(count: int) -> None:
    hall = Hall(count)
    for number in range(count):
        assert hall.slots.free_for("another")
        hall.slots.take(str(number))
    assert not hall.slots.free_for("another")
    assert hall.slots.free_for("0")
    hall.slots.give_back("0")
    assert hall.slots.free_for("another")
    assert hall.freed == 1


def test_an_engine_that_has_none_gives_none_back() -> None:
    hall = Hall(1)
    hall.slots.give_back("a")
    hall.slots.take("a")
    hall.slots.give_back("b")
    assert not hall.slots.free_for("b")
    assert hall.freed == 0


def test_one_that_says_nothing_may_be_paused_until_its_time_is_over() -> None:
    hall = Hall(1)
    assert not hall.slots.may_be_paused("a")
    hall.slots.take("a")
    hall.now += 74.0
    assert hall.slots.may_be_paused("a")
    hall.now += 1.0
    assert not hall.slots.may_be_paused("a")
    assert not hall.slots.free_for("b")  # until somebody takes it


def test_whenever_it_is_seen_at_it_its_time_begins_anew() -> None:
    hall = Hall(1)
    hall.slots.take("a")
    hall.now += 74.0
    hall.slots.take("a")
    hall.now += 74.0
    assert hall.slots.may_be_paused("a")
    assert hall.freed == 0


def test_a_suspect_is_kept_from_all_engines_but_the_one_it_poisoned() -> None:
    suspects, bad = Suspects(), Target("policy", 7, "bad", Path("/out/versions/000007"))
    suspects.note("bad", "a")
    suspects.note("bad", "b")  # at the same time: two may pause
    assert not suspects.for_engine("a")
    assert set(suspects.for_engine("b")) == set(suspects.for_engine("c")) == {"bad"}
    assert suspects.why(bad, "a") is None
    why = suspects.why(bad, "c")
    assert why is not None
    assert why.startswith("engine c is not paused for version 7, whose load left engine a")
    suspects.clear("good")
    assert suspects.for_engine("c")
    suspects.clear("bad")
    assert not suspects.for_engine("c")
    assert suspects.why(bad, "c") is None

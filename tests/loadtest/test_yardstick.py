"""Floors and published ways, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from loadtest.regimes import Cell, cell
from loadtest.slow_link import Moment, moments, outcome
from loadtest.training import REGIMES, Training
from loadtest.yardstick import (
    FLOORS,
    PUBLISHED,
    change,
    elements,
    floor_by_exponent,
    floor_iid,
    measure,
    ordered,
)


def test_codes_are_ordered_as_their_values_are() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    values = (codes.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    order = np.argsort(ordered(codes[finite]), kind="stable")
    assert np.all(np.diff(values[finite][order]) >= 0)
    assert ordered(np.array([0x8000], np.uint16)) == ordered(np.array([0], np.uint16))


def test_a_floor_is_the_entropy_of_positions_and_differences() -> None:
    old = np.full(16, 0x3F80, np.uint16)
    new = old.copy()
    new[[3, 9, 10, 15]] += np.array([1, 1, 2, 2], np.uint16)
    step = change(old, new)
    assert step.density == 0.25
    positions = 16 * -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert floor_iid(step) == pytest.approx((positions + 4) / 8)  # two differences: a bit each
    # One exponent only: knowing it tells nothing. Two regions of eight: 1 and 3 changes.
    assert floor_by_exponent(step, 16, values_too=True) == pytest.approx(floor_iid(step))
    halves = sum(
        8 * -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) for p in (1 / 8, 3 / 8)
    ) + 3 * -(math.log2(1 / 3) / 3 + 2 * math.log2(2 / 3) / 3)
    assert floor_by_exponent(step, 8, values_too=True) == pytest.approx(halves / 8)


def test_an_exponent_that_tells_everything_leaves_nothing() -> None:
    old = np.array([0x3F80, 0x3000] * 8, np.uint16)
    new = old.copy()
    new[1::2] += 1
    step = change(old, new)
    assert floor_by_exponent(step, 16, values_too=True) == 0
    assert floor_iid(step) == pytest.approx(16 / 8)


def test_a_made_up_step_costs_less_than_the_published_ways_and_no_less_than_no_table() -> None:
    training = Training(4_000_000, REGIMES["adam"])
    versions = [training.safetensors()]
    training.step()
    versions.append(training.safetensors())
    ((density, count, ratio, costs),) = measure(iter(versions))
    assert len(costs) == 1 + len(PUBLISHED) + len(FLOORS)
    assert count == round(density * len(elements(versions[0])))
    assert ratio == pytest.approx(len(versions[1]) / (costs[0] * count))
    ours, others = costs[0], costs[1 : 1 + len(PUBLISHED)]
    assert all(ours < other for other in others)


def test_a_cell_tells_bytes_and_what_they_take_on_the_link() -> None:
    assert Cell(0.01, 1.0, 841.0).seconds == pytest.approx(1.0, rel=0.001)
    training = Training(3_000_000, REGIMES["adam-fp8"])
    old, before = training.safetensors(), [codes for *_, codes in training.arrays()]
    training.step(4)
    found = cell(training.safetensors(), old, [codes for *_, codes in training.arrays()], before)
    assert 0 < found.density < 0.01
    assert found.ratio > 100


def test_how_far_behind_a_worker_was_follows_from_events() -> None:
    def event(second: float, version: int) -> dict[str, float]:
        return {"t": 5000 + second * 1000, "version": version}

    published = [event(n * 2, n + 1) for n in range(6)]
    line = moments(published, [event(5, 1), event(7, 4), event(10.5, 6)])
    assert line[0] == Moment(0, 1, 0)
    assert line[-1] == Moment(10.5, 6, 6)
    assert outcome(line) == (5, 7, 2)

"""What became of an activation, read from what an engine says of itself: a table of sequences."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardcast.engine.attempts import Attempts, Learned
from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState
from shardcast.errors import (
    EngineError,
    EngineRefusedError,
    EngineUncertainError,
    EngineUnsupportedError,
)
from tests.engines import activating_of, fresh_state, served_state

LATE = EngineRefusedError("not over after its lease", phase="load", reason="timeout")
NO = EngineRefusedError("the 7th tensor is truncated", phase="load", reason="failed")
LOST = EngineUncertainError("the connection was reset")


def target(number: int) -> Target:
    return Target("policy", number, f"{number:064x}", Path(f"/out/versions/{number:06d}"))


def serving(number: int) -> EngineState:
    return served_state(fresh_state("fake"), target(number), None)


def loading(number: int, *, poisoned: bool = False) -> EngineState:
    made = fresh_state("fake")
    begun = activating_of(target(number))
    return msgspec.structs.replace(made, activating=begun, paused=True, poisoned=poisoned)


def poisoned() -> EngineState:
    return msgspec.structs.replace(fresh_state("fake"), poisoned=True, paused=True)


def told(attempts: Attempts, number: int, error: EngineError | None = None) -> Attempts:
    """It was told to activate a version, and that was the answer."""
    attempts.begin(target(number))
    if error is not None:
        attempts.failed(target(number), error)
    return attempts


@pytest.mark.parametrize("error", [LATE, LOST])
def test_what_became_of_it_is_not_known_until_it_is_over(error: EngineError) -> None:
    attempts = told(Attempts(), 2, error)
    assert attempts.pending == target(2)
    overran = error if isinstance(error, EngineRefusedError) else None
    assert attempts.see(loading(2)) == Learned(at_it=True, overran=overran)
    assert attempts.see(loading(2)) == Learned(at_it=True)  # it is said once
    assert attempts.pending == target(2)
    assert attempts.see(serving(2)) == Learned()
    assert attempts.pending is None


@pytest.mark.parametrize("error", [LATE, LOST])
@pytest.mark.parametrize("end", [serving(1), fresh_state("fake")])
def test_what_it_did_not_get_to_is_learned(error: EngineError, end: EngineState) -> None:
    attempts = told(Attempts(), 2, error)
    assert attempts.see(end) == Learned(missed=target(2))
    assert attempts.see(end) == Learned()


@pytest.mark.parametrize("error", [NO, EngineUnsupportedError("speaks another protocol")])
def test_an_answer_that_says_it_leaves_nothing_open(error: EngineError) -> None:
    attempts = told(Attempts(), 2, error)
    assert attempts.pending is None
    assert attempts.see(serving(1)) == Learned()


def test_a_silence_that_is_too_long_leaves_nothing_open() -> None:
    attempts = told(Attempts(), 2, LOST)
    attempts.give_up()
    assert attempts.see(serving(1)) == Learned()


@pytest.mark.parametrize("error", [NO, LATE, LOST])
def test_a_load_that_took_its_weights_is_named(error: EngineError) -> None:
    attempts = Attempts()
    attempts.see(serving(1))
    learned = told(attempts, 2, error).see(poisoned())
    assert learned.poisoned_by == target(2).identity
    assert learned.missed == (None if error is NO else target(2))
    assert attempts.see(poisoned()) == Learned()


def test_a_load_that_somebody_else_began_is_named_too() -> None:
    attempts = Attempts()
    assert attempts.see(loading(2)).at_it
    assert attempts.see(poisoned()).poisoned_by == target(2).identity


def test_what_an_engine_without_weights_cannot_load_is_not_to_blame() -> None:
    attempts = Attempts()
    attempts.see(poisoned())
    assert told(attempts, 2, NO).see(poisoned()) == Learned()
    assert attempts.see(loading(3, poisoned=True)) == Learned(at_it=True)
    assert attempts.see(poisoned()) == Learned()
    attempts.see(serving(4))
    assert told(attempts, 5, NO).see(poisoned()).poisoned_by == target(5).identity


def test_what_it_never_heard_of_is_not_to_blame() -> None:
    attempts = told(Attempts(), 2)
    attempts.never_began()
    assert attempts.see(poisoned()) == Learned()

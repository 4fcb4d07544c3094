"""What an engine answers is held against the canary of the version that it served all the while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from shardcast.canary import Canary, Prompt
from shardcast.engine import patience
from shardcast.engine.checking import Checks, Outcome
from shardcast.engine.decide import Mode
from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState
from shardcast.engine.patience import RETRY_CAP_S
from shardcast.errors import EngineUncertainError, EngineUnreachableError
from shardcast.events import EventKind
from tests.engines import (
    FakeEngine,
    activating_of,
    fresh_state,
    logprobs,
    make_version,
    served_state,
    weights_of,
)
from tests.unit.engine.test_agent import World, minding, served

TOKENS = [1, 2, 3]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(patience, "RETRY_CAP_S", 0.02)


def canary_of(target: Target) -> Canary:
    """What the trainer says of a version."""
    right = logprobs(weights_of(target), TOKENS)
    return Canary(prompts=[Prompt(tokens=TOKENS, logprobs=right)], tolerance=0.001)


class Scored(FakeEngine):
    """Does something of a test's before it answers; counts how often it was asked for what."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], Awaitable[object]] | None = None
        self.asked: list[int | None] = []

    async def score(self, tokens: Sequence[int]) -> list[float]:
        self.asked.append(served(self))
        self.changed.set()
        if self.before is not None:
            await self.before()
        return await super().score(tokens)


def checked(world: World) -> None:
    """Let versions have canaries."""
    assert world.agent is not None
    for minder in world.agent._minders:
        minder._canary = canary_of


async def test_a_swap_within_a_check_accuses_neither_version(tmp_path: Path) -> None:
    engine = Scored()
    async with minding(tmp_path, engine, mode=Mode.MANUAL, check_canary=True) as world:
        checked(world)
        world.publish(1)

        async def swap() -> None:
            engine.before = None
            await engine.activate(world.publish(2))

        engine.before = swap
        await world.until(lambda: engine._state.staged is not None)
        await engine.activate(world.version(1))
        await world.until(lambda: engine.asked == [1, 2])
        await world.serve(2)
        await engine.activate(world.publish(1))  # which is checked now
        await world.until(lambda: engine.asked == [1, 2, 1])
        await world.until(lambda: len(world.of(EventKind.ACTIVATED)) == 3)
        assert not world.of(EventKind.ENGINE_FAILED)


async def test_what_cannot_be_asked_holds_no_version_up(tmp_path: Path) -> None:
    """And is asked again after a rest, and when another version is served."""
    now = 100.0
    engine = Scored()

    async def silence() -> None:
        raise EngineUncertainError("no answer in 120 s", source=engine.name)

    async with minding(tmp_path, engine, clock=lambda: now, check_canary=True) as world:
        checked(world)
        engine.before = silence
        for number in (1, 2, 3):
            world.publish(number)
            await world.serve(number)
            await world.until(
                lambda: (
                    world.metric("failures_total", engine, phase="check")
                    == len(world.of(EventKind.ACTIVATED))
                )
            )
        assert engine.asked == [1, 2, 3]
        engine.before = None
        now += RETRY_CAP_S
        await world.until(lambda: engine.asked == [1, 2, 3, 3])


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_hangs_while_it_is_asked_is_lost_until_it_answers(
    tmp_path: Path,
) -> None:
    engine = Scored()

    async def hang() -> None:
        engine.before = None
        engine.unreachable = EngineUnreachableError("no answer in 10 s", source=engine.name)
        await asyncio.Event().wait()

    engine.before = hang
    async with minding(tmp_path, engine, check_canary=True) as world:
        checked(world)
        world.publish(1)
        await world.until(lambda: world.metric("reachable", engine) == 0)
        engine.unreachable = None
        await world.until(lambda: engine.asked == [1, 1])
        await world.until(lambda: world.metric("reachable", engine) == 1)
        assert world.metric("failures_total", engine, phase="check") == 1


# --- by itself ------------------------------------------------------------------------------------


def checks(engine: FakeEngine, clock: Callable[[], float] = lambda: 100.0) -> Checks:
    return Checks(engine, enabled=True, clock=clock, rng=random.Random(1))


@pytest.mark.parametrize("wrong_by", [0.0, -0.5])
async def test_an_answer_after_a_pause_is_nobody_s(tmp_path: Path, wrong_by: float) -> None:
    """The same version before and after: a load failed meanwhile, and it was loaded again."""
    engine = Scored()
    target = make_version(tmp_path, 1)
    before = (await engine.activate(target)).state
    engine.machine.wrong_by[weights_of(target)] = wrong_by

    async def pause() -> None:
        engine.set(swap_count=engine._state.swap_count + 1)

    engine.before = pause
    made = checks(engine)
    verdict = await made.ask(target.identity, canary_of(target), before)
    assert verdict.outcome is Outcome.MOVED
    assert made.due(target.identity, engine._state)
    engine.before = None
    verdict = await made.ask(target.identity, canary_of(target), engine._state)
    assert verdict.outcome is (Outcome.WRONG if wrong_by else Outcome.RIGHT)
    assert bool(verdict.why) is bool(wrong_by)
    assert not made.due(target.identity, engine._state)
    made.forget(target.identity)
    assert made.due(target.identity, engine._state)


def test_an_engine_that_answers_nobody_is_not_asked(tmp_path: Path) -> None:
    target = make_version(tmp_path, 1)
    serves = served_state(fresh_state("fake"), target, None)
    changes: list[dict[str, object]] = [{"paused": True}, {"activating": activating_of(target)}]
    made = checks(FakeEngine())
    assert made.due(target.identity, serves)
    for change in changes:
        paused: EngineState = msgspec.structs.replace(serves, **change)
        assert not made.due(target.identity, paused)


async def test_without_a_canary_every_answer_is_right_and_none_is_asked_for(tmp_path: Path) -> None:
    engine = Scored()
    target = make_version(tmp_path, 1)
    state = (await engine.activate(target)).state
    made = checks(engine)
    assert (await made.ask(target.identity, None, state)).outcome is Outcome.RIGHT
    assert not engine.asked

"""Engines are looked at while they stage and load: what is seen is shown, and one that hangs is let go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState
from shardcast.engine.watching import SILENT_LOOKS, SilentError, watched
from shardcast.errors import EngineRefusedError, EngineUnreachableError
from shardcast.events import EventKind
from tests.engines import FakeEngine, staged_of
from tests.unit.engine.test_agent import minding

WAIT_S = 20
GONE = EngineUnreachableError("no answer in 10 s", source="http://fake:1")


class Work:
    """Takes until it is told to end; notes how it ended."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.over = False
        self.cancelled = False

    async def run(self) -> str:
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            await asyncio.sleep(0)  # and takes its time to end
            raise
        finally:
            self.over = True
        return "done"


class Looks:
    """Answers, or does not, as a test says; then ends the work, if one is given."""

    def __init__(self, answers: Sequence[Exception | None], work: Work | None = None) -> None:
        self._answers = list(answers)
        self._work = work
        self.times = 0
        self.exhausted = asyncio.Event()

    async def look(self) -> None:
        self.times += 1
        answer = self._answers.pop(0) if self._answers else None
        if not self._answers:
            self.exhausted.set()
            if self._work is not None:
                self._work.end.set()
        if answer is not None:
            raise answer


async def test_what_is_waited_for_comes_through_and_it_was_looked_at_meanwhile() -> None:
    work = Work()
    looks = Looks([None, GONE, GONE, None, GONE, GONE, None], work)  # never three in a row
    async with asyncio.timeout(WAIT_S):
        assert await watched(work.run(), looks.look, every_s=0, silent_looks=3) == "done"
    assert looks.times >= 7
    assert not work.cancelled


async def test_a_failure_comes_through() -> None:
    async def refuse() -> None:
        raise EngineRefusedError("no", reason="refused")

    with pytest.raises(EngineRefusedError, match="no"):
        await watched(refuse(), Looks([]).look, every_s=WAIT_S)


async def test_what_says_nothing_any_more_is_cancelled_and_over() -> None:
    work = Work()
    looks = Looks([None, GONE, GONE, GONE, None])
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(SilentError, match="no answer in 10 s") as silent:
            await watched(work.run(), looks.look, every_s=0, silent_looks=3)
    assert silent.value.source == GONE.source
    assert (work.cancelled, work.over, looks.times) == (True, True, 4)


async def test_what_has_a_lease_of_its_own_is_not_cancelled_for_silence() -> None:
    work = Work()
    async with asyncio.timeout(WAIT_S):
        assert await watched(work.run(), Looks([GONE] * 50, work).look, every_s=0) == "done"


async def test_a_cancellation_ends_the_work_before_it_goes_on() -> None:
    work, looks = Work(), Looks([None, None])
    running = asyncio.ensure_future(watched(work.run(), looks.look, every_s=0))
    async with asyncio.timeout(WAIT_S):
        await looks.exhausted.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert work.cancelled
    assert work.over
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_look_that_breaks_is_a_bug_that_is_not_hidden() -> None:
    work = Work()
    with pytest.raises(ZeroDivisionError):
        await watched(work.run(), Looks([ZeroDivisionError()]).look, every_s=0)
    assert work.over


# --- what the agent makes of it -------------------------------------------------------------------


class Stuck(FakeEngine):
    """Its process is stopped while it stages: nothing is answered any more."""

    def __init__(self, *, took_it: bool) -> None:
        super().__init__()
        self.took_it = took_it
        self.given_up = 0
        self.looks = 0

    async def state(self) -> EngineState:
        self.looks += 1
        self.changed.set()
        return await super().state()

    async def stage(self, target: Target) -> EngineState:
        if self.given_up:
            return await super().stage(target)
        self.called(f"stage {target.version}")
        self.unreachable = GONE
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up += 1
            if self.took_it:
                self.set(staged=staged_of(target))
        raise AssertionError("it never ends")


@pytest.mark.parametrize("took_it", [False, True])
async def test_an_engine_that_hangs_while_it_stages_is_lost_until_it_answers(
    tmp_path: Path, took_it: bool
) -> None:
    """Then what it took is told, and it gets the version that came meanwhile."""
    engine = Stuck(took_it=took_it)
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.until(lambda: bool(engine.given_up))
        await world.until(lambda: world.metric("reachable", engine) == 0)
        assert world.metric("ready", engine) == 0
        looks = engine.looks
        await world.until(lambda: engine.looks > looks + 2)  # it is asked on
        (failed,) = world.of(EventKind.ENGINE_FAILED)
        assert GONE.message in str(failed.error)
        world.publish(2)
        assert engine.calls.count("stage 1") == 1
        engine.unreachable = None
        await world.serve(2)
        assert engine.calls.count("stage 1") == 1
        staged = [event.version for event in world.of(EventKind.STAGED)]
        assert staged == ([1, 2] if took_it else [2])


async def test_a_pause_is_shown_and_an_engine_that_says_nothing_within_it_is_not_given_up(
    tmp_path: Path,
) -> None:
    engine = Stuck(took_it=False)
    engine.given_up = 1  # it stages well
    engine.machine.gate.clear()
    async with minding(tmp_path, engine, lease_s=60.0) as world:
        world.publish(1)
        await world.until(engine.machine.loading.is_set)
        await world.until(lambda: world.metric("paused", engine) == 1)
        assert world.metric("ready", engine) == 0
        engine.unreachable = GONE
        looks = engine.looks
        await world.until(lambda: engine.looks > looks + SILENT_LOOKS + 1)
        assert world.metric("paused", engine) == 1
        engine.unreachable = None
        engine.machine.gate.set()
        await world.serve(1)
        await world.until(lambda: world.metric("paused", engine) == 0)
        assert engine.calls.count("activate 1") == 1
        assert not world.of(EventKind.ENGINE_FAILED)


async def test_the_lag_grows_while_an_engine_stages(tmp_path: Path) -> None:
    engine = Slow()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        engine.gate.clear()
        world.publish(2)
        await world.until(lambda: "stage 2" in engine.calls)
        for number in (3, 4):
            world.announce(number)
        await world.until(lambda: world.metric("lag_versions", engine) == 3)
        engine.gate.set()
        await world.serve(2)


class Slow(FakeEngine):
    """Stages when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def stage(self, target: Target) -> EngineState:
        self.called(f"stage {target.version}")
        await self.gate.wait()
        self.set(staged=staged_of(target))
        return self._state

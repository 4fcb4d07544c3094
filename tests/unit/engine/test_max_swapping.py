"""No more engines are paused at once than may be, however an activation ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from shardcast.engine import patience
from shardcast.engine.driver import Swapped, Target
from shardcast.engine.forms import EngineState
from shardcast.errors import EngineRefusedError, EngineUnreachableError
from shardcast.events import EventKind
from tests.engines import WAIT_S, FakeEngine, activating_of, make_version, staged_of
from tests.unit.engine.test_agent import World, minding, served


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(patience, "RETRY_CAP_S", 0.02)


class Watched(FakeEngine):
    """Counts how often it was looked at; says nothing while it is not to be heard."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.looks = 0
        self.heard = asyncio.Event()
        self.heard.set()

    async def state(self) -> EngineState:
        await self.heard.wait()
        self.looks += 1
        self.changed.set()
        return await super().state()

    def told_to(self, number: int) -> int:
        """How often it was told to activate a version."""
        return self.calls.count(f"activate {number}")


class Overrunning(Watched):
    """Its lease ends while it loads: it says so (504), and goes on loading, as vLLM does. Once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.late: asyncio.Future[Swapped] | None = None

    async def activate(self, target: Target) -> Swapped:
        if self.late is not None:
            return await super().activate(target)
        self.machine.gate.clear()
        self.late = asyncio.ensure_future(super().activate(target))
        assert await asyncio.to_thread(self.machine.loading.wait, WAIT_S)
        self.set(paused=True, ready=False)
        raise EngineRefusedError(
            "loading is not over after its lease", source=self.name, phase="load", reason="timeout"
        )


Kind = TypeVar("Kind", bound=Watched)


def of_kind(kind: Callable[[str], Kind]) -> list[Kind]:
    return [kind(f"http://engine:{port}") for port in (1, 2, 3)]


async def looked(world: World, engines: Sequence[Watched], times: int = 4) -> None:
    """Wait until engines were looked at so often from now on, and what came of it was done."""
    before = {engine.name: engine.looks for engine in engines}
    await world.until(lambda: all(one.looks >= before[one.name] + times for one in engines))


def told_to(engines: Sequence[Kind], number: int) -> list[Kind]:
    return [engine for engine in engines if engine.told_to(number)]


async def test_a_load_that_outlasts_its_lease_keeps_the_others_from_pausing(tmp_path: Path) -> None:
    """However late the engine's state is heard after its lease was over."""
    engines = of_kind(Overrunning)
    left = list(engines)
    async with minding(tmp_path, *engines, max_swapping=1, lease_s=60.0) as world:
        world.publish(1)
        while left:
            await world.until(lambda: any(one.machine.loading.is_set() for one in left))
            (first,) = told_to(left, 1)
            left.remove(first)
            first.heard.clear()
            await looked(world, left)
            assert not told_to(left, 1)
            first.heard.set()
            await looked(world, engines)
            assert not told_to(left, 1)
            assert [one for one in engines if one.machine.paused] == [first]
            first.machine.gate.set()
            await world.serve(1, first)
        told = world.of(EventKind.ENGINE_FAILED)
        assert sorted(str(event.engine) for event in told) == [engine.name for engine in engines]
        assert all("loading is not over after its lease" in str(event.error) for event in told)
        assert [engine.told_to(1) for engine in engines] == [1, 1, 1]


async def test_a_load_that_fails_after_its_lease_is_told_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    engines = of_kind(Overrunning)
    async with minding(tmp_path, *engines, max_swapping=1, lease_s=60.0) as world:
        world.publish(1)
        await world.until(lambda: any(engine.machine.loading.is_set() for engine in engines))
        (first,) = told_to(engines, 1)
        first.machine.fail_loads = 1
        first.machine.gate.set()
        await world.until(lambda: first.told_to(1) == 2)  # a whole version
        await world.serve(1, first)
        for _ in range(2):  # and each of the others overruns its own
            await world.until(lambda: any(engine.machine.loading.is_set() for engine in engines))
            (next_one,) = [engine for engine in engines if engine.machine.loading.is_set()]
            next_one.machine.gate.set()
            await world.serve(1, next_one)
        await world.serve(1)
        said = [str(e.error) for e in world.of(EventKind.ENGINE_FAILED) if e.engine == first.name]
        assert any("did not activate version 1: the 7th tensor is truncated" in one for one in said)
        assert first.late is not None
        with pytest.raises(EngineRefusedError):
            await first.late


async def test_an_activation_of_an_earlier_agent_keeps_its_slot_through_a_look_that_is_missed(
    tmp_path: Path,
) -> None:
    """Until the lease and the margin are over since it was last seen at it."""
    now = 100.0
    first, second, _ = of_kind(Watched)
    version = make_version(tmp_path / "versions", 1)
    first.set(activating=activating_of(version), paused=True, ready=False)
    second.set(staged=staged_of(version))
    async with minding(
        tmp_path, first, second, clock=lambda: now, lease_s=60.0, margin_s=15.0
    ) as world:
        world.publish(1)
        await looked(world, [first, second])
        first.unreachable = EngineUnreachableError("no answer in 10 s", source=first.name)
        for step_s in (0.0, 74.0):
            now += step_s
            await looked(world, [second])
            assert not second.told_to(1)
        now += 1.0
        await world.serve(1, second)


async def test_a_version_that_poisons_one_engine_takes_down_no_other(tmp_path: Path) -> None:
    """They go on with what they have, and to the next version, whatever becomes of the first."""
    engines = of_kind(Watched)
    for engine in engines:
        engine.machine.fail_loads = 10**6
    async with minding(tmp_path, *engines, max_swapping=1) as world:
        world.publish(1)
        await world.until(lambda: bool(told_to(engines, 1)))
        (first,) = told_to(engines, 1)
        others = [engine for engine in engines if engine is not first]
        await world.until(lambda: first.told_to(1) > 2)  # it is told again and again
        await looked(world, others)
        assert told_to(engines, 1) == [first]
        assert [engine for engine in engines if engine._state.paused] == [first]
        for engine in others:
            assert engine._state.staged is not None
            (told,) = [e for e in world.of(EventKind.ENGINE_FAILED) if e.engine == engine.name]
            assert told.version == 1
            assert f"whose load left engine {first.name} without weights" in str(told.error)
            engine.machine.fail_loads = 0
        world.publish(2)  # which the first one cannot load either
        await world.serve(2, *others)
        assert first._state.poisoned
        first.machine.fail_loads = 0
        await world.serve(2, first)
        world.publish(3)
        await world.serve(3)


async def test_an_engine_that_recovers_clears_the_version_for_the_others(tmp_path: Path) -> None:
    engines = of_kind(Watched)
    for engine in engines:
        engine.machine.fail_loads = 2  # each of them is poisoned for a while
    async with minding(tmp_path, *engines, max_swapping=1) as world:
        world.publish(1)
        await world.serve(1)
        assert [engine.told_to(1) for engine in engines] == [3, 3, 3]
    assert all(served(engine) == 1 for engine in engines)

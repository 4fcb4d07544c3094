"""The agent with engines in memory: who stages, who pauses, what stays on the disk, what is told."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcast.canary import Canary, Prompt
from shardcast.engine import patience
from shardcast.engine.agent import Agent
from shardcast.engine.board import AgentOptions
from shardcast.engine.decide import Mode, served_by
from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState
from shardcast.errors import (
    EngineKeyError,
    EngineUnreachableError,
    EngineUnsupportedError,
    UsageError,
)
from shardcast.events import EventKind, WorkerEvent
from shardcast.protocol.head import Head
from shardcast.store.run import RunStore
from tests.engines import FakeEngine, logprobs, make_version
from tests.unit.worker.test_follow import head as make_head

WAIT_S = 20


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(patience, "RETRY_CAP_S", 0.02)
    monkeypatch.setattr(patience, "MISFIT_S", 0.02)


@dataclass
class World:
    """A worker's directory, an agent, and what it told."""

    out: Path
    engines: list[FakeEngine]
    events: list[WorkerEvent] = field(default_factory=list)
    head: Head | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)
    agent: Agent | None = None

    def emit(self, event: WorkerEvent) -> None:
        self.events.append(event)
        self.came.set()

    def version(self, number: int) -> Target:
        return make_version(self.out / "versions", number)

    def publish(self, number: int, **more: Any) -> Target:
        """A version becomes current here, and the head names it."""
        self.announce(number, **more)
        target = self.version(number)
        assert self.agent is not None
        self.agent.update(target)
        return target

    def announce(self, number: int, **more: Any) -> None:
        self.head = make_head(number, (number,), **more)
        assert self.agent is not None
        self.agent.look()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that events or engines show is so."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.came.clear()
                waits = [self.came, *(engine.changed for engine in self.engines)]
                for one in waits:
                    one.clear()
                tasks = [asyncio.ensure_future(one.wait()) for one in waits]
                # What an engine says can change without a call: it is looked at now and then.
                await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, number: int, *engines: FakeEngine) -> None:
        """Wait until engines serve a version, and it was told of them."""
        chosen = engines or tuple(self.engines)
        names = {engine.name for engine in chosen}
        await self.until(
            lambda: (
                all(served(engine) == number for engine in chosen)
                and names <= {e.engine for e in self.of(EventKind.ACTIVATED) if e.version == number}
            )
        )

    def of(self, kind: EventKind) -> list[WorkerEvent]:
        return [event for event in self.events if event.kind is kind]

    def metric(self, name: str, engine: FakeEngine, **labels: str) -> float | None:
        assert self.agent is not None
        found = {"engine": engine.name, **labels}
        return self.agent.metrics.registry.get_sample_value(f"shardcast_engine_{name}", found)


def served(engine: FakeEngine) -> int | None:
    identity = served_by(engine._state)
    return None if identity is None else identity.version


@asynccontextmanager
async def minding(
    out: Path,
    *engines: FakeEngine,
    canary: Canary | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> AsyncIterator[World]:
    world = World(out, list(engines))
    made = AgentOptions(**{"poll_s": 0.02, "watch_s": 0.01, "lease_s": 1.0, **options})
    agent = Agent(engines, out, "policy", world.emit, made, clock=clock, rng=random.Random(1))
    if canary is not None:
        for one in agent._minders:
            one._canary = lambda target: canary
    world.agent = agent
    agent.follow_head(lambda: world.head)
    running = asyncio.ensure_future(agent.run())
    try:
        yield world
    finally:
        for engine in engines:
            engine.machine.gate.set()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


class Looked(FakeEngine):
    """Counts how often it was looked at."""

    looks = 0

    async def state(self) -> EngineState:
        self.looks += 1
        return await super().state()


def three() -> tuple[FakeEngine, FakeEngine, FakeEngine]:
    a, b, c = (FakeEngine(f"http://engine:{port}") for port in (1, 2, 3))
    return a, b, c


# --- the ordinary way -----------------------------------------------------------------------------


async def test_each_version_is_staged_then_activated_and_told(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        world.publish(2)
        await world.serve(2)
        await world.until(lambda: world.metric("served_version", engine) == 2)
        assert world.metric("lag_versions", engine) == 0
        assert world.metric("activations_total", engine) == 2
        assert world.metric("reachable", engine) == 1
    calls = [call for call in engine.calls if not call.startswith("tell")]
    assert calls == ["stage 1", "activate 1", "stage 2", "activate 2"]
    assert [call for call in engine.calls if call.startswith("tell")] == ["tell 1", "tell 2"]
    kinds = [(event.kind, event.version) for event in world.events]
    assert kinds == [
        (EventKind.STAGED, 1), (EventKind.ACTIVATED, 1),
        (EventKind.STAGED, 2), (EventKind.ACTIVATED, 2),
    ]  # fmt: skip
    last = world.events[-1]
    assert (last.engine, last.step, last.pause_ms) == (engine.name, 20, 1.0)
    assert last.manifest == world.version(2).digest


async def test_one_at_a_time_pauses_and_all_stage_meanwhile(tmp_path: Path) -> None:
    engines = three()
    for engine in engines:
        engine.machine.gate.clear()
    async with minding(tmp_path, *engines, max_swapping=1) as world:
        world.publish(1)
        await world.until(lambda: all("stage 1" in engine.calls for engine in engines))
        await world.until(lambda: any(engine.machine.loading.is_set() for engine in engines))
        order = []
        for _ in engines:
            await world.until(lambda: any(engine.machine.loading.is_set() for engine in engines))
            (loading,) = [engine for engine in engines if engine.machine.loading.is_set()]
            order.append(loading)
            assert [engine for engine in engines if engine.machine.paused] == [loading]
            loading.machine.gate.set()
            await world.serve(1, loading)
        assert len(set(map(id, order))) == 3


async def test_two_may_pause_where_two_may(tmp_path: Path) -> None:
    engines = three()
    for engine in engines:
        engine.machine.gate.clear()
    async with minding(tmp_path, *engines, max_swapping=2) as world:
        world.publish(1)
        await world.until(lambda: sum(e.machine.loading.is_set() for e in engines) == 2)
        await world.until(lambda: all("stage 1" in engine.calls for engine in engines))
        assert sum(engine.machine.paused for engine in engines) == 2


async def test_versions_are_skipped(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        for number in range(2, 6):
            world.publish(number)
        await world.serve(5)
    assert engine.calls.count("activate 2") == engine.calls.count("activate 4") == 0


# --- what engines do ------------------------------------------------------------------------------


async def test_an_engine_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    lost, well, other = three()
    lost.unreachable = EngineUnreachableError("connection refused", source=lost.name)
    async with minding(tmp_path, lost, well, other) as world:
        world.publish(1)
        await world.serve(1, well, other)
        assert world.metric("reachable", lost) == 0
        told = [event for event in world.of(EventKind.ENGINE_FAILED) if event.engine == lost.name]
        assert len(told) == 1  # not once for each look
        lost.unreachable = None
        await world.serve(1)
        await world.until(lambda: world.metric("reachable", lost) == 1)


async def test_an_engine_that_restarts_is_made_to_sync(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(3)
        await world.serve(3)
        engine.restart()
        await world.until(lambda: engine.calls.count("activate 3") == 2)
        await world.until(lambda: served(engine) == 3)
        assert engine.machine.weights == "weights of policy 3"
        await world.until(lambda: engine.calls.count("tell 3") == 2)


async def test_a_poisoned_engine_gets_a_whole_version(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        engine.machine.fail_loads = 4  # version 2, back to 1, version 2 again, back to 1
        world.publish(2)
        await world.serve(2)
        assert not engine.machine.half
        failed = world.of(EventKind.ENGINE_FAILED)
        assert failed
        assert "truncated" in str(failed[0].error)
        assert world.metric("failures_total", engine, phase="load") == 2
        assert world.metric("failure_timestamp_seconds", engine, phase="load")


async def test_what_cannot_be_staged_is_told_once_and_the_next_version_is_tried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        engine.refuse_stage = "lm_head.weight is [65, 32] here and [64, 32] there"
        world.publish(2)
        await world.until(lambda: engine.calls.count("stage 2") > 2)
        (failed,) = world.of(EventKind.ENGINE_FAILED)
        assert failed.version == 2
        assert "lm_head" in str(failed.error)
        assert served(engine) == 1
        monkeypatch.setattr(patience, "MISFIT_S", 3600.0)
        assert world.agent is not None
        (minder,) = world.agent._minders
        await world.until(lambda: minder._patience.left_s > WAIT_S)  # it rests an hour now
        engine.refuse_stage = None
        world.publish(3)
        await world.serve(3)


async def test_an_answer_that_was_lost_is_asked_for(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.lose_answers = 1
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        assert engine.calls.count("activate 1") == 1
        (told,) = world.of(EventKind.ACTIVATED)
        assert told.pause_ms == 1.0  # of the engine's own log
        assert not world.of(EventKind.ENGINE_FAILED)


async def test_an_agent_that_is_killed_leaves_its_work_to_the_next(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.machine.gate.clear()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.until(engine.machine.loading.is_set)
    # The first one is gone, the engine goes on by itself.
    done = make_version(tmp_path / "versions", 1)
    await engine.activate(done)
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.until(lambda: world.metric("served_version", engine) == 1)
        world.publish(2)
        await world.serve(2)
    assert engine.calls.count("stage 1") == 1


# --- what the publisher says ----------------------------------------------------------------------


async def test_hold_stops_activations_and_not_staging(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        world.publish(2, hold=True)
        await world.until(lambda: "stage 2" in engine.calls)
        engine.restart()  # what it loses meanwhile it gets back
        await world.until(lambda: engine.calls.count("activate 1") == 2)
        await world.until(lambda: served(engine) == 1)
        assert "activate 2" not in engine.calls
        world.announce(2)
        await world.serve(2)


async def test_what_the_last_head_said_holds_while_there_is_none(tmp_path: Path) -> None:
    """A follower that has just begun to lead has accepted nothing yet, perhaps for long."""
    engine = Looked()
    async with minding(tmp_path, engine) as world:
        assert world.agent is not None
        world.publish(1)
        await world.serve(1)
        world.publish(2, hold=True)
        await world.until(lambda: "stage 2" in engine.calls)
        world.announce(1, withdrawn=(2,))
        world.head = None
        world.agent.look()
        seen = engine.looks
        await world.until(lambda: engine.looks >= seen + 4)
        assert "activate 2" not in engine.calls
        world.publish(3, hold=True)
        await world.until(lambda: "stage 3" in engine.calls)
        world.head = None
        seen = engine.looks
        await world.until(lambda: engine.looks >= seen + 4)
        assert "activate 3" not in engine.calls
        assert engine.calls[-1] != "tell 1"
        world.announce(3)
        await world.serve(3)


async def test_a_head_is_not_taken_back_for_an_older_one(tmp_path: Path) -> None:
    agent = Agent([FakeEngine()], tmp_path, "policy", lambda event: None)
    older, newer = make_head(1, (1,)), msgspec.structs.replace(make_head(2, (2,)), sequence=2)
    given = newer
    agent.follow_head(lambda: given)
    agent.look()
    given = older
    assert agent._newest_head() is newer
    given = msgspec.structs.replace(newer, hold=True)
    assert agent._newest_head() is given
    await agent.close()


async def test_a_withdrawn_version_is_left_also_downwards(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        world.publish(2)
        await world.serve(2)
        world.publish(1, withdrawn=(2,))
        await world.serve(1)
        await world.until(lambda: engine.calls.count("activate 1") == 2)


async def test_it_never_goes_back_by_itself(tmp_path: Path) -> None:
    engine = FakeEngine()
    await engine.activate(make_version(tmp_path / "versions", 7))
    async with minding(tmp_path, engine) as world:
        world.publish(6)
        await world.until(lambda: "tell 6" in engine.calls)
        world.publish(8)
        await world.serve(8)
    assert "stage 6" not in engine.calls


# --- manual ---------------------------------------------------------------------------------------


async def test_in_manual_mode_the_orchestrator_activates_and_it_is_told(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine, mode=Mode.MANUAL) as world:
        target = world.publish(1)
        await world.until(lambda: bool(world.of(EventKind.STAGED)))
        await engine.activate(target)
        await world.serve(1)
        (told,) = world.of(EventKind.ACTIVATED)
        assert (told.version, told.pause_ms, told.step) == (1, 1.0, 10)
        engine.machine.fail_loads = 1
        with suppress(Exception):
            await engine.activate(world.version(2))
        await world.until(lambda: bool(world.of(EventKind.ENGINE_FAILED)))
        assert "truncated" in str(world.of(EventKind.ENGINE_FAILED)[0].error)
    assert engine.calls.count("activate 1") == 1


# --- the disk -------------------------------------------------------------------------------------


async def test_what_is_served_or_staged_is_never_evicted(tmp_path: Path) -> None:
    engine = FakeEngine()
    store = RunStore(tmp_path, "policy")
    async with minding(tmp_path, engine, mode=Mode.MANUAL) as world:
        await engine.activate(world.publish(1))
        await world.serve(1)
        world.publish(2)
        await world.until(lambda: len(world.of(EventKind.STAGED)) > 0)
        world.publish(3)
        await world.until(lambda: {e.version for e in world.of(EventKind.STAGED)} >= {2, 3})
        await world.until(lambda: store.evict(2))  # neither served nor staged any more
        assert not store.evict(1)
        assert not store.evict(3)
        await engine.activate(world.version(3))
        await world.serve(3)
        await world.until(lambda: store.evict(1))
        assert not store.evict(3)
    assert store.evict(3)
    store.close()


async def test_an_engine_that_is_gone_keeps_its_version_for_its_return(tmp_path: Path) -> None:
    engine = FakeEngine()
    store = RunStore(tmp_path, "policy")
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        engine.unreachable = EngineUnreachableError("gone", source=engine.name)
        await world.until(lambda: world.metric("reachable", engine) == 0)
        world.publish(2)
        assert not store.evict(1)
    store.close()


# --- adapters -------------------------------------------------------------------------------------


async def test_adapters_are_loaded_anew_and_the_old_ones_given_up(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine, adapter="math") as world:
        world.publish(1)
        await world.until(lambda: "load 1" in engine.calls)
        second = world.publish(2)
        await world.until(lambda: "unload 1" in engine.calls)
        assert engine.calls.index("load 2") < engine.calls.index("unload 1")
        assert [one.version for one in engine._state.lora] == [2]
        engine.set(lora=[])  # dropped by a full swap
        await world.until(lambda: engine.calls.count("load 2") == 2)
    told = world.of(EventKind.ACTIVATED)
    assert (told[-1].version, told[-1].model) == (2, f"math-{second.digest}")
    assert not any("activate" in call or "stage" in call for call in engine.calls)


# --- canaries -------------------------------------------------------------------------------------


def canary(text: str, tolerance: float = 0.1) -> Canary:
    tokens = [1, 2, 3]
    return Canary(
        prompts=[Prompt(tokens=tokens, logprobs=logprobs(text, tokens))], tolerance=tolerance
    )


async def test_a_canary_that_is_right_changes_nothing(tmp_path: Path) -> None:
    engine = FakeEngine()
    right = canary("weights of policy 1")
    async with minding(tmp_path, engine, canary=right, check_canary=True) as world:
        world.publish(1)
        await world.serve(1)
        await world.until(lambda: world.metric("served_version", engine) == 1)
    assert not world.of(EventKind.ENGINE_FAILED)


async def test_a_canary_that_is_wrong_moves_the_engine_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine, check_canary=True) as world:
        assert world.agent is not None
        of_version = {n: canary(f"weights of policy {n}") for n in (1, 2, 3)}
        world.agent._minders[0]._canary = lambda target: of_version[target.version]
        world.publish(1)
        await world.serve(1)
        engine.machine.wrong_by["weights of policy 2"] = -0.5
        world.publish(2)  # it serves that for a moment
        await world.until(lambda: engine.calls.count("activate 1") == 2)
        await world.until(lambda: served(engine) == 1)
        (failed,) = world.of(EventKind.ENGINE_FAILED)
        assert failed.version == 2
        assert "goes back to version 1" in str(failed.error)
        assert world.metric("failures_total", engine, phase="check") == 1
        assert not RunStore(tmp_path, "policy").evict(1)
        world.publish(3)
        await world.serve(3)
    assert engine.calls.count("activate 2") == 1


async def test_where_there_is_nothing_to_go_back_to_that_is_said(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.machine.wrong_by["weights of policy 1"] = -0.5
    wrong = canary("weights of policy 1")
    async with minding(tmp_path, engine, canary=wrong, check_canary=True) as world:
        world.publish(1)
        await world.until(lambda: bool(world.of(EventKind.ENGINE_FAILED)))
        assert "activate another version" in str(world.of(EventKind.ENGINE_FAILED)[0].error)
        assert served(engine) == 1


# --- at the start ---------------------------------------------------------------------------------


def test_engines_are_given_once_each(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="given twice"):
        Agent([FakeEngine(), FakeEngine()], tmp_path, "policy", lambda event: None)
    with pytest.raises(UsageError, match="--engine-url"):
        Agent([], tmp_path, "policy", lambda event: None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineKeyError("does not take the key"), UsageError),
        (EngineUnsupportedError("has no routes"), EngineUnsupportedError),
    ],
)
async def test_what_no_later_look_would_mend_ends_it(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    engine, well = FakeEngine("http://a:1"), FakeEngine("http://b:1")
    engine.unreachable = error
    agent = Agent([well, engine], tmp_path, "policy", lambda event: None)
    with pytest.raises(kind, match=str(error)):
        await agent.run()


@pytest.mark.parametrize(
    "options",
    [
        {"max_swapping": 0},
        {"adapter": "math", "mode": Mode.MANUAL},
        {"adapter": "math", "check_canary": True},
    ],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AgentOptions(**options)

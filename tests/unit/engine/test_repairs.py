"""What the agent does where an engine calls a version damaged, was overtaken, or is to load an adapter."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcast.engine import patience, repairs
from shardcast.engine.adapters import Use, use_of
from shardcast.engine.decide import Kind, Mode
from shardcast.engine.driver import Target, reason_of
from shardcast.engine.forms import Failure
from shardcast.engine.leases import Leases
from shardcast.engine.metrics import EngineMetrics
from shardcast.engine.patience import Patience
from shardcast.engine.repairs import Repairs
from shardcast.errors import (
    BusyError,
    DiskError,
    EngineRefusedError,
    EngineUncertainError,
    IntegrityError,
    MalformedError,
    MixAndMatchError,
    NetworkError,
    NotFoundError,
    ShardcastError,
)
from shardcast.events import EventKind, WorkerEvent
from shardcast.mending import Repaired
from shardcast.protocol.layout import FileEntry, Layout
from shardcast.store.run import RunStore
from tests.engines import FakeEngine, make_version
from tests.unit.engine.test_agent import World, minding, served

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(patience, "RETRY_CAP_S", 0.02)
    monkeypatch.setattr(patience, "MISFIT_S", 0.02)


class Worker:
    """Repairs as it is told to; ``then`` is done first."""

    def __init__(self, damage: str = "shard 3 has other bytes") -> None:
        self.damage = damage
        self.asked: list[tuple[int, str]] = []
        self.error: Exception | None = None
        self.then: Callable[[], None] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = False

    async def repair(self, version: int, manifest: str) -> Repaired:
        self.asked.append((version, manifest))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        self.then()
        return Repaired(version, manifest, self.damage)


def repairing(world: World, worker: Worker) -> None:
    assert world.agent is not None
    world.agent.repair_with(worker.repair)


def outcomes(world: World) -> dict[str, float]:
    assert world.agent is not None
    registry = world.agent.metrics.registry
    found = {
        name: registry.get_sample_value("shardcast_agent_repairs_total", {"outcome": name})
        for name in ("repaired", "intact", "failed")
    }
    return {name: count for name, count in found.items() if count}


# --- damaged files ----------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["integrity", "unavailable"])
async def test_a_version_that_an_engine_calls_damaged_is_repaired_and_told_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    for name in ("RETRY_FIRST_S", "RETRY_CAP_S"):  # nobody waits for a second try by itself
        monkeypatch.setattr(patience, name, HOUR_S)
    engine, other = FakeEngine("http://e:1"), FakeEngine("http://e:2")
    worker = Worker()
    async with minding(tmp_path, engine, other) as world:
        repairing(world, worker)
        for one in (engine, other):
            one.refuse_stage, one.refuse_reason = "shard 3 is not what was published", reason

        def mend() -> None:
            engine.refuse_stage = other.refuse_stage = None

        worker.then = mend
        target = world.publish(1)
        await world.serve(1)
        assert worker.asked == [(1, target.digest)]  # once, for both
        assert outcomes(world) == {"repaired": 1}
        assert world.of(EventKind.ENGINE_FAILED)
        assert not world.of(EventKind.INTACT)


async def test_where_nothing_is_damaged_that_is_said_once_and_not_looked_for_again_and_again(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    worker = Worker(damage="")
    async with minding(tmp_path, engine) as world:
        repairing(world, worker)
        engine.refuse_stage, engine.refuse_reason = "no such directory", "unavailable"
        target = world.publish(1)
        await world.until(lambda: engine.calls.count("stage 1") > 5)
        (told,) = world.of(EventKind.INTACT)
        assert (told.engine, told.version, told.path) == (engine.name, 1, target.path)
        assert str(target.path) in str(told.error)
        assert worker.asked == [(1, target.digest)]
        assert outcomes(world) == {"intact": 1}
        engine.refuse_stage = None
        await world.serve(1)


async def test_a_repair_that_fails_is_told_and_tried_again_after_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairs, "FIRST_REST_S", 0.02)
    engine = FakeEngine()
    worker = Worker()
    worker.error = NetworkError("no source delivered shard 3")
    async with minding(tmp_path, engine) as world:
        repairing(world, worker)
        engine.refuse_stage, engine.refuse_reason = "not what was published", "integrity"
        world.publish(1)
        await world.until(lambda: len(worker.asked) > 1)
        failed = world.of(EventKind.ERROR)[0]
        assert (failed.version, str(failed.error)) == (1, "no source delivered shard 3")
        worker.error = None
        worker.then = lambda: setattr(engine, "refuse_stage", None)
        await world.serve(1)


async def test_an_engine_is_not_asked_while_its_version_is_repaired_and_a_newer_one_ends_that(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    worker = Worker()
    worker.gate.clear()
    async with minding(tmp_path, engine) as world:
        repairing(world, worker)
        engine.refuse_stage, engine.refuse_reason = "not what was published", "integrity"
        world.publish(1)
        await world.until(lambda: bool(worker.asked))
        tried = engine.calls.count("stage 1")
        for _ in range(5):
            assert world.agent is not None
            world.agent.look()
            await asyncio.sleep(0)
        assert engine.calls.count("stage 1") == tried
        engine.refuse_stage = None
        world.publish(2)
        await world.serve(2)
        assert worker.cancelled
        assert engine.calls.count("stage 1") == tried


async def test_other_failures_and_nobody_to_repair_are_as_before(tmp_path: Path) -> None:
    engine = FakeEngine()
    worker = Worker()
    async with minding(tmp_path, engine) as world:
        engine.refuse_stage, engine.refuse_reason = "not what was published", "integrity"
        world.publish(1)  # nobody repairs
        await world.until(lambda: engine.calls.count("stage 1") > 2)
        engine.refuse_reason = "incompatible"
        tried = engine.calls.count("stage 1")
        await world.until(lambda: engine.calls.count("stage 1") > tried + 1)
        repairing(world, worker)
        tried = engine.calls.count("stage 1")
        await world.until(lambda: engine.calls.count("stage 1") > tried + 2)
        assert worker.asked == []


async def test_what_an_orchestrator_fails_at_is_repaired_too(tmp_path: Path) -> None:
    engine = FakeEngine()
    worker = Worker()
    async with minding(tmp_path, engine, mode=Mode.MANUAL) as world:
        repairing(world, worker)
        target = world.publish(1)
        await world.until(lambda: bool(world.of(EventKind.STAGED)))
        engine.set(
            last_failure=Failure(phase="stage", code="integrity", message="shard 3", version=1, t=5)
        )
        await world.until(lambda: worker.asked == [(1, target.digest)])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (IntegrityError("shard 3"), "integrity"),
        (NotFoundError("it lacks a file"), "unavailable"),
        (DiskError("EIO"), "unavailable"),
        (BusyError("it is being evicted"), "unavailable"),
        (MalformedError("no .safetensors file"), "incompatible"),
        (MixAndMatchError("of another version"), "conflict"),
    ],
)
def test_what_drivers_call_what_they_cannot_read(error: ShardcastError, reason: str) -> None:
    assert reason_of(error) == reason
    refused = EngineRefusedError("no", phase="stage", reason=reason_of(error))
    assert repairs.is_about_files(refused) == (reason in ("integrity", "unavailable"))
    # The agent's own note could not be written: no version's fault.
    assert not repairs.is_about_files(EngineRefusedError("no", phase="pause", reason="unavailable"))


def test_a_directory_that_was_made_anew_is_leased_anew(tmp_path: Path) -> None:
    store = RunStore(tmp_path, "policy")
    leases = Leases(store)
    target = make_version(tmp_path / "versions", 1)
    assert leases.hold(target)
    shutil.rmtree(target.path)
    make_version(tmp_path / "versions", 1)
    assert leases.hold(target)
    assert dict(leases.targets) == {target.digest: target}
    assert not store.evict(1)
    leases.close()
    assert store.evict(1)
    store.close()


class Scene:
    """Repairs without an agent, on a clock that is told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[WorkerEvent] = []
        self.worker = Worker(damage="")
        self.over = asyncio.Event()
        self.repairs = Repairs(
            "policy",
            self.events.append,
            EngineMetrics("policy"),
            lambda target: self.over.set(),
            clock=lambda: self.now,
            rng=random.Random(1),
        )
        self.repairs.repair = self.worker.repair

    async def asked_for(self, target: Target) -> bool:
        """Ask; say whether a look was begun, and wait for its end."""
        self.over.clear()
        self.repairs.ask(target, "http://e:1")
        if not self.repairs.under_way(target.digest):
            return False
        await asyncio.wait_for(self.over.wait(), 20)
        return True


@pytest.mark.parametrize("damage", ["", "shard 3"], ids=["intact", "damaged each time"])
async def test_rests_grow_whatever_comes_of_it_and_end_with_quiet(
    tmp_path: Path, damage: str
) -> None:
    scene, target = Scene(), make_version(tmp_path, 1)
    scene.worker.damage = damage
    assert await scene.asked_for(target)
    rests = []
    for _ in range(9):
        began = scene.now
        while not await scene.asked_for(target):
            scene.now += 1
        rests.append(scene.now - began)
    assert 0 < rests[0] <= repairs.FIRST_REST_S + 1
    assert repairs.MOST_REST_S / 2 <= rests[-1] <= repairs.MOST_REST_S + 1
    assert len(scene.worker.asked) == 10
    scene.now += 3 * repairs.MOST_REST_S
    assert await scene.asked_for(target)
    scene.now += repairs.FIRST_REST_S + 1
    assert await scene.asked_for(target)  # as after the first one
    assert len([e for e in scene.events if e.kind is EventKind.INTACT]) == (not damage)
    assert await scene.asked_for(make_version(tmp_path, 2))  # of another version nothing is known
    await scene.repairs.close()


# --- overtaken --------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["superseded", "conflict"])
async def test_what_was_given_up_for_another_version_is_looked_at_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    for name in ("RETRY_FIRST_S", "RETRY_CAP_S", "MISFIT_S"):
        monkeypatch.setattr(patience, name, HOUR_S)
    engine = FakeEngine()
    stage = engine.stage

    async def once(target: Target) -> Any:
        engine.stage = stage  # type: ignore[method-assign]
        engine.called("given up")
        raise EngineRefusedError("another one was asked for", phase="stage", reason=reason)

    engine.stage = once  # type: ignore[method-assign]
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        assert engine.calls[-3:] == ["given up", "stage 1", "activate 1"]
        assert not world.of(EventKind.ENGINE_FAILED)


async def test_what_is_staged_no_more_when_it_is_activated_is_staged_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RETRY_FIRST_S", "RETRY_CAP_S", "MISFIT_S"):
        monkeypatch.setattr(patience, name, HOUR_S)
    engine = FakeEngine()
    activate = engine.activate

    async def once(target: Target) -> Any:
        engine.activate = activate  # type: ignore[method-assign]
        engine.set(staged=None)
        raise EngineRefusedError("it is not staged", phase="activate", reason="conflict")

    engine.activate = once  # type: ignore[method-assign]
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.serve(1)
        assert engine.calls.count("stage 1") == 2
        assert not world.of(EventKind.ENGINE_FAILED)


async def test_an_engine_that_somebody_else_drives_as_well_is_told_of(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refuse_stage, engine.refuse_reason = "another one was asked for", "superseded"
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.until(lambda: bool(world.of(EventKind.ENGINE_FAILED)))
        assert engine.calls.count("stage 1") >= 2


async def test_an_engine_that_comes_back_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "MISFIT_S", HOUR_S)
    engine = FakeEngine()
    engine.refuse_stage = "lm_head.weight has another shape"
    async with minding(tmp_path, engine) as world:
        world.publish(1)
        await world.until(lambda: bool(world.of(EventKind.ENGINE_FAILED)))
        engine.unreachable = EngineUncertainError("it is started anew")
        await world.until(lambda: len(world.of(EventKind.ENGINE_FAILED)) == 2)
        engine.restart()  # with the right model
        engine.refuse_stage = engine.unreachable = None
        await world.serve(1)
        assert served(engine) == 1


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = [100.0]
    kept = Patience(lambda: now[0], random.Random(3))
    failed = EngineRefusedError("no", reason="failed")
    misfit = EngineRefusedError("no", reason="incompatible")
    given_up = EngineRefusedError("no", reason="superseded")
    kept.at_stake("a")
    rests = []
    for _ in range(8):  # staged well each time, and it fails to load: no pause a second
        kept.succeeded(Kind.STAGE)
        kept.failed(failed, Kind.ACTIVATE)
        rests.append(kept.left_s)
        now[0] += kept.left_s
    assert rests[0] <= 2
    assert patience.RETRY_CAP_S / 2 <= rests[-1] <= patience.RETRY_CAP_S
    kept.succeeded(Kind.ACTIVATE)
    kept.failed(failed, Kind.STAGE)
    assert kept.left_s <= 2
    kept.succeeded(Kind.STAGE)
    assert kept.left_s <= 0
    kept.failed(misfit, Kind.STAGE)
    assert kept.left_s >= patience.MISFIT_S / 2
    kept.at_stake("a")
    assert kept.left_s > 0
    kept.at_stake("b")
    assert kept.left_s <= 0
    assert not kept.passes(failed, Kind.STAGE)
    assert kept.passes(given_up, Kind.STAGE)
    assert not kept.passes(given_up, Kind.STAGE)
    kept.failed(EngineRefusedError("no", reason="unsupported"), Kind.LOAD)
    assert 0 < kept.left_s <= patience.RETRY_CAP_S
    kept.hurry()
    assert kept.left_s <= 0


# --- adapters ---------------------------------------------------------------------------------


ADAPTER = ("README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")


def layout(*paths: str, **metadata: str) -> Layout:
    return Layout(
        run="style",
        version=3,
        step=None,
        lineage="lineage",
        created_at=1,
        shard_bytes=1 << 20,
        metadata=metadata,
        files=[FileEntry(path=path, bytes=5) for path in paths],
    )


@pytest.mark.parametrize(
    ("made", "name", "use"),
    [
        (layout(*ADAPTER), None, Use("style")),
        (layout(*ADAPTER, lora="haiku"), None, Use("haiku")),
        (layout(*ADAPTER, lora="haiku"), "mine", Use("mine")),
        (layout("config.json", "model.safetensors"), None, Use()),
        # A whole model may bring an adapter of its own along.
        (layout(*ADAPTER, "model.safetensors"), None, Use()),
        (layout("adapter_config.json", "model.safetensors"), None, Use()),
        (layout("adapter_model.safetensors"), None, Use()),
        (layout("x/adapter_config.json", "x/adapter_model.safetensors"), None, Use()),
    ],
)
def test_a_version_says_what_it_is(made: Layout, name: str | None, use: Use) -> None:
    assert use_of(made, name=name, mode=Mode.AUTO) == use


@pytest.mark.parametrize(
    ("made", "name", "mode", "said"),
    [
        (layout("model.safetensors"), "math", Mode.AUTO, "--lora math was given: leave that away"),
        (layout(*ADAPTER), None, Mode.MANUAL, "use --activate auto"),
        (layout(*ADAPTER, lora="a/b"), None, Mode.AUTO, "publish --metadata lora=NAME"),
    ],
)
def test_what_no_engine_is_told_to_take(
    made: Layout, name: str | None, mode: Mode, said: str
) -> None:
    use = use_of(made, name=name, mode=mode)
    assert use.adapter is None
    assert "version 3 of run style" in use.refusal
    assert said in use.refusal

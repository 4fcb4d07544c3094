"""Whatever fails in an activation, it ends in one of three ways, and never in a half-loaded engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest
from msgspec.structs import replace

from shardcast.engine.forms import (
    ActivateAnswer,
    ActivateRequest,
    NewestRequest,
    Requests,
    StageRequest,
    label_of,
)
from tests.unit.swapping.engine import NEW, NEXT, OLD, POINTS, FakeClock, FakeEngine
from trainer_adapter.vllm.machine import Facts, SwapError
from trainer_adapter.vllm.ranks import Target
from trainer_adapter.vllm.swap import Swapper

FACTS = Facts(engine_version="0.32.0", plugin_version="0.1.0", keep_refusal="not salted")
SALTED = Facts(engine_version="0.32.0", plugin_version="0.1.0", keep_refusal="")
BOUND = 5.0
"""Seconds after which a test is stuck."""

_T = TypeVar("_T")


async def soon(work: Awaitable[_T]) -> _T:
    return await asyncio.wait_for(work, BOUND)


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until a condition holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def wanted(
    target: Target, *, path: bool = True, requests: Requests = "recompute"
) -> ActivateRequest:
    return ActivateRequest(
        run=target.run,
        version=target.version,
        digest=target.digest,
        path=target.path if path else None,
        step=target.step,
        requests=requests,
    )


def to_stage(target: Target) -> StageRequest:
    return StageRequest(
        run=target.run,
        version=target.version,
        digest=target.digest,
        path=target.path,
        step=target.step,
    )


def under_way() -> set[str]:
    """Return the names of all coroutines that run as tasks."""
    return {str(getattr(one.get_coro(), "__name__", "")) for one in asyncio.all_tasks()}


class Told:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.pauses: list[float | None] = []

    def ended(self, outcome: str, pause_seconds: float | None) -> None:
        self.outcomes.append(outcome)
        self.pauses.append(pause_seconds)


class World:
    """A booted server over a scripted engine."""

    def __init__(self, engine: FakeEngine, facts: Facts = FACTS) -> None:
        self.engine = engine
        self.clock = FakeClock()
        self.told = Told()
        self.swapper = Swapper(engine, facts, self.clock, observer=self.told)

    async def boot(self) -> World:
        await soon(self.swapper.boot())
        self.engine.calls.clear()
        return self

    async def activate(self, target: Target, requests: Requests = "recompute") -> ActivateAnswer:
        return await soon(self.swapper.activate(wanted(target, requests=requests)))

    async def over(self) -> None:
        """Wait until no activation is under way."""

        await until(lambda: self.swapper.machine.activating is None)

    def outcome(self) -> str:
        """Return which of the three outcomes it is, after checking all that it promises."""
        engine, state = self.engine, self.swapper.state
        assert not engine.resumed_half
        assert state.activating is None
        if engine.dead():
            assert not state.ready
            assert state.served is None
            assert "restart the engine" in state.why
            return "c"
        if not engine.paused:
            assert state.ready, state.why
            assert engine.weights is not None
            assert state.served is not None
            assert state.served.digest == engine.weights.digest
            assert engine.label == label_of(engine.weights.identity)
            assert not state.paused
            assert not state.poisoned
            if engine.weights == NEW:
                assert state.last_failure is None
                return "a"
            assert engine.weights == OLD
            assert state.last_failure is not None
            assert state.last_failure.version == NEW.version
            return "b"
        assert state.paused
        assert not state.ready
        assert "send activate again" in state.why
        assert state.last_failure is not None
        return "c"


Make = Callable[..., Awaitable[World]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    worlds: list[World] = []

    async def build(engine: FakeEngine, facts: Facts = FACTS) -> World:
        worlds.append(await World(engine, facts).boot())
        return worlds[-1]

    yield build
    for world in worlds:
        await soon(world.swapper.close())


async def test_a_version_is_staged_paused_for_loaded_labelled_and_resumed(make: Make) -> None:
    world = await make(FakeEngine())
    answer = await world.activate(NEW)
    assert world.outcome() == "a"
    calls = [name for name in world.engine.calls if name in POINTS]
    assert calls == ["stage", "asleep", "pause", "load", "label", "resume"]
    assert answer.activated.digest == NEW.digest
    assert answer.pause_ms > 0
    assert set(answer.phases_ms) >= {"stage", "pause", "load", "resume"}
    assert answer.state == world.swapper.state
    (swap,) = answer.state.swaps
    assert (swap.from_, swap.to) == (label_of(OLD.identity), label_of(NEW.identity))
    assert swap.resumed_at is not None
    assert swap.resumed_at >= swap.paused_at
    assert world.told.outcomes == ["activated"]


FAILURES = [
    (point, kind)
    for point in POINTS
    for kind in ("raise", "cancel", "die", "lost")
    if (point, kind) not in {("asleep", "lost"), ("stage", "lost")}  # the same as raise
]


@pytest.mark.parametrize(("point", "kind"), FAILURES)
async def test_a_failure_at_any_point(make: Make, point: str, kind: str) -> None:
    world = await make(FakeEngine())
    world.engine.script[point] = kind
    if kind == "lost" and point in {"load", "resume"}:
        # It was done, and asking tells so.
        await world.activate(NEW)
        assert world.outcome() == "a"
        return
    with pytest.raises(SwapError) as caught:
        await world.activate(NEW)
    await world.over()
    expected = {"asleep": "b", "stage": "b", "pause": "b", "load": "b", "label": "c", "resume": "c"}
    assert world.outcome() == ("c" if kind == "die" else expected[point])
    failure = world.swapper.state.last_failure
    assert failure is not None
    assert failure.code == caught.value.slug == ("dead" if kind == "die" else "failed")
    assert failure.phase == caught.value.phase
    assert world.told.outcomes == ["not_ready" if world.outcome() == "c" else "kept"]
    if kind == "die":
        return
    # Whatever it was, the next activation puts it right, by a full load.
    await world.activate(NEXT)
    assert world.engine.weights == NEXT
    state = world.swapper.state
    assert state.ready
    assert state.last_failure is None
    assert world.engine.label == label_of(NEXT.identity)
    assert not world.engine.resumed_half


async def test_what_nobody_foresaw_poisons_a_paused_engine(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = await make(FakeEngine(load="nonsense"))
    with pytest.raises(SwapError, match="send activate again"):
        await world.activate(NEW)
    assert world.engine.paused
    assert world.outcome() == "c"
    assert world.swapper.state.poisoned
    assert "nobody foresaw" in caplog.text
    await world.activate(NEXT)
    assert world.swapper.state.ready


@pytest.mark.parametrize("also", ["state", "is_paused"])
async def test_answers_that_are_lost_twice(make: Make, also: str) -> None:
    """Nobody can tell what is loaded, or whether it runs: then it is not said to be served."""
    world = await make(FakeEngine())
    world.engine.polls = 0
    await soon(world.swapper.stage(to_stage(NEW)))
    world.engine.script |= {"load" if also == "state" else "resume": "lost", also: "raise"}
    with pytest.raises(SwapError):
        await world.activate(NEW)
    state = world.swapper.state
    assert not state.ready
    assert state.poisoned is (also == "state")
    assert (await world.activate(NEW)).state.ready


@pytest.mark.parametrize("said", ["refused", "restored", "poisoned"])
@pytest.mark.parametrize("booted", [OLD, None])
async def test_what_the_ranks_report(make: Make, said: str, booted: Target | None) -> None:
    world = await make(FakeEngine(booted))
    world.engine.script["load"] = said
    with pytest.raises(SwapError, match="the ranks say") as caught:
        await world.activate(NEW)
    state = world.swapper.state
    assert not world.engine.resumed_half
    if said == "poisoned":
        assert world.engine.paused
        assert state.poisoned
        assert state.served is None
        assert "send activate again" in caught.value.message
        assert not state.ready
    elif booted is None:
        assert not world.engine.paused
        assert state.served is None
        assert world.engine.label == "default"
    else:
        assert world.outcome() == "b"
        assert state.swaps[-1].from_ == state.swaps[-1].to
    await world.activate(NEXT)
    assert world.swapper.state.ready
    assert world.swapper.state.served is not None
    assert world.swapper.state.served.digest == NEXT.digest


async def test_poisoned_ranks_that_refuse_stay_poisoned(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.script["load"] = "poisoned"
    with pytest.raises(SwapError):
        await world.activate(NEW)
    for said in ("refused", "restored"):
        world.engine.script["load"] = said
        with pytest.raises(SwapError):
            await world.activate(NEXT)
        assert world.engine.paused
        assert world.swapper.state.poisoned
    world.engine.script["pause"] = "raise"
    with pytest.raises(SwapError):
        await world.activate(NEXT)
    assert world.engine.paused
    assert not world.engine.resumed_half
    await world.activate(NEXT)
    assert world.swapper.state.ready


async def test_poisoned_ranks_are_found_at_boot(make: Make) -> None:
    engine = FakeEngine()
    engine.ranks = replace(engine.ranks, served=None, poisoned="half of version 1")
    world = await make(engine)
    assert world.swapper.state.poisoned
    assert not world.swapper.state.ready
    assert "half of version 1" in world.swapper.state.why
    await world.activate(NEW)
    assert world.outcome() == "a"


async def hung(world: World, point: str, *, how: str = "hang") -> asyncio.Task[ActivateAnswer]:
    """Begin an activation that hangs at a point, and return when it does."""
    world.engine.script[point] = how
    task = asyncio.ensure_future(world.swapper.activate(wanted(NEW)))
    await soon(world.engine.hanging.wait())
    return task


@pytest.mark.parametrize("point", ["asleep", "stage", "pause"])
async def test_a_hang_before_the_load_goes_back_when_the_lease_ends(make: Make, point: str) -> None:
    world = await make(FakeEngine())
    task = await hung(world, point)
    world.clock.end_leases()
    with pytest.raises(SwapError, match="longer than the lease") as caught:
        await soon(task)
    assert caught.value.slug == "timeout"
    assert world.outcome() == "b"
    assert ("load" in world.engine.calls) is False
    world.engine.release.set()
    await asyncio.sleep(0)
    if point != "pause":
        assert not world.engine.paused
    await world.activate(NEXT)
    assert world.swapper.state.ready


@pytest.mark.parametrize("point", ["load", "label", "resume"])
async def test_a_hang_from_the_load_on_is_said_and_heals(make: Make, point: str) -> None:
    world = await make(FakeEngine())
    task = await hung(world, point)
    world.clock.end_leases()
    with pytest.raises(SwapError, match="lease of 60 s") as caught:
        await soon(task)
    assert caught.value.slug == "timeout"
    state = world.swapper.state
    assert state.paused
    assert not state.ready
    assert "restart the engine" in state.why
    assert state.last_failure is not None
    assert state.last_failure.phase == ("resume" if point == "resume" else "load")
    with pytest.raises(SwapError) as busy:
        await world.activate(NEXT)
    assert busy.value.slug == "busy"
    world.engine.release.set()
    await world.over()
    assert world.outcome() == "a"


async def test_a_hang_that_ends_with_the_engines_death(make: Make) -> None:
    world = await make(FakeEngine())
    task = await hung(world, "load")
    world.engine.die()
    with pytest.raises(SwapError) as caught:
        await soon(task)
    assert caught.value.slug == "dead"
    assert world.outcome() == "c"
    with pytest.raises(SwapError) as again:
        await world.activate(NEXT)
    assert again.value.slug == "dead"


async def test_a_pause_that_was_given_up_is_not_sent_after_the_resume(make: Make) -> None:
    """vLLM first clears a cache in this process, behind whatever images are being read."""
    world = await make(FakeEngine())
    task = await hung(world, "pause", how="unsent")
    world.clock.end_leases()
    with pytest.raises(SwapError, match="longer than the lease"):
        await soon(task)
    await world.over()
    assert world.outcome() == "b"
    world.engine.release.set()
    await until(lambda: not {"pause", "resume"} & under_way())
    assert not world.engine.paused
    assert (await soon(world.swapper.look())).ready


async def test_a_resume_that_fails_twice_leaves_it_paused_and_says_so(make: Make) -> None:
    world = await make(FakeEngine(pause="raise", resume="raise"))
    world.engine.paused = True
    with pytest.raises(SwapError, match="send activate again"):
        await world.activate(NEW)
    assert world.outcome() == "c"
    assert not world.swapper.state.poisoned
    await world.activate(NEW)
    assert world.outcome() == "a"


@pytest.mark.parametrize("point", ["stage", "pause", "load", "label", "resume"])
async def test_a_client_that_goes_away_changes_nothing(make: Make, point: str) -> None:
    world = await make(FakeEngine())
    task = await hung(world, point)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    world.engine.release.set()
    await world.over()
    assert world.outcome() == "a"


async def test_a_second_activation_is_refused_while_one_runs(make: Make) -> None:
    world = await make(FakeEngine())
    task = await hung(world, "load")
    for target in (NEW, NEXT):
        with pytest.raises(SwapError) as caught:
            await world.activate(target)
        assert caught.value.slug == "busy"
    with pytest.raises(SwapError) as caught:
        await soon(world.swapper.stage(to_stage(NEXT)))
    assert caught.value.slug == "busy"
    world.engine.release.set()
    await soon(task)
    assert world.outcome() == "a"
    assert world.engine.calls.count("load") == 1


async def test_what_is_served_already_is_not_loaded_again(make: Make) -> None:
    world = await make(FakeEngine())
    first = await world.activate(NEW)
    again = await world.activate(NEW)
    assert first.pause_ms > 0
    assert again.pause_ms == 0
    assert again.activated == first.activated
    assert world.engine.calls.count("pause") == 1


async def test_an_engine_that_somebody_paused_is_seen_and_resumed(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.paused = True
    state = await soon(world.swapper.look())
    assert state.paused
    assert not state.ready
    assert "send activate again" in state.why
    answer = await world.activate(OLD)
    assert answer.state.ready
    assert not world.engine.paused
    world.engine.paused = True
    await soon(world.swapper.look())
    world.engine.paused = False
    assert (await soon(world.swapper.look())).ready


async def test_weights_that_somebody_threw_away_are_noticed_and_loaded_again(make: Make) -> None:
    world = await make(FakeEngine(), dataclasses.replace(FACTS, may_sleep=True))
    world.engine.ranks = replace(world.engine.ranks, served=None, poisoned="thrown away")
    world.engine.weights = None
    state = await soon(world.swapper.look())
    assert (state.ready, state.why, state.served) == (False, "thrown away", None)
    answer = await world.activate(OLD)
    assert answer.pause_ms > 0
    assert world.engine.calls.count("load") == 1
    assert answer.state.ready
    assert world.engine.weights == OLD


async def test_weights_that_are_gone_are_not_taken_for_served(make: Make) -> None:
    world = await make(FakeEngine(), dataclasses.replace(FACTS, may_sleep=True))
    world.engine.ranks = replace(world.engine.ranks, served=None, poisoned="thrown away")
    world.engine.weights = None
    answer = await world.activate(OLD)
    assert answer.pause_ms > 0
    assert answer.state.ready
    assert world.engine.weights == OLD


async def test_a_look_at_an_engine_that_does_not_answer(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.script["is_paused"] = "hang"
    look = asyncio.ensure_future(world.swapper.look())
    await soon(world.engine.hanging.wait())
    world.clock.end_leases()
    assert (await soon(look)).ready
    world.engine.die()
    state = await soon(world.swapper.look())
    assert not state.ready
    assert "restart the engine" in state.why


async def test_a_version_and_its_digest_belong_together(make: Make) -> None:
    world = await make(FakeEngine())
    other = Target(run="demo", version=OLD.version, digest=NEW.digest, path="/x")
    false_names = [
        Target(run=run, version=version, digest=OLD.digest, path="/x")
        for run, version in (("demo", 9), ("other", OLD.version), ("other", 9))
    ]
    for target in (other, *false_names):
        with pytest.raises(SwapError, match="belong together") as caught:
            await world.activate(target)
        assert caught.value.slug == "conflict"
        with pytest.raises(SwapError, match="belong together"):
            await soon(world.swapper.stage(to_stage(target)))
    assert "pause" not in world.engine.calls
    elsewhere = Target(run="other", version=OLD.version, digest=NEW.digest, path="/x")
    assert (await world.activate(elsewhere)).state.run == "other"


async def test_the_path_may_be_left_out_where_the_version_is_staged(make: Make) -> None:
    world = await make(FakeEngine())
    with pytest.raises(SwapError, match="not staged") as caught:
        await soon(world.swapper.activate(wanted(NEW, path=False)))
    assert caught.value.slug == "conflict"
    state = await soon(world.swapper.stage(to_stage(NEW)))
    assert state.staged is not None
    assert state.staged.digest == NEW.digest
    assert state.served is not None
    assert state.served.digest == OLD.digest
    answer = await soon(world.swapper.activate(wanted(NEW, path=False)))
    assert answer.activated.step == NEW.step
    assert answer.state.staged is None


@pytest.mark.parametrize("code", ["integrity", "incompatible"])
async def test_what_cannot_be_staged_is_refused_before_any_pause(make: Make, code: str) -> None:
    world = await make(FakeEngine())
    for act in (world.swapper.stage(to_stage(NEW)), world.swapper.activate(wanted(NEW))):
        world.engine.script["stage"] = code
        with pytest.raises(SwapError) as caught:
            await soon(act)
        assert caught.value.slug == code
        assert caught.value.phase == "stage"
    assert "pause" not in world.engine.calls
    assert world.outcome() == "b"


@pytest.mark.parametrize("activating", [True, False])
async def test_what_was_staged_and_can_not_be_any_more_is_not_said_to_be(
    make: Make, activating: bool
) -> None:
    world = await make(FakeEngine())
    await soon(world.swapper.stage(to_stage(NEW)))
    world.engine.script["stage"] = "integrity"  # its files were changed since
    swapper = world.swapper
    with pytest.raises(SwapError, match="integrity!"):
        await soon(swapper.activate(wanted(NEW)) if activating else swapper.stage(to_stage(NEW)))
    assert world.swapper.state.staged is None
    assert world.outcome() == "b"


async def test_the_step_and_the_path_are_those_that_the_ranks_hold(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.published[NEW.digest] = NEW
    claimed = replace(NEW, step=4242, path="/another/way/there")
    state = (await world.activate(claimed)).state
    assert state.served is not None
    assert state.served.step == NEW.step
    # So what is served is known again where the answer of the next load is lost.
    world.engine.script["load"] = "raise"
    with pytest.raises(SwapError, match="load went wrong"):
        await world.activate(NEXT)
    assert world.swapper.state.ready
    assert world.swapper.machine.identity == NEW.identity


async def test_staging_another_version_gives_up_the_one_before(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.polls = 10
    first = asyncio.ensure_future(world.swapper.stage(to_stage(NEW)))
    await until(lambda: world.engine.ranks.staging is not None)
    state = await soon(world.swapper.stage(to_stage(NEXT)))
    assert state.staged is not None
    assert state.staged.digest == NEXT.digest
    with pytest.raises(SwapError, match="given up") as caught:
        await soon(first)
    assert caught.value.slug == "superseded"
    assert world.swapper.state.last_failure is None


async def test_a_disk_that_stands_still_ends_staging(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.polls = 10**9
    with pytest.raises(SwapError, match="stood still") as caught:
        await soon(world.swapper.stage(to_stage(NEW)))
    assert caught.value.slug == "unavailable"


async def test_a_sleeping_engine_is_not_touched(make: Make) -> None:
    world = await make(FakeEngine())
    world.engine.sleeping = True
    with pytest.raises(SwapError, match="wake it up") as caught:
        await world.activate(NEW)
    assert caught.value.slug == "refused"
    assert world.outcome() == "b"


async def test_an_engine_that_falls_asleep_while_it_stages_is_not_touched(make: Make) -> None:
    world = await make(FakeEngine())
    task = await hung(world, "stage")
    world.engine.sleeping = True
    world.engine.release.set()
    with pytest.raises(SwapError, match="wake it up") as caught:
        await soon(task)
    assert (caught.value.slug, caught.value.phase) == ("refused", "check")
    assert not {"pause", "load", "resume"} & set(world.engine.calls)
    assert world.outcome() == "b"
    staged = world.swapper.state.staged
    assert staged is not None
    assert staged.digest == NEW.digest
    world.engine.sleeping = False
    assert (await world.activate(NEW)).state.ready


async def test_a_pause_of_our_own_is_not_taken_for_sleep(make: Make) -> None:
    """vLLM says of every paused engine that it sleeps."""
    world = await make(FakeEngine(load="poisoned"))
    world.engine.may_sleep = True
    with pytest.raises(SwapError):
        await world.activate(NEW)
    assert (await world.activate(NEW)).state.ready
    world.engine.paused = True  # by somebody else, perhaps to sleep
    with pytest.raises(SwapError, match="wake it up"):
        await world.activate(NEXT)


@pytest.mark.parametrize("requests", ["recompute", "wait", "abort", "keep"])
async def test_modes_of_running_requests(make: Make, requests: Requests) -> None:
    world = await make(FakeEngine(), SALTED)
    answer = await world.activate(NEW, requests)
    assert world.engine.pauses == [requests]
    assert answer.state.swaps[-1].requests == requests
    assert answer.state.keep_allowed


async def test_requests_cannot_keep_what_is_wiped(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = await make(FakeEngine(), SALTED)
    answer = await world.activate(NEW, "keep")
    assert (world.engine.pauses, world.engine.kept) == (["keep"], [True])
    assert answer.state.swaps[-1].requests == "keep"

    world.engine.ranks = replace(world.engine.ranks, suspect="w holds NaN at [3]")
    answer = await world.activate(NEXT, "keep")

    assert (world.engine.pauses, world.engine.kept) == (["keep", "recompute"], [True, False])
    assert answer.state.swaps[-1].requests == "recompute"
    assert "computed again instead of keeping their cache" in caplog.text
    assert "w holds NaN at [3]" in caplog.text


async def test_a_version_with_nan_is_served_and_said(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = await make(FakeEngine())
    world.engine.published[NEW.digest] = replace(NEW, nonfinite="w holds NaN at [3]")
    state = await soon(world.swapper.stage(to_stage(NEW)))
    assert state.staged is not None
    assert state.staged.nonfinite == "w holds NaN at [3]"
    assert state.served is not None
    assert state.served.nonfinite == ""

    state = (await world.activate(NEW)).state

    assert state.served is not None
    assert state.served.nonfinite == "w holds NaN at [3]"
    assert "is served, and its answers may be NaN: w holds NaN at [3]" in caplog.text
    state = (await world.activate(NEXT)).state
    assert state.served is not None
    assert state.served.nonfinite == ""


async def test_keep_is_refused_without_salts(make: Make) -> None:
    world = await make(FakeEngine())
    with pytest.raises(SwapError, match="not salted") as caught:
        await world.activate(NEW, "keep")
    assert caught.value.slug == "refused"
    assert world.engine.calls == []
    assert not world.swapper.state.keep_allowed


async def test_falling_behind_drops_readiness_and_nothing_else(make: Make) -> None:
    world = await make(FakeEngine())
    state = world.swapper.tell_newest(NewestRequest(run="demo", version=4, max_lag=3))
    assert (state.lag, state.ready) == (3, True)
    state = world.swapper.tell_newest(NewestRequest(run="demo", version=5, max_lag=3))
    assert (state.lag, state.ready, state.paused) == (4, False, False)
    assert "4 versions behind" in state.why
    assert "pause" not in world.engine.calls
    state = world.swapper.tell_newest(NewestRequest(run="demo", version=50))
    assert (state.lag, state.ready) == (49, True)
    state = world.swapper.tell_newest(NewestRequest(run="another", version=1, max_lag=0))
    assert (state.lag, state.ready) == (None, False)


async def test_an_engine_from_elsewhere_has_no_label_until_it_is_synced(make: Make) -> None:
    world = await make(FakeEngine(None))
    state = world.swapper.state
    assert state.served is None
    assert world.engine.label == "default"
    assert world.swapper.machine.label == "unknown"
    assert state.ready
    assert world.swapper.machine.why_not_ready(must_serve=True)
    await world.activate(NEW)
    assert world.engine.label == label_of(NEW.identity)
    assert world.swapper.state.swaps[0].from_ is None


async def test_an_engine_booted_from_a_run_is_labelled_at_boot(make: Make) -> None:
    world = await make(FakeEngine(OLD))
    assert world.engine.label == label_of(OLD.identity)
    assert world.swapper.state.served is not None


async def test_a_server_that_cannot_swap_says_so(make: Make) -> None:
    facts = Facts(engine_version="0.99", plugin_version="0.1.0", unsupported="not this vLLM")
    world = World(FakeEngine(), facts)
    for act in (world.swapper.stage(to_stage(NEW)), world.swapper.activate(wanted(NEW))):
        with pytest.raises(SwapError, match="not this vLLM") as caught:
            await soon(act)
        assert caught.value.slug == "unsupported"
    state = await soon(world.swapper.look())
    assert not state.ready
    assert state.why == "not this vLLM"
    assert world.engine.calls == []


async def test_the_swap_log_keeps_the_last_64(make: Make) -> None:
    world = await make(FakeEngine())
    for turn in range(70):
        await world.activate(NEW if turn % 2 == 0 else OLD)
    state = world.swapper.state
    assert state.swap_count == 70
    assert [swap.n for swap in state.swaps] == list(range(7, 71))


async def test_a_server_that_is_stopped_takes_its_activation_along() -> None:
    world = await World(FakeEngine()).boot()
    task = await hung(world, "load")
    await soon(world.swapper.close())
    with pytest.raises(SwapError, match="stopped"):
        await soon(task)
    assert not world.swapper.state.ready

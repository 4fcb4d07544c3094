"""How far the run is is told to engines that take it, that do not, and that forget it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcast.engine.forms import EngineState
from shardcast.engine.patience import RETRY_CAP_S
from shardcast.errors import (
    EngineError,
    EngineKeyError,
    EngineRefusedError,
    EngineUncertainError,
    EngineUnsupportedError,
)
from shardcast.events import EventKind
from tests.engines import FakeEngine
from tests.unit.engine.test_agent import minding

REFUSALS = [
    EngineRefusedError("only this host may", source="http://fake:1", phase="newest", reason="refused"),
    EngineUncertainError("answers 502", source="http://fake:1"),
    EngineKeyError("does not take the key", source="http://fake:1"),
    EngineUnsupportedError("has no such route", source="http://fake:1"),
]  # fmt: skip


class Deaf(FakeEngine):
    """Does not take how far the run is."""

    def __init__(self, refusal: EngineError) -> None:
        super().__init__()
        self.refusal: EngineError | None = refusal

    async def tell(self, run: str, newest: int, max_lag: int | None) -> EngineState:
        if self.refusal is None:
            return await super().tell(run, newest, max_lag)
        self.called(f"tell {newest}")
        raise self.refusal


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
async def test_an_engine_that_does_not_take_it_gets_versions_all_the_same(
    tmp_path: Path, refusal: EngineError
) -> None:
    """And is told again with the next version, and after a rest."""
    now = 100.0
    engine = Deaf(refusal)
    async with minding(tmp_path, engine, clock=lambda: now) as world:
        for number in (1, 2):
            world.publish(number)
            await world.serve(number)
        assert [engine.calls.count(f"tell {number}") for number in (1, 2)] == [1, 1]
        failed = world.of(EventKind.ENGINE_FAILED)
        assert {event.error for event in failed} == {refusal}
        assert world.metric("failures_total", engine, phase="newest") == 2
        assert world.metric("reachable", engine) == 1
        engine.refusal = None
        now += RETRY_CAP_S
        await world.until(lambda: engine.calls.count("tell 2") == 2)
        await world.until(lambda: world.metric("lag_versions", engine) == 0)
        assert engine._state.newest == 2


async def test_an_engine_that_forgot_it_is_told_at_once(tmp_path: Path) -> None:
    engine = Deaf(REFUSALS[0])
    async with minding(tmp_path, engine, clock=lambda: 100.0) as world:
        world.publish(1)
        await world.serve(1)
        engine.refusal = None
        engine.restart()
        await world.until(lambda: engine.calls.count("tell 1") == 2)
        await world.until(lambda: engine.calls.count("activate 1") == 2)

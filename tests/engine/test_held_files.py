"""Files that somebody spoils while they are loaded: the load is held in its middle meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.checkpoints import Out
from tests.engine.conftest import Start
from tests.engine.engines import Answers, EngineRaisedError, RunningEngine
from tests.engine.servers import stopped, until
from tests.engine.test_failures import _flip, _truncate
from trainer_adapter.vllm.ranks import Report, Target


class Held:
    """An engine on version 1 whose loads can be held."""

    def __init__(self, out: Out, engine: RunningEngine, one: Target, two: Target) -> None:
        self.out, self.engine, self.one, self.two = out, engine, one, two
        self.cold_one: Answers = engine.answers()
        engine.swap(two)
        self.answers_two: Answers = engine.answers()  # test_equality: those of a cold start
        engine.swap(one)
        assert self.answers_two != self.cold_one

    def load_over(self, target: Target, work: Callable[[Path], None]) -> list[Report | Exception]:
        """Load a version, and do something to its file when three tensors are loaded."""
        assert self.engine.stage(target).staged == target
        self.engine.arm("stop", after=3)
        found: list[Report | Exception] = []

        def load() -> None:
            try:
                found.append(self.engine.activate(target))
            except EngineRaisedError as error:
                found.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        until(lambda: stopped(self.engine.pid), "the load is held")
        work(Path(target.path) / "model.safetensors")
        os.kill(self.engine.pid, signal.SIGCONT)
        loading.join(60)
        return found

    def fresh(self) -> Target:
        """Version 2 once more, in files of its own."""
        return self.out.publish(self.out.scratch / "qwen2-tied-bfloat16-2", current=False)


@pytest.fixture(scope="module")
def held(out: Out, start: Start) -> Held:
    two, one = (out.model("qwen2-tied", "bfloat16", seed) for seed in (2, 1))
    return Held(out, start(out.current, load_format="shardcast"), one, two)


@pytest.mark.parametrize(
    ("ahead", "spoil"), [(True, _truncate), (True, _flip), (False, _flip)],
    ids=["prepared-truncated", "prepared-flipped", "mapped-flipped"],
)  # fmt: skip
def test_the_old_version_is_loaded_again_and_the_engine_goes_on(
    held: Held, ahead: bool, spoil: Callable[[Path], None]
) -> None:
    held.engine.prepare_ahead(ahead)

    (report,) = held.load_over(held.fresh(), spoil)

    assert isinstance(report, Report)
    assert (report.outcome, report.served, report.poisoned) == ("restored", held.one, "")
    assert "model.safetensors" in report.message
    assert "while it was loaded" in report.message
    held.engine.order("reset")
    assert held.engine.answers() == held.cold_one
    assert held.engine.swap(held.two).outcome == "activated"
    assert held.engine.answers() == held.answers_two
    assert held.engine.swap(held.one).outcome == "activated"
    assert held.engine.answers() == held.cold_one


def test_what_is_loaded_from_a_mapped_file_that_shrinks_ends_the_engine(held: Held) -> None:
    """The kernel's word for it is SIGBUS: the one fault here that needs a restart. Last: it does."""
    held.engine.prepare_ahead(False)

    (ended,) = held.load_over(held.fresh(), _truncate)

    assert isinstance(ended, EngineRaisedError)
    assert "the engine ended" in str(ended)

"""``LLM`` as vLLM makes it by default: its engine is a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.engine.checkpoints import Out
from tests.engine.conftest import Start
from tests.engine.engines import Answers, EngineRaisedError, RunningEngine
from trainer_adapter.vllm.ranks import Target


class Scene:
    """An engine that was booted from version 1, what it answers, and version 2."""

    def __init__(self, engine: RunningEngine, one: Target, two: Target) -> None:
        self.engine, self.one, self.two = engine, one, two
        engine.order("served")
        self.answers = engine.answers()

    def serves(self, target: Target, answers: Answers) -> None:
        assert self.engine.state().served == target
        assert self.engine.label() == f"policy/{target.version}/{target.digest}"
        assert self.engine.answers() == answers


@pytest.fixture(scope="module")
def scene(out: Out, start: Start) -> Scene:
    one, two = (out.model("qwen2-tied", "bfloat16", seed) for seed in (1, 2))
    out.run.switch_current(one.version)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    engine = start(out.current, load_format="shardcast", environment=environment)
    return Scene(engine, one, two)


def test_there_and_back(scene: Scene) -> None:
    assert scene.engine.swap(scene.two).outcome == "activated"
    answers = scene.engine.answers()
    assert answers != scene.answers
    scene.serves(scene.two, answers)
    assert scene.engine.swap(scene.two).outcome == "already"
    assert scene.engine.swap(scene.one).outcome == "activated"
    scene.serves(scene.one, scene.answers)


def test_no_prefix_of_the_old_weights_survives(scene: Scene) -> None:
    """Also where its cache could not be reset at first."""
    scene.engine.order("hold_prefixes")
    with pytest.raises(EngineRaisedError, match=r"nothing was loaded.*swap again"):
        scene.engine.swap(scene.two)
    scene.serves(scene.one, scene.answers)

    assert scene.engine.swap(scene.two).outcome == "activated"
    warm = scene.engine.answers()
    scene.engine.order("reset")
    assert scene.engine.answers() == warm
    assert scene.engine.swap(scene.one).outcome == "activated"
    scene.serves(scene.one, scene.answers)


def test_an_engine_that_sleeps_is_not_touched(scene: Scene) -> None:
    scene.engine.order("sleep")
    with pytest.raises(EngineRaisedError, match="asleep: call wake_up"):
        scene.engine.swap(scene.two)
    scene.engine.order("wake_up")
    scene.serves(scene.one, scene.answers)


def test_weights_that_sleep_threw_away_are_loaded_again_whatever_they_were(scene: Scene) -> None:
    """On CPUs sleep mode is ignored, and told to the ranks like everywhere."""
    scene.engine.order("sleep", level=2)
    scene.engine.order("wake_up")
    with pytest.raises(EngineRaisedError, match="were thrown away"):
        scene.engine.order("served")

    assert scene.engine.swap(scene.one).outcome == "activated"

    scene.serves(scene.one, scene.answers)
    assert scene.engine.swap(scene.one).outcome == "already"


def test_connectors_that_cannot_forget_are_refused_wherever_they_are_held(scene: Scene) -> None:
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}

    def said(transfer: Mapping[str, object]) -> str:
        return str(scene.engine.order("with_connectors", transfer=transfer))

    def several(*held: dict[str, str]) -> dict[str, object]:
        extra = {"connectors": list(held)}
        return {
            "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
        }  # fmt: skip

    assert said(offloading) == said(several(offloading)) == ""
    for refused in (example, several(offloading, example)):
        assert "KV connector ExampleConnector cannot forget" in said(refused)


def test_what_was_loaded_again_goes_on_under_its_label(scene: Scene) -> None:
    scene.engine.arm("tensors", after=9)
    with pytest.raises(EngineRaisedError, match=r"EngineRefusedError.*was loaded again"):
        scene.engine.swap(scene.two)
    scene.serves(scene.one, scene.answers)


def test_poisoned_weights_answer_nobody_until_the_next_swap(scene: Scene) -> None:
    scene.engine.arm("tensors", after=9, times=2)
    with pytest.raises(EngineRaisedError, match="activate a version again"):
        scene.engine.swap(scene.two)

    assert scene.engine.label() == "unknown"
    for work in (scene.engine.answers, lambda: scene.engine.order("served")):
        with pytest.raises(EngineRaisedError, match="EngineError: loading version 2 failed"):
            work()

    assert scene.engine.swap(scene.one).outcome == "activated"
    scene.serves(scene.one, scene.answers)

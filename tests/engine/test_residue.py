"""After weights that are no numbers, the next good version answers as a cold start, at once."""

from __future__ import annotations

import pytest
import torch

from tests.engine.checkpoints import Out
from tests.engine.conftest import Start
from tests.engine.engines import Answers, RunningEngine
from trainer_adapter.vllm.ranks import Target

BLOCKS = 32
"""As many as eight requests of four blocks need: each is written by whoever comes first."""
MANY = [[(7 * row + 3 * at) % 380 + 3 for at in range(20 + 9 * row)] for row in range(8)]

SAID = "tensor 'model.layers.0.mlp.down_proj.weight' in model.safetensors holds NaN at [3, 17]"


def answers(engine: RunningEngine) -> Answers:
    """Let eight requests run at once, over all blocks."""
    found: Answers = engine.order("generate", prompts=MANY, tokens=40, alone=False)
    return found


def share(engine: RunningEngine) -> float:
    (found,) = engine.order("rpc", method="bad_in_memory")
    return float(found)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"][3, 17] = torch.nan


@pytest.fixture(scope="module")
def good(out: Out) -> list[Target]:
    return [out.model("qwen2", "bfloat16", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def bad(out: Out, good: list[Target]) -> Target:
    return out.broken(out.scratch / "qwen2-bfloat16-1", "with-nan", poison)


@pytest.fixture(scope="module")
def cold(start: Start, good: list[Target]) -> Answers:
    """What a cold start on the second good version answers."""
    engine = start(good[1].path, num_gpu_blocks_override=BLOCKS)
    found = answers(engine)
    engine.end()
    return found


def is_nan(told: Answers) -> bool:
    return any("nan" in value for one in told for step in one["logprobs"] for _, value in step)


def test_a_version_with_nan_leaves_nothing_for_the_next(
    start: Start, good: list[Target], bad: Target, cold: Answers
) -> None:
    engine = start(good[0].path, num_gpu_blocks_override=BLOCKS)
    cold_first = answers(engine)
    assert cold_first != cold

    def go_bad() -> None:
        report = engine.swap(bad)
        assert report.outcome == "activated"
        assert report.served is not None
        assert report.served.nonfinite == SAID
        assert is_nan(answers(engine))
        assert share(engine) > 0.2

    go_bad()
    report = engine.swap(good[1])
    assert report.outcome == "activated"
    assert report.phases_ms["wipe"] > 0
    assert share(engine) == 0
    assert answers(engine) == cold

    # Where nothing is wiped it shows, in these very answers.
    go_bad()
    engine.order("rpc", method="spoil_wipe", args=["skip"])
    assert engine.swap(good[1]).outcome == "activated"
    assert is_nan(answers(engine))
    # What nobody knows of is seen in the memory while the next version is staged.
    assert "keys or values that are NaN" in engine.stage(good[0]).suspect
    assert engine.swap(good[0]).outcome == "activated"
    assert answers(engine) == cold_first

    # What fails at its very end goes back to the bad version; the next one gets a clean memory.
    go_bad()
    engine.stage(good[1])
    engine.order("rpc", method="spoil_wipe", args=["raise"])
    assert engine.activate(good[1]).outcome == "restored"
    engine.order("reset")
    assert is_nan(answers(engine))
    assert engine.swap(good[1]).outcome == "activated"
    assert answers(engine) == cold

    # A swap between good versions does not pay for any of it.
    assert "wipe" not in engine.swap(good[0]).phases_ms
    assert answers(engine) == cold_first
    engine.end()


@pytest.mark.parametrize("labelled", [False, True], ids=["from elsewhere", "from the run"])
def test_an_engine_that_was_booted_with_nan(
    start: Start, out: Out, good: list[Target], bad: Target, cold: Answers, labelled: bool
) -> None:
    options = {"load_format": "shardcast"} if labelled else {}
    engine = start(bad.path, num_gpu_blocks_override=BLOCKS, **options)
    assert engine.stage(good[1]).staged == good[1]  # nothing has been written yet
    assert (SAID in engine.state().suspect) == labelled
    assert is_nan(answers(engine))

    assert engine.activate(good[1]).outcome == "activated"
    engine.order("reset")
    assert share(engine) == 0
    assert answers(engine) == cold
    engine.end()

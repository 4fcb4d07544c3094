"""Two ranks (tensor parallel): all take a version over, or none does; they agree before any acts."""

from __future__ import annotations

import pytest

from tests.engine.checkpoints import Out
from tests.engine.conftest import Start
from tests.engine.engines import Answers, RunningEngine
from trainer_adapter.vllm.ranks import Target, drop_command

TWO = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


class Pair:
    def __init__(
        self, engine: RunningEngine, one: Target, two: Target, cold: list[Answers]
    ) -> None:
        self.engine, self.one, self.two = engine, one, two
        self.cold_one, self.cold_two = cold


@pytest.fixture(scope="module")
def pair(out: Out, start: Start) -> Pair:
    one, two = (out.model("qwen2-tied", "bfloat16", seed) for seed in (1, 2))
    out.run.switch_current(two.version)
    other = start(out.current, load_format="shardcast", **TWO)
    cold_two = other.answers()
    other.end()
    out.run.switch_current(one.version)
    engine = start(out.current, load_format="shardcast", **TWO)
    cold = [engine.answers(), cold_two]
    assert engine.state().ranks == 2
    assert engine.state().served == one
    assert cold[0] != cold[1]
    return Pair(engine, one, two, cold)


def test_both_ranks_take_a_version_over_and_go_back(pair: Pair) -> None:
    assert pair.engine.swap(pair.two).outcome == "activated"
    assert pair.engine.answers() == pair.cold_two
    assert pair.engine.swap(pair.one).outcome == "activated"
    assert pair.engine.answers() == pair.cold_one


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("place", "after"), [("tensors", 7), ("process", 5), ("end", 0)])
def test_a_rank_that_fails_takes_the_other_back_with_it(
    pair: Pair, rank: int, place: str, after: int
) -> None:
    assert pair.engine.stage(pair.two).staged == pair.two
    pair.engine.arm(place, rank=rank, after=after)

    report = pair.engine.activate(pair.two)

    assert report.outcome == "restored"
    assert f"rank {rank}: " in report.message
    assert "injected" in report.message
    assert report.served == pair.one
    pair.engine.order("reset")
    assert pair.engine.answers() == pair.cold_one


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_go_back_poisons_both_and_a_full_load_recovers(
    pair: Pair, rank: int
) -> None:
    pair.engine.stage(pair.two)
    pair.engine.arm("tensors", rank=rank, after=7, times=2)

    report = pair.engine.activate(pair.two)

    assert report.outcome == "poisoned"
    assert report.served is None
    assert pair.engine.swap(pair.two).outcome == "activated"
    assert pair.engine.answers() == pair.cold_two
    pair.engine.swap(pair.one)
    assert pair.engine.answers() == pair.cold_one


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_could_not_stage_no_rank_loads(pair: Pair, rank: int) -> None:
    pair.engine.tell(drop_command())
    pair.engine.arm("check", rank=rank)

    report = pair.engine.stage(pair.two)

    assert report.staged is None
    assert report.failed is not None
    assert "injected" in report.failed.message
    report = pair.engine.activate(pair.two)
    assert (report.outcome, report.served) == ("refused", pair.one)
    assert f"rank {rank}: " in report.message
    assert pair.engine.answers() == pair.cold_one


def test_one_copy_on_disk_serves_both_ranks(pair: Pair, out: Out) -> None:
    """Each rank holds files of the one directory, and a lease on it."""
    pair.engine.stage(pair.two)
    held = pair.engine.order("rpc", method="open_files", args=[str(out.root)])

    assert len(held) == 2
    for files in held:
        assert {pair.one.path, pair.two.path} <= set(files)
        assert all(file.startswith((pair.one.path, pair.two.path)) for file in files)

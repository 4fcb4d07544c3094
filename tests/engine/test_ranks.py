"""Two ranks (tensor parallel): all take a version over, or none does; they agree before any acts."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shardcast.engine.forms import READY_PATH, VERSION_HEADER, label_of
from tests.engine.checkpoints import Out
from tests.engine.conftest import Start
from tests.engine.engines import PROMPTS, Answers, RunningEngine
from tests.engine.servers import BACKEND, INJECTED, Answer, Server, ServerHost, stopped, until
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
        self.cold_one, self.cold_two, self.alone_one, self.alone_two = cold


@pytest.fixture(scope="module")
def pair(out: Out, start: Start) -> Pair:
    """Their vocabulary is no multiple of 64: the last rank has fewer rows of it, and padding."""
    one, two = (out.model("qwen2-tied", "bfloat16", seed, vocab_size=380) for seed in (1, 2))
    out.run.switch_current(two.version)
    other = start(out.current, load_format="shardcast", **TWO)
    cold_two, alone_two = other.answers(), other.answers(alone=True)
    other.end()
    out.run.switch_current(one.version)
    engine = start(out.current, load_format="shardcast", **TWO)
    cold = [engine.answers(), cold_two, engine.answers(alone=True), alone_two]
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


# --- behind the server -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(pair: Pair, servers: ServerHost, out: Out) -> Iterator[Server]:
    """Two ranks below a server's engine process, booted from version 1."""
    out.run.switch_current(pair.one.version)
    server = servers.begin(
        str(out.current), *BACKEND, *INJECTED, "--load-format", "shardcast", "--enable-scale-out",
        "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )  # fmt: skip
    try:
        server.wait_started()
        yield server
    finally:
        server.end()


def chosen(cold: Answers) -> list[tuple[list[int], list[str]]]:
    """Return what a server tells: the log-probabilities of the chosen tokens."""
    return [
        (
            one["tokens"],
            [dict(step)[token] for token, step in zip(one["tokens"], one["logprobs"], strict=True)],
        )
        for one in cold
    ]


def serves(server: Server, target: Target, cold: Answers, prompts: int = len(PROMPTS)) -> None:
    """Check state, label, readiness, and every bit of so many answers."""
    state = server.state()
    assert (state.identity, state.ready, state.paused) == (target.identity, True, False)
    answer = server.completion([5, 6, 7], 2)
    assert answer.headers[VERSION_HEADER.lower()] == label_of(target.identity)
    assert server.answers(PROMPTS[:prompts]) == chosen(cold)[:prompts]


def test_a_server_s_ranks_take_a_version_over_and_go_back(server: Server, pair: Pair) -> None:
    serves(server, pair.one, pair.alone_one)
    for target, cold in ((pair.two, pair.alone_two), (pair.one, pair.alone_one)):
        assert server.activate(target).status == 200
        serves(server, target, cold)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_s_rank_that_fails_leaves_the_old_version(
    server: Server, pair: Pair, rank: int
) -> None:
    server.arm("tensors", 3, rank=rank)

    answer = server.activate(pair.two)

    assert answer.status == 500
    assert answer.json["error"]["phase"] == "load"
    assert f"rank {rank}: " in answer.json["error"]["message"]
    assert "injected" in answer.json["error"]["message"]
    serves(server, pair.one, pair.alone_one, prompts=1)


def test_a_server_s_rank_that_is_killed_in_the_load_is_said(server: Server, pair: Pair) -> None:
    """Last: the server ends with it. The other rank waits for it at that moment."""
    rank = server.arm("stop", 3, rank=1)
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(server.activate(pair.two)))
    asking.start()
    until(lambda: stopped(rank), "rank 1 is in the middle of its load")
    os.kill(rank, signal.SIGKILL)
    asking.join(60)

    (answer,) = answers
    assert answer.status == 503, answer.body
    assert answer.json["error"]["code"] == "dead"
    assert "restart the engine" in answer.json["error"]["message"]
    state = answer.json["state"]
    assert (state["ready"], state["served"]) == (False, None)
    with contextlib.suppress(OSError, http.client.HTTPException):  # vLLM ends such a server
        assert server.ask(READY_PATH).status == 503

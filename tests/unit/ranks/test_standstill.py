"""Staging that takes long is told from staging that stands still, in each of its phases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.ranks.memory import FakeMemory
from tests.unit.ranks.test_rank import WAIT_SECONDS, FakeReady, FakeWeights
from tests.unit.ranks.versions import publish
from trainer_adapter import checkpoint as module
from trainer_adapter.checkpoint import Checkpoint, StoppedError
from trainer_adapter.vllm.agreement import Alone
from trainer_adapter.vllm.machine import SwapError
from trainer_adapter.vllm.rank import Rank
from trainer_adapter.vllm.ranks import (
    Command,
    Progress,
    RankReply,
    Target,
    combine,
    write_reply,
)
from trainer_adapter.vllm.residue import Residue
from trainer_adapter.vllm.staging import STALL_SECONDS, Staging
from trainer_adapter.vllm.verifying import Verifier, open_target

LONG = STALL_SECONDS * 0.9


class Packing:
    """``Prepare`` that packs one tensor whenever a test lets it."""

    def __init__(self) -> None:
        self.weights = FakeWeights()
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._over = False

    def __call__(self, checkpoint: Checkpoint, stopping: Callable[[], bool]) -> FakeReady:
        self._done.release()
        while self._go.acquire(timeout=WAIT_SECONDS) and not self._over:
            stopping()
            self._done.release()
        return self.weights.prepare(checkpoint, stopping)

    def begun(self) -> None:
        assert self._done.acquire(timeout=WAIT_SECONDS)

    def step(self) -> None:
        self._go.release()
        assert self._done.acquire(timeout=WAIT_SECONDS)

    def end(self) -> None:
        self._over = True
        self._go.release()


@contextmanager
def packing(rank: Rank, work: Packing) -> Iterator[None]:
    work.begun()
    try:
        yield
    finally:
        work.end()
        rank.wait()
        rank.close()


def test_packing_that_takes_longer_than_a_standstill_is_none(tmp_path: Path) -> None:
    target, work = publish(tmp_path, 1), Packing()
    rank = Rank(work.weights, Verifier(work), Alone(), Residue(FakeMemory()))
    staging, now = Staging(target, 0.0), 0.0
    rank.tell(Command(op="stage", target=target))
    with packing(rank, work):
        for _ in range(5):
            assert not staging.over(combine([write_reply(rank.tell(Command(op="state")))]), now)
            work.step()
            now += LONG
        still = combine([write_reply(rank.tell(Command(op="state")))])
        assert not staging.over(still, now)
        with pytest.raises(SwapError, match="stood still for 120 s") as caught:
            staging.over(combine([write_reply(rank.tell(Command(op="state")))]), now + 2 * LONG)
        assert caught.value.slug == "unavailable"
        assert target.path in caught.value.message


def test_of_two_ranks_the_one_that_is_behind_counts() -> None:
    def reply(rank: int, done: int, steps: int) -> dict[str, Any]:
        progress = Progress(digest="d", done=done, bytes=9, steps=steps)
        return write_reply(RankReply(rank=rank, staging=progress))

    staging = combine([reply(0, 4, 7), reply(1, 9, 3)]).staging
    assert staging is not None
    assert staging.done == 4
    staging = combine([reply(0, 9, 7), reply(1, 9, 3)]).staging
    assert staging is not None
    assert staging.steps == 3


class Mapped:
    """A large file's mapping."""

    path = "model.safetensors"
    identity = (0, 0, 5 * module._POPULATE_BYTES - 1, 0, 0)

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def mapped(self) -> Mapped:
        return self

    def madvise(self, advice: int, start: int, length: int) -> None:
        self.pieces.append((start, length))


def test_mapping_pages_counts_as_steps_and_can_be_given_up() -> None:
    file, asked = Mapped(), []

    def stopping() -> bool:
        asked.append(len(file.pieces))
        return False

    module._make_resident(file, stopping)  # type: ignore[arg-type]
    assert sum(length for _, length in file.pieces) == file.identity[2]
    assert asked == [0, 1, 2, 3, 4]
    given_up = Mapped()
    with pytest.raises(StoppedError):
        module._make_resident(given_up, lambda: len(given_up.pieces) == 2)  # type: ignore[arg-type]
    assert len(given_up.pieces) == 2


def test_a_version_that_hangs_is_staged_from_another_path(
    tmp_path: Path,
) -> None:
    go, opened = threading.Event(), list[str]()
    hangs, other = publish(tmp_path, 1), tmp_path / "another way there"
    other.symlink_to(hangs.path)

    def opener(target: Target) -> Checkpoint:
        opened.append(target.path)
        if target == hangs:
            assert go.wait(WAIT_SECONDS)
        return open_target(target)

    verifier = Verifier(FakeWeights().prepare, opener=opener)
    verifier.begin(hangs)
    verifier.begin(hangs)  # it is at it already
    elsewhere = msgspec.structs.replace(hangs, path=str(other))
    verifier.begin(elsewhere)
    verifier.wait()
    assert verifier.staged() == elsewhere
    verifier.begin(hangs)  # it has it already, whatever the path
    assert verifier.progress() is None
    assert verifier.staged() == elsewhere
    assert sorted(opened) == sorted([hangs.path, str(other)])
    go.set()
    for thread in threading.enumerate():
        if thread.name == "shardcast-stage":
            thread.join(WAIT_SECONDS)
    verifier.drop()

"""Ranks that agree: every rank runs in a thread of its own, over a model that is a name."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcast.errors import EngineRefusedError
from shardcast.store.run import RunStore
from tests.unit.ranks.memory import FakeMemory
from tests.unit.ranks.versions import publish
from trainer_adapter.checkpoint import Checkpoint, StoppedError
from trainer_adapter.vllm.agreement import Agreement, Alone
from trainer_adapter.vllm.rank import Rank
from trainer_adapter.vllm.ranks import (
    Command,
    Report,
    Target,
    activate_command,
    combine,
    drop_command,
    read_command,
    stage_command,
    state_command,
    write_reply,
)
from trainer_adapter.vllm.residue import Residue
from trainer_adapter.vllm.verifying import Prepare, Verifier, code_of, open_target

WAIT_SECONDS = 20.0


@dataclass
class FakeWeights:
    """A model that knows which version it was loaded with last, if that ended well."""

    loaded: str = "boot"
    fail: list[str] = field(default_factory=list)
    refuse: str = ""
    prepared: list[str] = field(default_factory=list)

    def prepare(self, checkpoint: Checkpoint, stopping: Callable[[], bool]) -> FakeReady:
        if self.refuse:
            raise EngineRefusedError(self.refuse, phase="check", reason="incompatible")
        self.prepared.append(checkpoint.digest)
        return FakeReady(self, checkpoint)

    def load(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.verified, "it is loaded, and nobody has verified it"
        self.loaded = "half"
        if self.fail:
            raise ValueError(self.fail.pop())
        self.loaded = checkpoint.digest

    def gemm(self) -> dict[str, int]:
        return {"torch": 2}


@dataclass
class FakeReady:
    """What was prepared for a model, which knows what was not given back."""

    weights: FakeWeights
    checkpoint: Checkpoint

    def load(self) -> None:
        self.weights.load(self.checkpoint)

    def close(self) -> None:
        self.weights.prepared.remove(self.checkpoint.digest)


def noting(looked: list[str]) -> Prepare:
    """Note which versions are compared with the model."""

    def prepare(checkpoint: Checkpoint, stopping: Callable[[], bool]) -> FakeReady:
        looked.append(checkpoint.digest)
        return FakeWeights().prepare(checkpoint, stopping)

    return prepare


class Words:
    """An agreement of threads."""

    def __init__(self, rank: int, words: list[str], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(words)
        self._words, self._barrier = words, barrier

    def gather(self, word: str) -> list[str]:
        self._words[self.rank] = word
        self._barrier.wait(WAIT_SECONDS)
        found = list(self._words)
        self._barrier.wait(WAIT_SECONDS)
        return found


class Crew:
    """Ranks under orders, as an executor gives them."""

    def __init__(self, size: int) -> None:
        words, barrier = [""] * size, threading.Barrier(size)
        agreements: list[Agreement] = (
            [Alone()] if size == 1 else [Words(n, words, barrier) for n in range(size)]
        )
        self.weights = [FakeWeights() for _ in range(size)]
        self.memories = [FakeMemory() for _ in range(size)]
        residues = [Residue(memory) for memory in self.memories]
        self.verifiers = [
            Verifier(residue.preparing(weights.prepare))
            for weights, residue in zip(self.weights, residues, strict=True)
        ]
        self.ranks = [
            Rank(*four)
            for four in zip(self.weights, self.verifiers, agreements, residues, strict=True)
        ]

    def tell(self, command: dict[str, Any]) -> Report:
        replies: list[Any] = [None] * len(self.ranks)

        def run(number: int) -> None:
            replies[number] = write_reply(self.ranks[number].tell(read_command(command)))

        threads = [threading.Thread(target=run, args=(n,)) for n in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        return combine(replies)

    def stage(self, target: Target) -> Report:
        self.tell(stage_command(target))
        for rank in self.ranks:
            rank.wait()
        return self.tell(state_command())

    def swap(self, target: Target) -> Report:
        assert self.stage(target).staged == target
        return self.tell(activate_command(target))

    @property
    def loaded(self) -> list[str]:
        return [weights.loaded for weights in self.weights]


@pytest.fixture(params=[1, 3])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(request.param)
    yield crew
    for rank in crew.ranks:
        rank.close()
    assert not [digest for weights in crew.weights for digest in weights.prepared]


@pytest.fixture
def versions(tmp_path: Path) -> list[Target]:
    return [publish(tmp_path, seed) for seed in range(3)]


def test_all_ranks_run_what_was_activated(crew: Crew, versions: list[Target]) -> None:
    for target in versions:
        report = crew.swap(target)
        assert (report.outcome, report.served, report.staged) == ("activated", target, None)
        assert set(report.phases_ms) == {"check", "load"}
        assert set(crew.loaded) == {target.digest}
        assert report.gemm == {"torch": 2 * len(crew.ranks)}
    assert crew.tell(activate_command(versions[2])).outcome == "already"
    assert crew.stage(versions[2]).served == versions[2]


def test_what_is_not_staged_is_refused(crew: Crew, versions: list[Target]) -> None:
    crew.swap(versions[0])

    report = crew.tell(activate_command(versions[1]))

    assert (report.outcome, report.code, report.phase) == ("refused", "unavailable", "check")
    assert "rank 0: " in report.message
    assert set(crew.loaded) == {versions[0].digest}
    crew.stage(versions[1])
    crew.tell(drop_command())
    assert crew.tell(activate_command(versions[1])).outcome == "refused"


def test_a_failure_on_one_rank_takes_all_back(crew: Crew, versions: list[Target]) -> None:
    crew.swap(versions[0])
    crew.weights[-1].fail = ["no memory"]

    report = crew.swap(versions[1])

    assert (report.outcome, report.code, report.served) == ("restored", "failed", versions[0])
    assert f"rank {len(crew.ranks) - 1}: ValueError: no memory" in report.message
    assert set(crew.loaded) == {versions[0].digest}
    assert crew.swap(versions[1]).outcome == "activated"


def test_a_second_failure_poisons_all_and_a_full_load_recovers(
    crew: Crew, versions: list[Target]
) -> None:
    crew.swap(versions[0])
    crew.weights[0].fail = ["again", "no memory"]

    report = crew.swap(versions[1])

    assert (report.outcome, report.served) == ("poisoned", None)
    assert "no memory" in report.poisoned
    assert "again" in report.poisoned
    assert "activate a version again" in report.poisoned
    assert crew.swap(versions[0]).outcome == "activated"
    assert set(crew.loaded) == {versions[0].digest}


def test_a_failure_after_a_boot_from_elsewhere_poisons(crew: Crew, versions: list[Target]) -> None:
    crew.weights[0].fail = ["no memory"]
    report = crew.swap(versions[0])
    assert report.outcome == "poisoned"
    assert "booted from elsewhere" in report.message


def test_a_boot_from_a_version_can_be_gone_back_to(crew: Crew, versions: list[Target]) -> None:
    for rank in crew.ranks:
        one = versions[0]
        booted = Checkpoint(Path(one.path), run=one.run, version=one.version, digest=one.digest)
        booted.verify()
        rank.boot(one, booted)
    assert crew.tell(state_command()).served == versions[0]
    crew.weights[0].fail = ["no memory"]
    assert crew.swap(versions[1]).outcome == "restored"
    assert set(crew.loaded) == {versions[0].digest}


def deleted(path: Path) -> None:
    shutil.rmtree(path)


def put_anew(path: Path) -> None:
    weights = path / "model.safetensors"
    shutil.copy(weights, path / "copy")
    (path / "copy").rename(weights)


def damaged(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(bytes(weights.stat().st_size))


def damaged_and_put_anew(path: Path) -> None:
    weights = path / "model.safetensors"
    good = weights.read_bytes()
    damaged(path)
    (path / "copy").write_bytes(good)
    (path / "copy").rename(weights)


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        (deleted, "restored"),
        (put_anew, "restored"),
        (damaged_and_put_anew, "restored"),
        (damaged, "poisoned"),
    ],
)
def test_what_becomes_of_the_served_version_on_the_disk(
    crew: Crew, versions: list[Target], what: Callable[[Path], None], outcome: str
) -> None:
    crew.swap(versions[0])
    what(Path(versions[0].path))
    crew.weights[-1].fail = ["no memory"]
    assert crew.swap(versions[1]).outcome == outcome
    if outcome == "restored":
        assert crew.loaded == [versions[0].digest] * len(crew.ranks)
        crew.weights[-1].fail = ["no memory"]  # and once more
        assert crew.swap(versions[1]).outcome == "restored"


def test_a_version_that_cannot_be_verified_is_never_gone_back_to(
    crew: Crew, versions: list[Target]
) -> None:
    crew.swap(versions[0])
    damaged(Path(versions[0].path))
    for target in versions[1:]:
        for weights in crew.weights:
            weights.fail = ["no memory"]
        report = crew.swap(target)
        assert (report.outcome, report.served) == ("poisoned", None)
        assert "is not what was published" in report.poisoned
    assert crew.tell(activate_command(versions[0])).outcome == "refused"
    assert crew.swap(versions[1]).outcome == "activated"


def test_a_rank_that_is_gone_leaves_the_others_poisoned(versions: list[Target]) -> None:
    class Gone(Alone):
        def gather(self, word: str) -> list[str]:
            raise ConnectionError("peer closed")

    weights = FakeWeights()
    rank = Rank(weights, Verifier(weights.prepare), Gone(), Residue(FakeMemory()))
    rank.tell(Command(op="stage", target=versions[0]))
    rank.wait()

    reply = rank.activate(versions[0])

    assert reply.outcome == "poisoned"
    assert "peer closed" in reply.poisoned
    rank.close()


def test_a_refusal_at_stage_names_its_code(crew: Crew, versions: list[Target]) -> None:
    crew.weights[0].refuse = "q_proj has no place"
    report = crew.stage(versions[0])
    assert report.staged is None
    assert report.failed is not None
    assert (report.failed.code, report.failed.message) == ("incompatible", "q_proj has no place")
    assert report.failed.digest == versions[0].digest


def test_a_version_that_changed_after_it_was_staged_is_given_up(
    crew: Crew, versions: list[Target]
) -> None:
    assert crew.stage(versions[0]).staged == versions[0]
    path = Path(versions[0].path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    assert crew.tell(state_command()).staged is None
    assert crew.tell(activate_command(versions[0])).outcome == "refused"
    assert set(crew.loaded) == {"boot"}


def test_staging_another_version_gives_up_the_one_before(
    crew: Crew, versions: list[Target], tmp_path: Path
) -> None:
    crew.stage(versions[0])
    assert crew.stage(versions[1]).staged == versions[1]
    assert RunStore(tmp_path / "out", "policy").evict(versions[0].version)
    assert not RunStore(tmp_path / "out", "policy").evict(versions[1].version)


def test_a_thread_that_hangs_is_not_waited_for(versions: list[Target]) -> None:
    go, looked = threading.Event(), list[str]()

    def opener(target: Target) -> Checkpoint:
        if target == versions[0]:
            assert go.wait(WAIT_SECONDS)
        return open_target(target)

    verifier = Verifier(noting(looked), opener=opener)
    verifier.begin(versions[0])
    verifier.begin(versions[1])  # the engine generates nothing until it returns
    verifier.wait()
    assert verifier.staged() == versions[1]
    go.set()
    for thread in threading.enumerate():
        if thread.name == "shardcast-stage":
            thread.join(WAIT_SECONDS)
    assert looked == [versions[1].digest]  # what was given up is not compared with the model
    verifier.drop()


def test_nothing_is_loaded_while_a_thread_looks_at_the_model(
    versions: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_adapter.vllm.verifying.CHECK_SECONDS", 0.01)
    begun, go = threading.Event(), threading.Event()

    weights = FakeWeights()

    def prepare(checkpoint: Checkpoint, stopping: Callable[[], bool]) -> FakeReady:
        if checkpoint.digest == versions[0].digest:
            begun.set()
            assert go.wait(WAIT_SECONDS)
        return weights.prepare(checkpoint, stopping)

    verifier = Verifier(prepare)
    rank = Rank(weights, verifier, Alone(), Residue(FakeMemory()))
    rank.tell(read_command(stage_command(versions[0])))
    assert begun.wait(WAIT_SECONDS)
    # It is given up and still at it; meanwhile another version gets staged.
    monkeypatch.setattr(verifier, "_checking", threading.Lock())
    checking = verifier._job._checking  # type: ignore[union-attr]
    rank.tell(read_command(stage_command(versions[1])))
    rank.wait()
    monkeypatch.setattr(verifier, "_checking", checking)
    reply = rank.activate(versions[1])
    assert (reply.outcome, reply.code) == ("refused", "unavailable")
    assert weights.loaded == "boot"
    go.set()
    with checking:
        pass
    assert rank.activate(versions[1]).outcome == "activated"
    rank.close()


def test_a_step_is_the_publishers(tmp_path: Path) -> None:
    target = publish(tmp_path, 1, step=70)
    verifier = Verifier(FakeWeights().prepare)
    verifier.begin(msgspec.structs.replace(target, step=4242))
    verifier.wait()
    assert target.step == 70
    assert verifier.staged() == target
    verifier.drop()


@pytest.mark.parametrize("false_name", [{"run": "other"}, {"version": 9}])
def test_a_digest_under_another_name_is_not_taken_for_what_is_served(
    crew: Crew, versions: list[Target], false_name: dict[str, Any]
) -> None:
    crew.swap(versions[0])
    claimed = msgspec.structs.replace(versions[0], **false_name)
    report = crew.stage(claimed)
    assert report.staged is None
    assert report.failed is not None
    assert report.failed.code == "conflict"
    report = crew.tell(activate_command(claimed))
    assert report.outcome == "refused"
    assert report.served == versions[0]


def test_staging_is_stopped_when_another_version_takes_its_place(versions: list[Target]) -> None:
    begun, go = threading.Event(), threading.Event()

    def prepare(checkpoint: Checkpoint, stopping: Callable[[], bool]) -> FakeReady:
        begun.set()
        assert go.wait(WAIT_SECONDS)
        return FakeWeights().prepare(checkpoint, stopping)

    verifier = Verifier(prepare)
    verifier.begin(versions[0])
    assert begun.wait(WAIT_SECONDS)
    progress = verifier.progress()
    assert progress is not None
    assert progress.done == progress.bytes > 0
    assert verifier.staged() is None
    verifier.begin(versions[0])  # it is at it already
    go.set()
    verifier.wait()
    assert verifier.staged() == versions[0]
    verifier.begin(versions[0])  # it has it already
    assert verifier.progress() is None
    verifier.drop()
    with pytest.raises(EngineRefusedError, match="no version is staged"):
        verifier.take()


@pytest.mark.parametrize(
    "command", [{"op": "stage"}, {"op": "activate"}], ids=lambda command: str(command["op"])
)
def test_a_command_without_its_target_is_malformed(command: dict[str, Any]) -> None:
    reply = Crew(1).tell(command)
    assert (reply.outcome, reply.code) == ("refused", "malformed")


def test_a_command_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        read_command({"op": "state", "extra": 1})


def test_only_what_every_rank_says_counts(versions: list[Target]) -> None:
    one, two = versions[:2]
    plain: Callable[..., dict[str, Any]] = lambda **members: {"rank": 0, **members}  # noqa: E731
    both = [plain(served=msgspec.to_builtins(one)), plain(served=msgspec.to_builtins(two))]
    assert combine(both).served is None
    assert combine([both[0], both[0]]).served == one
    worst = combine([plain(outcome="activated"), plain(outcome="poisoned", code="failed")])
    assert (worst.outcome, worst.code) == ("poisoned", "failed")
    with pytest.raises(ValueError, match="no rank"):
        combine([])


def test_errors_have_codes() -> None:
    assert code_of(OSError()) == "failed"
    assert code_of(EngineRefusedError("x", reason="busy")) == "busy"
    assert code_of(StoppedError("given up")) == "superseded"

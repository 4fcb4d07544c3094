"""What weights that are no numbers leave in the KV memory is wiped before others are served, and
only then."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.ranks.memory import FakeMemory
from tests.unit.ranks.test_rank import Crew
from tests.unit.ranks.versions import publish
from tests.unit.safetensors import safetensors
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.ranks import Target, activate_command, state_command
from trainer_adapter.vllm.residue import Residue

NAN = struct.pack("<4f", 1.0, 2.0, float("nan"), 4.0)
SAID = "tensor 'layers.0.w' in model.safetensors holds NaN at [1, 0]"


@pytest.fixture(params=[1, 3])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(request.param)
    yield crew
    for rank in crew.ranks:
        rank.close()


@pytest.fixture
def good(tmp_path: Path) -> list[Target]:
    return [publish(tmp_path, seed) for seed in range(2)]


@pytest.fixture
def bad(tmp_path: Path) -> Target:
    weights = safetensors({"layers.0.w": ("F32", [2, 2], NAN), "ids": ("I8", [1], b"\x7f")})
    return publish(tmp_path, 9, files={"model.safetensors": weights}, weights=False)


def wiped(crew: Crew) -> list[int]:
    return [memory.wiped for memory in crew.memories]


def generate(crew: Crew, bad: Target) -> None:
    """Leave in the memory what the weights do."""
    for memory, weights in zip(crew.memories, crew.weights, strict=True):
        memory.nan |= weights.loaded == bad.digest


def staged(crew: Crew, target: Target) -> Target:
    """Stage it; return it as the ranks know it."""
    found = crew.stage(target).staged
    assert found is not None
    assert found.identity == target.identity
    return found


def test_a_version_with_nan_is_served_and_wiped_away(
    crew: Crew, good: list[Target], bad: Target, caplog: pytest.LogCaptureFixture
) -> None:
    crew.swap(good[0])
    known = staged(crew, bad)
    assert known.nonfinite == SAID
    assert SAID in caplog.text
    report = crew.tell(activate_command(bad))
    assert report.outcome == "activated"
    assert report.served == known
    assert f"version {bad.version} is served: {SAID}" in report.suspect
    assert not any(wiped(crew))
    generate(crew, bad)

    report = crew.swap(good[1])

    assert report.outcome == "activated"
    assert "wipe" in report.phases_ms
    assert not any(memory.nan for memory in crew.memories)
    assert report.suspect == ""
    assert report.served == good[1]
    crew.swap(good[0])
    assert set(wiped(crew)) == {1}


def test_a_healthy_swap_wipes_nothing_and_looks_outside_of_the_pause(
    crew: Crew, good: list[Target]
) -> None:
    crew.swap(good[0])
    staged(crew, good[1])
    looks = [memory.looks for memory in crew.memories]
    report = crew.tell(activate_command(good[1]))
    assert set(report.phases_ms) == {"check", "load"}
    assert [memory.looks for memory in crew.memories] == looks
    assert not any(wiped(crew))


def test_finite_weights_that_overflow_are_seen_while_the_next_version_is_staged(
    crew: Crew, good: list[Target]
) -> None:
    crew.swap(good[0])
    crew.memories[-1].nan = True
    staged(crew, good[1])
    assert "layer 3" in crew.tell(state_command()).suspect
    assert crew.tell(activate_command(good[1])).outcome == "activated"
    assert wiped(crew) == [0] * (len(crew.ranks) - 1) + [1]


@pytest.mark.parametrize(
    ("nan", "visible", "times"), [(False, True, 0), (True, True, 1), (False, False, 1)]
)
def test_an_engine_that_was_booted_from_elsewhere_is_looked_at_in_its_first_pause(
    crew: Crew, good: list[Target], nan: bool, visible: bool, times: int
) -> None:
    for memory in crew.memories:
        memory.visible = visible
    staged(crew, good[0])
    for memory in crew.memories:
        memory.nan = nan  # after the staging thread has looked
    crew.tell(activate_command(good[0]))
    assert set(wiped(crew)) == {times}
    crew.swap(good[1])  # from here on it is known what was served
    assert set(wiped(crew)) == {times}


def test_a_boot_from_a_version_with_nan_is_wiped_away(
    crew: Crew, good: list[Target], bad: Target
) -> None:
    known = msgspec.structs.replace(bad, nonfinite=SAID)
    for rank in crew.ranks:
        booted = Checkpoint(Path(bad.path), run=bad.run, version=bad.version, digest=bad.digest)
        booted.verify()
        rank.boot(known, booted)
    assert SAID in crew.tell(state_command()).suspect
    crew.swap(good[0])
    assert set(wiped(crew)) == {1}


def test_after_a_restore_it_is_still_to_be_wiped(
    crew: Crew, good: list[Target], bad: Target
) -> None:
    staged(crew, bad)
    crew.tell(activate_command(bad))
    crew.weights[0].fail = ["no memory"]
    report = crew.swap(good[0])
    assert report.outcome == "restored"
    generate(crew, bad)
    assert SAID in report.suspect
    assert crew.swap(good[0]).outcome == "activated"
    assert not any(memory.nan for memory in crew.memories)


def test_a_load_of_nan_that_failed_leaves_nothing_behind(
    crew: Crew, good: list[Target], bad: Target
) -> None:
    crew.swap(good[0])
    staged(crew, bad)
    crew.weights[0].fail = ["no memory"]
    assert crew.tell(activate_command(bad)).outcome == "restored"
    assert crew.swap(good[1]).outcome == "activated"
    assert not any(wiped(crew))


def test_what_poisoned_ranks_leave_is_wiped(crew: Crew, good: list[Target]) -> None:
    crew.swap(good[0])
    crew.weights[-1].fail = ["again", "no memory"]
    assert crew.swap(good[1]).outcome == "poisoned"
    assert crew.swap(good[1]).outcome == "activated"
    assert set(wiped(crew)) == {1}
    assert crew.tell(state_command()).suspect == ""


def test_going_back_to_a_version_from_poisoned_ranks_wipes(
    crew: Crew, good: list[Target], bad: Target
) -> None:
    """Nothing is loaded after that: to activate what is served again does nothing."""
    crew.swap(good[0])
    for rank, memory in zip(crew.ranks, crew.memories, strict=True):
        rank.lost("the weights were thrown away")
        memory.nan = True
    crew.weights[-1].fail = ["no memory"]

    report = crew.swap(good[1])

    assert (report.outcome, report.served, report.suspect) == ("restored", good[0], "")
    assert not any(memory.nan for memory in crew.memories)
    assert crew.tell(activate_command(good[0])).outcome == "already"
    staged(crew, bad)
    assert crew.tell(activate_command(bad)).outcome == "activated"
    for rank in crew.ranks:
        rank.lost("the weights were thrown away")
    crew.weights[-1].fail = ["no memory"]
    report = crew.swap(good[1])
    assert report.outcome == "restored"
    assert SAID in report.suspect  # it is served again


def test_going_back_needs_the_wipe(crew: Crew, good: list[Target]) -> None:
    crew.swap(good[0])
    for rank in crew.ranks:
        rank.lost("the weights were thrown away")
    crew.weights[0].fail = ["no memory"]
    crew.memories[-1].fail = "the device is gone"
    report = crew.swap(good[1])
    assert report.outcome == "poisoned"
    assert "the device is gone" in report.message


def test_a_wipe_that_fails_is_a_load_that_fails(
    crew: Crew, good: list[Target], bad: Target
) -> None:
    staged(crew, bad)
    crew.tell(activate_command(bad))
    generate(crew, bad)
    crew.memories[-1].fail = "the device is gone"
    report = crew.swap(good[0])
    assert report.outcome == "restored"
    assert "the device is gone" in report.message
    crew.memories[-1].fail = ""
    assert crew.swap(good[0]).outcome == "activated"
    assert not any(memory.nan for memory in crew.memories)


def test_requests_cannot_keep_what_must_be_wiped(
    crew: Crew, good: list[Target], bad: Target
) -> None:
    staged(crew, bad)
    crew.tell(activate_command(bad))
    staged(crew, good[0])
    loaded = list(crew.loaded)

    report = crew.tell(activate_command(good[0], keep=True))

    assert (report.outcome, report.code, report.phase) == ("refused", "refused", "check")
    assert SAID in report.message
    assert "requests: recompute" in report.message
    assert crew.loaded == loaded
    assert not any(wiped(crew))
    assert crew.tell(activate_command(good[0])).outcome == "activated"
    staged(crew, good[1])
    assert crew.tell(activate_command(good[1], keep=True)).outcome == "activated"


def test_a_memory_that_cannot_be_seen_may_be_kept_and_is_wiped_otherwise() -> None:
    memory = FakeMemory(visible=False)
    residue = Residue(memory)
    assert residue.suspect == ""
    assert residue.refusal(keep=True) == ""  # nothing is known against it
    assert residue.refusal(keep=False) == ""
    assert residue.suspect

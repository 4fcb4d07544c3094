"""What is kept on the disk for engines, and what becomes of it where the system refuses."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcast.canary import Canary, Prompt
from shardcast.engine import leases as module
from shardcast.engine.driver import Target
from shardcast.engine.forms import Identity
from shardcast.engine.leases import Leases
from shardcast.errors import DiskError
from shardcast.events import EventKind
from shardcast.store.files import disk_error
from shardcast.store.locks import try_lock
from shardcast.store.run import RunStore
from tests.engines import FakeEngine, make_version
from tests.unit.engine.test_agent import minding


class Refusing:
    """The system will not open directories, as often as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self.why = errno.EMFILE
        self._open = os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: Path, flags: int, *more: int) -> int:
        if flags & os.O_DIRECTORY and self.times > 0:
            self.times -= 1
            raise OSError(self.why, os.strerror(self.why), str(path))
        return self._open(path, flags, *more)


@dataclass(frozen=True)
class Stored:
    """What the store remembers of a version, as far as leases look at it."""

    target: Target

    @property
    def manifest(self) -> str:
        return self.target.digest

    @property
    def layout(self) -> Target:
        return self.target  # it has a step, too


class Told:
    """A store, and what leases of it tell."""

    def __init__(self, out: Path) -> None:
        self.told: list[tuple[int, str]] = []
        self.store = RunStore(out, "policy")
        self.leases = Leases(self.store, self._refused)

    def _refused(self, identity: Identity, error: DiskError) -> None:
        self.told.append((identity.version, error.message))


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    told = Told(tmp_path)
    yield told
    told.leases.close()
    told.store.close()


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return make_version(tmp_path / "versions", 1)


def test_each_reason_is_told_once_until_the_version_is_held(
    told: Told, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Refusing(monkeypatch)
    system.times = 3
    assert [told.leases.hold(target) for _ in range(3)] == [False] * 3
    assert told.told == [(1, "opening failed: Too many open files")]
    system.times, system.why = 2, errno.EIO
    assert not told.leases.hold(target)
    assert not told.leases.hold(target)
    assert told.told[1:] == [(1, "opening failed: Input/output error")]
    assert told.leases.hold(target)
    told.leases.keep(())
    system.times = 1
    assert not told.leases.hold(target)
    assert len(told.told) == 3


def test_what_was_evicted_is_not_held_and_not_told(told: Told, target: Target) -> None:
    shutil.rmtree(target.path)
    assert not told.leases.hold(target)
    assert told.leases.find(target.identity) is None
    assert told.told == []


def test_what_is_being_evicted_is_not_held_and_not_told(told: Told, target: Target) -> None:
    fd = os.open(target.path, os.O_RDONLY)
    assert try_lock(fd, exclusive=True)
    assert not told.leases.hold(target)
    os.close(fd)
    assert told.leases.hold(target)
    assert told.told == []


@pytest.mark.parametrize("asked", ["looking", "reading"])
def test_the_system_refuses_to_find_a_version(
    told: Told, target: Target, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def refuse(*_: object) -> None:
        raise disk_error(PermissionError(errno.EACCES, "Permission denied"), "/x", asked)

    if asked == "looking":
        monkeypatch.setattr(module, "is_there", refuse)
    else:
        monkeypatch.setattr(RunStore, "load_state", refuse)
    assert told.leases.find(target.identity) is None
    assert told.leases.find(target.identity) is None
    assert told.told == [(1, f"{asked} failed: Permission denied")]


# --- beside an agent ------------------------------------------------------------------------------


async def test_a_version_that_cannot_be_held_when_it_comes_is_held_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, engine = Refusing(monkeypatch), FakeEngine()
    async with minding(tmp_path, engine) as world:
        system.times = 5
        world.publish(1)
        await world.serve(1)
        (told,) = world.of(EventKind.ERROR)
        assert told.version == 1
        assert "version 1 cannot be kept for engines" in str(told.error)
        assert "Too many open files" in str(told.error)
        assert not RunStore(tmp_path, "policy").evict(1)
        system.times = 5
        world.publish(2)
        await world.serve(2)
        assert len(world.of(EventKind.ERROR)) == 2


async def test_a_version_whose_documents_cannot_be_read_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, load, left = FakeEngine(), RunStore.load_state, [3]

    def load_state(store: RunStore, number: int) -> object:
        if left[0] > 0:
            left[0] -= 1
            raise disk_error(OSError(errno.EIO, "Input/output error"), "state", "reading")
        return load(store, number)

    async with minding(tmp_path, engine) as world:
        monkeypatch.setattr(RunStore, "load_state", load_state)
        world.publish(1)
        await world.serve(1)
        (told,) = world.of(EventKind.ERROR)
        assert "Input/output error" in str(told.error)


async def test_a_version_that_is_evicted_before_it_is_held_is_left_for_the_next(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    async with minding(tmp_path, engine) as world:
        assert world.agent is not None
        gone = world.version(1)
        shutil.rmtree(gone.path)
        world.agent.update(gone)
        world.publish(2)
        await world.serve(2)
        assert not world.of(EventKind.ERROR)
    assert "stage 1" not in engine.calls


async def test_a_canary_that_cannot_be_read_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, load, left = FakeEngine(), RunStore.load_state, [0]

    def load_state(store: RunStore, number: int) -> object:
        if left[0] > 0:
            left[0] -= 1
            raise disk_error(OSError(errno.EIO, "Input/output error"), "state", "reading")
        return load(store, number)

    async with minding(tmp_path, engine, check_canary=True) as world:
        engine.machine.gate.clear()
        world.publish(1)
        await world.until(engine.machine.loading.is_set)
        monkeypatch.setattr(RunStore, "load_state", load_state)
        left[0] = 1
        engine.machine.gate.set()
        await world.until(lambda: bool(world.of(EventKind.ENGINE_FAILED)))
        assert "the canary of version 1 cannot be read" in str(
            world.of(EventKind.ENGINE_FAILED)[0].error
        )
        world.publish(2)  # the agent goes on
        await world.serve(2)


async def test_a_version_that_cannot_be_held_when_it_is_served_has_its_canary_asked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, engine = Refusing(monkeypatch), FakeEngine()
    wrong = Canary(prompts=[Prompt(tokens=[1, 2, 3], logprobs=[-90.0, -90.0])], tolerance=0.1)
    target = make_version(tmp_path / "versions", 1)
    monkeypatch.setattr(RunStore, "load_state", lambda *_: Stored(target))
    await engine.activate(target)
    system.times = 3
    async with minding(tmp_path, engine, canary=wrong, check_canary=True) as world:
        await world.until(lambda: bool(world.of(EventKind.ENGINE_FAILED)))
        (failed,) = world.of(EventKind.ENGINE_FAILED)
        assert "does not answer as the canary of version 1" in str(failed.error)
        assert system.times == 0

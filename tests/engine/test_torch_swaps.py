"""A module never serves under a version's name what is not that version: ties, files that change
meanwhile, stagings that are given up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from shardcast.engine.driver import Target
from shardcast.errors import EngineRefusedError
from shardcast.store.run import RunStore
from tests.unit.ranks.versions import publish
from tests.unit.safetensors import safetensors
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.torch_fit import Tensors, misfits
from trainer_adapter.torch_module import TorchEngine, named_tensors

WAIT_S = 20.0
SHAPE = [6, 4]


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(*SHAPE)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    @property
    def value(self) -> float:
        """What all its numbers are."""
        found = set(self.embed.weight.flatten().tolist())
        assert len(found) == 1, "its weights are of several versions"
        return float(found.pop())


class Versions:
    """Versions 1, 2, 3: all numbers of a version are its number."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.run = RunStore(root / "out", "policy")
        self.targets = [self.publish(float(number)) for number in (1, 2, 3)]

    def publish(self, value: float) -> Target:
        data = torch.full(SHAPE, value).numpy().tobytes()
        names = ("embed.weight", "head.weight")
        weights = safetensors(dict.fromkeys(names, ("F32", SHAPE, data)))
        files = {"model.safetensors": weights}
        made = publish(self._root, int(value), files=files, weights=False)
        return Target(made.run, made.version, made.digest, Path(made.path), step=made.step)

    def leased(self) -> list[int]:
        """Return which cannot be evicted; evict the others. Version 3 is what ``current`` names."""
        return [one.version for one in self.targets[:2] if not self.run.evict(one.version)]


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


@pytest.fixture
def module() -> Tied:
    return Tied()


@contextlib.asynccontextmanager
async def serving(module: Tied, **options: object) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(module, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        await engine.close()


def write_over(path: Path, value: float) -> None:
    """Write other weights into the same file."""
    data = torch.full(SHAPE, value).numpy().tobytes() * 2
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-len(data), os.SEEK_END)
        file.write(data)


def put_anew(path: Path) -> None:
    """Damage the file; then put a good one in its place, as a repair does."""
    good = path / "good"
    shutil.copy(path / "model.safetensors", good)
    write_over(path, 9.0)
    good.rename(path / "model.safetensors")


class Failing:
    """Copies, and fails as often as it is told to, after the first tensor."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        into.copy_(tensor)
        if self.times > 0:
            self.times -= 1
            raise OSError("no memory")


# --- ties --------------------------------------------------------------------------------------

WEIGHT = torch.arange(24.0).reshape(6, 4)
NAN = torch.full((6, 4), float("nan"))


def tied_in_part() -> torch.nn.Module:
    """A module with a row of its embeddings, and their transpose, under names of their own."""
    module = Tied()
    module.register_buffer("row", module.embed.weight.detach()[2])
    module.register_buffer("turned", module.embed.weight.detach().T)
    return module


@pytest.mark.parametrize(
    ("make", "tensors", "said"),
    [
        (Tied, {"embed": WEIGHT}, None),
        (Tied, {"head": WEIGHT}, None),
        (Tied, {"embed": WEIGHT, "head": WEIGHT.clone()}, None),
        (Tied, {"embed": NAN, "head": NAN.clone()}, None),
        (Tied, {"embed": WEIGHT, "head": WEIGHT + 1}, "embed.weight, head.weight share memory"),
        (Tied, {}, "lacks embed.weight, head.weight"),
        (tied_in_part, {"head": WEIGHT, "row": WEIGHT[2], "turned": WEIGHT.T}, None),
        (tied_in_part, {"turned": WEIGHT.T}, "lacks row"),
        (tied_in_part, {"row": WEIGHT[2]}, "lacks embed.weight, head.weight, turned"),
        (tied_in_part, {"head": WEIGHT, "row": WEIGHT[3]}, "head.weight, row share memory"),
        (
            tied_in_part,
            {"head": WEIGHT, "row": WEIGHT[2], "turned": WEIGHT.flip(0).T},
            "head.weight, row, turned share memory",
        ),
        (lambda: Tied().to("meta"), {"embed": WEIGHT}, "on the meta device"),
    ],
)
def test_tensors_for_one_memory_must_be_equal(
    make: Callable[[], torch.nn.Module], tensors: dict[str, torch.Tensor], said: str | None
) -> None:
    module = make()
    full = {"embed": "embed.weight", "head": "head.weight"}
    found = misfits(module, {full.get(name, name): one for name, one in tensors.items()})
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


async def test_a_version_that_is_not_tied_is_refused(
    module: Tied, versions: Versions, tmp_path: Path
) -> None:
    def load(_: torch.nn.Module, checkpoint: Checkpoint) -> Tensors:
        found = dict(named_tensors(module, checkpoint))
        if checkpoint.version.number == 2:
            found["head.weight"] = found["head.weight"] + 1
        return found

    async with serving(module, load=load) as engine:
        await engine.activate(versions.targets[0])
        with pytest.raises(EngineRefusedError, match="share memory") as refused:
            await engine.activate(versions.targets[1])
        assert refused.value.reason == "incompatible"
        assert module.value == 1.0
        assert (await engine.state()).served is not None


# --- files that change -------------------------------------------------------------------------


async def test_bytes_that_change_while_forward_passes_are_waited_for_are_not_served(
    module: Tied, versions: Versions
) -> None:
    one, two, _ = versions.targets
    async with serving(module) as engine:
        await engine.activate(one)
        await engine.stage(two)
        pause = engine._gate.pause

        def pausing(seconds: float) -> bool:
            write_over(two.path, 9.0)
            return pause(seconds)

        engine._gate.pause = pausing  # type: ignore[method-assign]
        with pytest.raises(EngineRefusedError, match="changed or replaced while it was loaded"):
            await engine.activate(two)
        state = await engine.state()
        assert state.served is not None
        assert (state.served.version, state.poisoned) == (one.version, False)
        assert module.value == 1.0


async def test_bytes_that_change_while_they_are_read_are_not_staged(
    module: Tied, versions: Versions
) -> None:
    def load(_: torch.nn.Module, checkpoint: Checkpoint) -> Tensors:
        write_over(checkpoint.directory, 9.0)
        return {name: one.clone() for name, one in checkpoint.tensors()}

    async with serving(module, load=load) as engine:
        with pytest.raises(EngineRefusedError, match="while it was read") as refused:
            await engine.stage(versions.targets[0])
        assert refused.value.reason == "integrity"
        assert (await engine.state()).staged is None


async def test_what_lies_in_memory_of_its_own_needs_no_file_to_go_back(
    module: Tied, versions: Versions
) -> None:
    def load(_: torch.nn.Module, checkpoint: Checkpoint) -> Tensors:
        return {name: one.clone() for name, one in checkpoint.tensors()}

    copy = Failing()
    one, two, _ = versions.targets
    async with serving(module, load=load, copy=copy) as engine:
        await engine.activate(one)
        write_over(one.path, 9.0)
        copy.times = 1
        with pytest.raises(EngineRefusedError, match="no memory"):
            await engine.activate(two)
        state = await engine.state()
        assert (state.poisoned, module.value) == (False, 1.0)


async def test_a_mapped_file_that_was_damaged_is_never_gone_back_to(
    module: Tied, versions: Versions
) -> None:
    copy = Failing()
    one, two, three = versions.targets
    async with serving(module, copy=copy) as engine:
        await engine.activate(one)
        put_anew(one.path)
        for target in (two, three):  # the second time it knows of no change any more
            copy.times = 1
            with pytest.raises(EngineRefusedError, match="no memory"):
                await engine.activate(target)
            assert not (await engine.state()).poisoned
            assert module.value == 1.0
        write_over(one.path, 9.0)
        copy.times = 1
        with pytest.raises(EngineRefusedError, match="nor did what it had before"):
            await engine.activate(two)
        assert (await engine.state()).poisoned


async def test_bytes_that_change_while_the_old_version_is_loaded_again_are_not_served(
    module: Tied, versions: Versions
) -> None:
    one, two, _ = versions.targets
    copied: list[float] = []

    def copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
        into.copy_(tensor)
        copied.append(float(tensor.flatten()[0]))
        if copied.count(2.0) == 1 and copied[-1] == 2.0:
            raise OSError("no memory")
        if copied[-1] == 1.0 and 2.0 in copied:
            write_over(one.path, 9.0)

    async with serving(module, copy=copy) as engine:
        await engine.activate(one)
        with pytest.raises(EngineRefusedError, match="changed or replaced while it was loaded"):
            await engine.activate(two)
        assert (await engine.state()).poisoned


# --- stagings that are given up ----------------------------------------------------------------


class Slow:
    """A load that waits in one version until it may go on."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self, module: torch.nn.Module, checkpoint: Checkpoint) -> Tensors:
        if checkpoint.version.number == self._version:
            self.inside.set()
            assert self.go.wait(WAIT_S)
        return named_tensors(module, checkpoint)


async def given_up(engine: TorchEngine, slow: Slow, target: Target) -> asyncio.Task[object]:
    """Cancel a staging in its middle, twice."""
    staging: asyncio.Task[object] = asyncio.ensure_future(engine.stage(target))
    assert await asyncio.to_thread(slow.inside.wait, WAIT_S)
    for _ in range(2):
        staging.cancel()
        await asyncio.sleep(0)
    return staging


async def test_nothing_is_leased_after_a_cancelled_staging_and_close(
    module: Tied, versions: Versions
) -> None:
    slow = Slow(2)
    async with serving(module, load=slow) as engine:
        await engine.activate(versions.targets[0])
        staging = await given_up(engine, slow, versions.targets[1])
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        slow.go.set()
        await asyncio.wait_for(closing, WAIT_S)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(staging, WAIT_S)
        assert versions.leased() == []


async def test_a_cancelled_staging_takes_no_other_version_s_place(
    module: Tied, versions: Versions
) -> None:
    slow = Slow(2)
    one, two, three = versions.targets
    async with serving(module, load=slow) as engine:
        await engine.activate(one)
        staging = await given_up(engine, slow, two)
        with pytest.raises(EngineRefusedError) as busy:
            await engine.activate(three)
        assert busy.value.reason == "busy"
        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(staging, WAIT_S)
        await engine.activate(three)
        state = await engine.state()
        assert state.served is not None
        assert (state.served.version, module.value) == (3, 3.0)

"""A transformers model in place: the contract, and that it is what a fresh load of a version is."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardcast.canary import difference
from shardcast.engine.driver import Target
from shardcast.errors import EngineRefusedError
from tests.contract.engine_suite import EngineContract, Harness
from tests.engine.checkpoints import RUN, Out
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.torch_module import (
    TorchEngine,
    make_canary,
    prompt_logprobs,
    transformers_tensors,
)

TOKENS = [5, 17, 101, 44, 8, 300, 2, 90]


def opened(path: Path | str) -> Any:
    """A cold start on a version."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype="auto")
    return model.eval()


class Versions:
    """Versions of one model in an OUT, made when they are asked for."""

    def __init__(self, root: Path, kind: str = "qwen2-tied", dtype: str = "float32") -> None:
        self.out = Out(root)
        self.kind, self.dtype = kind, dtype
        self._made: dict[int, Target] = {}

    def __getitem__(self, number: int) -> Target:
        while number not in self._made:
            made = self.out.model(self.kind, self.dtype, len(self._made) + 1)
            self._made[made.version] = Target(
                RUN, made.version, made.digest, Path(made.path), step=made.step
            )
        return self._made[number]


class TorchHarness:
    """A model that was booted from elsewhere."""

    def __init__(self, versions: Versions, boot: Path) -> None:
        self._versions, self._boot = versions, boot
        self._breaks = 0
        self.engine = self._new()

    def _new(self) -> TorchEngine:
        self.module = opened(self._boot)
        self._parameters = len(list(self.module.state_dict()))
        self._copied = 0
        return TorchEngine(self.module, copy=self._copy)

    def _copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        self._copied += self._breaks > 0
        if self._copied > 3:
            self._copied, self._breaks = 0, self._breaks - 1
            raise OSError("the 4th tensor is truncated")
        into.copy_(tensor)

    def version(self, number: int) -> Target:
        return self._versions[number]

    async def loaded(self) -> int | None:
        found = await self.engine.score(TOKENS)
        if found == prompt_logprobs(opened(self._boot), TOKENS):
            return None
        for number in (1, 2, 3):
            if found == prompt_logprobs(opened(self._versions[number].path), TOKENS):
                return number
        raise AssertionError("it answers as no version does")

    def break_next_loads(self, count: int) -> None:
        self._breaks = count

    async def restart(self) -> None:
        await self.engine.close()
        self.engine = self._new()

    def adapter(self, number: int) -> Target | None:
        return None


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    made = Versions(tmp_path_factory.mktemp("torch"))
    assert made[3].version == 3
    return made


@pytest.fixture(scope="module")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.checkpoints import save

    return save("qwen2-tied", "float32", 99, tmp_path_factory.mktemp("boot") / "model")


class TestTorch(EngineContract):
    """The suite, on a real model."""

    @pytest.fixture
    async def harness(self, versions: Versions, boot: Path) -> Any:
        made = TorchHarness(versions, boot)
        harness: Harness = made
        yield harness
        await made.engine.close()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen2", "bfloat16"), ("qwen3-tied", "bfloat16"), ("llama", "float32")],
)
async def test_a_swapped_version_is_bit_equal_to_a_cold_start(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    versions = Versions(tmp_path, kind, dtype)
    module = opened(versions[1].path)
    where = [parameter.data_ptr() for parameter in module.parameters()]
    engine = TorchEngine(module)
    for number in (2, 1, 3, 3, 1):
        await engine.activate(versions[number])
        cold = opened(versions[number].path)
        assert prompt_logprobs(module, TOKENS) == prompt_logprobs(cold, TOKENS)
        ids = torch.tensor([TOKENS])
        ours, theirs = (m.generate(ids, max_new_tokens=12, do_sample=False) for m in (module, cold))
        assert ours.tolist() == theirs.tolist()
    assert [parameter.data_ptr() for parameter in module.parameters()] == where
    await engine.close()


async def test_experts_that_transformers_fuses(tmp_path: Path) -> None:
    """They are saved one by one and held as one tensor: by name they do not fit."""
    versions = Versions(tmp_path, "qwen3-moe", "float32")
    module = opened(versions[1].path)
    plain = TorchEngine(module)
    with pytest.raises(EngineRefusedError, match="experts"):
        await plain.activate(versions[2])
    engine = TorchEngine(module, load=transformers_tensors)
    for number in (2, 1, 2):
        await engine.activate(versions[number])
        cold = opened(versions[number].path)
        assert prompt_logprobs(module, TOKENS) == prompt_logprobs(cold, TOKENS)
    await engine.close()


def test_what_transformers_has_loaded_is_in_memory_of_its_own(tmp_path: Path) -> None:
    """It maps the files by their names: what becomes of those must not reach the weights."""
    target = Versions(tmp_path)[1]
    with Checkpoint(
        target.path, run=target.run, version=target.version, digest=target.digest
    ) as checkpoint:
        checkpoint.verify()
        found = transformers_tensors(opened(target.path), checkpoint)
    kept = {name: tensor.clone() for name, tensor in found.items()}
    weights = target.path / "model.safetensors"
    with open(weights, "r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    tied = found["lm_head.weight"], found["model.embed_tokens.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()


async def test_a_shape_that_differs_is_named_before_anything_is_touched(tmp_path: Path) -> None:
    small, large = Versions(tmp_path / "a"), Versions(tmp_path / "b")
    large.out.model("qwen2-tied", "float32", 9, intermediate_size=320)
    wide = Target(RUN, 1, _digest(large.out), Path(large.out.run.version_directory(1)))
    module = opened(small[1].path)
    before = prompt_logprobs(module, TOKENS)
    engine = TorchEngine(module)
    with pytest.raises(EngineRefusedError, match=r"mlp.*320") as refused:
        await engine.stage(wide)
    assert refused.value.reason == "incompatible"
    assert prompt_logprobs(module, TOKENS) == before
    await engine.close()


def _digest(out: Out) -> str:
    version = out.run.load_state(1)
    assert version is not None
    return str(version.manifest)


async def test_bytes_that_are_not_the_publisher_s_are_never_copied(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    module = opened(versions[1].path)
    engine = TorchEngine(module)
    await engine.activate(versions[1])
    file = versions[2].path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(EngineRefusedError) as refused:
        await engine.activate(versions[2])
    assert refused.value.reason == "integrity"
    assert prompt_logprobs(module, TOKENS) == prompt_logprobs(opened(versions[1].path), TOKENS)
    await engine.close()


async def test_forward_passes_under_way_are_waited_for(versions: Versions, boot: Path) -> None:
    module = opened(boot)
    engine = TorchEngine(module, lease_s=0.05)
    inside, go_on = threading.Event(), threading.Event()

    def forward() -> list[float]:
        with engine.serving():
            inside.set()
            assert go_on.wait(20)
            return prompt_logprobs(module, TOKENS)

    running = asyncio.ensure_future(asyncio.to_thread(forward))
    assert await asyncio.to_thread(inside.wait, 20)
    with pytest.raises(EngineRefusedError) as late:
        await engine.activate(versions[1])
    assert (late.value.phase, late.value.reason) == ("pause", "timeout")
    state = await engine.state()
    assert (state.paused, state.served, state.poisoned) == (False, None, False)
    go_on.set()
    assert await running == prompt_logprobs(opened(boot), TOKENS)
    await engine.activate(versions[1])
    assert await engine.score(TOKENS) == prompt_logprobs(opened(versions[1].path), TOKENS)
    await engine.close()


async def test_a_canary_of_the_trainer_s_model_is_right_for_its_version(versions: Versions) -> None:
    trainer = opened(versions[1].path)
    canary = make_canary(trainer, [TOKENS, [9, 8, 7]], 0.01)
    engine = TorchEngine(opened(versions[2].path))
    scores = [await engine.score(prompt.tokens) for prompt in canary.prompts]
    assert difference(canary, 0, scores[0]) is not None
    await engine.activate(versions[1])
    for number, prompt in enumerate(canary.prompts):
        assert difference(canary, number, await engine.score(prompt.tokens)) is None
    await engine.close()

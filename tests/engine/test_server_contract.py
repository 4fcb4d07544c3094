"""The suite that every engine driver passes, on a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shardcast.engine.driver import Manner, Target
from shardcast.engine.vllm import VllmEngine
from tests.contract.engine_suite import EngineContract
from tests.engine.checkpoints import RUN, Out, save
from tests.engine.servers import BACKEND, INJECTED, KEY, Server, ServerHost
from tests.engine.test_torch_module import opened
from trainer_adapter.torch_module import prompt_logprobs

TOKENS = [5, 17, 101, 44, 8, 300, 2, 90]
KIND, DTYPE = "qwen2-tied", "float32"
OPTIONS = (*BACKEND, *INJECTED, "--dtype", DTYPE)
NEAR = 0.02
"""vLLM's kernels are not transformers'; two versions are more than ten times further apart."""


class Shared:
    """One server for all tests, and another one where a test wants it restarted."""

    def __init__(self, servers: ServerHost, out: Out, boot: Path) -> None:
        self._servers, self._boot = servers, boot
        self.versions: dict[int, Target] = {}
        self.scores: dict[int | None, list[float]] = {None: prompt_logprobs(opened(boot), TOKENS)}
        for seed in (1, 2, 3):
            made = out.model(KIND, DTYPE, seed)
            path = Path(made.path)
            self.versions[seed] = Target(RUN, made.version, made.digest, path, made.step)
            self.scores[seed] = prompt_logprobs(opened(path), TOKENS)
        assert [one.version for one in self.versions.values()] == [1, 2, 3]
        self.server = self.start()
        self.fresh = True

    def start(self) -> Server:
        """Start a server on weights that are no version."""
        server = self._servers.begin(str(self._boot), *OPTIONS)
        server.wait_started()
        return server


def driver(server: Server) -> VllmEngine:
    """A driver of it, for one event loop."""
    return VllmEngine(server.url, KEY, Manner(lease_s=30.0))


class VllmHarness:
    """The shared server, driven in one test."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.engine = driver(shared.server)

    def version(self, number: int) -> Target:
        return self._shared.versions[number]

    async def loaded(self) -> int | None:
        found = await self.engine.score(TOKENS)
        near = [number for number, scores in self._shared.scores.items() if alike(found, scores)]
        assert len(near) == 1, f"it answers as {len(near)} versions do"
        return near[0]

    def break_next_loads(self, count: int) -> None:
        self._shared.server.arm("tensors", after=5, times=count)

    async def restart(self) -> None:
        if self._shared.fresh:  # a start takes seconds, and this one has just been
            return
        await self.engine.close()
        self._shared.server.end()
        self._shared.server = self._shared.start()
        self.engine = driver(self._shared.server)

    def adapter(self, number: int) -> Target | None:
        return None


def alike(found: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) < NEAR


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, servers: ServerHost, out: Out
) -> Iterator[Shared]:
    boot = save(KIND, DTYPE, 99, tmp_path_factory.mktemp("boot") / "model")
    made = Shared(servers, out, boot)
    yield made
    made.server.end()


class TestVllm(EngineContract):
    """Over our routes, in a real server."""

    @pytest.fixture
    async def harness(self, shared: Shared) -> AsyncIterator[VllmHarness]:
        made = VllmHarness(shared)
        if not shared.fresh:
            await made.engine.activate(made.version(3))
            await made.engine.tell(RUN, 3, None)
        yield made
        shared.fresh = False
        await made.engine.close()


def asked(server: Server) -> list[float]:
    async def ask() -> list[float]:
        engine = driver(server)
        try:
            return await engine.score(TOKENS)
        finally:
            await engine.close()

    return asyncio.run(ask())

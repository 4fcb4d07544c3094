"""The suite that every engine driver passes, on a real SGLang; its traps; and the agent that minds one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from loadtest.processes import Processes
from loadtest.topology import shardcast
from shardcast.canary import METADATA_KEY, write_canary
from shardcast.engine.decide import served_by
from shardcast.engine.driver import Manner, Target
from shardcast.engine.forms import parse_label
from shardcast.engine.intents import FileIntents
from shardcast.engine.sglang import SglangEngine
from shardcast.errors import EngineRefusedError, EngineUncertainError
from shardcast.keys import public_pem
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from tests.contract.engine_suite import EngineContract, Harness
from tests.contract.made import signer
from tests.engine.adapters import save_adapter
from tests.engine.checkpoints import RUN, Out, save
from tests.engine.test_torch_module import opened
from tests.engine_sglang.servers import KEY, Server
from tests.fakes import now_ms
from trainer_adapter.torch_module import make_canary, prompt_logprobs

TOKENS = [5, 17, 101, 44, 8, 300, 2, 90]
KIND, DTYPE = "qwen2", "float32"
NEAR = 0.001


class Shared:
    """One server for all tests, and another start of it where a test wants that."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = Out(root / "out")
        boot = save(KIND, DTYPE, 99, root / "boot")
        self.versions: dict[int, Target] = {}
        self.scores: dict[int | None, list[float]] = {None: prompt_logprobs(opened(boot), TOKENS)}
        for seed in (1, 2, 3):
            made = self.out.model(KIND, DTYPE, seed)
            path = Path(made.path)
            self.versions[seed] = Target(RUN, made.version, made.digest, path, made.step)
            self.scores[seed] = prompt_logprobs(opened(path), TOKENS)
        self.server = Server(root / "server", boot)
        self.server.start()
        self.fresh = True

    def engine(self, requests: str = "recompute") -> SglangEngine:
        """A driver, as an agent makes it."""
        found = {one.digest: one for one in self.versions.values()}
        return SglangEngine(
            self.server.url,
            KEY,
            Manner(requests, 30.0),  # type: ignore[arg-type]
            intents=FileIntents(self.root / "state", self.server.url),
            find=found.get,
        )

    def answers_as(self, found: list[float]) -> int | None:
        """Which version's log-probabilities these are."""
        near = [number for number, scores in self.scores.items() if alike(found, scores)]
        assert len(near) == 1, f"it answers as {len(near)} versions do"
        return near[0]


def alike(found: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) < NEAR


class SglangHarness:
    """The shared server, driven in one test."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.engine = shared.engine()

    def version(self, number: int) -> Target:
        return self.shared.versions[number]

    async def loaded(self) -> int | None:
        return self.shared.answers_as(await self.engine.score(TOKENS))

    def break_next_loads(self, count: int) -> None:
        self.shared.server.break_next_loads(count)

    async def restart(self) -> None:
        if not self.shared.fresh:  # a start takes half a minute
            await asyncio.to_thread(self.shared.server.restart)

    def adapter(self, number: int) -> Target | None:
        path = self.shared.root / f"adapter_{number}"
        if not path.exists():
            save_adapter(path, number)
        return Target(RUN, number, f"{number:064x}", path, None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("sglang"))
    yield made
    made.server.end()


@pytest.fixture
async def harness(shared: Shared) -> AsyncIterator[SglangHarness]:
    made = SglangHarness(shared)
    if not shared.fresh:
        await made.engine.activate(made.version(3))
        await made.engine.tell(RUN, 3, None)
    yield made
    shared.fresh = False
    await made.engine.close()


class TestSglang(EngineContract):
    """Over SGLang's own routes."""

    async def test_without_a_way_back_it_is_paused_and_the_next_activation_recovers(
        self, harness: Harness
    ) -> None:
        """SGLang's own way back reads the new path again: where that breaks, too, its server ends."""
        assert isinstance(harness, SglangHarness)
        await harness.engine.activate(harness.version(1))
        harness.break_next_loads(2)
        with pytest.raises(EngineUncertainError):
            await harness.engine.activate(harness.version(2))
        await asyncio.to_thread(harness.shared.server.wait_ended)
        await asyncio.to_thread(harness.shared.server.start)
        state = await harness.engine.state()
        assert (served_by(state), state.poisoned, state.ready) == (None, True, False)
        await harness.engine.activate(harness.version(3))
        state = await harness.engine.state()
        assert served_by(state) == harness.version(3).identity
        assert (state.poisoned, state.paused, state.ready) == (False, False, True)
        assert await harness.loaded() == 3


async def test_a_swap_answers_to_the_last_bit_as_a_cold_start_does(
    harness: SglangHarness, shared: Shared
) -> None:
    await harness.engine.activate(harness.version(2))
    swapped = await harness.engine.score(TOKENS)
    cold = Server(shared.root / "cold", harness.version(2).path)
    try:
        await asyncio.to_thread(cold.start)
        engine = SglangEngine(cold.url, KEY)
        assert await engine.score(TOKENS) == swapped
        await engine.close()
    finally:
        cold.end()


@pytest.mark.parametrize("wrong", ["missing", "shape"])
async def test_what_sglang_itself_would_mix_is_refused_before(
    harness: SglangHarness, shared: Shared, wrong: str
) -> None:
    """SGLang answers that it succeeded, and serves neither version: the reason for the check."""
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        whole = tensors.pop(name)
        if wrong == "shape":
            tensors[name] = whole[:, : whole.shape[1] // 2].contiguous()

    await harness.engine.activate(harness.version(1))
    made = shared.out.broken(harness.version(2).path, wrong, spoil)
    spoilt = Target(RUN, made.version, made.digest, Path(made.path), made.step)
    for act in (harness.engine.stage, harness.engine.activate):
        with pytest.raises(EngineRefusedError, match=name) as refused:
            await act(spoilt)
        assert refused.value.reason == "incompatible"
    assert await harness.loaded() == 1
    by_hand(shared, spoilt)
    found = await harness.engine.score(TOKENS)
    assert not any(alike(found, scores) for scores in shared.scores.values())
    by_hand(shared, harness.version(1))  # with the spoilt one loaded, the driver refuses whole ones
    assert await harness.loaded() == 1


def by_hand(shared: Shared, target: Target) -> None:
    """Have SGLang load a version, without the driver."""
    body = {"model_path": str(target.path), "weight_version": str(target.identity)}
    status, answer = shared.server.ask("/update_weights_from_disk", json.dumps(body).encode())
    assert (status, json.loads(answer)["success"]) == (200, True)


@pytest.mark.parametrize("requests", ["recompute", "abort"])
async def test_running_requests_go_on_with_the_new_weights_or_end(
    harness: SglangHarness, shared: Shared, requests: str
) -> None:
    await harness.engine.activate(harness.version(1))
    started = threading.Event()
    chunks: list[dict[str, object]] = []

    def stream() -> None:
        import http.client

        link = http.client.HTTPConnection("127.0.0.1", shared.server.port, timeout=60)
        sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": TOKENS, "sampling_params": sampling, "stream": True}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        link.request("POST", "/generate", json.dumps(body), headers)
        for line in link.getresponse():
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
                if len(chunks) == 5:
                    started.set()
        link.close()

    streaming = asyncio.ensure_future(asyncio.to_thread(stream))
    assert await asyncio.to_thread(started.wait, 60)
    engine = shared.engine(requests)
    try:
        await engine.activate(harness.version(2))
    finally:
        await engine.close()
    await asyncio.wait_for(streaming, 60)
    meta = chunks[-1]["meta_info"]
    assert isinstance(meta, dict)
    if requests == "abort":
        assert meta["finish_reason"]["type"] == "abort"
    else:
        assert meta["completion_tokens"] == 200
        spans = [parse_label(span["version"]) for span in meta["weight_versions"]]
        assert spans == [harness.version(1).identity, harness.version(2).identity]
    assert await harness.loaded() == 2


async def test_each_adapter_answers_for_itself_and_outlives_a_swap(
    harness: SglangHarness, shared: Shared
) -> None:
    async def asked(model: str | None) -> list[float]:
        body = {
            "input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True, "logprob_start_len": 0, "lora_path": model,
        }  # fmt: skip
        status, answer = await asyncio.to_thread(
            shared.server.ask, "/generate", json.dumps(body).encode()
        )
        assert status == 200, answer
        return [one[0] for one in json.loads(answer)["meta_info"]["input_token_logprobs"][1:]]

    await harness.engine.activate(harness.version(1))
    models = []
    for number in (1, 2):
        state = await harness.engine.load_adapter("style", harness.adapter(number))  # type: ignore[arg-type]
        models += [one.model for one in state.lora if (one.name, one.version) == ("style", number)]
    first, second = [await asked(model) for model in models]
    assert not alike(first, second)
    assert alike(await asked(None), shared.scores[1])
    await harness.engine.activate(harness.version(2))
    assert not alike(await asked(models[0]), first)
    assert alike(await asked(None), shared.scores[2])
    await harness.engine.activate(harness.version(1))
    assert alike(await asked(models[0]), first)


def test_an_agent_brings_a_real_server_from_version_to_version(
    shared: Shared, tmp_path: Path
) -> None:
    """Published, pulled, activated, its canary checked; killed while SGLang is paused; a file damaged."""
    store, out = tmp_path / "origin", tmp_path / "out"
    (tmp_path / "run.pub").write_bytes(public_pem(signer().public_key))
    (tmp_path / "token").write_text(KEY)

    def publish(seed: int) -> Path:
        directory = save(KIND, DTYPE, seed, tmp_path / f"step_{seed}")
        canary = make_canary(opened(directory), [TOKENS, [9, 8, 7, 6]], NEAR)
        options = PublishOptions(source=directory, metadata={METADATA_KEY: write_canary(canary)})
        publish_directory(options, RunStore(store / "live", "live"), [signer()], now_ms)
        return directory

    def served(directory: Path) -> bool:
        async def ask() -> list[float]:
            engine = SglangEngine(shared.server.url, KEY)
            try:
                return await engine.score(TOKENS)
            finally:
                await engine.close()

        return alike(asyncio.run(ask()), prompt_logprobs(opened(directory), TOKENS))

    with Processes(tmp_path / "logs") as processes:
        first = publish(11)
        origin = processes.start(
            shardcast("relay", "--store", store, "--listen", "127.0.0.1:0"), name="origin"
        )
        url = origin.wait_event("listening", timeout=30)["url"]
        argv = shardcast(
            "follow", "live", "--from", url, "--out", out, "--pubkey", tmp_path / "run.pub",
            "--durability", "none", "--json", "--engine", "sglang", "--engine-url",
            shared.server.url, "--engine-token-file", tmp_path / "token", "--check-canary",
        )  # fmt: skip
        agent = processes.start(argv, name="killed")
        event = agent.wait_event("activated", timeout=60, where=lambda e: e["version"] == 1)
        assert event["pause_ms"] > 0
        assert served(first)
        # Killed between its calls: what it leaves is an intent and a paused server.
        agent.kill()
        agent.wait(timeout=30)
        FileIntents(out / "state" / "engines", shared.server.url).begin(
            parse_label(f"live/2/{'b' * 64}")  # type: ignore[arg-type]
        )
        assert shared.server.ask("/pause_generation", b'{"mode": "retract"}')[0] == 200
        second = publish(12)
        agent = processes.start(argv, name="after")
        agent.wait_event("activated", timeout=60, where=lambda e: e["version"] == 2)
        assert served(second)
        assert not agent.events("engine_failed")
        # A server that has died and was started again takes the next version, or this one and the next.
        shared.server.restart()
        third = publish(13)
        agent.wait_event("activated", timeout=60, where=lambda e: e["version"] == 3)
        assert served(third)
        agent.terminate()
        agent.wait(timeout=30)

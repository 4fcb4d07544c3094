"""vLLM's engine client as swaps see it: which of its calls stand for which of ours."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardcast.engine.forms import Requests
from tests.unit.swapping.engine import OLD
from trainer_adapter.vllm import client as module
from trainer_adapter.vllm.client import VllmAdapters, VllmControl
from trainer_adapter.vllm.ranks import RankReply, state_command, write_reply

LORA = "vllm.entrypoints.serve.lora"


class EngineClient:
    """vLLM's, as far as it is used; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.errored = False
        self.version = "default"
        self.deaf = False
        self.loras: set[int] = set()

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, args))
        return [write_reply(RankReply(rank=rank, served=OLD)) for rank in range(2)]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", (mode, clear_cache)))

    async def resume_generation(self) -> None:
        self.calls.append(("resume", ()))

    async def is_paused(self) -> bool:
        return True

    async def is_sleeping(self) -> bool:
        return True

    async def update_weight_version(self, label: str) -> None:
        if not self.deaf:
            self.version = label

    async def get_weight_version(self) -> str:
        return self.version

    async def add_lora(self, request: Any) -> None:
        self.loras.add(request.lora_int_id)

    async def remove_lora(self, number: int) -> None:
        self.loras.discard(number)

    async def list_loras(self) -> set[int]:
        return self.loras


async def test_all_ranks_are_told_and_answer_together() -> None:
    client = EngineClient()
    report = await VllmControl(client).tell(state_command())
    assert client.calls == [("shardcast", (state_command(),))]
    assert (report.ranks, report.served) == (2, OLD)


@pytest.mark.parametrize(
    ("requests", "pause"),
    [
        ("recompute", ("keep", True)),
        ("wait", ("wait", True)),
        ("abort", ("abort", True)),
        ("keep", ("keep", False)),
    ],
)
async def test_how_each_mode_pauses(requests: Requests, pause: tuple[str, bool]) -> None:
    client = EngineClient()
    await VllmControl(client).pause(requests)
    await VllmControl(client).resume()
    assert client.calls == [("pause", pause), ("resume", ())]


async def test_only_a_server_with_sleep_mode_can_be_asleep() -> None:
    assert await VllmControl(EngineClient()).is_paused()
    assert not await VllmControl(EngineClient()).is_asleep()
    assert await VllmControl(EngineClient(), may_sleep=True).is_asleep()


async def test_a_label_is_read_back() -> None:
    client = EngineClient()
    await VllmControl(client).set_label("a/1/x")
    client.deaf = True
    with pytest.raises(RuntimeError, match="a/1/x"):
        await VllmControl(client).set_label("a/2/y")


async def test_death_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEATH_POLL_SECONDS", 0)
    client = EngineClient()
    control = VllmControl(client)
    death = asyncio.ensure_future(control.death())
    await asyncio.sleep(0)
    assert control.dead() == ""
    assert not death.done()
    client.errored = True
    assert "engine core" in await asyncio.wait_for(death, 5)
    assert control.dead()


async def test_adapters_are_known_by_the_names_of_requests() -> None:
    client = EngineClient()
    known = {name: SimpleNamespace(lora_int_id=n) for n, name in enumerate(("a", "b"))}
    state = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests=known))
    host = VllmAdapters(client, state, enabled=True)
    assert host.refusal() == ""
    assert host.models() == {"a", "b"}
    assert await host.present() == set()
    await host.again("b")
    assert await host.present() == {"b"}
    assert client.loras == {1}
    none = VllmAdapters(client, SimpleNamespace(), enabled=False)
    assert "--enable-lora" in none.refusal()
    assert none.models() == set()
    assert await none.present() == set()


class Models:
    """vLLM's ``OpenAIServingModels``, as far as it is used."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._made = 0
        self.lora_requests: dict[str, Any] = {}

    async def load_lora_adapter(self, request: Any) -> Any:
        if request.lora_name in self.lora_requests:
            return SimpleNamespace(error=SimpleNamespace(message="it is loaded already"))
        self._made += 1
        made = SimpleNamespace(lora_int_id=self._made, lora_path=request.lora_path)
        self.lora_requests[request.lora_name] = made
        await self._client.add_lora(made)
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> Any:
        if self.lora_requests.pop(request.lora_name, None) is None:
            return SimpleNamespace(error=SimpleNamespace(message="it is not there"))
        return "Success"


async def test_an_adapter_is_loaded_from_where_it_was_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.serve", LORA, f"{LORA}.protocol"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    protocol = sys.modules[f"{LORA}.protocol"]
    for kind in ("LoadLoRAAdapterRequest", "UnloadLoRAAdapterRequest"):
        monkeypatch.setattr(protocol, kind, SimpleNamespace, raising=False)
    client = EngineClient()
    models = Models(client)
    host = VllmAdapters(client, SimpleNamespace(openai_serving_models=models), enabled=True)

    async def loaded_from(path: str) -> None:
        await host.add("a", path)
        assert models.lora_requests["a"].lora_path == path
        assert await host.present() == {"a"}
        assert client.loras == {models.lora_requests["a"].lora_int_id}

    await loaded_from("/out/versions/1")
    client.loras.clear()  # by a reload
    await loaded_from("/out/versions/1")
    assert models.lora_requests["a"].lora_int_id == 1  # the same one, once more
    await loaded_from("/another/out/versions/1")
    await host.remove("a")
    await host.remove("a")
    assert (host.models(), client.loras) == (set(), set())

"""vLLM's engine client as swaps see it: which of its calls stand for which of ours."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shardcast.engine.forms import Requests
from tests.unit.swapping.engine import OLD
from trainer_adapter.vllm import client as module
from trainer_adapter.vllm.client import VllmAdapters, VllmControl
from trainer_adapter.vllm.ranks import RankReply, state_command, write_reply


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
    none = VllmAdapters(client, SimpleNamespace(), enabled=False)
    assert "--enable-lora" in none.refusal()
    assert none.models() == set()
    assert await none.present() == set()

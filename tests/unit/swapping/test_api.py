"""The routes: what each answers, to whom, and with which status."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from shardcast.engine.forms import (
    ACTIVATE_PATH,
    LORA_PATH,
    NEWEST_PATH,
    READY_PATH,
    STAGE_PATH,
    STATE_PATH,
    STATUS_OF,
    ActivateAnswer,
    EngineState,
    FaultAnswer,
    Identity,
    ReadyAnswer,
    StageAnswer,
    read_answer,
)
from shardcast.errors import IntegrityError, MalformedError, MixAndMatchError
from tests.unit.swapping.engine import (
    NEW,
    NEXT,
    OLD,
    FakeClock,
    FakeEngine,
    FakeHost,
    Lease,
    Leases,
)
from tests.unit.swapping.test_activation import until
from trainer_adapter.vllm.adapters import Adapters, model_name
from trainer_adapter.vllm.api import Api, Call, Reply, is_near
from trainer_adapter.vllm.machine import Facts
from trainer_adapter.vllm.ranks import Target
from trainer_adapter.vllm.swap import Swapper

FACTS = Facts(engine_version="0.32.0", plugin_version="0.1.0", keep_refusal="not salted")


def members(target: Target, **more: Any) -> dict[str, Any]:
    named = {"run": target.run, "version": target.version, "digest": target.digest}
    return {**named, "path": target.path, **more}


class Server:
    """A booted server, and calls to it."""

    def __init__(self, *, has_key: bool = True, facts: Facts = FACTS) -> None:
        self.engine = FakeEngine()
        self.swapper = Swapper(self.engine, facts, FakeClock())
        self.host = FakeHost(self.engine)
        self.leases = Leases()
        self.adapters = Adapters(self.host, self.leases, self.swapper)
        self.swapper.after_load = self.adapters
        self.api = Api(self.swapper, self.adapters, has_key=has_key)

    async def post(self, path: str, body: Any, peer: str | None = "127.0.0.1") -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        call = Call(path=path, query={}, body=data, peer=peer)
        return await asyncio.wait_for(self.api.answer(call), 5)

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Reply:
        call = Call(path=path, query=query or {}, peer="192.0.2.1")
        return await asyncio.wait_for(self.api.answer(call), 5)


@pytest.fixture
async def server() -> Server:
    made = Server()
    await made.swapper.boot()
    return made


def fault(reply: Reply) -> FaultAnswer:
    answer = read_answer(reply.body, FaultAnswer, source="test")
    assert reply.status == STATUS_OF[answer.error.code]
    return answer


async def test_stage_then_activate_then_state(server: Server) -> None:
    staged = await server.post(STAGE_PATH, members(NEW))
    assert staged.status == 200
    assert read_answer(staged.body, StageAnswer, source="x").state.staged is not None
    told = {name: value for name, value in members(NEW).items() if name != "path"}
    activated = await server.post(ACTIVATE_PATH, told)
    assert activated.status == 200
    answer = read_answer(activated.body, ActivateAnswer, source="x")
    assert answer.activated.digest == NEW.digest
    state = read_answer((await server.get(STATE_PATH)).body, EngineState, source="x")
    assert state.served is not None
    assert state.served.digest == NEW.digest
    assert state == answer.state


@pytest.mark.parametrize("path", [STAGE_PATH, ACTIVATE_PATH, NEWEST_PATH, LORA_PATH])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "malformed"),
        (b"[]", "malformed"),
        (b"\xff{}", "malformed"),
        ({"run": "demo"}, "malformed"),
        (members(NEW, surprise=1), "malformed"),
        (members(NEW) | {"version": "2"}, "malformed"),
        (members(NEW) | {"digest": "AB" * 32}, "malformed"),
        (members(NEW) | {"run": "../x"}, "malformed"),
        (members(NEW, x="y" * 70_000), "too_large"),
    ],
)
async def test_bodies_that_are_refused(server: Server, path: str, body: Any, code: str) -> None:
    answer = fault(await server.post(path, body))
    assert answer.error.code == code
    assert answer.state is not None
    assert server.engine.calls == ["state", "label"]


@pytest.mark.parametrize("where", ["versions/1", "/out/../etc", "/out/\0x", ""])
async def test_paths_that_are_refused(server: Server, where: str) -> None:
    for path in (STAGE_PATH, ACTIVATE_PATH):
        answer = fault(await server.post(path, members(NEW) | {"path": where}))
        assert answer.error.code == "malformed"


@pytest.mark.parametrize("lease", [0.01, 1e9, "60", None])
async def test_leases_that_are_refused(server: Server, lease: Any) -> None:
    answer = fault(await server.post(ACTIVATE_PATH, members(NEW, lease_s=lease)))
    assert answer.error.code == "malformed"


async def test_errors_carry_their_status_and_the_state(server: Server) -> None:
    for code in ("incompatible", "integrity"):
        server.engine.script["stage"] = code
        answer = fault(await server.post(STAGE_PATH, members(NEW)))
        assert (answer.error.code, answer.error.phase) == (code, "stage")
    server.engine.script["load"] = "poisoned"
    answer = fault(await server.post(ACTIVATE_PATH, members(NEW)))
    assert answer.error.code == "failed"
    assert answer.state is not None
    assert answer.state.poisoned
    server.engine.die()
    answer = fault(await server.post(ACTIVATE_PATH, members(NEW)))
    assert answer.error.code == "dead"


async def test_ready_is_503_while_poisoned_paused_or_behind(server: Server) -> None:
    async def ready(query: Mapping[str, str] | None = None) -> tuple[int, str]:
        reply = await server.get(READY_PATH, query)
        answer = read_answer(reply.body, ReadyAnswer, source="x")
        assert answer.ready == (reply.status == 200) == (not answer.why)
        return reply.status, answer.why

    assert await ready() == (200, "")
    server.engine.paused = True
    assert (await ready())[0] == 503
    server.engine.paused = False
    assert await ready() == (200, "")
    await server.post(NEWEST_PATH, {"run": "demo", "version": 9, "max_lag": 2})
    status, why = await ready()
    assert (status, "8 versions behind" in why) == (503, True)
    await server.post(NEWEST_PATH, {"run": "demo", "version": 9, "max_lag": None})
    assert await ready() == (200, "")
    server.engine.script["load"] = "poisoned"
    await server.post(ACTIVATE_PATH, members(NEW))
    assert (await ready())[0] == 503


async def test_ready_may_demand_that_a_version_is_served() -> None:
    server = Server()
    server.engine = FakeEngine(None)
    server.swapper = Swapper(server.engine, FACTS, FakeClock())
    server.api = Api(server.swapper, server.adapters, has_key=True)
    await server.swapper.boot()
    assert (await server.get(READY_PATH)).status == 200
    assert (await server.get(READY_PATH, {"require": "served"})).status == 503


async def test_without_a_key_only_its_own_host_may_change_anything() -> None:
    server = Server(has_key=False)
    await server.swapper.boot()
    for path in (STAGE_PATH, ACTIVATE_PATH, NEWEST_PATH, LORA_PATH):
        answer = fault(await server.post(path, members(NEW), peer="192.0.2.7"))
        assert answer.error.code == "refused"
        assert "--api-key" in answer.error.message
    assert (await server.get(STATE_PATH)).status == 200
    for near in ("127.0.0.1", "::1", "::ffff:127.0.0.1", None):
        assert (await server.post(ACTIVATE_PATH, members(NEW), peer=near)).status == 200


def test_who_is_near() -> None:
    assert not is_near("10.0.0.1")
    assert not is_near("::ffff:10.0.0.1")
    assert not is_near("fe80::1%eth0")
    assert not is_near("testclient")
    assert is_near("127.9.9.9")


# --- adapters --------------------------------------------------------------------------------


def lora(target: Target, action: str = "load", name: str = "style") -> dict[str, Any]:
    return members(target, action=action, name=name)


def adapters(server: Server) -> dict[str, bool]:
    return {one.model: one.loaded for one in server.swapper.state.lora}


async def test_an_adapter_has_a_name_of_its_own_for_every_version(server: Server) -> None:
    assert (await server.post(LORA_PATH, lora(OLD))).status == 200
    first = model_name("style", OLD.identity)
    assert adapters(server) == {first: True}
    assert (await server.post(LORA_PATH, lora(NEW))).status == 200
    second = model_name("style", NEW.identity)
    assert second != first
    assert adapters(server) == {second: True}
    assert server.host.registered == {second: NEW.path}
    # The new one is there before the old one goes.
    assert server.host.log == [f"add {first}", f"add {second}", f"remove {first}"]
    assert (await server.post(LORA_PATH, lora(NEW))).status == 200
    assert len(server.host.log) == 3
    # Files of the old one stay leased until the next one goes: running requests may read them.
    assert server.leases.held == {OLD.path, NEW.path}
    assert (await server.post(LORA_PATH, lora(OLD, "unload"))).status == 200
    assert adapters(server) == {second: True}
    assert (await server.post(LORA_PATH, lora(NEW, "unload"))).status == 200
    assert adapters(server) == {}
    assert server.leases.held == {NEW.path}


async def test_adapters_are_added_again_after_a_swap(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    await server.host.add("of somebody else", "/elsewhere")
    answer = await server.post(ACTIVATE_PATH, members(NEW))
    assert answer.status == 200
    assert server.host.loaded == {model_name("style", OLD.identity), "of somebody else"}
    assert server.swapper.state.last_failure is None
    assert "lora" in read_answer(answer.body, ActivateAnswer, source="x").phases_ms


async def test_adapters_are_added_again_where_the_old_version_was_restored(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    server.engine.script["load"] = "restored"
    assert fault(await server.post(ACTIVATE_PATH, members(NEW))).error.code == "failed"
    assert server.host.loaded == {model_name("style", OLD.identity)}


async def test_an_adapter_that_does_not_come_back_is_said(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    model = model_name("style", OLD.identity)
    server.host.broken = {model}
    assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200
    state = server.swapper.state
    assert adapters(server) == {model: False}
    assert state.ready
    assert state.last_failure is not None
    assert state.last_failure.phase == "lora"
    assert model in state.last_failure.message


async def test_an_adapter_that_comes_back_with_the_next_swap_is_no_failure_any_more(
    server: Server,
) -> None:
    await server.post(LORA_PATH, lora(OLD))
    model = model_name("style", OLD.identity)
    server.host.broken = {model}
    await server.post(ACTIVATE_PATH, members(NEW))
    server.host.broken = set()
    assert (await server.post(ACTIVATE_PATH, members(NEXT))).status == 200
    assert adapters(server) == {model: True}
    assert server.swapper.state.last_failure is None


async def test_more_adapters_than_the_engine_holds_at_a_time_come_back(server: Server) -> None:
    """vLLM holds ``--max-cpu-loras`` (1), and loads the others when a request wants them."""
    server.host.capacity = 1
    for name in ("style", "tone"):
        assert (await server.post(LORA_PATH, lora(OLD, name=name))).status == 200
    for target in (NEW, NEXT):
        assert (await server.post(ACTIVATE_PATH, members(target))).status == 200
        assert server.swapper.state.last_failure is None
        assert adapters(server) == {
            model_name("style", OLD.identity): True,
            model_name("tone", OLD.identity): True,
        }
    server.host.forgetful = True
    assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200
    assert set(adapters(server).values()) == {False}
    failure = server.swapper.state.last_failure
    assert failure is not None
    for name in ("style", "tone"):
        assert f"{model_name(name, OLD.identity)} is not there after" in failure.message


async def test_an_adapter_that_others_have_unloaded_is_not_called_loaded(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    await server.host.remove(model_name("style", OLD.identity))  # by vLLM's own route
    assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200
    assert adapters(server) == {model_name("style", OLD.identity): False}


async def test_the_lease_of_an_unloaded_adapter_ends(server: Server) -> None:
    retiring = Adapters(server.host, server.leases, server.swapper, retired_s=0.0)
    server.api = Api(server.swapper, retiring, has_key=True)
    for target in (OLD, NEW):
        await server.post(LORA_PATH, lora(target))
    await server.post(LORA_PATH, lora(NEW, "unload"))
    await until(lambda: not server.leases.held)


async def test_an_adapter_whose_files_were_changed_is_not_put_back(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    model = model_name("style", OLD.identity)
    server.leases.changed = {OLD.path}
    assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200
    state = server.swapper.state
    assert adapters(server) == {model: False}
    assert model not in server.host.models()  # a request would make vLLM read the files
    assert state.last_failure is not None
    assert state.last_failure.phase == "lora"
    assert "it was changed" in state.last_failure.message
    server.leases.changed = set()
    assert (await server.post(LORA_PATH, lora(OLD))).status == 200
    assert adapters(server) == {model: True}


async def test_an_adapter_whose_files_change_while_it_is_loaded_is_taken_off(
    server: Server,
) -> None:
    server.leases.changed = {OLD.path}
    answer = fault(await server.post(LORA_PATH, lora(OLD)))
    assert (answer.error.code, answer.error.phase) == ("integrity", "lora")
    assert server.host.models() == set()
    assert server.leases.held == set()


def held_up(server: Server) -> tuple[threading.Event, threading.Event]:
    """Have verifying an adapter wait; return an event for when it does, and one that lets it go on."""
    begun, go = threading.Event(), threading.Event()
    hold = server.leases

    def slow(identity: Identity, path: str) -> Lease:
        begun.set()
        assert go.wait(5)
        return hold(identity, path)

    server.adapters = Adapters(server.host, slow, server.swapper)
    server.swapper.after_load = server.adapters
    server.api = Api(server.swapper, server.adapters, has_key=True)
    return begun, go


async def test_a_client_that_goes_away_does_not_stop_its_adapter(server: Server) -> None:
    begun, go = held_up(server)
    loading = asyncio.ensure_future(server.post(LORA_PATH, lora(OLD)))
    assert await asyncio.to_thread(begun.wait, 5)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    (goes_on,) = (
        task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "load"
    )
    go.set()
    await asyncio.wait_for(goes_on, 5)
    assert adapters(server) == {model_name("style", OLD.identity): True}
    assert server.leases.held == {OLD.path}


async def test_an_adapter_that_is_being_verified_holds_up_no_swap(server: Server) -> None:
    begun, go = held_up(server)
    loading = asyncio.ensure_future(server.post(LORA_PATH, lora(OLD)))
    assert await asyncio.to_thread(begun.wait, 5)
    try:
        assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200
        server.engine.dropped_adapters = False  # there were none to be dropped
    finally:
        go.set()
    assert (await loading).status == 200


async def test_an_adapter_under_a_false_name_is_not_taken_for_the_loaded_one(
    server: Server,
) -> None:
    await server.post(LORA_PATH, lora(OLD))
    server.leases.error = MixAndMatchError("it is of another version")
    answer = fault(await server.post(LORA_PATH, {**lora(OLD), "version": 9}))
    assert answer.error.code == "conflict"


async def test_adapters_that_nobody_can_look_for_do_not_stop_a_swap(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    server.host.deaf = True
    assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200
    state = server.swapper.state
    assert state.ready
    assert state.last_failure is not None
    assert state.last_failure.phase == "lora"
    assert fault(await server.post(LORA_PATH, lora(NEW))).error.code == "failed"
    assert fault(await server.post(LORA_PATH, lora(NEW))).error.phase == "lora"


@pytest.mark.parametrize(
    ("error", "code"),
    [(IntegrityError("bad bytes"), "integrity"), (MalformedError("no adapter"), "incompatible")],
)
async def test_an_adapter_that_is_not_what_was_signed(
    server: Server, error: Exception, code: str
) -> None:
    server.leases.error = error
    answer = fault(await server.post(LORA_PATH, lora(OLD)))
    assert (answer.error.code, answer.error.phase) == (code, "lora")
    assert server.host.log == []


async def test_an_adapter_that_cannot_be_loaded_leaves_the_old_one(server: Server) -> None:
    await server.post(LORA_PATH, lora(OLD))
    server.host.broken = {model_name("style", NEW.identity)}
    assert fault(await server.post(LORA_PATH, lora(NEW))).error.code == "failed"
    assert adapters(server) == {model_name("style", OLD.identity): True}
    assert server.leases.held == {OLD.path}


async def test_adapters_where_there_can_be_none(server: Server) -> None:
    server.host.why_not = "start it with --enable-lora"
    answer = fault(await server.post(LORA_PATH, lora(OLD)))
    assert answer.error.code == "unsupported"
    assert "--enable-lora" in answer.error.message
    missing = {name: value for name, value in lora(OLD).items() if name != "path"}
    assert fault(await server.post(LORA_PATH, missing)).error.code == "malformed"

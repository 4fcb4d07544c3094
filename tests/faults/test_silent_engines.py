"""Engines that take a request and never answer: what drivers say, and what an agent makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardcast.engine import forms, patience
from shardcast.engine.agent import Agent
from shardcast.engine.board import AgentOptions
from shardcast.engine.decide import Mode, served_by
from shardcast.engine.driver import Engine, Manner, Target, Waits
from shardcast.engine.intents import FileIntents
from shardcast.engine.sglang import SglangEngine
from shardcast.engine.vllm import VllmEngine
from shardcast.errors import EngineUncertainError, EngineUnreachableError
from shardcast.events import EventKind, WorkerEvent
from tests.engines import WAIT_S, PluginServer, SglangServer, make_version, weights_of

Server = PluginServer | SglangServer
Asking = Callable[[Engine, Target], Awaitable[object]]

SOON_S = 0.25
"""How long an answer is waited for that does not come. On a slow machine others come too late as well:
then the same happens once more, and the end is the same."""
SOON = Waits(SOON_S, SOON_S, SOON_S, 0.0)
PATIENT = Waits(WAIT_S, WAIT_S, WAIT_S, WAIT_S)
UPDATE = "/update_weights_from_disk"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(patience, "RETRY_CAP_S", 0.02)


def driver(server: Server, root: Path, waits: Waits, lease_s: float = SOON_S) -> Engine:
    """The driver of an engine, as an agent makes it."""
    manner = Manner("recompute", lease_s, waits)
    if isinstance(server, PluginServer):
        return VllmEngine(server.url, manner=manner)
    return SglangEngine(
        server.url,
        manner=manner,
        intents=FileIntents(root / "state", server.url),
        find=lambda digest: make_version(root / "versions", int(digest, 16)),
    )


# --- what a driver says -----------------------------------------------------------------------

ASKED: dict[str, tuple[str, Asking]] = {
    "stage": (forms.STAGE_PATH, lambda engine, target: engine.stage(target)),
    "activate": (forms.ACTIVATE_PATH, lambda engine, target: engine.activate(target)),
    "tell": (forms.NEWEST_PATH, lambda engine, target: engine.tell("policy", 7, None)),
    "load": (forms.LORA_PATH, lambda engine, target: engine.load_adapter("a", target)),
    "score": ("/v1/completions", lambda engine, target: engine.score([1, 2, 3])),
}


def done(state: forms.EngineState) -> dict[str, bool]:
    """Return what an engine has done of what it was asked for."""
    return {
        "stage": state.staged is not None,
        "activate": state.served is not None,
        "tell": state.newest == 7,
        "load": bool(state.lora),
        "score": False,
    }


@pytest.mark.parametrize("fault", ["silent", "silent after"])
@pytest.mark.parametrize("name", ASKED)
async def test_nobody_knows_what_became_of_a_request_that_is_not_answered(
    tmp_path: Path, name: str, fault: str
) -> None:
    path, ask = ASKED[name]
    server = PluginServer()
    server.http.faults[path] = [fault]
    hasty = driver(
        server, tmp_path, Waits(SOON_S if name == "tell" else WAIT_S, SOON_S, SOON_S, 0.0)
    )
    calm = driver(server, tmp_path, PATIENT)
    with server.http.running():
        with pytest.raises(EngineUncertainError, match=f"{server.url} .*no answer to {path} in"):
            await ask(hasty, make_version(tmp_path / "versions", 1))
        expected = dict.fromkeys(ASKED, False) | {name: fault == "silent after"}
        expected["score"] = False  # it leaves nothing behind
        await asyncio.to_thread(server.http.wait_for, lambda: done(server.state) == expected)
        assert done(await calm.state()) == expected
        assert server.http.asked.count(f"POST {path}") == 1  # told once: it may have had an effect
        for engine in (hasty, calm):
            await engine.close()


@pytest.mark.parametrize("kind", [PluginServer, SglangServer])
async def test_a_state_that_is_not_told_is_an_engine_that_cannot_be_reached(
    tmp_path: Path, kind: type[Server]
) -> None:
    server = kind()
    path = forms.STATE_PATH if kind is PluginServer else "/model_info"
    server.http.faults[path] = ["silent"]
    engine, calm = (driver(server, tmp_path, waits) for waits in (SOON, PATIENT))
    with server.http.running():
        with pytest.raises(EngineUnreachableError, match=f"{server.url} .*no answer to {path} in"):
            await engine.state()
        assert (await calm.state()).served is None
        for one in (engine, calm):
            await one.close()


@pytest.mark.parametrize("fault", ["silent", "silent after"])
@pytest.mark.parametrize(
    "path", ["/pause_generation", UPDATE, "/flush_cache", "/continue_generation"]
)
async def test_sglang_that_says_nothing_is_poisoned_until_a_whole_version_is_loaded(
    tmp_path: Path, path: str, fault: str
) -> None:
    server = SglangServer()
    versions = tmp_path / "versions"
    hasty = driver(server, tmp_path, SOON)
    calm = driver(server, tmp_path, PATIENT, lease_s=WAIT_S)
    with server.http.running():
        await calm.activate(make_version(versions, 1))
        server.http.faults[path] = [fault]
        server.skip_flushes = int(path == "/flush_cache")
        while server.http.faults[path]:  # a call before it may be answered too late as well
            late = (EngineUncertainError, EngineUnreachableError)
            with pytest.raises(late, match=f"{server.url}.* no answer to /"):
                await hasty.activate(make_version(versions, 2))
        state = await calm.state()
        assert (state.poisoned, state.ready, served_by(state)) == (True, False, None)
        await calm.activate(make_version(versions, 2))
        state = await calm.state()
        assert (state.poisoned, state.ready) == (False, True)
        assert served_by(state) == make_version(versions, 2).identity
        assert server.machine.answer() == weights_of(make_version(versions, 2))
        assert server.cached in (None, server.machine.weights)
        for engine in (hasty, calm):
            await engine.close()


# --- what an agent makes of it ----------------------------------------------------------------


@dataclass
class World:
    """Two engines, the agent that lets one of them pause at a time, and what it tells."""

    root: Path
    servers: list[Server]
    events: list[WorkerEvent] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    agent: Agent | None = None
    now: float = 0.0

    def emit(self, event: WorkerEvent) -> None:
        self.events.append(event)
        self.came.set()

    def version(self, number: int) -> Target:
        return make_version(self.root / "versions", number)

    def publish(self, number: int) -> None:
        """A version becomes current here."""
        assert self.agent is not None
        self.agent.update(self.version(number))

    def told(self, kind: EventKind, server: Server) -> list[int | None]:
        """Return the versions that were told of an engine."""
        return [e.version for e in self.events if e.kind is kind and e.engine == server.url]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until events or engines show something."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.came.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await self.came.wait()

    async def asked(self, server: Server, method_and_path: str, times: int = 1) -> None:
        """Wait until an engine was asked for something so many times from now on."""
        before = server.http.asked.count(method_and_path)
        await self.until(lambda: server.http.asked.count(method_and_path) >= before + times)

    async def activated(self, number: int, *servers: Server) -> None:
        """Wait until it was told that engines serve a version, and look whether they do."""
        chosen = servers or tuple(self.servers)
        await self.until(
            lambda: all(number in self.told(EventKind.ACTIVATED, server) for server in chosen)
        )
        for server in chosen:
            assert server.machine.answer() == weights_of(self.version(number))

    def failures(self) -> set[str]:
        return {str(e.error) for e in self.events if e.kind is EventKind.ENGINE_FAILED}


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """Two engines of the kind that a test's parameter says; vLLM where it says nothing."""
    kind = getattr(request, "param", PluginServer)
    made = [kind(), kind()]
    with contextlib.ExitStack() as undo:
        for server in made:
            undo.enter_context(server.http.running())
            undo.callback(server.machine.gate.set)
        yield made


@asynccontextmanager
async def minding(
    root: Path, servers: list[Server], waits: Waits, *, lease_s: float = WAIT_S, frozen: bool = False,
    mode: Mode = Mode.AUTO, adapter: str | None = None,
) -> AsyncIterator[World]:  # fmt: skip
    world = World(root, servers)
    options = AgentOptions(
        poll_s=0.02, watch_s=0.01, lease_s=lease_s, margin_s=waits.margin_s, mode=mode,
        adapter=adapter, max_swapping=1,
    )  # fmt: skip
    engines = [driver(server, root, waits, lease_s) for server in servers]
    clock = (lambda: world.now) if frozen else asyncio.get_running_loop().time
    agent = Agent(engines, root, "policy", world.emit, options, clock=clock, rng=random.Random(1))
    world.agent = agent
    running = asyncio.ensure_future(agent.run())
    try:
        yield world
    finally:
        for server in servers:
            server.machine.gate.set()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("fault", ["silent", "silent after"])
@pytest.mark.parametrize(
    ("path", "waits", "lease_s"),
    [
        (forms.STAGE_PATH, Waits(WAIT_S, SOON_S), WAIT_S),
        (forms.ACTIVATE_PATH, Waits(WAIT_S, margin_s=0.0), SOON_S),
        (forms.NEWEST_PATH, Waits(SOON_S), WAIT_S),
        (forms.STATE_PATH, Waits(SOON_S), WAIT_S),
    ],
)
async def test_whatever_is_not_answered_all_engines_end_on_the_version_and_it_is_told_once(
    tmp_path: Path, servers: list[Server], path: str, waits: Waits, lease_s: float, fault: str
) -> None:
    async with minding(tmp_path, servers, waits, lease_s=lease_s) as world:
        world.publish(1)
        await world.activated(1)
        servers[0].http.faults[path] = [fault]
        world.publish(2)
        await world.activated(2)
        await world.until(lambda: not servers[0].http.faults[path])
        for server in servers:
            await world.asked(server, f"GET {forms.STATE_PATH}", 3)
            assert world.told(EventKind.STAGED, server) == [1, 2]
            assert world.told(EventKind.ACTIVATED, server) == [1, 2]
            assert server.machine.loads == [str(world.version(number).path) for number in (1, 2)]
    for said in world.failures():
        assert "did not answer" in said or "did not activate" in said or "cannot be reached" in said


@pytest.mark.parametrize("servers", [SglangServer], indirect=True)
@pytest.mark.parametrize("fault", ["silent", "silent after"])
@pytest.mark.parametrize("path", ["/pause_generation", UPDATE, "/continue_generation"])
async def test_sglang_that_says_nothing_is_activated_again(
    tmp_path: Path, servers: list[Server], path: str, fault: str
) -> None:
    waits = Waits(WAIT_S, margin_s=0.0)
    async with minding(tmp_path, servers, waits, lease_s=SOON_S) as world:
        world.publish(1)
        await world.activated(1)
        servers[0].http.faults[path] = [fault]
        world.publish(2)
        await world.activated(2)
        for server in servers:
            assert world.told(EventKind.ACTIVATED, server) == [1, 2]
            assert not server.machine.paused
    assert world.failures()
    for said in world.failures():
        assert f"engine {servers[0].url} did not activate version" in said or (
            f"engine {servers[1].url} is not paused for version"
            in said  # nor until the first has it
        )


async def test_an_activation_that_outlasts_its_answer_keeps_the_others_from_pausing(
    tmp_path: Path, servers: list[Server]
) -> None:
    for server in servers:
        server.machine.gate.clear()
    async with minding(tmp_path, servers, Waits(WAIT_S, margin_s=0.0), lease_s=SOON_S) as world:
        world.publish(1)
        await world.until(lambda: any(server.machine.loading.is_set() for server in servers))
        first, second = sorted(servers, key=lambda one: not one.machine.loading.is_set())
        # Its client has given up, and looks at the state instead.
        await world.asked(first, f"GET {forms.STATE_PATH}", 3)
        await world.asked(second, f"GET {forms.STATE_PATH}", 3)
        assert not second.machine.paused
        assert f"POST {forms.ACTIVATE_PATH}" not in second.http.asked
        assert not world.told(EventKind.ACTIVATED, first)
        first.machine.gate.set()
        await world.activated(1, first)
        await world.until(second.machine.loading.is_set)
        second.machine.gate.set()
        await world.activated(1)
        for server in servers:
            assert world.told(EventKind.ACTIVATED, server) == [1]
            assert server.machine.loads == [str(world.version(1).path)]
    assert not world.failures()


async def test_an_engine_that_is_silent_for_good_holds_the_others_up_for_its_lease(
    tmp_path: Path,
) -> None:
    """And where it answers again, it is brought to the version, too."""
    first, second = servers = [PluginServer(), PluginServer()]
    first.http.faults[forms.ACTIVATE_PATH] = ["silent"]
    waits = Waits(SOON_S, margin_s=0.0)
    with first.http.running():
        async with minding(tmp_path, [*servers], waits, lease_s=SOON_S, frozen=True) as world:
            world.publish(1)
            await world.asked(first, f"POST {forms.ACTIVATE_PATH}")
            first.http.faults[forms.STATE_PATH] = ["silent"] * 1000
            with second.http.running():  # until now nobody heard it either
                await world.until(lambda: second.state.staged is not None)
                await world.asked(second, f"GET {forms.STATE_PATH}", 3)
                await world.asked(first, f"GET {forms.STATE_PATH}", 2)
                assert f"POST {forms.ACTIVATE_PATH}" not in second.http.asked
                world.now += SOON_S + 1
                await world.activated(1, second)
                first.http.faults.clear()
                await world.activated(1)
                assert world.told(EventKind.ACTIVATED, first) == [1]
                assert first.machine.loads == [str(world.version(1).path)]


async def test_an_engine_that_hangs_while_it_stages_is_found_by_its_state(
    tmp_path: Path, servers: list[Server]
) -> None:
    """However long hashing may take; when it answers again it is told the newest version at once."""
    first, second = servers
    first.http.faults[forms.STAGE_PATH] = ["silent"]
    async with minding(tmp_path, servers, Waits(SOON_S, stage_s=3600.0, margin_s=0.0)) as world:
        world.publish(1)
        await world.asked(first, f"POST {forms.STAGE_PATH}")
        first.http.faults[forms.STATE_PATH] = ["silent"] * 1000
        await world.activated(1, second)
        await world.until(lambda: any("cannot be reached" in said for said in world.failures()))
        world.publish(2)
        first.http.faults.clear()
        await world.activated(2)
        assert world.told(EventKind.STAGED, first) == [2]


async def test_an_orchestrator_hears_of_what_was_staged_without_an_answer(
    tmp_path: Path, servers: list[Server]
) -> None:
    servers[0].http.faults[forms.STAGE_PATH] = ["silent after"]
    waits = Waits(WAIT_S, SOON_S)
    async with minding(tmp_path, servers, waits, mode=Mode.MANUAL) as world:
        world.publish(1)
        await world.until(lambda: all(world.told(EventKind.STAGED, one) for one in servers))
        await world.asked(servers[0], f"GET {forms.STATE_PATH}", 3)
        assert world.told(EventKind.STAGED, servers[0]) == [1]
        assert servers[0].http.asked.count(f"POST {forms.STAGE_PATH}") == 1


@pytest.mark.parametrize("fault", ["silent", "silent after"])
async def test_an_adapter_that_was_loaded_without_an_answer_is_told_once(
    tmp_path: Path, servers: list[Server], fault: str
) -> None:
    servers[0].http.faults[forms.LORA_PATH] = [fault]
    waits = Waits(WAIT_S, margin_s=0.0)
    async with minding(tmp_path, servers, waits, lease_s=SOON_S, adapter="math") as world:
        world.publish(1)
        await world.until(lambda: all(world.told(EventKind.ACTIVATED, one) for one in servers))
        await world.asked(servers[0], f"GET {forms.STATE_PATH}", 3)
        assert world.told(EventKind.ACTIVATED, servers[0]) == [1]
        assert isinstance(servers[0], PluginServer)
        assert [one.version for one in servers[0].state.lora] == [1]
    models = {e.model for e in world.events if e.kind is EventKind.ACTIVATED}
    assert models == {f"math-{world.version(1).digest}"}

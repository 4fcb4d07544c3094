"""One suite for every engine driver; here those that need no torch, over fakes that can break.

The torch module and a real vLLM pass the same suite in tests/engine.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from shardcast.config import NetConfig
from shardcast.engine.decide import served_by
from shardcast.engine.driver import Engine, Manner, Target
from shardcast.engine.forms import Identity, label_of
from shardcast.engine.intents import FileIntents, MemoryIntents
from shardcast.engine.sglang import SglangEngine
from shardcast.engine.vllm import VllmEngine
from shardcast.errors import (
    DiskError,
    EngineError,
    EngineKeyError,
    EngineRefusedError,
    EngineUncertainError,
    EngineUnreachableError,
    EngineUnsupportedError,
    UsageError,
)
from tests.contract.engine_suite import EngineContract, Harness
from tests.engines import (
    WAIT_S,
    FakeEngine,
    JsonServer,
    Machine,
    PluginServer,
    SglangServer,
    make_version,
    weights_of,
)
from tests.unit.safetensors import safetensors

QUICK = NetConfig(connect_timeout_s=2.0)


class FakeHarness:
    """An engine whose weights are a text."""

    def __init__(
        self, root: Path, engine: Engine, machine: Machine, restart: Callable[[], None]
    ) -> None:
        self.engine = engine
        self._root = root
        self._machine = machine
        self._restart = restart

    def version(self, number: int) -> Target:
        return make_version(self._root, number)

    async def loaded(self) -> int | None:
        answered = self._machine.answer()
        if answered is None:
            return None
        known = {weights_of(self.version(number)): number for number in range(1, 10)}
        assert answered in known
        return known[answered]

    def break_next_loads(self, count: int) -> None:
        self._machine.fail_loads = count

    async def restart(self) -> None:
        self._restart()

    def adapter(self, number: int) -> Target | None:
        return make_version(self._root / "adapters", number)


class TestFake(EngineContract):
    """The fake that the agent's tests use."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        engine = FakeEngine()
        return FakeHarness(tmp_path, engine, engine.machine, engine.restart)


class TestVllm(EngineContract):
    """Our routes, over HTTP."""

    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        server = PluginServer(token="secret")
        engine = VllmEngine(server.url, "secret", config=QUICK)
        with server.http.running():
            yield FakeHarness(tmp_path, engine, server.machine, server.restart)
            await engine.close()


class TestSglang(EngineContract):
    """SGLang's own routes, over HTTP."""

    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        server = SglangServer(token="secret")
        engine = sglang(server, tmp_path, token="secret")
        with server.http.running():
            yield FakeHarness(tmp_path, engine, server.machine, server.restart)
            await engine.close()


def sglang(
    server: SglangServer, root: Path, *, token: str | None = None, lease_s: float = 20.0
) -> SglangEngine:
    """The driver, as an agent makes it; versions are found below ``root``."""

    def find(digest: str) -> Target | None:
        return make_version(root, int(digest, 16))

    return SglangEngine(
        server.url,
        token,
        Manner("recompute", lease_s),
        intents=FileIntents(root / "state", server.url),
        find=find,
        config=QUICK,
    )


# --- over HTTP --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_wrong_key_names_the_engine_and_the_option(
    kind: Callable[..., Engine],
) -> None:
    server = PluginServer(token="right") if kind is VllmEngine else SglangServer(token="right")
    with server.http.running():
        for token in (None, "wrong-secret"):
            engine = kind(server.url, token, config=QUICK)
            with pytest.raises(EngineKeyError, match="--engine-token-file") as refused:
                await engine.state()
            assert server.url in str(refused.value)
            assert "wrong-secret" not in str(refused.value)
            await engine.close()


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_key_that_is_rotated_is_read_again(
    kind: Callable[..., Engine], tmp_path: Path
) -> None:
    server = (
        PluginServer(token="secret-1") if kind is VllmEngine else SglangServer(token="secret-1")
    )
    keys, reads = ["secret-1"], [0]

    def key() -> str:
        reads[0] += 1
        if keys[0] == "gone":
            raise UsageError("cannot read token file /etc/key")
        return keys[0]

    with server.http.running():
        engine = kind(server.url, key, config=QUICK)
        await engine.state()
        assert reads == [1]
        server.http.token = keys[0] = "secret-2"
        await engine.state()
        assert reads == [2]
        server.http.token = keys[0] = "secret-3"
        target = make_version(tmp_path / "versions", 1)
        await engine.activate(target)  # a POST: what was refused is posted again
        assert served_by(await engine.state()) == target.identity
        assert server.machine.loads == [str(target.path)]
        assert reads == [3]
        server.http.token = "secret-4"
        asked = len(server.http.asked)
        with pytest.raises(EngineKeyError, match="which is read again") as refused:
            await engine.state()
        assert len(server.http.asked) <= asked + 1  # the same key is not shown twice
        keys[0] = "gone"
        with pytest.raises(EngineKeyError, match="cannot read token file /etc/key") as unread:
            await engine.state()
        for error in (refused, unread):
            assert "secret" not in str(error.value)
        keys[0] = "secret-4"
        await engine.state()
        await engine.close()


async def test_a_server_without_our_routes_is_told_how_to_get_them() -> None:
    server = SglangServer()
    with server.http.running():
        engine = VllmEngine(server.url, config=QUICK)
        with pytest.raises(EngineUnsupportedError) as refused:
            await engine.state()
        await engine.close()
    for word in (server.url, "VLLM_PLUGINS=shardcast,shardcast_http", "--weight-transfer-config"):
        assert word in str(refused.value)


async def test_a_server_that_speaks_something_else_is_no_engine() -> None:
    server = JsonServer(lambda method, path, body: (200, {"engine": 7}))
    with server.running():
        engine = VllmEngine(server.url, config=QUICK)
        with pytest.raises(EngineUnsupportedError, match="same release"):
            await engine.state()
        await engine.close()


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_an_engine_that_is_not_there_is_unreachable(kind: Callable[..., Engine]) -> None:
    server = PluginServer()
    with server.http.running():
        url = server.url
    engine = kind(url, config=QUICK)
    with pytest.raises(EngineUnreachableError, match=url):
        await engine.state()
    await engine.close()


@pytest.mark.parametrize("fault", ["reset", "reset after", 502])
async def test_an_activation_that_is_not_answered_is_uncertain(
    tmp_path: Path, fault: int | str
) -> None:
    server = PluginServer()
    server.http.faults["/v1/shardcast/activate"] = [fault]
    target = make_version(tmp_path, 1)
    with server.http.running():
        engine = VllmEngine(server.url, config=QUICK)
        with pytest.raises(EngineUncertainError, match=server.url):
            await engine.activate(target)
        served = served_by(await engine.state())
        assert served == (target.identity if fault == "reset after" else None)
        await engine.close()


async def test_a_reason_of_the_engine_s_comes_through(tmp_path: Path) -> None:
    server = PluginServer()
    server.fault = ("stage", "incompatible", "lm_head.weight is [64, 32] there and [65, 32] here")
    with server.http.running():
        engine = VllmEngine(server.url, config=QUICK)
        with pytest.raises(EngineRefusedError, match=r"lm_head\.weight") as refused:
            await engine.stage(make_version(tmp_path, 1))
        assert (refused.value.reason, refused.value.phase) == ("incompatible", "check")
        await engine.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"data": []},
        {"data": [{"id": "m"}], "choices": []},
        {"data": [{"id": "m"}], "choices": [{"logprobs": None, "prompt_logprobs": None}]},
        {"data": [{"id": "m"}], "choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1}}]}]},
        {
            "data": [{"id": "m"}],
            "meta_info": {"input_token_logprobs": [[None, 1], [-1, 9], [-1, 3]]},
        },
        {"data": [{"id": "m"}], "meta_info": {"input_token_logprobs": [[None, 1], [-1, 2]]}},
    ],
)
@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_an_engine_that_tells_no_logprobs_cannot_be_checked(
    kind: Callable[..., Engine], answer: dict[str, object]
) -> None:
    server = JsonServer(lambda method, path, body: (200, answer))
    with server.running():
        engine = kind(server.url, config=QUICK)
        with pytest.raises(EngineRefusedError, match="canaries cannot be checked"):
            await engine.score([1, 2, 3])
        await engine.close()


# --- SGLang's traps ---------------------------------------------------------------------------


async def test_a_cache_that_was_not_flushed_is_flushed_before_it_goes_on(tmp_path: Path) -> None:
    """``success: false`` with the old label: the weights are loaded, the prefixes are old."""
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        await engine.activate(make_version(tmp_path, 1))
        server.skip_flushes = 2
        await engine.activate(make_version(tmp_path, 2))
        assert served_by(await engine.state()) == make_version(tmp_path, 2).identity
        assert server.cached is None
        assert server.machine.answer() == "weights of policy 2"
        await engine.close()


async def test_files_that_it_cannot_read_end_it_and_the_next_version_is_taken(
    tmp_path: Path,
) -> None:
    """Its way back reads the same files again; a supervisor starts it, from where it was booted."""
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        await engine.activate(make_version(tmp_path, 1))
        server.machine.fail_loads = 2
        with pytest.raises(EngineUncertainError, match="nobody knows what it has loaded"):
            await engine.activate(make_version(tmp_path, 2))
        assert (server.deaths, server.label, server.machine.paused) == (1, "default", False)
        state = await engine.state()
        assert (state.poisoned, state.ready, served_by(state)) == (True, False, None)
        await engine.activate(make_version(tmp_path, 3))
        assert served_by(await engine.state()) == make_version(tmp_path, 3).identity
        assert server.machine.answer() == "weights of policy 3"
        await engine.close()


def shaped(target: Target, tensors: dict[str, list[int]], *, tied: bool = False) -> Target:
    """The same version, with tensors of these shapes."""
    files = {name: ("U8", shape, bytes(math.prod(shape))) for name, shape in tensors.items()}
    (target.path / "model.safetensors").write_bytes(safetensors(files))
    (target.path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return target


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a": [4, 2]}, "it lacks b"),
        ({"a": [4, 2], "b": [2]}, r"b is \[3\] there and \[2\] here"),
        ({"a": [2, 4], "b": [3]}, r"a is \[4, 2\] there and \[2, 4\] here"),
        ({"a": [4, 2], "b": [3], "c": [1]}, "c is not in the model"),
        ({}, "it lacks a; it lacks b"),
        ({f"new{n}": [1] for n in range(9)}, "it lacks a; it lacks b; new0 .* and 8 more"),
    ],
)
async def test_what_sglang_would_mix_with_the_old_weights_is_refused(
    tmp_path: Path, tensors: dict[str, list[int]], why: str
) -> None:
    """SGLang loads what is there and has room, and says that it succeeded."""
    server = SglangServer()
    fits = {"a": [4, 2], "b": [3]}
    server.boot = server.path = str(shaped(make_version(tmp_path / "boot", 7), fits).path)
    first = shaped(make_version(tmp_path, 1), fits)
    wrong = shaped(make_version(tmp_path, 2), tensors)
    with server.http.running():
        engine = sglang(server, tmp_path)
        for before in (None, first):
            if before is not None:
                await engine.activate(before)
            for act in (engine.stage, engine.activate):
                with pytest.raises(EngineRefusedError, match=why) as refused:
                    await act(wrong)
                assert (refused.value.phase, refused.value.reason) == ("check", "incompatible")
        state = await engine.state()
        assert served_by(state) == first.identity
        assert state.staged is None
        assert "POST /pause_generation" not in server.http.asked[-4:]
        assert server.machine.loads == [str(first.path)]
        await engine.close()


async def test_a_tied_output_embedding_may_be_left_out(tmp_path: Path) -> None:
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        await engine.activate(shaped(make_version(tmp_path, 1), {"a": [1], "lm_head.weight": [2]}))
        untied = shaped(make_version(tmp_path, 2), {"a": [1]})
        with pytest.raises(EngineRefusedError, match=r"it lacks lm_head\.weight"):
            await engine.activate(untied)
        await engine.activate(shaped(make_version(tmp_path, 3), {"a": [1]}, tied=True))
        assert server.machine.answer() == "weights of policy 3"
        await engine.close()


async def test_a_cache_that_cannot_be_flushed_is_no_activation(tmp_path: Path) -> None:
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        await engine.activate(make_version(tmp_path, 1))
        server.skip_flushes = 1 + 3  # the update's own, and every further try
        with pytest.raises(EngineRefusedError, match="not flushed"):
            await engine.activate(make_version(tmp_path, 2))
        # Its way back flushed at last: the old weights, with no prefix of the new ones.
        assert served_by(await engine.state()) == make_version(tmp_path, 1).identity
        assert (server.cached, server.machine.answer()) == (None, "weights of policy 1")
        await engine.close()


async def test_an_agent_killed_between_pause_and_continue_is_recovered_from(
    tmp_path: Path,
) -> None:
    """The next agent finds the intent, knows that nobody knows, and loads a whole version."""
    server = SglangServer()
    with server.http.running():
        first = sglang(server, tmp_path)
        await first.activate(make_version(tmp_path, 1))
        server.machine.gate.clear()
        server.machine.fail_loads = 1  # and what it was doing breaks, with nobody to hear of it
        doomed = asyncio.ensure_future(first.activate(make_version(tmp_path, 2)))
        assert await asyncio.to_thread(server.machine.loading.wait, WAIT_S)
        second = sglang(server, tmp_path)  # the first one is as good as gone
        state = await second.state()
        assert (state.poisoned, state.ready, served_by(state)) == (True, False, None)
        server.machine.gate.set()
        with pytest.raises(EngineError):
            await doomed
        FileIntents(tmp_path / "state", server.url).begin(make_version(tmp_path, 2).identity)
        await second.activate(make_version(tmp_path, 2))
        state = await second.state()
        assert served_by(state) == make_version(tmp_path, 2).identity
        assert server.machine.answer() == "weights of policy 2"
        for engine in (first, second):
            await engine.close()


async def test_what_sglang_serves_outlives_the_agent(tmp_path: Path) -> None:
    server = SglangServer()
    with server.http.running():
        for number in (1, 1):
            engine = sglang(server, tmp_path)
            await engine.activate(make_version(tmp_path, number))
            assert server.label == label_of(make_version(tmp_path, 1).identity)
            await engine.close()
    assert server.machine.loads == [str(make_version(tmp_path, 1).path)]


async def test_a_cancelled_activation_is_ended_first(tmp_path: Path) -> None:
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        server.machine.gate.clear()
        running = asyncio.ensure_future(engine.activate(make_version(tmp_path, 1)))
        assert await asyncio.to_thread(server.machine.loading.wait, WAIT_S)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        server.machine.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert served_by(await engine.state()) == make_version(tmp_path, 1).identity
        assert server.machine.answer() == "weights of policy 1"
        await engine.close()


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/continue_generation"])
async def test_what_cannot_be_sent_after_the_pause_leaves_it_paused_and_says_so(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the activation was begun: that is what an engine that cannot be reached would mean."""
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        await engine.activate(make_version(tmp_path, 1))
        post = engine._client.post

        async def refused(asked: str, *more: Any, **members: Any) -> Any:
            if asked == path:
                raise EngineUnreachableError("connection refused", source=engine.name)
            return await post(asked, *more, **members)

        with monkeypatch.context() as broken:
            broken.setattr(engine._client, "post", refused)
            with pytest.raises(EngineUncertainError, match="connection refused"):
                await engine.activate(make_version(tmp_path, 2))
        state = await engine.state()
        assert (state.poisoned, state.ready, server.machine.paused) == (True, False, True)
        await engine.activate(make_version(tmp_path, 2))
        assert server.machine.answer() == "weights of policy 2"
        await engine.close()


async def test_a_pause_that_is_refused_leaves_it_as_it_was(tmp_path: Path) -> None:
    server = SglangServer()
    with server.http.running():
        engine = sglang(server, tmp_path)
        await engine.activate(make_version(tmp_path, 1))
        server.http.faults["/pause_generation"] = [400]
        with pytest.raises(EngineRefusedError) as refused:
            await engine.activate(make_version(tmp_path, 2))
        assert refused.value.phase == "pause"
        assert served_by(await engine.state()) == make_version(tmp_path, 1).identity
        server.http.faults["/pause_generation"] = ["reset"]
        with pytest.raises(EngineUncertainError):
            await engine.activate(make_version(tmp_path, 2))
        assert (await engine.state()).poisoned  # perhaps it is paused: only an activation helps
        await engine.activate(make_version(tmp_path, 2))
        assert server.machine.answer() == "weights of policy 2"
        await engine.close()


async def test_bytes_that_are_wrong_never_reach_sglang(tmp_path: Path) -> None:
    async def check(target: Target) -> None:
        raise OSError(f"shard 3 of version {target.version} is not what was published")

    server = SglangServer()
    with server.http.running():
        engine = SglangEngine(server.url, check=check, intents=MemoryIntents(), config=QUICK)
        for act in (engine.stage, engine.activate):
            with pytest.raises(EngineRefusedError, match="shard 3") as refused:
                await act(make_version(tmp_path, 1))
            assert refused.value.reason == "integrity"
        assert not server.machine.loads
        assert not server.machine.paused
        await engine.close()


@pytest.mark.parametrize("requests", ["keep", "wait"])
def test_sglang_cannot_keep_or_wait(requests: str) -> None:
    with pytest.raises(UsageError, match=f"--requests {requests}"):
        SglangEngine("http://127.0.0.1:1", manner=Manner(requests))  # type: ignore[arg-type]


async def test_without_a_note_on_disk_nothing_is_begun(tmp_path: Path) -> None:
    """Else a kill in the middle would go unnoticed."""

    class Full(MemoryIntents):
        def begin(self, identity: Identity) -> None:
            raise DiskError("no space left on device")

    server = SglangServer()
    with server.http.running():
        engine = SglangEngine(server.url, intents=Full(), config=QUICK)
        with pytest.raises(EngineRefusedError, match="no space left") as refused:
            await engine.activate(make_version(tmp_path, 1))
        assert refused.value.phase == "pause"
        assert "POST /pause_generation" not in server.http.asked
        state = await engine.state()
        assert (state.paused, state.poisoned, state.activating) == (False, False, None)
        await engine.close()

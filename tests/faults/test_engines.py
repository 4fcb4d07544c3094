"""`follow --engine` as a process of its own, with engines that go on when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loadtest.processes import Event, Process, Processes
from loadtest.topology import shardcast
from shardcast.engine import forms
from shardcast.engine.decide import served_by
from shardcast.engine.driver import Target
from shardcast.engine.vllm import VllmEngine
from shardcast.keys import public_pem
from shardcast.store.run import RunStore
from tests.engines import PluginServer, SglangServer, logprobs
from tests.fakes import Close, FakeRun, Request, RunServer
from tests.tree import tree
from tests.unit.safetensors import safetensors
from trainer_adapter.checkpoint import Checkpoint

pytestmark = [pytest.mark.e2e]

WAIT_S = 60
SECRET = "a-very-secret-engine-key"
Server = PluginServer | SglangServer


@dataclass
class Place:
    """A host: its worker's directory, its engines, and the relay that it reads from."""

    root: Path
    run: FakeRun
    source: RunServer
    processes: Processes
    servers: list[Server] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.root / "out"

    def publish(self, number: int) -> None:
        """The run's next version: its weights say which it is."""
        assert self.run.publish(files_of(number)).version == number

    def follow(self, *options: str, kind: str = "vllm", name: str = "follow") -> Process:
        pem, token = self.root / "run.pub", self.root / "token"
        pem.write_bytes(public_pem(self.run.keys[0]))
        token.write_text(f"{SECRET}\n")
        urls = [part for server in self.servers for part in ("--engine-url", server.url)]
        argv = shardcast(
            "follow", self.run.name, "--from", self.source.url, "--out", self.out, "--pubkey", pem,
            "--durability", "none", "--keep", "1", "--json", "--engine", kind, *urls,
            "--engine-token-file", token, *options,
        )  # fmt: skip
        return self.processes.start(argv, name=name)


def files_of(number: int) -> dict[str, bytes]:
    """A version whose ``weights`` are what a fake engine loads."""
    noise = random.Random(number).randbytes(300_000)
    return {
        "weights": weights(number).encode(),
        "config.json": b"{}",
        "model.safetensors": safetensors({"w": ("U8", [len(noise)], noise)}),
    }


def weights(number: int) -> str:
    return f"weights {number}"


@contextmanager
def place(root: Path, *servers: Server) -> Iterator[Place]:
    run = FakeRun()
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(RunServer(run))
        for server in servers:
            server.http.token = SECRET
            stack.enter_context(server.http.running())
        for server in servers:
            stack.callback(server.machine.gate.set)
        processes = stack.enter_context(Processes(root / "logs"))
        made = Place(root, run, source, processes, list(servers))
        yield made
        for process in root.glob("logs/*"):
            assert SECRET not in process.read_text(errors="replace")


def activated(process: Process, version: int, *servers: Server) -> list[Event]:
    """Wait until the agent has told that each engine serves a version."""
    return [
        process.wait_event(
            "activated",
            timeout=WAIT_S,
            where=lambda e, s=server: (e["version"], e["engine"]) == (version, s.url),  # type: ignore[misc]
        )
        for server in servers
    ]


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until something that another process does is so."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_two_engines_one_download_and_what_it_tells(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer(), PluginServer()) as here:
        here.publish(1)
        follow = here.follow("--metrics", "127.0.0.1:0", "--max-lag", "2")
        activated(follow, 1, *here.servers)
        here.publish(2)
        for event, server in zip(activated(follow, 2, *here.servers), here.servers, strict=True):
            assert event["run"] == "policy"
            assert event["manifest"] == here.run.head.versions[0].manifest  # type: ignore[union-attr]
            assert event["pause_ms"] == 1.0
            assert isinstance(event["t"], int)
            assert server.machine.answer() == weights(2)
        for digest, count in here.source.sent.items():
            assert count == len(here.run.blobs[digest]), "fetched twice"
        states = [server.state for server in here.servers if isinstance(server, PluginServer)]
        assert [(state.newest, state.max_lag, state.lag) for state in states] == [(2, 2, 0)] * 2
        url = follow.wait_event("metrics", timeout=WAIT_S)["url"]
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            text = answer.read().decode()
        for server in here.servers:
            assert f'shardcast_engine_served_version{{engine="{server.url}"}} 2.0' in text
        assert "shardcast_agent_newest_version 2.0" in text
        order = [e["event"] for e in follow.events() if e.get("version") == 2]
        assert order.index("committed") < order.index("staged") < order.index("activated")
        follow.terminate()
        assert follow.wait(timeout=WAIT_S) == 0


def test_what_engines_serve_stays_on_the_disk(tmp_path: Path) -> None:
    slow = PluginServer()
    with place(tmp_path, slow, PluginServer()) as here:
        here.publish(1)
        follow = here.follow()
        activated(follow, 1, *here.servers)
        slow.http.faults[forms.STAGE_PATH] = [503] * 1000
        for number in (2, 3, 4):
            here.publish(number)
            activated(follow, number, here.servers[1])
        store = RunStore(here.out, "policy")
        # 3 was served while 4 was committed; what is over goes at the next commit.
        eventually(lambda: store.committed() == [4, 3, 1], "version 2 is over, 1 is still served")
        slow.http.faults.clear()
        activated(follow, 4, slow)
        for number in (5, 6):
            here.publish(number)
            activated(follow, number, *here.servers)
        eventually(lambda: store.committed() == [6, 5], "nobody needs version 1 any more")
        store.close()


def test_an_agent_that_starts_again_knows_what_is_served(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        first = here.follow()
        activated(first, 1, server)
        first.kill()
        first.wait(timeout=WAIT_S)
        second = here.follow(name="second")
        here.publish(2)
        activated(second, 2, server)
        assert [event["version"] for event in second.events("activated")] == [2]
        assert server.machine.loads == [str(here.out / f"versions/00000{n}") for n in (1, 2)]


def pulled(here: Place) -> Path:
    """Get version 1, without any engine; return its directory."""
    here.publish(1)
    pem = here.root / "run.pub"
    pem.write_bytes(public_pem(here.run.keys[0]))
    pull = here.processes.start(
        shardcast(
            "pull", here.run.name, "--from", here.source.url, "--out", here.out, "--pubkey", pem
        ),
        name="pull",
    )
    assert pull.wait(timeout=WAIT_S) == 0
    return here.out / "versions" / "000001"


def test_what_was_current_before_is_brought_to_engines_while_no_source_answers(
    tmp_path: Path,
) -> None:
    with place(tmp_path, PluginServer()) as here:
        pulled(here)
        here.source.head_fault = lambda request: [Close()]
        activated(here.follow(), 1, *here.servers)
        assert here.servers[0].machine.answer() == weights(1)


def test_what_was_current_before_and_is_damaged_is_brought_to_engines_once_it_is_whole(
    tmp_path: Path,
) -> None:
    with place(tmp_path, PluginServer()) as here:
        os.truncate(pulled(here) / "model.safetensors", 10)
        asked: list[Request] = []

        def close(request: Request, data: bytes) -> list[Close]:
            asked.append(request)
            return [Close()]

        here.source.fault = close
        follow = here.follow()
        eventually(lambda: len(asked) >= 4, "what is missing is asked for again and again")
        # At the start, and when it was begun to be fetched.
        assert len(follow.events("damaged")) <= 2
        here.source.fault = lambda request, data: None
        activated(follow, 1, *here.servers)


def test_killed_while_an_engine_loads(tmp_path: Path) -> None:
    """The activation is the engine's: it ends, and the next agent finds it done."""
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        first = here.follow()
        activated(first, 1, server)
        server.machine.gate.clear()
        here.publish(2)
        assert server.machine.loading.wait(WAIT_S)
        first.kill()
        first.wait(timeout=WAIT_S)
        second = here.follow(name="second")
        time_of_start = len(server.http.asked)
        server.http.wait_for(lambda: len(server.http.asked) > time_of_start)
        server.machine.gate.set()
        here.publish(3)
        activated(second, 3, server)
        assert server.machine.answer() == weights(3)
        assert not server.machine.half


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Each time an engine is asked for something, or the next time, the agent dies."""
    rng = random.Random(seed)
    with place(tmp_path, PluginServer(), PluginServer()) as here:
        for number in range(1, 4):
            here.publish(number)
            follow = here.follow("--max-swapping", "2", name=f"doomed{number}")
            server = rng.choice(here.servers)
            wanted = len(server.http.asked) + rng.randrange(1, 8)
            with server.http.changed:
                server.http.changed.wait_for(lambda: len(server.http.asked) >= wanted, timeout=4)  # noqa: B023
            follow.kill()
            follow.wait(timeout=WAIT_S)
            for one in here.servers:  # whatever it is doing ends by itself, one way or the other
                eventually(lambda: not one.machine.paused, "an engine stays paused")  # noqa: B023
                assert one.machine.answer() in (None, *(weights(n) for n in range(1, number + 1)))
        last = here.follow(name="last")
        here.publish(4)
        activated(last, 4, *here.servers)
        for one in here.servers:
            assert one.machine.answer() == weights(4)


def test_killed_between_the_calls_that_sglang_needs(tmp_path: Path) -> None:
    """SGLang stays paused, not ready; the next agent loads a whole version and goes on."""
    server = SglangServer()
    with place(tmp_path, server) as here:
        here.publish(1)
        first = here.follow(kind="sglang")
        activated(first, 1, server)
        server.machine.gate.clear()
        server.machine.fail_loads = 1
        here.publish(2)
        assert server.machine.loading.wait(WAIT_S)
        first.kill()
        first.wait(timeout=WAIT_S)
        server.machine.gate.set()
        # Its way back reads the new version once more, under the old one's label.
        eventually(lambda: server.machine.weights == weights(2), "the load does not end")
        assert server.machine.paused
        assert server.label.startswith("policy/1/")
        second = here.follow(kind="sglang", name="second")
        activated(second, 2, server)
        assert server.machine.answer() == weights(2)


def test_answers_that_get_lost(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        faults = server.http.faults
        faults[forms.STATE_PATH] = [502, "reset"]
        faults[forms.STAGE_PATH] = ["reset after", 500]
        faults[forms.ACTIVATE_PATH] = ["reset", 502, "reset after"]
        follow = here.follow()
        activated(follow, 1, server)
        assert server.machine.answer() == weights(1)
        assert len(follow.events("activated")) == 1
        assert follow.events("engine_failed")
        assert len(server.machine.loads) == 1


def test_a_version_that_is_withdrawn_is_left_and_hold_holds(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        follow = here.follow()
        activated(follow, 1, server)
        here.publish(2)
        activated(follow, 2, server)
        here.run.withdraw(2)
        eventually(lambda: server.machine.weights == weights(1), "it stays on a withdrawn version")
        here.run.amend(hold=True)
        here.publish(3)
        here.run.amend(hold=True)
        follow.wait_event("held", timeout=WAIT_S)
        assert server.machine.answer() == weights(1)
        here.run.amend(hold=False)
        activated(follow, 3, server)


def test_the_orchestrator_activates(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        follow = here.follow("--activate", "manual")
        staged = follow.wait_event("staged", timeout=WAIT_S)
        assert server.machine.loads == []

        async def orchestrate() -> None:
            engine = VllmEngine(server.url, SECRET)
            path = Path(staged["path"])
            await engine.activate(Target("policy", 1, staged["manifest"], path))
            assert served_by(await engine.state()) is not None
            await engine.close()

        asyncio.run(orchestrate())
        (event,) = activated(follow, 1, server)
        assert event["pause_ms"] == 1.0


def adapter_files(number: int) -> dict[str, bytes]:
    """A version as PEFT saves an adapter."""
    noise = random.Random(number).randbytes(3000)
    return {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": safetensors({"w": ("U8", [len(noise)], noise)}),
    }


@pytest.mark.parametrize(
    ("options", "name"), [(["--lora", "math"], "math"), ([], "policy")], ids=["named", "by the run"]
)
def test_adapters(tmp_path: Path, options: list[str], name: str) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.run.publish(adapter_files(1))
        follow = here.follow(*options)
        (event,) = activated(follow, 1, server)
        assert event["model"] == f"{name}-{event['manifest']}"
        here.run.publish(adapter_files(2))
        activated(follow, 2, server)
        assert isinstance(server, PluginServer)
        eventually(lambda: [one.version for one in server.state.lora] == [2], "both are loaded")
        assert server.machine.loads == []
        assert server.state.newest is None  # that is for whoever minds the base model


def test_a_whole_model_is_no_adapter(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        follow = here.follow("--lora", "math")
        failed = follow.wait_event("engine_failed", timeout=WAIT_S)
        assert "version 1 of run policy is no LoRA adapter" in failed["message"]
        assert "--lora math" in failed["message"]
        here.run.publish(adapter_files(2))
        activated(follow, 2, server)
        assert len(follow.events("engine_failed")) == 1
        assert not [one for one in server.http.asked if forms.STAGE_PATH in one]


def test_a_version_that_is_damaged_under_the_follower_is_repaired_and_served(
    tmp_path: Path,
) -> None:
    """Committed, then a bit flips on the disk, then the engine looks."""
    server = PluginServer()
    damaged: list[tuple[Path, int]] = []

    def verify(target: Target) -> None:
        path = target.path / "model.safetensors"
        if not damaged:
            times = path.stat()
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            damaged.append((path, times.st_ino))
        with Checkpoint(
            target.path, run=target.run, version=target.version, digest=target.digest
        ) as checkpoint:
            checkpoint.verify()

    server.verify = verify
    with tree(tmp_path / "tree") as made, server.http.running():
        origin = made.origin()
        relay = made.relay("relay", parents=[origin.url])
        checkpoint = tmp_path / "step"
        checkpoint.mkdir()
        for name, data in files_of(1).items():
            (checkpoint / name).write_bytes(data)
        made.publish(checkpoint)
        options = ["--engine", "vllm", "--engine-url", server.url]
        worker = made.follow("w", *options, sources=[relay.url])
        activated(worker.process, 1, server)
        order = [event["event"] for event in worker.process.events() if event.get("version") == 1]
        told = [kind for kind in order if kind in ORDER]
        assert told == list(ORDER)
        (failed,) = worker.process.events("engine_failed")
        assert "is not what was published" in failed["message"]
        (repaired,) = worker.process.events("repaired")
        assert repaired["path"] == str(damaged[0][0].parent)
        assert 0 < repaired["bytes_fetched"] < 100_000  # a shard of it
        assert server.machine.answer() == weights(1)
        assert damaged[0][0].read_bytes() == files_of(1)["model.safetensors"]
        assert damaged[0][0].stat().st_ino != damaged[0][1]
        verifying = made.processes.start(shardcast("verify", worker.out), name="verify")
        assert verifying.wait(timeout=WAIT_S) == 0
        made.pull(worker.out, sources=[relay.url])  # beside the follower


ORDER = ("committed", "engine_failed", "damaged", "repaired", "staged", "activated")


@pytest.mark.parametrize(
    ("kind", "token", "code", "said"),
    [
        ("vllm", "another", 2, "--engine-token-file"),
        ("vllm", None, 15, "VLLM_PLUGINS=shardcast,shardcast_http"),
        ("sglang", "another", 2, "--engine-token-file"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said_before_anything_is_fetched(
    tmp_path: Path, kind: str, token: str | None, code: int, said: str
) -> None:
    server: Server = PluginServer() if kind == "vllm" and token else SglangServer()
    with place(tmp_path, server) as here:
        server.http.token = token
        here.publish(1)
        follow = here.follow(kind=kind)
        assert follow.wait(timeout=WAIT_S) == code
        (error,) = follow.events("error")
        assert server.url in error["message"]
        assert said in error["message"]
        assert not here.source.blob_requests


def test_a_key_that_is_rotated_needs_no_other_start(tmp_path: Path) -> None:
    with place(tmp_path, PluginServer()) as here:
        (server,) = here.servers
        here.publish(1)
        follow = here.follow()
        activated(follow, 1, server)
        server.http.token = f"{SECRET}-the-next"
        told = follow.wait_event("engine_failed", timeout=WAIT_S)
        assert "does not take the key" in told["message"]
        (here.root / "token").write_text(f"{server.http.token}\n")
        here.publish(2)
        activated(follow, 2, server)


@pytest.mark.parametrize("wrong", ["metrics", "key"])
def test_what_ends_it_at_the_start_is_all_that_it_says(tmp_path: Path, wrong: str) -> None:
    """Nothing of Python's: no coroutine that was never awaited."""
    with place(tmp_path, PluginServer()) as here, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if wrong == "key":
            here.servers[0].http.token = "another"
        metrics = ("--metrics", f"127.0.0.1:{port}") if wrong == "metrics" else ()
        follow = here.follow("--serve", "127.0.0.1:0", *metrics)
        assert follow.wait(timeout=WAIT_S) == 2
        (error,) = follow.events("error")
        assert ("--metrics" if wrong == "metrics" else "--engine-token-file") in error["message"]
        assert follow.stderr_tail() == f"error: {error['message']}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine-url", "http://127.0.0.1:1"], "go with --engine"),
        (["--engine", "vllm"], "--engine-url"),
        (["--engine", "vllm", *["--engine-url", "http://a:1/"] * 2], "given twice"),
        (["--engine", "vllm", "--engine-url", "ftp://a"], "http"),
        (["--engine", "vllm", "--engine-url", "http://a:1", "--lease", "2h"], "--lease"),
        (["--engine", "sglang", "--engine-url", "http://a:1", "--requests", "keep"], "keep"),
        (
            [
                "--engine",
                "vllm",
                "--engine-url",
                "http://a:1",
                "--lora",
                "m",
                "--activate",
                "manual",
            ],
            "--lora",
        ),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: list[str], said: str) -> None:
    with Processes(tmp_path / "logs") as processes:
        argv = shardcast(
            "follow", "policy", "--from", "http://127.0.0.1:1", "--out", tmp_path / "out",
            "--trust-on-first-use", "--json", *options,
        )  # fmt: skip
        process = processes.start(argv, name="follow")
        assert process.wait(timeout=WAIT_S) == 2
        assert said in process.events("error")[0]["message"]


def test_a_canary_that_is_wrong_moves_the_engine_back(tmp_path: Path) -> None:
    tokens = [5, 6, 7]
    server = PluginServer()
    with tree(tmp_path / "tree") as made, server.http.running():
        origin = made.origin()
        worker = None
        for number in (1, 2):
            checkpoint = tmp_path / f"step_{number}"
            checkpoint.mkdir()
            for name, data in files_of(number).items():
                (checkpoint / name).write_bytes(data)
            right = weights(number) if number == 1 else "weights of nobody"
            prompt = {"tokens": tokens, "logprobs": logprobs(right, tokens)}
            canary = tmp_path / "canary.json"
            canary.write_text(json.dumps({"prompts": [prompt], "tolerance": 0.01}))
            made.publish(checkpoint, "--canary", str(canary))
            if worker is None:
                options = ["--engine", "vllm", "--engine-url", server.url, "--check-canary"]
                worker = made.follow("w", *options, sources=[origin.url])
            activated(worker.process, number, server)
        assert worker is not None
        failed = worker.process.wait_event("engine_failed", timeout=WAIT_S)
        assert "canary of version 2" in failed["message"]
        assert "goes back to version 1" in failed["message"]
        eventually(lambda: server.machine.weights == weights(1), "it goes on with wrong answers")
        worker.process.send(stop=False)
        worker.process.terminate()
        assert worker.process.wait(timeout=WAIT_S) in (0, 128 + signal.SIGTERM)

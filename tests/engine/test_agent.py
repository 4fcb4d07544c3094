"""The agent (`shardcast follow --engine vllm`) as a process, with real servers that two runs feed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loadtest.processes import Process, Processes
from loadtest.topology import shardcast
from shardcast.canary import METADATA_KEY, write_canary
from shardcast.engine.forms import READY_PATH, Swap
from shardcast.keys import public_pem
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from tests.contract.made import signer
from tests.engine.adapters import save_adapter
from tests.engine.checkpoints import save
from tests.engine.servers import KEY, Server, ServerHost, stopped, until
from tests.engine.test_server_contract import DTYPE, KIND, NEAR, OPTIONS, TOKENS, alike, asked
from tests.engine.test_torch_module import opened
from tests.fakes import now_ms
from trainer_adapter.torch_module import make_canary, prompt_logprobs

RUN, STYLE = "live", "style"
PROMPT = [5, 17, 101, 44, 8]
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
SECONDS = 120.0


@dataclass
class Host:
    """A host with two servers, and the origin from which its agents read."""

    root: Path
    servers: tuple[Server, Server]
    processes: Processes
    url: str = ""
    scores: dict[int, list[float]] = field(default_factory=dict)

    def begin(self) -> None:
        """Start the origin."""
        (self.root / "run.pub").write_bytes(public_pem(signer().public_key))
        (self.root / "token").write_text(KEY)
        (self.root / "origin").mkdir()
        argv = shardcast("relay", "--store", self.root / "origin", "--listen", "127.0.0.1:0")
        origin = self.processes.start(argv, name="origin")
        self.url = origin.wait_event("listening", timeout=SECONDS)["url"]

    def publish(self, seed: int, *, canary_of: int | None = None) -> int:
        """Publish a model, and what the trainer's model says as its canary; return the version."""
        trained = opened(self._model(seed))
        teller = trained if canary_of is None else opened(self._model(canary_of))
        canary = write_canary(make_canary(teller, [TOKENS, [9, 8, 7, 6]], NEAR))
        number = self._publish(self._model(seed), RUN, {METADATA_KEY: canary})
        self.scores[number] = prompt_logprobs(trained, TOKENS)
        return number

    def publish_held(self, seed: int) -> int:
        """Publish a model, and hold each server in its load until the other one could swap, too."""
        ranks = [server.arm("stop", 3) for server in self.servers]
        try:
            number = self.publish(seed)
            until(lambda: any(map(stopped, ranks)), "one of them loads, and is paused")
            (first,) = (index for index in (0, 1) if stopped(ranks[index]))
            second = 1 - first
            until(lambda: staged(self.servers[second]) == number, "the other one has staged")
            assert not self.servers[second].state().paused
            os.kill(ranks[first], signal.SIGCONT)
            until(lambda: stopped(ranks[second]), "then it loads, too")
        finally:
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
        return number

    def publish_adapter(self, seed: int) -> int:
        return self._publish(save_adapter(self.root / f"adapter-{seed}", seed), STYLE, {})

    def _model(self, seed: int) -> Path:
        directory = self.root / f"step-{seed}"
        return directory if directory.exists() else save(KIND, DTYPE, seed, directory)

    def _publish(self, source: Path, run: str, metadata: dict[str, str]) -> int:
        options = PublishOptions(source=source, metadata=metadata, threads=1, delta=False)
        store = RunStore(self.root / "origin" / run, run)
        return int(publish_directory(options, store, [signer()], now_ms).ref.version)

    @contextlib.contextmanager
    def follow(self, name: str, run: str, *options: str) -> Iterator[Process]:
        """Run an agent, for as long as the block takes."""
        argv = shardcast(
            "follow", run, "--from", self.url, "--out", self.root / f"out-{run}", "--pubkey",
            self.root / "run.pub", "--durability", "none", "--json", "--engine", "vllm",
            "--engine-token-file", self.root / "token", *options,
        )  # fmt: skip
        process = self.processes.start(argv, name=name)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=SECONDS)

    def agent(self, name: str) -> contextlib.AbstractContextManager[Process]:
        """One agent for both servers, that lets one of them be paused at a time."""
        urls = [part for server in self.servers for part in ("--engine-url", server.url)]
        return self.follow(name, RUN, *urls, "--max-swapping", "1", "--check-canary")

    def activated(self, agent: Process, number: int) -> None:
        """Wait until the agent says that both serve a version, and check that they do."""
        for server in self.servers:
            agent.wait_event(
                "activated",
                timeout=SECONDS,
                where=lambda e, url=server.url: (e["version"], e["engine"]) == (number, url),  # type: ignore[misc]
            )
        for server in self.servers:
            self.serves(server, number)

    def serves(self, server: Server, number: int) -> None:
        state = server.state()
        assert (state.run, state.ready, state.paused) == (RUN, True, False)
        assert state.served is not None
        assert state.served.version == number
        assert alike(asked(server), self.scores[number])

    def sent_bytes(self) -> int:
        """Return how many bytes of blobs the origin has served."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SECONDS) as answer:
            text = answer.read().decode()
        return sum(
            int(float(value))
            for value in re.findall(r"^shardcast_sent_bytes_total(?:{[^}]*})? (\S+)$", text, re.M)
        )

    def bytes_of(self, number: int) -> int:
        directory = RunStore(self.root / "origin" / RUN, RUN).version_directory(number)
        return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def here(servers: ServerHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("agents")
    boot = save(KIND, DTYPE, 99, root / "boot")
    with contextlib.ExitStack() as undo:
        pair = (servers.begin(str(boot), *OPTIONS), servers.begin(str(boot), *OPTIONS, *LORA))
        for server in pair:
            undo.callback(server.end)
        host = Host(root, pair, undo.enter_context(Processes(root / "logs")))
        host.begin()
        for server in pair:
            server.wait_started()
        yield host


def staged(server: Server) -> int | None:
    now = server.state().staged
    return None if now is None else now.version


def version(server: Server) -> int | None:
    """Return which version it serves, once it does nothing else."""
    state = server.state()
    if state.activating is not None or not state.ready or state.served is None:
        return None
    return state.served.version


def swaps(server: Server) -> list[Swap]:
    return [swap for swap in server.state().swaps if (swap.to or "").startswith(f"{RUN}/")]


def test_one_agent_feeds_two_engines_from_one_download_and_never_pauses_both(here: Host) -> None:
    """Published, relayed, pulled once, staged by both, activated one by one, canaries checked."""
    numbers = [here.publish(11)]
    with here.agent("first") as agent:
        here.activated(agent, numbers[0])
        numbers.append(here.publish(12))
        here.activated(agent, numbers[-1])
        numbers.append(here.publish_held(13))
        here.activated(agent, numbers[-1])
        assert not agent.events("engine_failed")
        assert all(event["pause_ms"] > 0 for event in agent.events("activated"))

    whole = sum(here.bytes_of(number) for number in numbers)
    assert whole <= here.sent_bytes() < 1.2 * whole

    one, two = (swaps(server) for server in here.servers)
    assert len(one) == len(two) == len(numbers)
    for a in one:
        for b in two:
            assert a.resumed_at is not None
            assert b.resumed_at is not None
            assert a.resumed_at <= b.paused_at or b.resumed_at <= a.paused_at


def test_an_agent_that_is_killed_in_the_load_leaves_it_to_the_engine(here: Host) -> None:
    server = here.servers[0]
    rank = server.arm("stop", 3)
    with here.agent("killed") as agent:
        number = here.publish(14)
        try:
            until(lambda: stopped(rank), "the load is held")
            agent.kill()
            agent.wait(timeout=SECONDS)
            state = server.state()
            assert state.activating is not None
            assert (state.activating.version, state.activating.phase) == (number, "load")
            assert server.ask(READY_PATH).status == 503
        finally:
            os.kill(rank, signal.SIGCONT)
    until(lambda: server.state().activating is None, "the load has ended, with nobody there")
    here.serves(server, number)
    assert server.state().last_failure is None
    count = server.state().swap_count

    with here.agent("after") as agent:  # finds it, and brings the other one there
        until(lambda: all(version(one) == number for one in here.servers), "both are there")
        newer = here.publish(15)
        here.activated(agent, newer)
        assert server.state().swap_count == count + 1
        assert not agent.events("engine_failed")


def test_engines_go_back_from_a_version_whose_canary_is_wrong(here: Host) -> None:
    with here.agent("canary") as agent:
        good = here.publish(16)
        here.activated(agent, good)
        wrong = here.publish(17, canary_of=18)  # the trainer held other weights than it published
        for server in here.servers:
            failed = agent.wait_event(
                "engine_failed",
                timeout=SECONDS,
                where=lambda e, url=server.url: e["engine"] == url,  # type: ignore[misc]
            )
            assert failed["version"] == wrong
            assert f"does not answer as the canary of version {wrong}" in failed["message"]
            assert f"it goes back to version {good}" in failed["message"]
        until(lambda: all(version(one) == good for one in here.servers), "they have gone back")
        for server in here.servers:
            here.serves(server, good)
        right = here.publish(18)
        here.activated(agent, right)
        assert len(agent.events("engine_failed")) == len(here.servers)


def test_an_agent_loads_adapters_under_names_never_used_again(here: Host) -> None:
    server = here.servers[1]
    served, base = server.state().served, server.tokens(PROMPT, 20)
    answers = [base]
    models: list[str] = []
    here.publish_adapter(1)
    with here.follow("adapters", STYLE, "--engine-url", server.url, "--lora", "math") as agent:
        for number in (1, 2):
            if number > 1:
                here.publish_adapter(number)
            agent.wait_event(
                "activated",
                timeout=SECONDS,
                where=lambda e, n=number: (e["run"], e["version"]) == (STYLE, n),  # type: ignore[misc]
            )
            until(lambda: len(server.state().lora) == 1, "the one before is unloaded")
            (lora,) = server.state().lora
            assert (lora.name, lora.run, lora.version, lora.loaded) == ("math", STYLE, number, True)
            assert lora.model not in models
            models.append(lora.model)
            told = server.tokens(PROMPT, 20, model=lora.model)
            assert told not in answers
            answers.append(told)
        assert server.completion(PROMPT, 4, model=models[0]).status == 404
        assert (server.state().served, server.tokens(PROMPT, 20)) == (served, base)
        assert not agent.events("engine_failed")

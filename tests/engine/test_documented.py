"""What docs/ENGINES.md says, done word for word: its commands and programs, not ours."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loadtest.processes import Processes
from shardcast.engine.driver import Target
from shardcast.engine.forms import (
    STATE_PATH,
    ActivateAnswer,
    EngineState,
    StageAnswer,
    read_answer,
)
from shardcast.events import WorkerEvent
from tests.engine.checkpoints import Out, add_tokenizer, save
from tests.engine.engines import START_SECONDS, EngineHost
from tests.engine.servers import Server, environment, free_port

PAGE = Path(__file__).parents[2] / "docs" / "ENGINES.md"
SECONDS = 60


def block(name: str) -> str:
    """Return the block that the page marks as tested under a name."""
    found = re.search(
        rf"<!-- tested: {name} -->\n```(?:bash|python)\n(.*?)\n```", PAGE.read_text(), re.DOTALL
    )
    assert found, f"the page has no block {name}"
    return found[1]


async def run(text: str, names: dict[str, Any]) -> None:
    """Run a block that awaits, with the names that its reader has; bind what it binds."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    work = eval(compile(text, str(PAGE), "exec", flags=flags), names)
    if work is not None:
        await work


class Place:
    """A directory as the page's reader has it, and its names in place of the page's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.relay: subprocess.Popen[str] | None = None
        self.url = ""
        self.out = str(root / "models" / "policy")
        self.environment = {
            **os.environ,
            **environment(root),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(root / "config"),
        }
        del self.environment["VLLM_PLUGINS"]  # the page sets it

    @property
    def token(self) -> str:
        """The server's API key, which the page makes."""
        return (self.root / "engine.token").read_text().strip()

    def words(self, text: str) -> str:
        """Put this host's names in."""
        for theirs, ours in {
            "http://relay-1:8470": self.url,
            "/models/policy": self.out,
            "8000": str(self.port),
        }.items():
            assert theirs in text or theirs == "8000", f"the page no longer says {theirs}"
            text = text.replace(theirs, ours)
        return text

    def shardcast(self, *argv: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "shardcast", *argv], cwd=self.root, env=self.environment,
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def publish(self, seed: int) -> None:
        """Publish a model with a tokenizer, as a user's has one."""
        directory = save("qwen2", "bfloat16", seed, self.root / f"checkpoint-{seed}")
        add_tokenizer(directory)
        self.shardcast(
            "publish",
            str(directory),
            "--run",
            "policy",
            "--store",
            "store",
            "--key",
            "shardcast.key",
        )

    def serve(self) -> None:
        """Be the relay that the page names."""
        self.relay = subprocess.Popen(
            [sys.executable, "-m", "shardcast", "relay", "--store", "store", "--listen",
             "127.0.0.1:0", "--pubkey", "shardcast.pub"],
            cwd=self.root, env=self.environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.relay.stdout is not None
        self.url = json.loads(self.relay.stdout.readline())["url"]

    def close(self) -> None:
        if self.relay is not None and self.relay.stdout is not None:
            self.relay.send_signal(signal.SIGTERM)
            self.relay.wait(SECONDS)
            self.relay.stdout.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    try:
        place.shardcast("keygen", "--out", ".")
        place.publish(1)
        place.serve()
        yield place
    finally:
        place.close()


@pytest.mark.timeout(480)
def test_the_page_from_pulling_to_activating(place: Place) -> None:
    text = place.words(block("server"))
    # A model this small needs no compiled graph, which takes longer than all the rest.
    text = text.replace(
        f"--port {place.port}", f"--port {place.port} --enforce-eager --enable-scale-out"
    )
    assert "--enforce-eager" in text
    text = text.replace("python -m vllm", "exec python -m vllm")
    log = place.root / "server.log"
    with log.open("w") as lines:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text], cwd=place.root, env=place.environment,
            stdout=lines, stderr=lines, start_new_session=True,
        )  # fmt: skip
    server = Server(process.pid, place.port, log)
    try:
        server.wait_started()
        place.publish(2)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", place.words(block("activate"))],
            cwd=place.root, env=place.environment, capture_output=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        staged, activated, state, ready = answers(done.stdout)
        assert read_answer(staged, StageAnswer, source="stage").state.staged is not None
        answer = read_answer(activated, ActivateAnswer, source="activate")
        assert answer.activated.version == 2
        assert answer.pause_ms > 0
        served = read_answer(state, EngineState, source="state")
        assert served.served is not None
        assert served.served.version == 2
        # It was labelled at boot: the swap log knows what it came from.
        assert (served.swaps[0].from_ or "").startswith("policy/1/")
        assert json.loads(ready) == {"ready": True, "why": ""}
        place.publish(3)
        asyncio.run(mind_as_the_page(place))
        stamp_as_the_page(place, server)
        follow_as_the_page(place, server)
    finally:
        server.end()
        process.wait(SECONDS)


def follow_as_the_page(place: Place, server: Server) -> None:
    """Run the page's agent until it has activated version 4; of its two engines one is not there."""
    other, metrics = free_port(), free_port()
    text = block("follow")
    for theirs, ours in (("127.0.0.1:8001", other), ("127.0.0.1:9470", metrics)):
        assert theirs in text, f"the page no longer says {theirs}"
        text = text.replace(theirs, f"127.0.0.1:{ours}")
    argv = ["bash", "-euo", "pipefail", "-c", f"exec {place.words(text)} --json"]
    with Processes(place.root / "logs") as processes:
        agent = processes.start(argv, name="follow", cwd=place.root, env=place.environment)
        agent.wait_event("engine_failed", timeout=SECONDS)  # it has asked the one that is not there
        place.publish(4)
        done = agent.wait_event(
            "activated", timeout=SECONDS, where=lambda event: event["version"] == 4
        )
        assert (done["engine"], done["pause_ms"] > 0) == (server.url, True)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{metrics}/metrics", timeout=SECONDS
        ) as shown:
            lines = shown.read().decode().splitlines()
        assert f'shardcast_engine_served_version{{engine="{server.url}"}} 4.0' in lines
        assert f'shardcast_engine_reachable{{engine="http://127.0.0.1:{other}"}} 0.0' in lines
        agent.terminate()
        assert agent.wait(timeout=SECONDS) == 0
    served = read_answer(server.ask(STATE_PATH, key=place.token).body, EngineState, source="")
    assert (served.served and served.served.version, served.newest, served.max_lag) == (4, 4, 3)


async def mind_as_the_page(place: Place) -> None:
    """Run the agent's block until it has activated version 3."""
    activated = asyncio.Event()

    def on_event(event: WorkerEvent) -> None:
        if (event.kind, event.version) == ("activated", 3):
            activated.set()

    names = {"token": place.token, "on_event": on_event}
    following = asyncio.ensure_future(run(place.words(block("agent")), names))
    waiting = asyncio.ensure_future(activated.wait())
    await asyncio.wait({following, waiting}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
    assert not following.done(), following.result()
    assert waiting.done(), "nothing was activated"
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


def stamp_as_the_page(place: Place, server: Server) -> None:
    """Run the stamps' block on answers of version 3."""
    sampling = {"max_tokens": 4}
    body = {"model": "policy", "prompt": "w5 w17", **sampling}
    response = server.ask("/v1/completions", body, key=place.token)
    generated = server.ask(
        "/inference/v1/generate",
        {"model": "policy", "token_ids": [5, 17], "sampling_params": sampling},
        key=place.token,
    )
    names: dict[str, Any] = {
        "response": response,
        "state": read_answer(server.ask(STATE_PATH, key=place.token).body, EngineState, source=""),
        "rollout": {},
        "choice": generated.json["choices"][0],
    }
    asyncio.run(run(block("stamps"), names))
    assert names["rollout"]["version"] == 3
    assert names["rollout"]["ambiguous"] is False
    assert [span.identity.version for span in names["spans"]] == [3]


def answers(output: bytes) -> list[bytes]:
    """Return JSON objects that follow each other without anything between."""
    decoder, text, found = json.JSONDecoder(), output.decode().strip(), []
    while text:
        _, end = decoder.raw_decode(text)
        found.append(text[:end].encode())
        text = text[end:].lstrip()
    return found


def test_all_python_of_the_page_is_run() -> None:
    page = PAGE.read_text()
    marked = re.findall(r"<!-- tested: (\w+) -->\n```python", page)
    assert sorted(marked) == ["agent", "async", "llm", "stamps", "torch"]
    assert page.count("```python") == len(marked), "a block that no test runs"


@pytest.mark.timeout(480)
def test_the_programs_of_the_page(place: Place, host: EngineHost) -> None:
    place.shardcast(
        "pull", "policy", "--from", place.url, "--out", place.out, "--pubkey", "shardcast.pub"
    )
    for version, name in ((2, "llm"), (3, "async")):
        place.publish(version)
        text = place.words(block(name))
        assert text.count('load_format="shardcast",') == 1
        # A model this small needs no compiled graph, which takes longer than all the rest.
        text = text.replace(
            'load_format="shardcast",', 'load_format="shardcast", enforce_eager=True,'
        )
        engine = host.start(
            "-", kind="program", environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        )
        try:
            told = engine.order(
                "run",
                within=START_SECONDS + SECONDS,
                text=text,
                until=f"policy/{version}/",
                seconds=SECONDS,
            )
        finally:
            engine.end()
        assert told["labels"][-1][-1].startswith(f"policy/{version}/")
        if name == "llm":
            assert "started with Target(run='policy', version=1" in told["said"]
        else:  # it was labelled before its first answer, and ran while it was swapped
            assert told["labels"][0][0].startswith("policy/2/")


async def test_the_torch_module_of_the_page(tmp_path: Path) -> None:
    out = Out(tmp_path)
    old, new = (out.model("qwen2-tied", "float32", seed) for seed in (1, 2))
    model = transformers.AutoModelForCausalLM.from_pretrained(old.path).eval()
    cold = transformers.AutoModelForCausalLM.from_pretrained(new.path).eval()
    tokens = torch.tensor([[5, 17, 101]])
    target = Target(new.run, new.version, new.digest, Path(new.path))

    await run(block("torch"), {"model": model, "tokens": tokens, "target": target})

    with torch.no_grad():
        assert torch.equal(model(tokens).logits, cold(tokens).logits)

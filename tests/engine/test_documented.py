"""What docs/ENGINES.md says of vLLM's server, done word for word: its commands, not ours."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import transformers

from shardcast.engine.forms import ActivateAnswer, EngineState, StageAnswer, read_answer
from tests.engine.checkpoints import VOCABULARY, save
from tests.engine.servers import Server, environment, free_port

PAGE = Path(__file__).parents[2] / "docs" / "ENGINES.md"
SECONDS = 60


def commands(name: str) -> str:
    """Return the block that the page marks as tested under a name."""
    found = re.search(rf"<!-- tested: {name} -->\n```bash\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert found, f"the page has no block {name}"
    return found[1]


class Place:
    """A directory as the page's reader has it, and its names in place of the page's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.relay: subprocess.Popen[str] | None = None
        self.url = ""
        self.environment = {
            **os.environ,
            **environment(root),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(root / "config"),
        }
        del self.environment["VLLM_PLUGINS"]  # the page sets it

    def words(self, text: str) -> str:
        """Put this host's names in."""
        for theirs, ours in {
            "http://relay-1:8470": self.url,
            "/models/policy": str(self.root / "models" / "policy"),
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
        words = tokenizers.models.WordLevel(
            {f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"
        )
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="w3", eos_token="w1"
        ).save_pretrained(directory)
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
        (tmp_path / "engine.token").write_text(secrets.token_hex(16) + "\n")
        yield place
    finally:
        place.close()


@pytest.mark.timeout(480)
def test_the_page_from_pulling_to_activating(place: Place) -> None:
    text = place.words(commands("server"))
    # A model this small needs no compiled graph, which takes longer than all the rest.
    text = text.replace(f"--port {place.port}", f"--port {place.port} --enforce-eager")
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
            ["bash", "-euo", "pipefail", "-c", place.words(commands("activate"))],
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
    finally:
        server.end()
        process.wait(SECONDS)


def answers(output: bytes) -> list[bytes]:
    """Return JSON objects that follow each other without anything between."""
    decoder, text, found = json.JSONDecoder(), output.decode().strip(), []
    while text:
        _, end = decoder.raw_decode(text)
        found.append(text[:end].encode())
        text = text[end:].lstrip()
    return found


def test_the_python_of_the_page_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

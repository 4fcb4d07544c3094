"""The test's end of `tests.engine.server_host`: start a server, talk to it, end it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardcast.engine.forms import (
    ACTIVATE_PATH,
    STAGE_PATH,
    STATE_PATH,
    EngineState,
    read_answer,
)
from tests.engine.engines import TOKENS
from tests.engine.server_faults import ARM_PATH, PAUSE_PATH
from trainer_adapter.vllm.ranks import Target

START_SECONDS = 240.0
ANSWER_SECONDS = 60.0
KEY = "sesame-for-tests"

BACKEND = ("--weight-transfer-config", '{"backend": "shardcast"}')
INJECTED = ("--worker-extension-cls", "tests.engine.injected.Injected")
SMALL = (
    "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "8",
    "--block-size", "32", "--seed", "0",
)  # fmt: skip


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask again and again, for a minute at most."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"it never came to that: {what}")


def stopped(pid: int) -> bool:
    """Say whether a process is stopped (SIGSTOP)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """One vLLM server."""

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.pid = pid
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    # --- HTTP ----------------------------------------------------------------------------------

    def open(
        self, path: str, body: Any = None, *, key: str | None = KEY
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request, and return before the answer's body is read."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            link.request("GET" if data is None else "POST", path, data, headers)
            return link, link.getresponse()
        except BaseException:
            link.close()
            raise

    def ask(self, path: str, body: Any = None, *, key: str | None = KEY) -> Answer:
        """Send a request and return the whole answer."""
        link, response = self.open(path, body, key=key)
        try:
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            link.close()

    def state(self) -> EngineState:
        return read_answer(self.ask(STATE_PATH).body, EngineState, source=self.url)

    def stage(self, target: Target) -> Answer:
        return self.ask(STAGE_PATH, members(target))

    def activate(self, target: Target, **more: Any) -> Answer:
        return self.ask(ACTIVATE_PATH, {**members(target), **more})

    def arm(self, place: str, after: int = 0, times: int = 1, *, rank: int = 0) -> int:
        """Let a rank's next load fail; return the rank's process id."""
        order = {"rank": rank, "place": place, "after": after, "times": times}
        answer = self.ask(ARM_PATH, order)
        assert answer.status == 200, answer.body
        return int(answer.json[rank])

    def pause(self) -> None:
        """Pause it as somebody else would, and go away."""
        assert self.ask(PAUSE_PATH, {}).status == 200

    # --- generating ----------------------------------------------------------------------------

    def completion(self, prompt: list[int], tokens: int = 12, **more: Any) -> Answer:
        return self.ask("/v1/completions", request(prompt, tokens, **more))

    def tokens(self, prompt: list[int], tokens: int = 12, **more: Any) -> list[int]:
        answer = self.completion(prompt, tokens, **more)
        assert answer.status == 200, answer.body
        found: list[int] = answer.json["choices"][0]["token_ids"]
        return found

    def generate(self, prompt: list[int], tokens: int, **more: Any) -> Any:
        """Ask vLLM's generate route: it tells log-probabilities and the version of every token."""
        sampling = {
            "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "detokenize": False,
            "logprobs": 2,
        }  # fmt: skip
        body = {"token_ids": prompt, "sampling_params": sampling, **more}
        answer = self.ask("/inference/v1/generate", body)
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]

    def answers(self, prompts: list[list[int]]) -> list[tuple[list[int], list[str]]]:
        """Answer prompts, one at a time: tokens, and their log-probabilities as hex."""
        found = [self.generate(prompt, TOKENS) for prompt in prompts]
        return [
            (
                one["token_ids"],
                [float(step["logprob"]).hex() for step in one["logprobs"]["content"]],
            )
            for one in found
        ]

    def stream(self, prompt: list[int], tokens: int, **more: Any) -> Stream:
        """Begin a streamed completion."""
        return Stream(*self.open("/v1/completions", request(prompt, tokens, stream=True, **more)))

    # --- its life ------------------------------------------------------------------------------

    def wait_started(self) -> None:
        """Wait until it answers.

        Raises:
            AssertionError: If it ends, or takes too long.
        """
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self.lives(), f"the server ended: {self.log.read_text()[-6000:]}"
            try:
                if self.ask("/health").status == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"the server does not start: {self.log.read_text()[-6000:]}")

    def lives(self) -> bool:
        """Say whether its API process does."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def engine_pid(self) -> int:
        """Return the engine core's process id, as vLLM's log says it."""
        found = re.findall(r"\(EngineCore[^)]*pid=(\d+)\)", self.log.read_text(errors="replace"))
        assert found, "no engine core in the log"
        return int(found[-1])

    def end(self) -> None:
        """End it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Stream:
    """A streamed completion: its headers at once, its tokens as they come."""

    def __init__(
        self, link: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._link = link
        self._response = response
        self.status = response.status
        self.headers = dict(response.getheaders())
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish = ""

    def __iter__(self) -> Iterator[int]:
        for line in self._response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            (choice,) = json.loads(line[6:])["choices"]
            self.finish = choice["finish_reason"] or self.finish
            for token in choice["token_ids"] or ():
                self.tokens.append(token)
                self.times.append(time.monotonic())
                yield token
        self._link.close()

    def rest(self) -> list[int]:
        """Read to the end; return all tokens."""
        for _ in self:
            pass
        return self.tokens


class Told:
    """A streamed answer of several choices, read in a thread of its own.

    Attributes:
        tokens: By choice, as they came.
        logprobs: By choice, the tokens that log-probabilities came for.
        text: By choice.
        finish: By choice, every reason that came.
        usage: How many tokens the server says that it has generated.
    """

    def __init__(self, server: Server, path: str, tokens: int, **more: Any) -> None:
        """Send the request."""
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[str]] = {}
        self.text: dict[int, str] = {}
        self.finish: dict[int, list[str]] = {}
        self.usage = 0
        self._error: BaseException | None = None
        body = {
            "model": "policy", "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
            "skip_special_tokens": False, "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, args=(server, path, body))
        self._thread.start()

    def wait_for(self, count: int) -> None:
        """Wait until every choice has so many tokens."""

        def there() -> bool:
            if not self._thread.is_alive():
                self.whole()
            return bool(self.tokens) and all(len(one) >= count for one in self.tokens.values())

        until(there, f"{count} tokens of every choice")

    def whole(self) -> Told:
        """Wait for the end; return itself."""
        self._thread.join(ANSWER_SECONDS)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self

    def _run(self, server: Server, path: str, body: dict[str, Any]) -> None:
        try:
            link, response = server.open(path, body)
            with contextlib.closing(link):
                assert response.status == 200, response.read()
                for line in response:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        self._take(json.loads(line[6:]))
        except BaseException as error:
            self._error = error

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "choices" in chunk, chunk
        if chunk.get("usage"):
            self.usage = int(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            index, logprobs = int(choice["index"]), choice.get("logprobs") or {}
            self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            named = [one["token"] for one in logprobs.get("content") or ()]
            self.logprobs.setdefault(index, []).extend(named or logprobs.get("tokens") or ())
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self.text[index] = self.text.get(index, "") + (text or "")
            if choice["finish_reason"]:
                self.finish.setdefault(index, []).append(choice["finish_reason"])


def request(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip


def members(target: Target) -> dict[str, Any]:
    """Return what a request says of a version: its directory, and what it is."""
    plain = msgspec.to_builtins(target)
    told = ("run", "version", "digest", "path", "step")
    return {name: plain[name] for name in told if plain.get(name) is not None}


class ServerHost:
    """Starts servers."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._count = 0
        self._log = open(scratch / "server-host.log", "w")  # noqa: SIM115 - outlives the block
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.server_host"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **environment(scratch)},
        )  # fmt: skip
        self._line("ready")

    def _line(self, what: str) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        line = self._process.stdout.readline().strip() if ready else ""
        assert line, f"the host does not say {what}: {Path(self._log.name).read_text()[-4000:]}"
        return line

    def begin(self, model: str, *argv: str, **variables: str) -> Server:
        """Begin to start a server; wait with ``wait_started``."""
        self._count += 1
        log = self._scratch / f"server-{self._count}.log"
        port = free_port()
        options = [
            "--model", model, "--served-model-name", "policy", "--host", "127.0.0.1",
            "--port", str(port), "--api-key", KEY, *SMALL, *argv,
        ]  # fmt: skip
        order = {"argv": options, "environment": variables, "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Server(int(self._line("the server's id")), port, log)

    def close(self) -> None:
        """End it; servers are ended by those who started them."""
        self._process.kill()
        self._process.wait(ANSWER_SECONDS)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def environment(scratch: Path) -> dict[str, str]:
    """Return what every server's environment has: small, alone, and off the network."""
    return {
        "VLLM_PLUGINS": "shardcast,shardcast_http",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(scratch.parent / "vllm-cache"),  # one for all of a session
        "TORCHINDUCTOR_CACHE_DIR": str(scratch.parent / "inductor"),
    }

"""Starts a real SGLang, restarts it as a supervisor would, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

BREAK: Final = "SHARDCAST_BREAK_LOADS"
"""The variable that names a file: how many of the next readings of weights break."""
KEY = "sesame-for-tests"
START_SECONDS = 240.0
END_SECONDS = 60.0
OPTIONS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--host", "127.0.0.1",
    "--max-total-tokens", "4096", "--context-length", "256", "--skip-tokenizer-init", "--api-key", KEY,
    "--served-model-name", "policy", "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj",
    "v_proj", "--lora-backend", "torch_native",
)  # fmt: skip


class Server:
    """One SGLang at one port, however often it is started."""

    def __init__(self, root: Path, model: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._root = root
        self._model = model
        self._order = root / "break"
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it has answered its own first request."""
        self._order.write_text("0")
        self._starts += 1
        log = self._root / f"{self._starts}.log"
        command = (sys.executable, "-m", "tests.engine_sglang.serve", "--port", str(self.port))
        environment = {**os.environ, BREAK: str(self._order), "SGLANG_USE_CPU_ENGINE": "1"}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--model-path", str(self._model), *OPTIONS],
                stdout=out, stderr=out, env=environment, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while b"ready to roll" not in log.read_bytes():
            assert self._process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, "SGLang does not start"
            time.sleep(0.2)

    def break_next_loads(self, count: int) -> None:
        """Let the next readings of weights break in the middle."""
        self._order.write_text(str(count))

    def wait_ended(self) -> None:
        """Wait until it has ended by itself."""
        assert self._process is not None
        self._process.wait(timeout=END_SECONDS)
        self.end()

    def end(self) -> None:
        """Kill it and all of its processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=END_SECONDS)
            self._process = None

    def restart(self) -> None:
        """As a supervisor does."""
        self.end()
        self.start()

    def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Post to it, as an orchestrator or a client would."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

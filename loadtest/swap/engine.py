"""A vLLM server, and what the measurements ask of it."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from loadtest.processes import Process, Processes, free_port

START_S: Final = 240.0
CALL_S: Final = 120.0
KEY: Final = "not-a-secret"

_OPTIONS: Final = (
    "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "512", "--max-num-seqs", "8",
    "--dtype", "bfloat16", "--seed", "0", "--served-model-name", "policy", "--host", "127.0.0.1",
    "--weight-transfer-config", '{"backend": "shardcast"}',
)  # fmt: skip


KEEP_FREED: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc: memory that was freed is used again, not given back to the kernel and made anew."""


class EngineServer:
    """One server at a time, always on the same port."""

    def __init__(self, processes: Processes, scratch: Path, variables: Mapping[str, str]) -> None:
        """Start nothing yet; ``variables`` come on top of its environment."""
        self._variables = variables
        self._processes = processes
        self._scratch = scratch
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Process | None = None

    def begin(self, model: str) -> None:
        """Start it with a model's directory; the development routes are open, for comparison."""
        environment = {
            **os.environ,
            **self._variables,
            "VLLM_PLUGINS": "shardcast,shardcast_http",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": KEY,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self._scratch / "vllm-cache"),
        }
        argv = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", model, "--port", str(self.port), *_OPTIONS,
        ]  # fmt: skip
        self.process = self._processes.start(argv, name="vllm", env=environment)

    def wait_started(self) -> None:
        """Wait until it serves.

        Raises:
            RuntimeError: If it ends first, or takes too long.
        """
        assert self.process is not None
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.alive():
            try:
                if self._ask("/health")[0] == 200:
                    return
            except OSError:
                self.process.watch_exit(0.02)
        raise RuntimeError(self.process.describe(f"does not start: {self.process.lines[-30:]}"))

    def kill(self) -> None:
        """End it at once. Asked nicely (SIGTERM), it goes on as long as clients stream."""
        assert self.process is not None
        self.process.kill()

    # --- our routes -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what it says of itself."""
        return dict(self.call("/v1/shardcast/state"))

    def wait_told(self, newest: int) -> None:
        """Wait until an agent has told it of the newest version: the agent is at work.

        Raises:
            TimeoutError: If none does.
        """
        assert self.process is not None
        end = time.monotonic() + CALL_S
        while self.state()["newest"] != newest:
            if time.monotonic() > end:
                raise TimeoutError(f"no agent told the engine of version {newest}")
            self.process.watch_exit(0.05)

    def stage(self, target: Mapping[str, Any]) -> None:
        """Let it verify a version while it serves."""
        self.call("/v1/shardcast/stage", target)

    def activate(self, target: Mapping[str, Any]) -> dict[str, Any]:
        """Let it swap to what is staged."""
        return dict(self.call("/v1/shardcast/activate", target))

    # --- vLLM's own, in development mode --------------------------------------------------------

    def reload_weights(self, path: str) -> dict[str, float]:
        """Do by vLLM's own routes what an activation does; return the milliseconds of each step."""
        steps: dict[str, Callable[[], Any]] = {
            "pause": lambda: self.call("/pause?mode=keep&clear_cache=true", {}),
            "load": lambda: self.call(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
            ),
            "resume": lambda: self.call("/resume", {}),
        }
        took = {}
        for name, step in steps.items():
            began = time.monotonic()
            step()
            took[name] = (time.monotonic() - began) * 1000
        return took

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return its JSON answer.

        Raises:
            RuntimeError: If the answer is not 200.
        """
        status, data = self._ask(path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {data[:2000]!r}")
        return json.loads(data or b"null")

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        data = None if body is None else json.dumps(body)
        try:
            link.request("GET" if body is None else "POST", path, data, headers)
            response = link.getresponse()
            return response.status, response.read()
        finally:
            link.close()

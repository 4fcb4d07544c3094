"""The test's end of `tests.engine.host`: start an engine, give it orders, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from trainer_adapter.vllm.ranks import (
    Report,
    Target,
    activate_command,
    combine,
    stage_command,
    state_command,
)

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0

PROMPTS = [[5, 17, 101, 44, 8], [300, 2, 90], [7] * 40]
TOKENS = 12

Answers = list[dict[str, Any]]


class EngineRaisedError(Exception):
    """What an engine raised."""


class RunningEngine:
    """One engine in a process of its own."""

    def __init__(self, link: socket.socket, log: Path) -> None:
        self._link = link
        self._lines = link.makefile("r", encoding="utf-8")
        self.log = log
        self.pid = int.from_bytes(
            link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little"
        )

    def wait_started(self) -> None:
        """Wait for its first word.

        Raises:
            EngineRaisedError: If it did not start.
        """
        self._link.settimeout(START_SECONDS)
        self._answer()
        self._link.settimeout(ANSWER_SECONDS)

    def order(self, do: str, *, within: float = ANSWER_SECONDS, **members: Any) -> Any:
        """Give an order and return what came of it.

        Args:
            do: A method of the engine's (``tests.engine.host``).
            within: Seconds that it may take.
            members: What it takes.

        Raises:
            EngineRaisedError: What it raised.
        """
        self._link.settimeout(within)
        self._link.sendall(json.dumps({"do": do, **members}).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise EngineRaisedError(f"the engine ended: {self.log.read_text()[-4000:]}")
        reply = json.loads(line)
        if reply["error"] is not None:
            raise EngineRaisedError(reply["error"])
        return reply["result"]

    # --- what tests say ----------------------------------------------------------------------

    def answers(self, *, alone: bool = False) -> Answers:
        """Return what it answers to the fixed prompts: tokens, and log-probabilities as hex.

        Args:
            alone: One prompt at a time; in a batch the sums are rounded in another order.
        """
        found: Answers = self.order("generate", prompts=PROMPTS, tokens=TOKENS, alone=alone)
        return found

    def tell(self, command: dict[str, Any]) -> Report:
        """Tell all ranks, as the server does."""
        return combine(self.order("rpc", method="shardcast", args=[command]))

    def state(self) -> Report:
        return self.tell(state_command())

    def stage(self, target: Target) -> Report:
        """Stage, and ask until it is done or has failed."""
        report = self.tell(stage_command(target))
        while report.staging is not None:
            report = self.state()
        return report

    def activate(self, target: Target) -> Report:
        """Activate what is staged."""
        return self.tell(activate_command(target))

    def swap(self, target: Target) -> Report:
        """Stage and activate the way docs/ENGINES.md says."""
        raw = self.order("swap", target=msgspec.to_builtins(target))
        return msgspec.convert(raw, Report)

    def arm(self, place: str, *, rank: int = 0, after: int = 0, times: int = 1) -> None:
        """Let a rank fail."""
        self.order("rpc", method="arm", args=[rank, place, after, times])

    def judge(self, able: bool) -> None:
        """Let dry runs say what they find, or that they cannot."""
        self.order("rpc", method="judge", args=[able])

    def prepare_ahead(self, ahead: bool) -> None:
        """Prepare versions while they are staged, or do not."""
        self.order("rpc", method="prepare_ahead", args=[ahead])

    def label(self) -> str:
        return str(self.order("label"))

    def end(self) -> None:
        """End it and whatever it started."""
        self._lines.close()
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class EngineHost:
    """Starts engines."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._count = 0
        self.cache = scratch / "vllm-cache"
        environment = {
            **os.environ,
            "VLLM_PLUGINS": "shardcast",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.cache),
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        }
        self._log = open(scratch / "host.log", "w")  # noqa: SIM115 - the process outlives the block
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.host"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise EngineRaisedError(f"the host ended: {Path(self._log.name).read_text()[-4000:]}")

    def begin(self, model: Path | str, **options: Any) -> RunningEngine:
        """Begin to start an engine; it says its first word when it has."""
        self._count += 1
        log = self._scratch / f"engine-{self._count}.log"
        options.setdefault("dtype", "bfloat16")
        options.setdefault("enforce_eager", True)
        with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{directory}/s")
            door.listen(1)
            door.settimeout(START_SECONDS)
            order = {
                "options": {"model": str(model), **options},
                "socket": f"{directory}/s",
                "log": str(log),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            link, _ = door.accept()
        return RunningEngine(link, log)

    def start(self, model: Path | str, **options: Any) -> RunningEngine:
        """Start an engine.

        Raises:
            EngineRaisedError: If it does not start; quotes what it raised.
        """
        engine = self.begin(model, **options)
        try:
            engine.wait_started()
        except BaseException:
            engine.end()
            raise
        return engine

    def close(self) -> None:
        """End it; engines are ended by those who started them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:  # a machine that has no time for it
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

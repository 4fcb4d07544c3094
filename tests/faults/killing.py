"""Processes that kill themselves with SIGKILL before the k-th change of their disk, or a named one.

Each is forked from one that has imported everything, so that hundreds of them cost little. Counted
are the calls that change what is on disk or make it durable; shards' bytes (``pwrite``) count too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

CALLS: Final = (
    "fsync", "ftruncate", "link", "mkdir", "pwrite", "rename", "replace", "rmdir", "symlink",
    "truncate", "unlink",
)  # fmt: skip


class Steps:
    """Counts changes, writes each one's name to a pipe, and ends the process before one of them."""

    def __init__(self, root: str, kill_before: int | str | None, told: int) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._root = root
        self._kill_before = kill_before
        self._told = told

    def watch(self, name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step(name, args)
            return real(*args, **kwargs)

        setattr(os, name, counted)

    def watch_all(self) -> None:
        """Count every change from now on."""
        for name in CALLS:
            self.watch(name)

    def step(self, name: str, args: tuple[Any, ...]) -> None:
        with self._lock:
            line = f"{name} {self._where(args)}"
            before = self._kill_before
            if line.startswith(before) if isinstance(before, str) else self.count == before:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            os.write(self._told, f"{line}\n".encode())

    def _where(self, args: tuple[Any, ...]) -> str:
        path = args[0]
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        named = " -> ".join(
            str(part) for part in (path, *args[1:2]) if isinstance(part, str | Path)
        )
        return named.replace(f"{self._root}/", "")


def answer_orders(work: Callable[[dict[str, Any], int], None]) -> None:
    """Read one JSON object a line until stdin ends; do each in a process, tell how that ended.

    Args:
        work: Does an order; given where it tells its steps.
    """
    for line in sys.stdin:
        print(json.dumps(_forked(work, json.loads(line))), flush=True)


def _forked(work: Callable[[dict[str, Any], int], None], order: dict[str, Any]) -> dict[str, Any]:
    """Fork a process; return how it ended and which steps it took."""
    reading, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(order, told)
        except BaseException as error:
            os.write(told, f"failed: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(told)
    with open(reading, encoding="utf-8", errors="replace") as lines:
        steps = lines.read().splitlines()
    _, status = os.waitpid(child, 0)
    return {"event": "ended", "status": os.waitstatus_to_exitcode(status), "steps": steps}

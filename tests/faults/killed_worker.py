"""A worker that kills itself with SIGKILL before the k-th change of its disk, or a named one.

`python -m tests.faults.killed_worker` reads one JSON object a line, and answers each with one: a
worker is forked for it, so that hundreds of them cost little. Counted are the calls that change
what is on disk or make it durable; shards' bytes (``pwrite``) count too.
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

from shardcast.hooks import UpdateHook
from shardcast.store import recycling
from shardcast.store.stored import Durability
from shardcast.worker import Worker
from tests.fakes import KIB
from tests.unit.worker.conftest import QUICK

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


def work(order: dict[str, Any], told: int) -> None:
    """Follow up to a version, recycling and with a hook, or pull once."""
    steps = Steps(order["out"], order["kill_before"], told)
    recycling.MIN_BYTES = KIB  # type: ignore[misc]
    recycling.REST_S = 0.0  # type: ignore[misc]
    for name in CALLS:
        steps.watch(name)
    worker = Worker(
        order["out"],
        order["run"],
        [order["url"]],
        keys=[bytes.fromhex(order["key"])],
        durability=Durability(order["durability"]),
        keep=order["keep"],
        on_update=UpdateHook(order["hook"]),
        config=QUICK,
    )
    if order["pull"]:
        worker.pull()
        return
    for update in worker.iterate():
        if update.version >= order["version"]:
            break


def one(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a worker; return how it ended and which steps it took."""
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


def main() -> None:
    """Answer orders until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(one(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

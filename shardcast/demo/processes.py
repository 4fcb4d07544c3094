"""Real processes of the command line, their events, and their certain end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from shardcast.errors import ShardcastError

STOP_WAIT_S: Final = 5.0
TICK_S: Final = 0.25
LOG_LINES: Final = 15
_XDG: Final = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")

Event = dict[str, Any]


class DemoError(ShardcastError):
    """A part of the demonstration did not do what it should."""

    code = "demo"


@dataclass
class Node:
    """One process: its name, whether it must not end by itself, and the events it has printed."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    stays: bool
    ended: bool = False
    events: list[Event] = field(default_factory=list)

    def find(self, kind: str) -> Event | None:
        """Return the first event of a kind, or None so far."""
        return next((event for event in self.events if event.get("event") == kind), None)


OnEvent = Callable[[Node, Event], None]


class Processes:
    """Starts ``shardcast`` commands; ends all of them when the block is left, however it is left.

    Args:
        root: Logs and everything that would go into a home directory lie below it.
        on_event: Called with every event, by the thread that calls ``wait``.
    """

    def __init__(self, root: Path, on_event: OnEvent) -> None:
        self._root = root
        self._on_event = on_event
        self._nodes: list[Node] = []
        self._events: queue.Queue[tuple[Node, Event | None]] = queue.Queue()
        self._environment = _environment(root)
        (root / "logs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        """Nothing runs yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process: SIGTERM, and SIGKILL for what is still there after five seconds."""
        running = [node.process for node in self._nodes if node.process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + STOP_WAIT_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def nodes(self) -> list[Node]:
        """All processes that were started."""
        return list(self._nodes)

    def start(self, name: str, arguments: Sequence[str | Path], *, stays: bool = True) -> Node:
        """Start ``shardcast ARGUMENTS``; ``stays``: it is an error if it ends."""
        log = self._root / "logs" / f"{name}.log"
        with log.open("ab") as errors, _uninterrupted():
            process = subprocess.Popen(
                [sys.executable, "-m", "shardcast", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                encoding="utf-8",
                start_new_session=True,  # a Ctrl-C is ours to handle, once
            )
            node = Node(name, process, log, stays)
            self._nodes.append(node)
        threading.Thread(target=self._read, args=(node,), name=f"read-{name}", daemon=True).start()
        return node

    def run(self, name: str, arguments: Sequence[str | Path], timeout_s: float) -> Node:
        """Start a command and wait for its end.

        Raises:
            DemoError: If it fails or does not end in time.
        """
        node = self.start(name, arguments, stays=False)
        self.wait(lambda: node.ended, timeout_s, f"{name} to end")
        return node

    def wait_event(self, node: Node, kind: str, timeout_s: float) -> Event:
        """Wait for the first event of a kind from a node.

        Raises:
            DemoError: If it does not come in time, or a process ends.
        """
        self.wait(lambda: node.find(kind) is not None, timeout_s, f"{node.name} to say {kind!r}")
        found = node.find(kind)
        assert found is not None
        return found

    def wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Handle events until ``done``.

        Raises:
            DemoError: If that takes longer than ``timeout_s`` or a process ends as it should not.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DemoError(f"waited {timeout_s:.0f} s in vain for {what}{self._said()}")
            try:
                node, event = self._events.get(timeout=min(left, TICK_S))
            except queue.Empty:
                continue
            if event is None:
                self._end(node)
            else:
                node.events.append(event)
                self._on_event(node, event)

    def _end(self, node: Node) -> None:
        code = node.process.wait()
        node.ended = True
        if code != 0 or node.stays:
            said = self._tail(node)
            raise DemoError(f"{node.name} ended with exit code {code}{said}", source=node.name)

    def _read(self, node: Node) -> None:
        assert node.process.stdout is not None
        with node.process.stdout as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    self._events.put((node, event))
        self._events.put((node, None))

    def _said(self) -> str:
        return "".join(self._tail(node) for node in self._nodes if not node.ended)

    def _tail(self, node: Node) -> str:
        """Return the end of what a process wrote to stderr."""
        with contextlib.suppress(OSError):
            lines = node.log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
            if lines:
                return "".join(f"\n  {node.name}: {line}" for line in lines)
        return ""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back signals while a process is started, so that none is started and not known."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals interrupt the main thread only
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in arrived:
            signal.raise_signal(late)


def _environment(root: Path) -> Mapping[str, str]:
    """Return the environment without the user's own settings of the command line."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SHARDCAST_")}
    return inherited | {name: str(root / "home" / name.lower()) for name in _XDG}


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody uses at this moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]

"""Real processes with JSON lines on stdout: started, awaited on events, ended by process id.

Nothing here knows Shardcast. Every wait is bounded and wakes on an event (a line, an exit),
never on a timer; a failure message carries the end of the process's stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loadtest import guardian, measure

Event = dict[str, Any]

_STDERR_TAIL_BYTES = 4000
_STOP_GRACE_S = 10.0


class ProcessError(Exception):
    """A process ended, or kept silent, where something else was expected of it."""


class _Termination:
    """SIGTERM, turned into one SystemExit at a moment where nothing gets lost by it.

    `timeout` signals the whole group, and whoever started us signals us once more: a second exit
    in the middle of the clean-up of the first would leave the rest of it undone.
    """

    def __init__(self) -> None:
        self._wanted: int | None = None
        self._leaving = False
        self._undisturbed = 0

    def on_signal(self, number: int, _frame: object) -> None:
        """Leave, now or at the end of what must not be disturbed; once."""
        self._wanted = number
        self._leave()

    def _leave(self) -> None:
        if self._wanted is not None and not self._undisturbed and not self._leaving:
            self._leaving = True
            raise SystemExit(128 + self._wanted)

    def reset(self) -> None:
        """Forget a signal: the next one counts again."""
        self._wanted, self._leaving = None, False

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let the block finish before a signal ends the program."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals arrive in the main thread
            return
        self._undisturbed += 1
        try:
            yield
        finally:
            self._undisturbed -= 1
        self._leave()


_termination = _Termination()


@contextlib.contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that context managers end what they started.

    Only the first one: later ones find the clean-up at work already.
    """
    previous = signal.signal(signal.SIGTERM, _termination.on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _termination.reset()


class _Guard:
    """Our end of the pipe to the guardian, who cleans up if this process is killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._child: subprocess.Popen[bytes] | None = None

    def tell(self, word: str, what: object) -> None:
        """Tell the guardian something; the first time, start it."""
        with self._lock:
            if self._child is None or self._owner != os.getpid():
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", guardian.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
                self._owner = os.getpid()
                atexit.register(self._done)
            self._write(f"{word} {what}\n")

    def _done(self) -> None:
        if self._child is not None and self._owner == os.getpid():
            self._write("done\n")
            assert self._child.stdin is not None
            with contextlib.suppress(OSError):
                self._child.stdin.close()
            self._child.wait(_STOP_GRACE_S)

    def _write(self, line: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # a guardian that is gone guards nothing; work goes on
            self._child.stdin.write(line.encode())
            self._child.stdin.flush()


_guard = _Guard()


def tell_guardian(word: str, what: object) -> None:
    """Tell whoever cleans up after a kill what there is, or is no more (guardian.py)."""
    _guard.tell(word, what)


@contextlib.contextmanager
def scratch(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Give a fresh directory that is removed afterwards, even if this process is killed."""
    with _termination.undisturbed():
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        _guard.tell("directory", path)
    try:
        yield path
    finally:
        with _termination.undisturbed():
            shutil.rmtree(path, ignore_errors=True)
            _guard.tell("removed", path)


class Process:
    """One child process: its JSON events, its exit, its bill.

    Attributes:
        name: What failure messages call it.
        pid: Its process id.
        started: `time.monotonic()` just before it was spawned.
        started_unix_ms: The same moment on the clock that events carry.
        lines: Stdout lines that were not JSON objects.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        name: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bool = False,
    ) -> None:
        """Spawn `argv` with its stderr appended to the file `log`."""
        self.name = name
        self.log = log
        self.argv = [str(part) for part in argv]
        self.lines: list[str] = []
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._closed = False
        self._usage: measure.Usage | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            self.started_unix_ms = time.time() * 1000
            self.started = time.monotonic()
            self._child = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=None if env is None else dict(env),
                cwd=cwd,
            )
        self.pid = self._child.pid
        _guard.tell("process", self.pid)
        self._pidfd = os.pidfd_open(self.pid)
        self._reader = threading.Thread(target=self._read, name=f"read {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for raw in self._child.stdout:
            text = raw.decode("utf-8", "replace").rstrip("\n")
            event = _event_of(text)
            with self._news:
                if event is None:
                    self.lines.append(text)
                else:
                    self._events.append(event)
                self._news.notify_all()
        with self._news:
            self._closed = True
            self._news.notify_all()

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the events so far, oldest first, all or those of one `kind`."""
        with self._news:
            return [event for event in self._events if kind in (None, event.get("event"))]

    def wait_event(
        self,
        kind: str,
        *,
        timeout: float,
        where: Callable[[Event], bool] = lambda _event: True,
    ) -> Event:
        """Return the first event of `kind` that satisfies `where`, now or when it comes.

        Raises:
            ProcessError: Stdout closed or `timeout` seconds passed without it.
        """
        deadline = time.monotonic() + timeout
        seen = 0
        with self._news:
            while True:
                for event in self._events[seen:]:
                    if event.get("event") == kind and where(event):
                        return event
                seen = len(self._events)
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    break
                self._news.wait(left)
        why = "closed its output" if self._closed else f"said nothing for {timeout:g} s"
        raise ProcessError(self.describe(f"{why} instead of an event {kind!r}"))

    def alive(self) -> bool:
        """Say whether the process is still running."""
        return not self.watch_exit(0)

    def watch_exit(self, timeout: float) -> bool:
        """Return as soon as the process ends, or after `timeout` seconds; say whether it did."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], timeout)[0])

    def wait(self, *, timeout: float) -> int:
        """Return the exit status once the process has ended, with its bill taken.

        Raises:
            ProcessError: It was still running after `timeout` seconds.
        """
        if self._child.returncode is None:
            if not self.watch_exit(timeout):
                raise ProcessError(self.describe(f"still running after {timeout:g} s"))
            self._settle()
        return self._child.returncode

    def _settle(self) -> None:
        # A zombie still has its accounts: read them, then let the kernel forget it.
        wall = time.monotonic() - self.started
        written = measure.written_bytes(self.pid)
        _guard.tell("ended", self.pid)
        _pid, status, spent = os.wait4(self.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        self._usage = measure.Usage(wall, spent.ru_utime + spent.ru_stime, written)
        self._reader.join(timeout=_STOP_GRACE_S)
        if self._child.stdout is not None and not self._reader.is_alive():
            self._child.stdout.close()
        os.close(self._pidfd)
        self._pidfd = -1
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()

    def check(self, *, timeout: float) -> Self:
        """Wait for exit status 0.

        Raises:
            ProcessError: It ended with another status, or not at all.
        """
        if self.wait(timeout=timeout) != 0:
            raise ProcessError(self.describe("failed"))
        return self

    @property
    def usage(self) -> measure.Usage:
        """The bill of the ended process."""
        if self._usage is None:
            raise ProcessError(self.describe("has not ended, so it has no bill yet"))
        return self._usage

    def say(self, line: str) -> None:
        """Write one line to the process's stdin (it must have been started with one)."""
        if self._child.stdin is None:
            raise ProcessError(self.describe("was started without stdin"))
        self._child.stdin.write(line.encode() + b"\n")
        self._child.stdin.flush()

    def kill(self) -> None:
        """End the process and its descendants at once (SIGKILL), as a crash would."""
        if self._child.returncode is None:
            with contextlib.ExitStack() as cleanup:
                _end(_handles(self.pid, cleanup))
                self.wait(timeout=_STOP_GRACE_S)

    def stop(self, *, grace: float = _STOP_GRACE_S) -> bool:
        """Ask the process to end (SIGTERM) and see to it; descendants it leaves are killed.

        Returns:
            True if it went by itself within `grace` seconds, False if it had to be killed.
        """
        if self._child.returncode is not None:
            return True
        with contextlib.ExitStack() as cleanup:
            handles = _handles(self.pid, cleanup)
            _send(self._pidfd, signal.SIGTERM)
            obeyed = self.watch_exit(grace)
            _end(handles)
            self.wait(timeout=_STOP_GRACE_S)
        return obeyed

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM) and return at once."""
        if self._pidfd >= 0:
            _send(self._pidfd, signal.SIGTERM)

    def send(self, *, stop: bool) -> None:
        """Stop the process where it stands (SIGSTOP), or let it go on (SIGCONT)."""
        if self._pidfd >= 0:
            _send(self._pidfd, signal.SIGSTOP if stop else signal.SIGCONT)

    def stderr_tail(self) -> str:
        """Return the end of what the process wrote to stderr."""
        data = self.log.read_bytes()[-_STDERR_TAIL_BYTES:]
        return data.decode("utf-8", "replace").strip()

    def describe(self, what: str) -> str:
        """Return a failure message: who, what, exit status, last events, stderr tail."""
        status = self._child.returncode
        state = "running" if status is None else f"exit status {status}"
        said = json.dumps(self.events()[-3:])
        return (
            f"{self.name} (pid {self.pid}, {state}) {what}\n"
            f"  command: {' '.join(self.argv)}\n  last events: {said}\n"
            f"  last lines: {self.lines[-3:]}\n  stderr: {self.stderr_tail() or '(empty)'}"
        )


def _handles(pid: int, cleanup: contextlib.ExitStack) -> list[int]:
    """Return pidfds of a process tree, root first: they cannot come to mean another process."""
    handles = []
    for member in measure.tree(pid):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(member)
            cleanup.callback(os.close, handle)
            handles.append(handle)
    return handles


def _send(handle: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def _end(handles: Sequence[int]) -> None:
    """Kill the processes, the root first so that it starts no new ones, and see them gone."""
    for handle in handles:
        _send(handle, signal.SIGKILL)
    for handle in handles:
        select.select([handle], [], [], _STOP_GRACE_S)


def _event_of(text: str) -> Event | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Processes:
    """Starts processes and ends exactly those, newest first, whatever happens.

    Attributes:
        stubborn: Names of processes that ignored SIGTERM and had to be killed.
    """

    def __init__(self, logs: Path, *, env: Mapping[str, str] | None = None) -> None:
        """Keep stderr files in `logs`; `env` is the environment of every process."""
        self.logs = logs
        self.stubborn: list[str] = []
        self._env = env
        self._started: list[Process] = []

    def __enter__(self) -> Self:
        """Return the group itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process that is still running."""
        self.stop_all()

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        name: str,
        cwd: Path | None = None,
        stdin: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a process that lives until it ends or the group is closed.

        `env` replaces the group's environment for this one.
        """
        log = self.logs / f"{len(self._started):03d}-{name}.stderr"
        with _termination.undisturbed():
            process = Process(argv, name=name, log=log, env=env or self._env, cwd=cwd, stdin=stdin)
            self._started.append(process)
        return process

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        name: str,
        timeout: float,
        cwd: Path | None = None,
    ) -> Process:
        """Run a command to its successful end.

        Raises:
            ProcessError: It failed or did not end in time.
        """
        return self.start(argv, name=name, cwd=cwd).check(timeout=timeout)

    @property
    def started(self) -> Sequence[Process]:
        """Every process of the group so far, ended ones too."""
        return tuple(self._started)

    def stop_all(self) -> None:
        """End every process that is still running, newest first."""
        with _termination.undisturbed():
            for process in reversed(self._started):
                if not process.stop():
                    self.stubborn.append(process.name)


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(process: Process, port: int, *, timeout: float) -> None:
    """Wait until something accepts connections on a loopback port.

    For programs that announce nothing on stdout (nginx, `python -m http.server`): connecting
    is the only event they offer, so this retries, watching the process's exit in between.

    Raises:
        ProcessError: `process` ended, or nothing listened for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not process.alive():
            raise ProcessError(process.describe(f"ended before it listened on port {port}"))
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            process.watch_exit(0.02)
            continue
        return
    raise ProcessError(process.describe(f"did not listen on port {port} within {timeout:g} s"))

"""Starting the process that is to take this relay's place: the same command, as it is on disk now."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from relay.handover import START_S

log = logging.getLogger("relay.successor")

TAKE_OVER: Final = "SHARDCAST_RELAY_TAKE_OVER"
"""What says ``--take-over`` to the command (every option may come from the environment)."""
_NOT_PASSED_ON: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_INIT: Final = 1


def command_of(original: Sequence[str], executable: str) -> list[str]:
    """Return the command line that started a process, with the interpreter that runs it. Pure."""
    return [executable, *original[1:]]


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a successor. Pure."""
    kept = {name: value for name, value in environment.items() if name not in _NOT_PASSED_ON}
    return kept | {TAKE_OVER: "1"}


class Successors:
    """Starts one successor at a time and says what became of it. Used on the event loop.

    Args:
        loop: The event loop.
        may_start: Returns why none may be started now, or None.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, may_start: Callable[[], str | None]
    ) -> None:
        self._loop = loop
        self._may_start = may_start
        self._pid: int | None = None
        self._pidfd = -1
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start a successor, or log why not."""
        problem = self._may_start()
        if os.getpid() == _INIT:
            problem = (
                "this relay is process 1, and the machine or container ends with it: "
                "start another container beside it instead"
            )
        if self._pid is not None:
            problem = f"process {self._pid} is going to take over already"
        if problem is not None:
            log.error("no successor is started: %s", problem)
            return
        command = command_of(sys.orig_argv, sys.executable)
        try:
            self._pid = os.posix_spawn(command[0], command, environment_of(os.environ))
            self._pidfd = os.pidfd_open(self._pid)
        except OSError as error:
            log.error("no successor is started: %s: %s", command[0], error)
            self._pid = None
            return
        log.info("started process %d to take over: %s", self._pid, " ".join(command[1:]))
        self._loop.add_reader(self._pidfd, self._ended)
        self._deadline = self._loop.call_later(START_S, self._too_late)

    def forget(self) -> None:
        """Look after it no more: it has taken over, or this relay ends."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._pid = None

    def _ended(self) -> None:
        assert self._pid is not None
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            log.error(
                "process %d ended (%s) before it took over: this relay goes on; what it printed "
                "says why",
                pid,
                how,
            )
        self.forget()

    def _too_late(self) -> None:
        log.error("process %d was not ready within %.0f s: it is ended", self._pid, START_S)
        self._deadline = None
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

"""The update hook: a command that is run after each commit, bounded in time and output."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from shardcast.cancel import Cancel
from shardcast.errors import EngineError

OUTPUT_BYTES: Final = 16 * 1024
"""How much of the end of a hook's output is kept: a traceback and what led to it."""

GRACE_S: Final = 5.0
"""From SIGTERM to SIGKILL, for a hook that runs too long."""

_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class UpdateHook:
    """A shell command to run after each commit.

    Attributes:
        command: Given to ``/bin/sh -c``.
        timeout_s: It is ended after so long; None lets it run.
    """

    command: str
    timeout_s: float | None = 3600.0

    def run(self, variables: Mapping[str, str], cancel: Cancel) -> str:
        """Run the command and wait for it. Where it is ended early, its process group is too.

        Args:
            variables: Added to the environment.
            cancel: Ends it early.

        Returns:
            The last part of what it wrote to stdout and stderr.

        Raises:
            EngineError: If it cannot be started, fails or takes too long. Names the exit status
                and quotes the end of the output.
        """
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self.command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"update hook cannot be started: {error}") from error
        with process:
            try:
                output = self._wait(process, cancel)
            finally:
                _end(process)
        if process.returncode:
            raise EngineError(
                f"update hook {_status(process.returncode)}: {self.command!r}{_quoted(output)}"
            )
        return output

    def _wait(self, process: subprocess.Popen[bytes], cancel: Cancel) -> str:
        assert process.stdout is not None
        kept = bytearray()
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            os.set_blocking(process.stdout.fileno(), False)
            selector.register(process.stdout, selectors.EVENT_READ)
            while process.poll() is None or selector.select(0):
                if cancel.cancelled:
                    raise EngineError("update hook was ended because the worker ends")
                if deadline is not None and time.monotonic() > deadline:
                    raise EngineError(
                        f"update hook took more than {self.timeout_s:g} s and was ended: "
                        f"{self.command!r}{_quoted(_text(kept))}"
                    )
                if not selector.get_map():
                    cancel.wait(_POLL_S / 10)
                elif selector.select(_POLL_S):
                    piece = process.stdout.read(OUTPUT_BYTES)
                    if piece:
                        kept += piece
                        del kept[:-OUTPUT_BYTES]
                    else:
                        selector.unregister(process.stdout)
        return _text(kept)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of a hook that still runs."""
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _status(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by signal {-returncode}"
    return f"exited with status {returncode}"


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace").strip()


def _quoted(output: str) -> str:
    return f": {output[-500:]}" if output else ""

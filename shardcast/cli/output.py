"""What a command says: lines for people, or one JSON object per line for programs.

Results go to stdout; notices, progress and errors go to stderr. With ``--json`` stdout carries
events and nothing else (docs/PROTOCOL.md, "Events").
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO

from shardcast.errors import DiskError, ShardcastError

EVENT_MEMBERS: Final = ("run", "version", "step", "manifest", "path", "bytes_fetched")
"""Members that every event about a version has; null where it says nothing about one."""

_CONTROL: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
"""What others wrote (a relay, a publisher, a file's name) must not steer the terminal."""


def unix_ms() -> int:
    """Return this machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass
class Output:
    """Where a command's words go.

    Attributes:
        command: The command's name.
        run: The run that the command is about, for error events.
        json: Events on stdout instead of lines for people.
        verbose: Say more; show the trace of an unexpected failure.
        quiet: Neither progress nor notices.
        clock: Unix milliseconds.
    """

    command: str = ""
    run: str | None = None
    json: bool = False
    verbose: bool = False
    quiet: bool = False
    clock: Callable[[], int] = unix_ms
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def terminal(self) -> bool:
        """Whether progress may be drawn: stderr is a terminal and nobody asked for silence."""
        return not self.quiet and not self.json and is_terminal(sys.stderr)

    def event(self, name: str, **members: object) -> None:
        """Print an event as one JSON line on stdout, with ``--json`` only."""
        if self.json:
            self.emit(name, **members)

    def version_event(self, name: str, **members: object) -> None:
        """Print an event about a version: all its members, null where unknown."""
        self.event(name, **{**dict.fromkeys(EVENT_MEMBERS), **members})

    def emit(self, name: str, **members: object) -> None:
        """Print an event whether or not ``--json`` was given."""
        line = json.dumps({"event": name, "t": self.clock()} | members)
        self._write(sys.stdout, line)

    def result(self, text: str = "") -> None:
        """Print a line of the result for people, on stdout."""
        if not self.json:
            self._write(sys.stdout, text)

    def notice(self, text: str) -> None:
        """Print a line beside the result, on stderr."""
        if not self.json and not self.quiet:
            self._write(sys.stderr, text)

    def warning(self, text: str) -> None:
        """Print what a person should look at, on stderr, also with ``--json`` and ``--quiet``."""
        self._write(sys.stderr, f"warning: {text}")

    def detail(self, text: str) -> None:
        """Print a line that only ``--verbose`` shows, on stderr."""
        if self.verbose:
            self._write(sys.stderr, text)

    def error(self, error: ShardcastError) -> None:
        """Report an error: one sentence on stderr, with ``--json`` an event as well."""
        with contextlib.suppress(DiskError, BrokenPipeError):  # the exit code says it too
            self.version_event(
                "error", run=self.run, code=error.code, message=error.message, source=error.source
            )
        self._write(sys.stderr, f"error: {error}")

    def _write(self, stream: TextIO | None, line: str) -> None:
        """Write a line.

        Raises:
            DiskError: If stdout cannot be written. What goes to stderr is lost then.
        """
        if stream is None:  # closed by whoever started us
            return
        encoding = stream.encoding or "utf-8"
        line = line.translate(_CONTROL).encode(encoding, "backslashreplace").decode(encoding)
        with self._lock:
            try:
                stream.write(line + "\n")
                stream.flush()
            except OSError as error:
                if stream is sys.stderr:
                    return
                if isinstance(error, BrokenPipeError):
                    raise
                raise DiskError(
                    f"writing failed: {error.strerror}", source="standard output"
                ) from error


def is_terminal(stream: TextIO | None) -> bool:
    """Say whether a stream is a terminal; a closed one is none."""
    return stream is not None and stream.isatty()


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, indent: str = "") -> str:
    """Return aligned columns; a column that holds only numbers is aligned to the right.

    Plain text on purpose: the same in a terminal, a pipe and a log, and never cut off.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max([len(head), *(len(row[column]) for row in cells)])
        for column, head in enumerate(headers)
    ]
    right = [
        bool(cells) and all(_numeric(row[column]) for row in cells)
        for column in range(len(headers))
    ]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in ([head.upper() for head in headers], *cells)
    ]
    return "\n".join(indent + line for line in lines)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _numeric(text: str) -> bool:
    return text == "-" or text[:1].isdigit()

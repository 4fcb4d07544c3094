"""Errors become one sentence, a hint and an exit code. Nothing else happens here."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Final

from shardcast.cli.output import Output
from shardcast.errors import DiskError, ShardcastError

EXIT_BUG: Final = 1
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE
EXIT_TERMINATED: Final = 143  # 128 + SIGTERM

HINTS: Final = {
    "busy": "another process works on the same directory; wait for it, or stop it",
    "clock": "check the time on this machine and on the publisher's (NTP)",
    "modified": "publish a copy that nobody writes to, or wait until it is written",
    "network": "is it running and reachable from here? `shardcast status URL` tells",
    "disk_full": "free some space, choose another directory, or keep fewer versions (--keep)",
    "state": "do what the message says, or begin in an empty directory",
}
"""What to do next, by the error's code."""

PULL_HINTS: Final = {
    "unknown_key": (
        "compare the key ids with the publisher's; after a rotation get the new public key from "
        "the publisher, never from a relay"
    ),
    "expired": "publish again, or take the old version on purpose with --accept-expired",
    "rollback": "the source serves an old head; try another one, or wait until it has caught up",
    "withdrawn": "leave --version out to get the newest version that may be run",
    "integrity": "the damaged bytes were not kept; fetch again, from another source if it persists",
    "stall": "a second --from gives it another source",
}
"""The same for those who pull."""


@contextlib.contextmanager
def guard(out: Output) -> Iterator[None]:
    """Report whatever ends the body by an error, and turn it into the exit code.

    SIGTERM ends the body as Ctrl-C does, so that it cleans up.

    Raises:
        SystemExit: With the exit code of DESIGN's table, 130 when interrupted, 143 when terminated,
            1 for a bug.
    """
    try:
        with _terminable():
            yield
    except ShardcastError as error:
        sys.exit(report(out, error))
    except KeyboardInterrupt as interrupt:
        sys.exit(_interrupted(out, interrupt))
    except BrokenPipeError:  # whoever read stdout has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
    except OSError as error:
        sys.exit(report(out, disk_error(error)))
    except BaseExceptionGroup as group:
        known = next((leaf for leaf in leaves(group) if isinstance(leaf, ShardcastError)), None)
        sys.exit(report(out, known) if known is not None else report_bug(out, group))
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # a class body that was interrupted
            sys.exit(_interrupted(out, error.__cause__))
        sys.exit(report_bug(out, error))


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise in the body; what handles the signal itself (an event loop) still may."""

    def terminate(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the cleaning up
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _interrupted(out: Output, interrupt: KeyboardInterrupt) -> int:
    if isinstance(interrupt, Terminated):
        out.warning("terminated")
        return EXIT_TERMINATED
    out.warning("interrupted")
    return EXIT_INTERRUPTED


def report(out: Output, error: ShardcastError) -> int:
    """Report an error that was raised on purpose; return its exit code."""
    out.error(error)
    hint = HINTS.get(error.code)
    if out.command in ("pull", "follow"):
        hint = PULL_HINTS.get(error.code, hint)
    if out.command == "status":
        hint = None  # it is what the hint would say
    if hint is not None:
        out.notice(f"hint: {hint}")
    if out.verbose:
        traceback.print_exception(error, limit=-6)
    return error.exit_code


def report_bug(out: Output, error: BaseException) -> int:
    """Report an error that nobody foresaw; return the exit code for it."""
    text = f"{type(error).__name__}: {error}"
    out.error(BugError(f"unexpected failure, a bug in shardcast: {text}"))
    if out.verbose:
        traceback.print_exception(error)
    else:
        out.notice("hint: run it again with --verbose for a trace, and report it")
    return EXIT_BUG


def disk_error(error: OSError) -> DiskError:
    """Return the named error for one of the operating system."""
    from shardcast.store import files

    return files.disk_error(error, str(error.filename or ""), "access")


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the exceptions in a group of groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


class BugError(ShardcastError):
    """Something that nobody foresaw."""

    code = "bug"

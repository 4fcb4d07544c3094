"""Runs the whole suite: `python -m tests [PYTEST OPTIONS]`.

Many tests wait for something that does not come, and need little of the machine meanwhile; others only
compute. So the suite runs in parts beside each other, each a pytest of its own with files of every kind;
what the later ones say follows what the first one says.

A machine that has too much to do may fail a test that waits for something with a bound. So what failed
runs once more when all parts have ended: alone, one test after the other. What passes then is named
and does not fail the suite: it is sensitive to load, or to what ran before it, and wants mending.
Where more than ``MOST_AGAIN`` tests failed something is broken, and nothing is tried again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

Part = Sequence[str]
"""What one pytest is told to run."""

ROOT: Final = Path("tests")
APART: Final = ("engine", "engine_sglang")
"""What needs an environment of its own: `make test-engine`, and docs/ENGINES.md for SGLang."""
PARTS: Final = 3
MOST_AGAIN: Final = 10

PASSED: Final = 0
FAILED: Final = 1
NOTHING_TO_RUN: Final = 5  # pytest.ExitCode


def parts() -> list[Part]:
    """The suite, dealt out file by file."""
    files = sorted(
        str(file)
        for file in ROOT.rglob("test_*.py")
        if not any(ROOT / name in file.parents for name in APART)
    )
    return [files[number::PARTS] for number in range(PARTS)]


def run(parts: Sequence[Part], options: Sequence[str]) -> int:
    """Run parts beside each other, then what failed once more; return pytest's exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        caches = [Path(scratch) / str(number) for number in range(len(parts))]
        commands = [
            command([*options, *part], cache) for part, cache in zip(parts, caches, strict=True)
        ]
        statuses = beside_each_other(commands)
        status = together(statuses)
        if status != FAILED:
            return status
        failed = [test for cache in caches for test in failed_tests(cache)]
        say(f"\nfailed: {len(failed)}")
        if len(failed) > MOST_AGAIN:
            say(f"more than {MOST_AGAIN}: not tried again")
        if not 1 <= len(failed) <= MOST_AGAIN:
            return FAILED
        return alone(failed, options, Path(scratch) / "again")


def command(arguments: Sequence[str], cache: Path) -> list[str]:
    """A pytest that leaves the names of what failed in a directory."""
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]


def failed_tests(cache: Path) -> list[str]:
    """The names of what failed, as pytest's ``--last-failed`` knows them."""
    try:
        names = json.loads((cache / "v" / "cache" / "lastfailed").read_text("utf-8"))
    except FileNotFoundError:
        return []
    return sorted(names)


def together(statuses: Iterable[int]) -> int:
    """One exit status for several; worse than a failed test is what kept pytest from running."""
    found = set(statuses)
    broken = found - {PASSED, FAILED, NOTHING_TO_RUN}
    if broken:
        return max(broken, key=abs)
    if FAILED in found:
        return FAILED
    return PASSED if PASSED in found else NOTHING_TO_RUN


def beside_each_other(commands: Sequence[Sequence[str]]) -> list[int]:
    """Run programs at once and return their exit statuses; the first one's output comes as it is."""
    with ExitStack() as stack:
        running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        stack.callback(end, running)
        for words in commands[1:]:
            output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
            running.append((process, output))
        statuses = [subprocess.call(commands[0])]
        for process, output in running:
            statuses.append(process.wait())
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    return statuses


def end(running: Iterable[tuple[subprocess.Popen[bytes], IO[bytes]]]) -> None:
    """End what still runs."""
    for process, _output in running:
        process.terminate()
        process.wait()


def alone(tests: Sequence[str], options: Sequence[str], cache: Path) -> int:
    """Run tests that failed once more, one after the other, and say which pass now."""
    say("once more, alone:")
    status = subprocess.call(command([*options, *tests], cache))
    again = failed_tests(cache)
    if status not in (PASSED, FAILED):
        return status
    for test in tests:
        if test in again:
            say(f"failed again: {test}")
        else:
            say(f"passed only alone: sensitive to load, or to what ran before it: {test}")
    return status


def say(text: str) -> None:
    """Print a line, in step with what other processes print."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(run(parts(), sys.argv[1:]))

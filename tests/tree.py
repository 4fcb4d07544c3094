"""Real trees for tests: small checkpoints, a tree that always ends, byte equality of directories.

Processes and topology come from `loadtest`, which needs the same; this adds what only tests use.
"""

import filecmp
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.checkpoints import MiB, write_checkpoint
from loadtest.processes import Process, ProcessError, Processes
from loadtest.topology import Published, Relay, Tree, Worker, last, wait_all

__all__ = [
    "MiB",
    "Process",
    "ProcessError",
    "Processes",
    "Published",
    "Relay",
    "Tree",
    "Worker",
    "assert_same_files",
    "contents_of",
    "files_of",
    "last",
    "need",
    "shard_bytes_of",
    "small_checkpoint",
    "tree",
    "wait_all",
]


@contextmanager
def tree(root: Path, *, run: str = "policy", durability: str = "none") -> Iterator[Tree]:
    """A tree whose processes all end by themselves when told to, or the test fails."""
    with Tree(root, run=run, durability=durability) as made:
        yield made
    assert not made.processes.stubborn, f"ignored SIGTERM: {made.processes.stubborn}"


def small_checkpoint(
    directory: Path, *, size: int = 8 * MiB, files: int = 3, seed: int = 0
) -> Path:
    """Writes a checkpoint with several weight files, a subfolder and an empty file."""
    write_checkpoint(directory, size, weight_files=files, seed=seed)
    extra = directory / "1_Pooling"
    extra.mkdir(exist_ok=True)
    (extra / "config.json").write_text('{"pooling_mode_mean_tokens": true}\n')
    (directory / "added_tokens.json").write_bytes(b"")
    return directory


def contents_of(directory: Path) -> dict[str, bytes]:
    """Relative path to bytes of every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def files_of(directory: Path) -> list[str]:
    """Relative paths of every file below a directory, sorted."""
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def assert_same_files(source: Path, copy: Path) -> None:
    """Same relative paths, same bytes."""
    names = files_of(source)
    assert files_of(copy) == names
    _same, different, errors = filecmp.cmpfiles(source, copy, names, shallow=False)
    assert (different, errors) == ([], [])


def shard_bytes_of(total: int) -> int:
    """The shard size that docs/PROTOCOL.md gives a first version of `total` bytes."""
    size = 256 * 1024
    while size * 2 <= total / 64 and size < 16 * MiB:
        size *= 2
    return size


def need(programs: Sequence[str]) -> None:
    """Skips a test where a program is missing, and fails it there if this is CI."""
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    message = f"not installed: {', '.join(missing)} (Debian: apt-get install {' '.join(missing)})"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)

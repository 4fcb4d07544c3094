"""Temporary files: locked while somebody writes them, so that those of the dead are found at once.

A process that is killed leaves its temporary files behind, and nobody may wait an hour with removing
them, nor remove one that a slow client still fills. Age decides neither (a clock may be
wrong), nor does a process id in the name (another container counts its own). A lock does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

SETTLE_S: Final = 5.0
"""Between being made and being locked, and between being closed and getting its final name, a file
is not locked: instants, but a process may be stopped there."""


def create_temporary(path: Path, mode: int = 0o644) -> int:
    """Create a file and return its descriptor; while that is open the file is not abandoned.

    Raises:
        OSError: If it exists, or the system refuses.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with contextlib.suppress(OSError):  # where nothing can be locked nothing is taken for abandoned
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def remove_abandoned(directory: Path, chosen: Callable[[str], bool]) -> None:
    """Remove the files of a directory that ``chosen`` picks by name and nobody writes any more.

    What the system refuses stays for the next time.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if chosen(name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(directory / name)


def is_hidden_temporary(name: str) -> bool:
    """Say whether ``files.temporary_beside`` makes such names."""
    return name.startswith(".") and name.endswith(".tmp")


def _remove_if_abandoned(path: Path) -> None:
    """Unlink a file.

    Raises:
        OSError: If somebody has it locked, or it cannot be removed.
    """
    if abs(time.time() - os.lstat(path).st_mtime) < SETTLE_S:
        return
    if path.is_symlink():
        path.unlink()
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(fd)

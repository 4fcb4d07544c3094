"""Advisory locks between processes: flock(2), released by the kernel when a process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shardcast.errors import BusyError
from shardcast.store.files import disk_errors

_POLL_SECONDS: Final = 0.05


class FileLock:
    """An exclusive lock on a file that is left in place, with its holder's pid inside.

    Use as a context manager (does not wait), or call ``acquire``.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        self._path = path
        self._what = what
        self._fd: int | None = None

    @property
    def what(self) -> str:
        """What it guards, for messages."""
        return self._what

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    @property
    def holder(self) -> str:
        """Who wrote its name into the file last: ``process 4711``, for messages."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return self._holder(fd)
            finally:
                os.close(fd)
        return "another process"

    def try_acquire(self) -> bool:
        """Take the lock if nobody else holds it; say whether this object holds it now.

        Raises:
            DiskError: If the lock file cannot be made.
        """
        if self._fd is None:
            with contextlib.suppress(BusyError):
                self.acquire()
        return self.held

    def acquire(self, *, wait_s: float = 0.0) -> None:
        """Take the lock, waiting at most ``wait_s`` seconds.

        Raises:
            BusyError: If another process holds it for longer; names that process.
            DiskError: If the lock file cannot be made.
        """
        if self._fd is not None:
            raise BusyError(f"{self._what} is already locked by this object")
        with disk_errors(self._path, "locking"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _lock_within(fd, wait_s, exclusive=True):
                raise BusyError(
                    f"{self._what} is in use by {self._holder(fd)}", source=str(self._path)
                )
            with contextlib.suppress(OSError):  # the pid is a help for people, not the lock
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _holder(self, fd: int) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f"process {int(os.pread(fd, 32, 0))}"
        return "another process"

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class DirectoryLock:
    """A lock on a directory: shared by those who need what lies in it, exclusive for who removes it.

    Args:
        directory: It must be there.
        exclusive: Whether nobody else may hold it.
        what: What it guards, for messages.
    """

    def __init__(self, directory: Path, *, exclusive: bool, what: str) -> None:
        self._directory = directory
        self._exclusive = exclusive
        self._what = what
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def acquire(self, *, wait_s: float = 0.0) -> None:
        """Take the lock, waiting at most ``wait_s`` seconds.

        Raises:
            BusyError: If others hold it for longer.
            DiskError: If the directory cannot be opened.
        """
        with disk_errors(self._directory, "locking"):
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not _lock_within(fd, wait_s, exclusive=self._exclusive):
                raise BusyError(f"{self._what} at the moment", source=str(self._directory))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock_within(fd: int, wait_s: float, *, exclusive: bool) -> bool:
    """Take a flock; False if others hold a conflicting one for longer than that."""
    deadline = time.monotonic() + wait_s
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take a flock without waiting; False if another open description holds a conflicting one."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def shared_lock(directory: Path) -> Iterator[None]:
    """Hold a shared lock on a version's directory while it is read from outside the store.

    Eviction takes the lock exclusively, so the version stays while any reader holds it.

    Raises:
        BusyError: If the version is being evicted at this moment.
        DiskError: If the directory is not there.
    """
    with disk_errors(directory, "opening"):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(fd, exclusive=False):
            raise BusyError("the version is being evicted", source=str(directory))
        yield
    finally:
        os.close(fd)

"""Descriptors that are open while they are used, and a bounded number of them after that.

A store may hold thousands of versions, each with a directory that is looked into again and again,
and a process may have only 256 descriptors. So those of directories and journals are opened when
they are needed and the least recently used ones closed, unless somebody is using them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

_LEAST: Final = 8
_MOST: Final = 512
_SHARE: Final = 8
"""One in so many of a process's descriptors lies here unused."""
OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


def affordable() -> int:
    """Return how many descriptors may lie open unused, by the process's limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, soft // _SHARE))


def raise_limit() -> None:
    """Take all descriptors that the system grants this process without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class DescriptorPool:
    """Keeps descriptors that nobody uses at the moment open, the latest ones. Thread-safe."""

    def __init__(self, most: Callable[[], int] = affordable) -> None:
        self.lock = threading.Lock()
        self._most = most
        self._idle: OrderedDict[int, PooledDescriptor] = OrderedDict()

    @property
    def idle(self) -> int:
        """How many are open and not in use."""
        return len(self._idle)

    def take(self, descriptor: PooledDescriptor) -> None:
        """Note that it is in use. With the lock held."""
        self._idle.pop(id(descriptor), None)

    def give_back(self, descriptor: PooledDescriptor) -> None:
        """Note that nobody uses it; close the oldest ones over the limit. With the lock held."""
        self._idle[id(descriptor)] = descriptor
        most = self._most()
        while len(self._idle) > most:
            self._idle.popitem(last=False)[1].drop()

    def shed(self) -> None:
        """Close all that nobody uses. With the lock held."""
        while self._idle:
            self._idle.popitem(last=False)[1].drop()


SHARED: Final = DescriptorPool()
"""The process's own: its limit is one for the whole process."""


class PooledDescriptor:
    """A descriptor that is opened when it is used. Thread-safe.

    Attributes:
        opened: How often it was opened.
    """

    def __init__(self, opener: Callable[[], int], pool: DescriptorPool = SHARED) -> None:
        """Open nothing yet.

        Args:
            opener: Opens and returns a new descriptor, or raises ``OSError``.
            pool: Where it lies while nobody uses it.
        """
        self.opened = 0
        self._opener = opener
        self._pool = pool
        self._fd = -1
        self._users = 0
        self._closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Give the descriptor, which stays open while the block runs.

        Raises:
            OSError: If it cannot be opened (again), or was closed for good.
        """
        fd = self.acquire()
        try:
            yield fd
        finally:
            self.release()

    def acquire(self) -> int:
        """Return the descriptor; it stays open until ``release`` was called as often.

        Raises:
            OSError: If it cannot be opened (again), or was closed for good.
        """
        with self._pool.lock:
            if self._closed:
                raise OSError(errno.EBADF, "closed already")
            if self._fd < 0:
                self._fd = self._open()
                self.opened += 1
            self._pool.take(self)
            self._users += 1
            return self._fd

    def release(self) -> None:
        """Stop using it."""
        with self._pool.lock:
            self._users -= 1
            if self._users == 0 and self._fd >= 0:
                if self._closed:
                    self.drop()
                else:
                    self._pool.give_back(self)

    def close(self) -> None:
        """Close it for good, as soon as nobody uses it."""
        with self._pool.lock:
            self._closed = True
            if self._users == 0:
                self._pool.take(self)
                self.drop()

    def let_go(self) -> None:
        """Close it unless somebody uses it; the next use opens it again."""
        with self._pool.lock:
            if self._users == 0:
                self._pool.take(self)
                self.drop()

    def drop(self) -> None:
        """Close the descriptor itself. For the pool, with its lock held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        try:
            return self._opener()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
        self._pool.shed()
        return self._opener()

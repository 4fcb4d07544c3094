"""A disk that refuses: the k-th call of the system's file operations fails, with a chosen errno.

The narrowest place that every write of the product passes is the ``os`` module. ``refusing``
replaces its functions for the time of a block and counts their calls, so that a test can let each
call of an operation fail in turn, until there is none left.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

_FULL: Final = (
    "create",
    "pwrite",
    "write",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "link",
    "symlink",
)
KINDS: Final[dict[int, frozenset[str]]] = {
    errno.ENOSPC: frozenset({*_FULL, "ftruncate", "posix_fallocate"}),
    errno.EDQUOT: frozenset({*_FULL, "ftruncate", "posix_fallocate"}),
    errno.EROFS: frozenset(
        {"create", "open", "mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir"}
    ),
    errno.EIO: frozenset(
        {*_FULL, "open", "read", "preadv", "pread", "ftruncate", "posix_fallocate", "unlink"}
        | {"listdir", "stat"}
    ),
}
"""Which operations fail in which way: a full disk still reads, renames within it may need a block."""
LASTING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""These stay until somebody makes room; an I/O error may hit once."""

_PATCHED: Final = (
    "pwrite",
    "write",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "link",
    "symlink",
    "ftruncate",
    "posix_fallocate",
    "unlink",
    "rmdir",
    "read",
    "pread",
    "preadv",
    "listdir",
    "stat",
)
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Refusals:
    """Counts operations, and refuses from the ``first`` on (0: never)."""

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = first
        self.count = 0
        self.refused: list[str] = []
        self._lock = threading.Lock()
        self._halved = False

    def refuses(self, kind: str, what: object) -> bool:
        """Count one operation; say whether it must fail."""
        if kind not in KINDS[self.number]:
            return False
        with self._lock:
            self.count += 1
            now = self.count >= self.first if self.number in LASTING else self.count == self.first
            if not self.first or not now:
                return False
            self.refused.append(f"{kind} {what}")
            return True

    def error(self, what: object) -> OSError:
        """What the system says."""
        name = what if isinstance(what, str | bytes | os.PathLike) else None
        return OSError(self.number, os.strerror(self.number), name)

    def halve(self) -> bool:
        """Whether a write puts half of its bytes there before the disk is full: once."""
        with self._lock:
            halved, self._halved = self._halved, True
        return self.number in (errno.ENOSPC, errno.EDQUOT) and not halved


def _patch(refusals: Refusals, name: str) -> Callable[..., Any]:
    original = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        what = args[-1] if name in ("symlink", "link", "rename", "replace") else args[0]
        if refusals.refuses(name, what):
            if name == "pwrite" and refusals.halve():
                return original(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)], args[2])
            raise refusals.error(what)
        return original(*args, **options)

    return call


def _patch_open(refusals: Refusals) -> Callable[..., int]:
    original = os.open

    def call(path: Any, flags: int, *args: Any, **options: Any) -> int:
        kind = "create" if flags & os.O_CREAT else "open" if flags & _WRITING else "read"
        if refusals.refuses(kind, path):
            raise refusals.error(path)
        return original(path, flags, *args, **options)

    return call


@contextmanager
def refusing(number: int, first: int = 0) -> Iterator[Refusals]:
    """Let file operations fail from the ``first`` on (an I/O error: only that one) with ``number``."""
    refusals = Refusals(number, first)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(os, "open", _patch_open(refusals)))
        for name in _PATCHED:
            patches.enter_context(mock.patch.object(os, name, _patch(refusals, name)))
        yield refusals

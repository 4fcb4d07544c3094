"""A version's directory under the shared lock that keeps it from being evicted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardcast.errors import BusyError, NotFoundError
from shardcast.store.files import disk_errors
from shardcast.store.locks import try_lock


def leased(directory: Path) -> int:
    """Open a directory under a shared lock, which eviction respects; return the descriptor.

    Raises:
        NotFoundError: If it is not there, or was just evicted.
        BusyError: If it is being evicted.
        DiskError: If the system refuses.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            "there is no such version directory: it was evicted, or never was there",
            source=str(directory),
        ) from error
    except OSError as error:
        with disk_errors(directory, "opening"):
            raise error
    try:
        here = os.fstat(fd)
        if not try_lock(fd, exclusive=False):
            raise BusyError("the version is being evicted", source=str(directory))
        with contextlib.suppress(OSError):
            named = os.stat(directory)
            if (named.st_dev, named.st_ino) == (here.st_dev, here.st_ino):
                return fd
        raise NotFoundError("the version was just evicted", source=str(directory))
    except BaseException:
        os.close(fd)
        raise

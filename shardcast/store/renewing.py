"""Files of a committed version that are repaired get new ones in their place.

Engines have a committed version's files open or mapped and check nothing any more. So no byte of those
files is ever written to: a copy takes the name, with the size that it should have, and what is wrong
in it is then overwritten by right bytes. Whoever had the old file keeps what it read; whoever opens the new
one sees each byte right, or as wrong as before.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shardcast.cancel import Cancel
from shardcast.errors import DiskError
from shardcast.protocol.layout import FileEntry
from shardcast.store.abandoned import create_temporary
from shardcast.store.files import (
    COPY_CHUNK_BYTES,
    MEMORY_FILE_SYSTEMS,
    disk_errors,
    file_system_of,
    fsync_directory,
    preallocate,
    read_into,
    reflink,
    require_space,
    write_all,
)

UNREADABLE: Final = frozenset(
    {
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.EISDIR,
        errno.ENXIO,
        errno.EBADMSG,
        errno.EUCLEAN,
    }
)
"""Errors that are about a file, not about this process: its bytes cannot be had from it."""
_LOOK_S: Final = 0.2
_PAGE_BYTES: Final = 4096


class Turns:
    """One thread at a time writes a version's files, and one those of committed versions."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers: set[int] = set()
        self._committed = False

    @contextmanager
    def mine(self, number: int, cancel: Cancel, *, committed: bool) -> Iterator[None]:
        """Wait for a turn, and have it while the block runs.

        Args:
            number: The version that is written to.
            cancel: Ends the waiting.
            committed: Whether files of committed versions are.

        Raises:
            TransferCancelledError: If it was cancelled meanwhile.
        """
        with self._changed:
            while number in self._numbers or (committed and self._committed):
                self._changed.wait(_LOOK_S)
                cancel.check()
            self._numbers.add(number)
            self._committed |= committed
        try:
            yield
        finally:
            with self._changed:
                self._numbers.remove(number)
                self._committed &= not committed
                self._changed.notify_all()


def is_unreadable(error: DiskError) -> bool:
    """Say whether the system will not give a file's bytes, to anybody as this process is."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in UNREADABLE


def is_missing(error: DiskError) -> bool:
    """Say whether the file is not there."""
    return isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)


def has_other_size(directory: Path, entry: FileEntry) -> bool:
    """Say whether a file is there, and has another size than it should.

    Raises:
        DiskError: If the system does not say.
    """
    path = directory / entry.path
    with disk_errors(path, "looking at"):
        try:
            found = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return stat.S_ISREG(found.st_mode) and found.st_size != entry.bytes


def renew(path: Path, entry: FileEntry, aside: Path) -> None:
    """Put a copy of a file in its place, durably and at once; what cannot be read of it is zeros.

    Args:
        path: The file; harmless if it is not there.
        entry: What it should be.
        aside: An unused name on the same file system.

    Raises:
        DiskFullError: If there is no room for both; the file is as it was.
        DiskError: If the system refuses otherwise; the file is as it was.
    """
    with disk_errors(path, "replacing"):
        try:
            source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return  # nobody finds it there: it is made
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            source = -1
        try:
            target = create_temporary(aside)
            try:
                _fill(source, target, entry, path)
                os.fsync(target)
                os.replace(aside, path)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
            finally:
                os.close(target)
        finally:
            if source >= 0:
                os.close(source)
        fsync_directory(path.parent)


def _fill(source: int, target: int, entry: FileEntry, path: Path) -> None:
    if source >= 0 and _cloned(source, target):
        os.ftruncate(target, entry.bytes)
        return
    require_space(path.parent, entry.bytes, what=f"repairing {path.name}")
    reserve = file_system_of(path.parent) not in MEMORY_FILE_SYSTEMS
    preallocate(target, entry.bytes, reserve=reserve)
    length = 0 if source < 0 else min(os.fstat(source).st_size, entry.bytes)
    buffer = memoryview(bytearray(COPY_CHUNK_BYTES))
    for start in range(0, length, COPY_CHUNK_BYTES):
        piece = buffer[: min(COPY_CHUNK_BYTES, length - start)]
        if not _copy(source, target, piece, start):
            for at in range(0, len(piece), _PAGE_BYTES):  # all around what cannot be read
                _copy(source, target, piece[at : at + _PAGE_BYTES], start + at)


def _copy(source: int, target: int, piece: memoryview, start: int) -> bool:
    """Copy bytes, as many as there are; False where they cannot be read."""
    try:
        got = read_into(source, piece, start)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return False
    write_all(target, piece[:got], start)
    return True


def _cloned(source: int, target: int) -> bool:
    try:
        return reflink(source, target)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return False

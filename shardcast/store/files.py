"""The few file operations everything on disk is made of, with the system's errors translated."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from shardcast.errors import DiskError, DiskFullError
from shardcast.store.abandoned import create_temporary

COPY_CHUNK_BYTES: Final = 1 << 20
"""Fits the second-level cache, so that hashing and writing find the bytes where reading left them."""

_FICLONE: Final = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
_NO_REFLINK: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}
)
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_unique = itertools.count()

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})
"""Their files are memory: reserving blocks touches every page once more, reading never waits."""


def disk_error(error: OSError, path: Path | str, doing: str) -> DiskError:
    """Return what the command line reports for an ``OSError`` on ``path``."""
    kind = DiskFullError if error.errno in FULL else DiskError
    return kind(f"{doing} failed: {error.strerror or error}", source=str(path))


@contextlib.contextmanager
def disk_errors(path: Path | str, doing: str) -> Iterator[None]:
    """Translate ``OSError`` inside the block.

    Raises:
        DiskFullError: Where the disk or a quota is full.
        DiskError: For every other error of the system.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, doing) from error


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_beside(path: Path) -> Path:
    """Return an unused hidden name in the directory of ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_unique)}.tmp")


def atomic_write(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: readers see the old bytes or the new ones.

    A crash leaves the old file, and perhaps a hidden ``.tmp`` beside it, which
    ``abandoned.remove_abandoned`` finds.

    Raises:
        DiskError: If the system refuses.
    """
    temporary = temporary_beside(path)
    with disk_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = create_temporary(temporary, mode)
            try:
                write_all(fd, memoryview(data), 0)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if sync:
            fsync_directory(path.parent)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset`` (``pwrite`` may write less)."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset`` on; return how much there was before the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def reflink(source: int, target: int) -> bool:
    """Make ``target`` share the blocks of ``source`` (FICLONE); False where that is not possible.

    Raises:
        OSError: For an error other than "this cannot be cloned here".
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NO_REFLINK:
            return False
        raise
    return True


def is_there(path: Path, kind: Callable[[int], bool]) -> bool:
    """Say whether there is something of a kind under a name.

    Raises:
        DiskError: If the system does not say.
    """
    with disk_errors(path, "looking at"):
        try:
            return kind(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none where it is not there.

    Raises:
        DiskError: If the system does not say.
    """
    with disk_errors(directory, "listing"):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds ``path`` (``tmpfs``, ``ext4``), or ``""``."""
    return file_system_of_device(os.stat(path).st_dev)


def file_system_of_device(device: int) -> str:
    """Return the type of the file system with that ``st_dev``, or ``""`` where nobody tells."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = line.split(" ")
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return ""


def preallocate(fd: int, length: int, *, reserve: bool) -> None:
    """Give a new file its size; with ``reserve`` also its blocks, so that ENOSPC comes now."""
    os.ftruncate(fd, length)
    if reserve and length and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def require_space(directory: Path, needed: int, *, what: str) -> None:
    """Check that ``needed`` bytes are free where ``directory`` lies.

    Raises:
        DiskFullError: Naming what needs how much and how much there is.
    """
    with disk_errors(directory, "looking for free space"):
        stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise DiskFullError(
            f"{what} needs {needed} bytes and {free} are free", source=str(directory)
        )


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it; what is gone already is fine."""
    shutil.rmtree(path, ignore_errors=True)

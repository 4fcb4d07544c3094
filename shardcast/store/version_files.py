"""The files of one version: made at their full size, made whole again, copied out of a hard link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardcast.errors import ModifiedError
from shardcast.protocol.layout import FileEntry
from shardcast.protocol.manifest import Version
from shardcast.store.files import (
    COPY_CHUNK_BYTES,
    MEMORY_FILE_SYSTEMS,
    disk_error,
    disk_errors,
    file_system_of,
    preallocate,
    read_into,
    reflink,
    require_space,
    temporary_beside,
    write_all,
)


def make_files(version: Version, directory: Path) -> None:
    """Create a version's files at their full size.

    Files that fit are left as they are. One of another size (a power cut, an editor) gets its
    size back and keeps what it has: the bytes in it are good or not by their hashes.

    Raises:
        DiskFullError: If there is no room for them; what was made stays for a later try.
        DiskError: If the system refuses otherwise.
    """
    with disk_errors(directory, "staging"):
        directory.mkdir(parents=True, exist_ok=True)
        reserve = file_system_of(directory) not in MEMORY_FILE_SYSTEMS
    lacking = []
    needed = 0
    for entry in version.layout.files:
        size = _size_of(directory / entry.path)
        if size != entry.bytes:
            lacking.append(entry)
            needed += max(0, entry.bytes - max(size, 0))
    require_space(directory, needed, what=f"version {version.number} of run {version.layout.run!r}")
    for entry in lacking:
        path = directory / entry.path
        try:
            _make_file(path, entry, reserve=reserve)
        except OSError as error:
            raise disk_error(error, path, "staging") from error


def _size_of(path: Path) -> int:
    """Return a regular file's size, -1 where there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except OSError as error:
        raise disk_error(error, path, "looking at") from error
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _make_file(path: Path, entry: FileEntry, *, reserve: bool) -> None:
    if _size_of(path) < 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    else:
        unshare(path)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o644)
    try:
        preallocate(fd, entry.bytes, reserve=reserve)
    finally:
        os.close(fd)


def unshare(path: Path) -> None:
    """Make a hard-linked file one of its own, so that writing to it changes no other.

    Raises:
        OSError: If the system refuses; the link is as it was then.
    """
    found = os.stat(path, follow_symlinks=False)
    if found.st_nlink == 1:
        return
    temporary = temporary_beside(path)
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            try:
                copy_bytes(source, target, found.st_size)
            finally:
                os.close(target)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    finally:
        os.close(source)


def copy_bytes(source: int, target: int, length: int) -> None:
    """Copy a file's bytes, sharing blocks where the file system can.

    Raises:
        OSError: If the system refuses.
        ModifiedError: If the source is shorter than ``length``.
    """
    if reflink(source, target):
        return
    buffer = memoryview(bytearray(min(COPY_CHUNK_BYTES, max(length, 1))))
    done = 0
    while done < length:
        piece = buffer[: min(len(buffer), length - done)]
        if read_into(source, piece, done) != len(piece):
            raise ModifiedError(f"a file shrank to less than {length} bytes while it was copied")
        write_all(target, piece, done)
        done += len(piece)


def has_data(fd: int, offset: int, length: int) -> bool:
    """Say whether an extent has bytes that anyone wrote: a hole or reserved space has none."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) < offset + length
    except OSError:
        return False  # ENXIO: nothing from there to the end


def forget_cached(path: Path) -> None:
    """Drop a file's clean pages from the page cache: what is read next comes from the disk."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return
    finally:
        os.close(fd)

"""A version's directory: the same one under whatever name it has at the moment, and its leases.

Files are opened relative to the directory's own descriptor, so they survive its rename. That
descriptor is open while it is used or a lease is held; otherwise it may be closed and opened again,
by name, if the name still leads to the same directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Final

import xxhash

from shardcast.errors import BusyError
from shardcast.store.descriptors import OUT_OF_DESCRIPTORS, DescriptorPool, PooledDescriptor
from shardcast.store.files import (
    COPY_CHUNK_BYTES,
    disk_error,
    disk_errors,
    fsync_directory,
    read_into,
)
from shardcast.store.locks import try_lock

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Stamp = tuple[int, int, int]
"""A file's size, mtime in nanoseconds and inode: what changes when others write to it."""


class VersionDirectory:
    """The directory of one version, staged or committed. Thread-safe.

    Attributes:
        path: Where it is now.
    """

    def __init__(self, path: Path, pool: DescriptorPool, *, target: Path | None = None) -> None:
        """Open it, to know it again later.

        Args:
            path: Where it is.
            pool: Bounds how many are open.
            target: The name that another process will give it; None: nobody but this one does.

        Raises:
            DiskError: If it cannot be opened.
        """
        self.path = path
        self._target = target
        self._identity: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._leases = 0
        self._lease_fd = -1
        self._handle = PooledDescriptor(self._open, pool)
        with disk_errors(path, "opening"), self._handle.use():
            pass

    @property
    def opened(self) -> int:
        """How often it was opened: a new number means that it was closed meanwhile."""
        return self._handle.opened

    @property
    def alive(self) -> bool:
        """Whether it still has its name (no other process evicted it).

        While it is being renamed that may be its new name already.
        """
        for directory in (self.path, self._target):
            with contextlib.suppress(OSError):
                named = os.stat(directory) if directory is not None else None
                if named is not None and (named.st_dev, named.st_ino) == self._identity:
                    return True
        return False

    # --- files ------------------------------------------------------------------------------

    def open_file(self, path: str, flags: int) -> int:
        """Open a file in it and return a new descriptor; the caller closes it.

        Raises:
            OSError: If it cannot be opened.
        """
        with self._handle.use() as here:
            return os.open(path, flags | os.O_CLOEXEC, dir_fd=here)

    def stamp(self, path: str) -> Stamp | None:
        """Return what tells whether a file was changed; None if it is not there.

        Raises:
            DiskError: If the process is out of descriptors, which says nothing about the file.
        """
        try:
            with self._handle.use() as here:
                stat = os.stat(path, dir_fd=here, follow_symlinks=False)
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                raise disk_error(error, self.path / path, "looking at") from error
            return None
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def xxh3(self, path: str, offset: int, length: int) -> bytes | None:
        """Return the xxh3 (128 bits) of a range of a file, None if that is gone, a link or too short.

        Raises:
            DiskError: If the system cannot say what the bytes are (EIO, out of descriptors).
        """
        hasher = xxhash.xxh3_128()
        with disk_errors(self.path / path, "reading"):
            try:
                fd = self.open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return None
                raise
            try:
                buffer = memoryview(bytearray(min(COPY_CHUNK_BYTES, length)))
                done = 0
                while done < length:
                    piece = buffer[: min(len(buffer), length - done)]
                    if read_into(fd, piece, offset + done) != len(piece):
                        return None
                    hasher.update(piece)
                    done += len(piece)
            finally:
                os.close(fd)
        return hasher.digest()

    # --- its name ---------------------------------------------------------------------------

    def rename(self, target: Path, *, sync: bool) -> None:
        """Give it the name ``target``; on an error it has the old one.

        Raises:
            OSError: If renaming fails, or with ``sync`` making that durable.
        """
        self._target = target
        os.rename(self.path, target)
        if sync:
            try:
                fsync_directory(target.parent)
            except OSError:
                os.rename(target, self.path)
                raise
        self.path = target

    # --- leases -----------------------------------------------------------------------------

    def acquire_lease(self) -> None:
        """Keep every process from evicting it; to be given back with ``release_lease``.

        Raises:
            BusyError: If it is being evicted at this moment, or is gone already.
            DiskError: If the system refuses.
        """
        with self._lock:
            if self._leases == 0:
                try:
                    fd = self._handle.acquire()
                except OSError as error:
                    if error.errno in (errno.EBADF, errno.ENOENT):
                        raise BusyError("the version was evicted", source=str(self.path)) from error
                    raise disk_error(error, self.path, "opening") from error
                if not try_lock(fd, exclusive=False):
                    self._handle.release()
                    raise BusyError("the version is being evicted", source=str(self.path))
                self._lease_fd = fd
            self._leases += 1

    def release_lease(self) -> None:
        """Give a lease back."""
        with self._lock:
            self._leases -= 1
            if self._leases == 0:
                fcntl.flock(self._lease_fd, fcntl.LOCK_UN)
                self._handle.release()

    @property
    def leased(self) -> bool:
        """Whether this process holds a lease."""
        return self._leases > 0

    # --- its descriptor ---------------------------------------------------------------------

    def let_go(self) -> None:
        """Hold no descriptor that nobody uses at the moment; the object stays usable."""
        self._handle.let_go()

    def close(self) -> None:
        """Close the descriptor for good, as soon as nobody uses it."""
        self._handle.close()

    def _open(self) -> int:
        """Open the directory; the second time only if it is the same one.

        A rename by this process may be under way: then it has its new name already.
        """
        try:
            fd = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            if self._target is None:
                raise
            fd = os.open(self._target, _FLAGS)
        found = os.fstat(fd)
        identity = (found.st_dev, found.st_ino)
        if self._identity not in (None, identity):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "another directory has taken its place")
        self._identity = identity
        return fd

"""The bytes of a version's files, for many threads that read ranges of them."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from typing import Final

from shardcast.errors import MalformedError
from shardcast.store.files import disk_errors, read_into
from shardcast.store.stored import StoredVersion

MOST_OPEN: Final = 64
"""Descriptors that are kept open: a version may have thousands of files."""


class _File:
    """One open file: mapped where nobody else can shorten it, else read into memory.

    A page of a mapping that the file has lost meanwhile would kill the process (SIGBUS); a file
    with other names than ours may be truncated by whoever uses those.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        close = weakref.finalize(self, os.close, fd)
        found = os.fstat(fd)
        self.size = found.st_size
        self._map: memoryview | None = None
        if found.st_nlink == 1 and found.st_size:
            self._map = memoryview(mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ))
            close()  # the mapping has a descriptor of its own

    def range(self, offset: int, length: int) -> memoryview | None:
        if offset + length > self.size:
            return None
        if self._map is not None:
            return self._map[offset : offset + length]
        data = memoryview(bytearray(length))
        return data if read_into(self._fd, data, offset) == length else None


class Contents:
    """Reads ranges of the files of a version. Thread-safe. Lease the version while it is used."""

    def __init__(self, stored: StoredVersion) -> None:
        self.stored = stored
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _File] = OrderedDict()

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of the file with index ``file``, as they are on disk: nothing is verified.

        Raises:
            MalformedError: If the file is not there, or ends before.
            DiskError: If the system refuses.
        """
        files = self.stored.version.layout.files
        if not 0 <= file < len(files):
            raise MalformedError(f"version {self.stored.version.number} has no file {file}")
        path = self.stored.directory / files[file].path
        with disk_errors(path, "reading"):
            data = self._file(file).range(offset, length)
        if data is None:
            raise MalformedError(
                f"version {self.stored.version.number}, {files[file].path} has no bytes "
                f"{offset}-{offset + length - 1}",
                source=str(path),
            )
        return data

    def close(self) -> None:
        """Let go of the files; ranges that are still in use stay good."""
        with self._lock:
            self._open.clear()

    def _file(self, file: int) -> _File:
        with self._lock:
            found = self._open.get(file)
            if found is None:
                found = self._open[file] = _File(self.stored.open_file(file))
                if len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(file)
            return found

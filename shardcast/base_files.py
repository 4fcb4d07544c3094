"""The bytes that a frame starts from, read from a version on this disk.

Read, not mapped: of a file that something truncates a mapping kills the process with SIGBUS, and a
read says how much there is. Reading costs a copy of what is decoded anyway, into a buffer whose pages
a thread touches once.
"""

from __future__ import annotations

import os
from typing import Final

from shardcast.errors import IntegrityError, MalformedError
from shardcast.store.files import disk_errors, read_into
from shardcast.store.stored import ShardState, StoredVersion

_MAX_OPEN: Final = 8
"""Files of a base that are open for one frame: frames go through the files in order."""


class BaseFiles:
    """A base's bytes, for one frame (``codec.encode.BaseReader``), or for one after the other.

    Attributes:
        touched: The shards of the base that were read from.
        gap: A range was asked for that is not (all) here.
    """

    def __init__(self, base: StoredVersion | None, arena: memoryview) -> None:
        self._base = base
        self._arena = arena
        self._used = 0
        self._files: dict[int, int] = {}
        self.touched: set[int] = set()
        self.gap = False

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of file number ``file``.

        Raises:
            MalformedError: If the base has no such bytes.
            IntegrityError: If they are not on this disk (any more).
            DiskError: If the system refuses.
        """
        base = self._base
        if base is None:
            raise MalformedError("it starts from a version although it is said to start from none")
        layout = base.version.layout
        if not 0 <= file < len(layout.files):
            raise MalformedError(f"it starts from file {file} of {len(layout.files)}")
        entry = layout.files[file]
        if offset < 0 or length < 0 or offset + length > entry.bytes:
            raise MalformedError(
                f"it starts from bytes {offset} to {offset + length} of {entry.path}, "
                f"which has {entry.bytes}"
            )
        buffer = self._buffer(length)
        if not length:
            return buffer
        first = layout.file_shards(file).start
        size = layout.shard_bytes
        shards = range(first + offset // size, first + (offset + length - 1) // size + 1)
        present = [shard for shard in shards if base.state(shard) is not ShardState.MISSING]
        if len(present) < len(shards):
            self.gap = True
            raise IntegrityError(f"bytes of {entry.path} are not here")
        self.touched.update(shards)
        with disk_errors(base.directory / entry.path, "reading"):
            if read_into(self._open(base, file), buffer, offset) < length:
                raise IntegrityError(f"{entry.path} is shorter than it should be")
        return buffer

    def rewind(self) -> None:
        """Begin the next frame: what was returned before is overwritten."""
        self._used = 0

    def _buffer(self, length: int) -> memoryview:
        if self._used + length > len(self._arena):
            return memoryview(bytearray(length))  # ranges are asked for twice: not by our frames
        self._used += length
        return self._arena[self._used - length : self._used]

    def _open(self, base: StoredVersion, file: int) -> int:
        if file not in self._files:
            if len(self._files) >= _MAX_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[file] = base.open_file(file)
        return self._files[file]

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

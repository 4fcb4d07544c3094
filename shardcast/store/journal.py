"""The shard journal: which shards of a version were verified, and the xxh3 of their bytes.

One file a version, ``state/{N:06d}.shards``. It is appended to, a whole record at a time, and
now and then replaced by a shorter one; a crash leaves at most one torn record at the end, which
readers drop. Losing records costs work (the shards are hashed or fetched again), never
correctness.

Format (all integers little-endian)::

    header  8 bytes  b"SHDJRNL1"
           32 bytes  digest of the layout that the shard numbers refer to
    record  4 bytes  shard number
            4 bytes  xxh32 (seed 0) of the other 20 bytes of the record
           16 bytes  xxh3-128 of the shard's bytes; all zero: the shard is not verified any more
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Final

import xxhash

from shardcast.errors import DiskError
from shardcast.store.descriptors import PooledDescriptor
from shardcast.store.files import atomic_write, disk_errors, write_all

MAGIC: Final = b"SHDJRNL1"
XXH3_BYTES: Final = 16
SPARE_RECORDS: Final = 1024
"""Records beyond two a shard before a journal is compacted: 24 kB."""
_HEADER_BYTES: Final = len(MAGIC) + 32
_RECORD: Final = struct.Struct("<II16s")
_FORGOTTEN: Final = bytes(XXH3_BYTES)


def _pack(shard: int, xxh3: bytes) -> bytes:
    number = shard.to_bytes(4, "little")
    check = xxhash.xxh32_intdigest(number + xxh3)
    return _RECORD.pack(shard, check, xxh3)


def parse_journal(data: bytes, layout_digest: str, shard_count: int) -> dict[int, bytes] | None:
    """Return shard number to xxh3 as a journal's bytes tell, or None if it is another layout's.

    Records that are torn, damaged or out of range are passed over.
    """
    if data[:_HEADER_BYTES] != MAGIC + bytes.fromhex(layout_digest):
        return None
    found: dict[int, bytes] = {}
    whole = len(data) - (len(data) - _HEADER_BYTES) % _RECORD.size
    for shard, check, xxh3 in _RECORD.iter_unpack(data[_HEADER_BYTES:whole]):
        number = shard.to_bytes(4, "little")
        if shard >= shard_count or check != xxhash.xxh32_intdigest(number + xxh3):
            continue
        if xxh3 == _FORGOTTEN:
            found.pop(shard, None)
        else:
            found[shard] = xxh3
    return found


class ShardJournal:
    """An open journal. Thread-safe; one process writes a version's journal at a time.

    Where that is another process, ``read_only`` is set, and changes are kept in memory only.

    It is bounded: once it holds more than twice as many records as the version has shards (and
    ``SPARE_RECORDS``), the next record is preceded by a rewrite with one record a shard, beside
    the old file and renamed over it.
    """

    def __init__(self, path: Path, layout_digest: str, shard_count: int) -> None:
        self.path = path
        self._header = MAGIC + bytes.fromhex(layout_digest)
        self._shard_count = shard_count
        self._lock = threading.Lock()
        self._file: PooledDescriptor | None = None
        self.read_only = False
        with disk_errors(path, "reading"):
            data = path.read_bytes() if path.exists() else b""
        known = parse_journal(data, layout_digest, shard_count)
        self._end = 0 if known is None else len(data) - (len(data) - _HEADER_BYTES) % _RECORD.size
        self._most = _HEADER_BYTES + _RECORD.size * (2 * shard_count + SPARE_RECORDS)
        self.entries: dict[int, bytes] = known or {}

    def append(self, shard: int, xxh3: bytes) -> None:
        """Say that a shard's bytes on disk are verified and have this xxh3-128 digest.

        Raises:
            DiskError: If the journal cannot be written.
        """
        self.extend({shard: xxh3})

    def extend(self, entries: dict[int, bytes]) -> None:
        """Append many records with one write."""
        with self._lock:
            self._write(b"".join(_pack(shard, xxh3) for shard, xxh3 in entries.items()))
            self.entries.update(entries)

    def reload(self) -> None:
        """Read again what the process that keeps the journal has written; only if ``read_only``.

        Raises:
            DiskError: If it cannot be read.
        """
        with disk_errors(self.path, "reading"):
            try:
                data = self.path.read_bytes()
            except FileNotFoundError:
                data = b""
        layout = self._header[len(MAGIC) :].hex()
        with self._lock:
            self.entries = parse_journal(data, layout, self._shard_count) or {}

    def forget(self, shard: int) -> None:
        """Say that a shard is not good any more.

        Raises:
            DiskError: If the journal cannot be written: this process forgets it all the same, and
                the next one finds out when it compares the shard's bytes with its record.
        """
        with self._lock:
            if self.entries.pop(shard, None) is not None:
                self._write(_pack(shard, _FORGOTTEN))

    def sync(self) -> None:
        """Make the records durable."""
        with self._lock:
            if self._file is not None:
                with disk_errors(self.path, "syncing"), self._file.use() as fd:
                    os.fsync(fd)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _write(self, records: bytes) -> None:
        if self.read_only:
            return
        if self._end + len(records) > self._most:
            self._compact()
        with disk_errors(self.path, "writing"):
            first = self._file is None
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = PooledDescriptor(self._open)
            with self._file.use() as fd:
                if first:
                    os.ftruncate(fd, self._end)
                if self._end == 0:
                    records = self._header + records
                write_all(fd, memoryview(records), self._end)
            self._end += len(records)

    def _compact(self) -> None:
        """Rewrite the file with one record a shard; where there is no room, it goes on growing."""
        data = self._header + b"".join(_pack(s, xxh3) for s, xxh3 in self.entries.items())
        try:
            atomic_write(self.path, data)
        except DiskError:
            self._most *= 2  # not tried again at every record
            return
        self._close()  # it is the old file
        self._end = len(data)

"""The shard journal: which shards of a version were verified, and the xxh3 of their bytes.

One file a version, ``state/{N:06d}.shards``. It is only ever appended to, a whole record at a
time; a crash leaves at most one torn record at the end, which readers drop. Losing records costs
work (the shards are hashed or fetched again), never correctness.

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

from shardcast.store.files import disk_errors, write_all

MAGIC: Final = b"SHDJRNL1"
XXH3_BYTES: Final = 16
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
    """An open journal. Thread-safe; one process writes a version's journal at a time."""

    def __init__(self, path: Path, layout_digest: str, shard_count: int) -> None:
        self.path = path
        self._layout_digest = layout_digest
        self._lock = threading.Lock()
        self._fd: int | None = None
        with disk_errors(path, "reading"):
            data = path.read_bytes() if path.exists() else b""
        known = parse_journal(data, layout_digest, shard_count)
        self._end = 0 if known is None else len(data) - (len(data) - _HEADER_BYTES) % _RECORD.size
        self.entries: dict[int, bytes] = known or {}

    def append(self, shard: int, xxh3: bytes) -> None:
        """Say that a shard's bytes on disk are verified and have this xxh3-128 digest.

        Raises:
            DiskError: If the journal cannot be written.
        """
        self._write(_pack(shard, xxh3))
        self.entries[shard] = xxh3

    def extend(self, entries: dict[int, bytes]) -> None:
        """Append many records with one write."""
        self._write(b"".join(_pack(shard, xxh3) for shard, xxh3 in entries.items()))
        self.entries.update(entries)

    def forget(self, shard: int) -> None:
        """Say that a shard is not good any more."""
        if self.entries.pop(shard, None) is not None:
            self._write(_pack(shard, _FORGOTTEN))

    def sync(self) -> None:
        """Make the records durable."""
        with self._lock:
            if self._fd is not None:
                with disk_errors(self.path, "syncing"):
                    os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _write(self, records: bytes) -> None:
        with self._lock, disk_errors(self.path, "writing"):
            if self._fd is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.ftruncate(self._fd, self._end)
            if self._end == 0:
                records = MAGIC + bytes.fromhex(self._layout_digest) + records
            write_all(self._fd, memoryview(records), self._end)
            self._end += len(records)

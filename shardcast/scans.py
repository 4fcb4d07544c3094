"""When a committed version must be hashed again: after a boot, or when its files changed.

A power cut can leave files of the right size with zeros at their end, and whoever edits a file
changes its times. So ``state/scanned.json`` remembers, for each version that was whole, the
machine's boot and a fingerprint of sizes, times and inodes. Losing the file costs one scan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shardcast.cancel import Cancel
from shardcast.errors import DiskError
from shardcast.hashing import default_threads
from shardcast.protocol.digest import digest_of
from shardcast.store.files import atomic_write
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAX_REMEMBERED: Final = 256


class _Scanned(msgspec.Struct):
    boot: str
    versions: Annotated[dict[str, str], msgspec.Meta(max_length=_MAX_REMEMBERED)]


class Scans:
    """Remembers which versions of a run were found whole, and scans those that need it."""

    def __init__(self, store: RunStore, threads: int | None = None) -> None:
        self._store = store
        self._path = store.root / "state" / "scanned.json"
        self._threads = threads or default_threads()

    def scan(self, number: int, cancel: Cancel) -> bool:
        """Hash a version's shards if it was not found whole before as it lies there.

        Shards that are not good, and those that the system will not read, become missing.

        Returns:
            Whether it is whole.

        Raises:
            DiskError: If the system refuses for reasons of its own (out of descriptors).
            TransferCancelledError: If it was cancelled.
        """
        stored = self._store.stored(number)
        if stored is None:
            return False
        known = self._load()
        if known.versions.get(str(number)) != _fingerprint(stored):
            self._all(stored.judge, stored.unconfirmed(), cancel)
            if stored.complete and stored.damaged is None:
                self.remember(number)
        return stored.complete and stored.damaged is None

    def look_again(self, stored: StoredVersion, cancel: Cancel) -> bool:
        """Hash all of a committed version, whatever was known of it; say whether it is whole.

        Shards that are not good, and those that the system will not read, become missing.

        Raises:
            DiskError: If the system refuses for reasons of its own (out of descriptors).
            TransferCancelledError: If it was cancelled.
        """
        stored.notice_changes()

        def look(shard: int) -> None:
            stored.judge(shard, again=True)

        self._all(look, sorted(stored.present()), cancel)
        return stored.complete and stored.damaged is None

    def remember(self, number: int) -> None:
        """Note that a version is whole as it lies there now."""
        stored = self._store.stored(number)
        if stored is None:
            return
        known = self._load()
        here = {str(n) for n in self._store.committed()}
        versions = {n: mark for n, mark in known.versions.items() if n in here}
        versions[str(number)] = _fingerprint(stored)
        atomic_write(
            self._path,
            msgspec.json.encode(
                _Scanned(known.boot, dict(list(versions.items())[-_MAX_REMEMBERED:]))
            ),
        )

    def _load(self) -> _Scanned:
        boot = _boot_id()
        try:
            known = msgspec.json.decode(self._path.read_bytes(), type=_Scanned)
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return _Scanned(boot, {})
        return known if boot and known.boot == boot else _Scanned(boot, {})

    def _all(self, look: Callable[[int], object], shards: Sequence[int], cancel: Cancel) -> None:
        def unless_cancelled(shard: int) -> None:
            if not cancel.cancelled:
                look(shard)

        with ThreadPoolExecutor(self._threads, thread_name_prefix="scan") as executor:
            for _ in executor.map(unless_cancelled, shards):
                pass
        cancel.check()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _fingerprint(stored: StoredVersion) -> str:
    """Return a digest of what the file system says about a version's files.

    Raises:
        DiskError: If it says nothing.
    """
    lines = []
    for entry in stored.version.layout.files:
        path = stored.directory / entry.path
        try:
            stat = os.stat(path, follow_symlinks=False)
            lines.append(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}")
        except FileNotFoundError:
            lines.append("gone")
        except OSError as error:
            raise DiskError(f"cannot look at a file: {error.strerror}", source=str(path)) from error
    return digest_of("\n".join(lines).encode())

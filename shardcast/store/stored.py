"""One version's files on disk, staged or committed, and which of its shards are good.

Life of a version: *staged* under ``state/staging/{N}`` while shards arrive, each recorded in the
journal once its bytes were verified; *committed* by one rename to ``versions/{N}``. The directory
stays the same one through that (``shardcast.store.directory``).

Crash windows of ``commit``: before the rename the version is staged and resumes from its
journal; after it the version is committed. With ``Durability.SYNC`` files and journal are on
stable storage before the rename. What an earlier process recorded is hashed again before it, so
that bytes which a power cut took never get the final name.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from shardcast.errors import DiskError, IntegrityError, ShardcastError, StateError
from shardcast.protocol.manifest import Version
from shardcast.store.descriptors import SHARED, DescriptorPool
from shardcast.store.directory import Stamp, VersionDirectory
from shardcast.store.files import (
    MEMORY_FILE_SYSTEMS,
    disk_error,
    disk_errors,
    file_system_of,
    fsync_directory,
    require_space,
)
from shardcast.store.journal import ShardJournal
from shardcast.store.renewing import is_unreadable, renew
from shardcast.store.version_files import forget_cached, has_data, make_files, unshare

log = logging.getLogger("shardcast.store")


class Durability(enum.StrEnum):
    """What a commit waits for: nothing, or that the files are on stable storage."""

    NONE = "none"
    SYNC = "sync"


class ShardState(enum.Enum):
    """What is known of a shard's bytes on disk.

    RECORDED: the journal says that they were verified once; nobody looked in this process.
    """

    MISSING = 0
    RECORDED = 1
    VERIFIED = 2


class StoredVersion:
    """The files of one version. Thread-safe. Made by ``RunStore``.

    Attributes:
        version: What its documents say.
        committed: Whether it has its final name.
        damaged: Why a committed version is not whole any more, or None.
    """

    def __init__(
        self,
        version: Version,
        directory: Path,
        journal: ShardJournal,
        *,
        committed: bool,
        pool: DescriptorPool = SHARED,
        target: Path | None = None,
    ) -> None:
        self.version = version
        self.committed = committed
        self.damaged: str | None = None
        self._journal = journal
        self._lock = threading.Lock()
        self._unsharing = threading.Lock()
        self._reserved: bool | None = None
        self._directory = VersionDirectory(directory, pool, target=target)
        self._openings = self._directory.opened
        self._states = bytearray(version.layout.shard_count)
        self._stamps = [self._stamp(file) for file in range(len(version.layout.files))]
        self._load_states()

    @property
    def directory(self) -> Path:
        """Where the files are now."""
        return self._directory.path

    # --- what is there ----------------------------------------------------------------------

    def update(self, version: Version) -> None:
        """Take over what an open version's newer documents say.

        A version that is closed stays closed, and what a part has named stays named, whatever a
        caller that is behind still believes. A shard that was verified against another digest than
        it has now is missing: parts of an open version may be replaced.

        Raises:
            StateError: If they are of another layout.
            DiskError: If that a shard is missing cannot be written down; this process knows it.
        """
        before = self.version
        if version.layout_digest != before.layout_digest:
            raise StateError(f"version {version.number} has another layout", source=self._name)
        if not version.complete and (
            before.complete or set(version.documents) < set(before.documents)
        ):
            return
        self.version = version
        if before.digests != version.digests:
            for shard, (old, new) in enumerate(zip(before.digests, version.digests, strict=True)):
                if old is not None and old != new and self._states[shard]:
                    self.discard(shard, "its digest is another one now")

    def catch_up(self, version: Version) -> None:
        """Take over what the process that writes this version has recorded until now.

        Args:
            version: What the newest head says of it.

        Raises:
            StateError: If it has another layout.
            DiskError: If the journal cannot be read.
        """
        self.update(version)
        self._journal.reload()
        with self._lock:
            for shard in self._journal.entries:
                known = self.version.digests[shard] is not None
                if known and self._states[shard] == ShardState.MISSING.value:
                    self._states[shard] = ShardState.RECORDED.value

    def state(self, shard: int) -> ShardState:
        """Return what is known of a shard."""
        return ShardState(self._states[shard])

    def present(self) -> frozenset[int]:
        """Return the shards that are recorded or verified."""
        return frozenset(shard for shard, state in enumerate(self._states) if state)

    def missing(self) -> list[int]:
        """Return the shards that are not there."""
        return [shard for shard, state in enumerate(self._states) if not state]

    def unconfirmed(self) -> list[int]:
        """Return the shards that are recorded: nobody looked at them, or their files changed since.

        Raises:
            DiskError: As ``confirm``.
        """
        if self.committed:
            self.notice_changes()
        recorded = ShardState.RECORDED.value
        return [shard for shard, state in enumerate(self._states) if state == recorded]

    @property
    def complete(self) -> bool:
        """Whether the version is closed and no shard is missing."""
        return self.version.complete and 0 not in self._states

    @property
    def alive(self) -> bool:
        """Whether the directory still has its name (no other process evicted it).

        While it is being committed that may be its new name already.
        """
        return self._directory.alive

    # --- reading and writing ----------------------------------------------------------------

    def open_file(self, file: int, *, writable: bool = False) -> int:
        """Open the file with index ``file`` and return a new descriptor; the caller closes it.

        Before it is written to, a file that is hard-linked becomes one of its own.

        Raises:
            DiskError: If it cannot be opened.
        """
        path = self.version.layout.files[file].path
        with disk_errors(self.directory / path, "opening"):
            if writable:
                with self._unsharing:  # two copies made at once would lose what was written
                    unshare(self.directory / path)
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW
            return self._directory.open_file(path, flags)

    def confirm(self, shard: int, *, read: bool = True) -> bool:
        """Say whether a shard is good on disk now; call it before serving or using one.

        A recorded shard is hashed once (xxh3, blocking). After that only the file's size, mtime
        and inode are compared; if those changed, all shards of the file are hashed again. A
        shard that is not good becomes missing, and a committed version is marked damaged.

        Args:
            shard: The shard.
            read: False where nothing may wait for a disk: a shard whose bytes would have to be
                hashed is then not said to be good.

        Raises:
            DiskError: If the bytes cannot be read now (EIO, out of descriptors): the shard keeps
                its state.
        """
        state = self._states[shard]
        if state == ShardState.MISSING.value:
            return False
        extent = self.version.layout.extent(shard)
        if self.committed:
            self._notice_change(extent.file)
        else:
            self._notice_reopening()
        state = self._states[shard]
        if state == ShardState.VERIFIED.value:
            return True
        return read and self.look_again(shard)

    def look_again(self, shard: int) -> bool:
        """Hash a shard that is here, whatever was known of it; say whether it is good.

        Only this finds what changes neither size nor time: a bit that flipped on the disk. The
        caller sees to it that nobody writes to the shard meanwhile.

        Raises:
            DiskError: As ``confirm``.
        """
        expected = self._journal.entries.get(shard)
        extent = self.version.layout.extent(shard)
        if expected is not None and expected == self._directory.xxh3(
            extent.path, extent.offset, extent.length
        ):
            with self._lock:
                if self._states[shard]:
                    self._states[shard] = ShardState.VERIFIED.value
            return True
        if self._states[shard]:
            self.discard(shard, "its bytes on disk changed")
        return False

    def judge(self, shard: int, *, again: bool = False) -> bool:
        """Say whether a shard is good, for good: one that the system will not read is missing.

        Args:
            shard: The shard.
            again: As ``look_again``, rather than ``confirm``.

        Raises:
            DiskError: If the system refuses for reasons of its own (out of descriptors).
        """
        try:
            return self.look_again(shard) if again else self.confirm(shard)
        except DiskError as error:
            if not is_unreadable(error):
                raise
            self.discard(shard, f"it cannot be read: {error.message}")
            return False

    def recorded(self, shard: int) -> bytes | None:
        """Return the xxh3-128 that a shard had when it was verified; None if it is not here."""
        return self._journal.entries.get(shard) if self._states[shard] else None

    def written(self, shard: int) -> bool:
        """Say whether a shard's extent has any bytes: worth hashing where no record tells."""
        extent = self.version.layout.extent(shard)
        try:
            fd = self.open_file(extent.file)
        except ShardcastError:
            return False
        try:
            return has_data(fd, extent.offset, extent.length)
        finally:
            os.close(fd)

    def require_room(self, shard: int) -> None:
        """Check that a shard's bytes will find room, where its blocks were not reserved.

        Raises:
            DiskFullError: If they will not.
        """
        if self._reserved is None:
            with disk_errors(self.directory, "looking for free space"):
                self._reserved = file_system_of(self.directory) not in MEMORY_FILE_SYSTEMS
        if not self._reserved:
            length = self.version.layout.extent(shard).length
            require_space(
                self.directory, length, what=f"shard {shard} of version {self.version.number}"
            )

    def renew(self, file: int, aside: Path) -> None:
        """Put a copy in the place of the file with index ``file``, which is then written to instead.

        Whoever has the old one open or mapped keeps it as it is (``store.renewing``).

        Args:
            file: The file.
            aside: An unused name on the same file system.

        Raises:
            DiskError: If the system refuses; the file is as it was.
        """
        entry = self.version.layout.files[file]
        with self._unsharing:
            renew(self.directory / entry.path, entry, aside)

    def notice_changes(self) -> None:
        """Look whether files have other sizes, times or inodes than when they were looked at last.

        Of those that have, no shard counts as verified any more (``confirm``).

        Raises:
            DiskError: As ``confirm``.
        """
        for file in range(len(self.version.layout.files)):
            self._notice_change(file)

    def restore_files(self) -> None:
        """Give files that are gone, too short or too long their size back; shards say the rest.

        Raises:
            DiskError: If the system refuses.
        """
        with self._unsharing:
            make_files(self.version, self.directory)
        with self._lock:
            if self.committed and 0 not in self._states:
                self.damaged = None

    def record(self, shard: int, xxh3: bytes) -> None:
        """Note that a shard's bytes were written and verified against the signed digest.

        Args:
            shard: The shard.
            xxh3: ``xxhash.xxh3_128`` digest of the same bytes, 16 bytes.

        Raises:
            DiskError: If the journal cannot be written.
        """
        self.record_all({shard: xxh3})

    def record_all(self, entries: dict[int, bytes]) -> None:
        """Note many shards at once, with one write to the journal."""
        self._journal.extend(entries)
        with self._lock:
            for shard in entries:
                self._states[shard] = ShardState.VERIFIED.value
            if self.committed and 0 not in self._states:
                self.damaged = None

    def discard(self, shard: int, reason: str) -> None:
        """Note that a shard's bytes are not good (any more)."""
        with self._lock:
            self._states[shard] = ShardState.MISSING.value
            if self.committed:
                path = self.version.layout.extent(shard).path
                self.damaged = f"version {self.version.number}, {path}, shard {shard}: {reason}"
        self._journal.forget(shard)

    # --- commit and leases ------------------------------------------------------------------

    def commit_to(self, target: Path, durability: Durability) -> None:
        """Give a complete staged version its final name ``target``: the commit point.

        Raises:
            IntegrityError: If shards are missing, or turn out bad now.
            StateError: If the name is taken.
            DiskError: If syncing or renaming fails; the version stays staged, and what the disk
                lost of it is missing from then on.
        """
        if self.committed:
            return
        for shard in self.unconfirmed():
            self.confirm(shard)
        if not self.complete:
            raise IntegrityError(
                f"version {self.version.number} lacks {_shards(len(self.missing()))}",
                source=self._name,
            )
        if durability is Durability.SYNC:
            self._sync()
        with disk_errors(target, "committing"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                raise StateError("a version of that number is already there", source=str(target))
            self._directory.rename(target, sync=durability is Durability.SYNC)
        with self._lock:
            self.committed = True
            self._journal.close()  # a descriptor less for each version that merely lies there
            self._stamps = [self._stamp(file) for file in range(len(self._stamps))]

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Keep the version from being evicted by any process while the block runs.

        Raises:
            BusyError: If it is being evicted at this moment.
        """
        self.acquire_lease()
        try:
            yield
        finally:
            self.release_lease()

    def acquire_lease(self) -> None:
        """Take a lease; every one must be given back with ``release_lease``.

        Raises:
            BusyError: If the version is being evicted at this moment, or is gone already.
            DiskError: If the system refuses.
        """
        self._directory.acquire_lease()

    def release_lease(self) -> None:
        """Give a lease back."""
        self._directory.release_lease()

    @property
    def leased(self) -> bool:
        """Whether this process holds a lease."""
        return self._directory.leased

    @property
    def read_only(self) -> bool:
        """Whether another process keeps the journal, and describes the version."""
        return self._journal.read_only

    def set_read_only(self, read_only: bool) -> None:
        """Say whether another process keeps the journal."""
        self._journal.read_only = read_only

    def let_go(self) -> None:
        """Hold no descriptor that nobody uses at the moment; the object stays usable."""
        self._directory.let_go()

    def close(self) -> None:
        """Close the descriptors that this object holds."""
        self._journal.close()
        self._directory.close()

    # --- inner workings ---------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return str(self.directory)

    def _notice_reopening(self) -> None:
        """Trust nothing in a staged version whose directory was closed meanwhile.

        Another process may have put a new one in its place that got the same inode number.
        """
        if self._openings != self._directory.opened:
            with self._lock:
                self._openings = self._directory.opened
                for shard, state in enumerate(self._states):
                    if state == ShardState.VERIFIED.value:
                        self._states[shard] = ShardState.RECORDED.value

    def _load_states(self) -> None:
        """Believe the journal as far as the files reach; their bytes are looked at before use.

        Not of shards that no part of an open version names: nobody knows what they were compared
        with.
        """
        layout = self.version.layout
        for shard in self._journal.entries:
            extent = layout.extent(shard)
            stamp = self._stamps[extent.file]
            if self.version.digests[shard] is None:
                continue
            if stamp is not None and stamp[0] >= extent.offset + extent.length:
                self._states[shard] = ShardState.RECORDED.value
        if self.committed and 0 in self._states:
            self.damaged = f"version {self.version.number} lacks {_shards(len(self.missing()))}"
        elif self.committed:
            for file in range(len(layout.files)):
                self._notice_size(file)

    def _notice_size(self, file: int) -> None:
        """Mark a committed version damaged whose file has another size than it should."""
        entry, stamp = self.version.layout.files[file], self._stamps[file]
        if stamp is None:
            self.damaged = f"version {self.version.number} lacks the file {entry.path}"
        elif stamp[0] != entry.bytes:
            self.damaged = (
                f"version {self.version.number}, {entry.path}: {stamp[0]} bytes on disk "
                f"instead of {entry.bytes}"
            )

    def _stamp(self, file: int) -> Stamp | None:
        return self._directory.stamp(self.version.layout.files[file].path)

    def _notice_change(self, file: int) -> None:
        stamp = self._stamp(file)
        if stamp == self._stamps[file]:
            return
        with self._lock:
            self._stamps[file] = stamp
            self._notice_size(file)
            for shard in self.version.layout.file_shards(file):
                if self._states[shard] == ShardState.VERIFIED.value:
                    self._states[shard] = ShardState.RECORDED.value

    def _sync(self) -> None:
        for file, entry in enumerate(self.version.layout.files):
            path = self.directory / entry.path
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                self._distrust(file)
                raise disk_error(error, path, "syncing") from error
        self._journal.sync()
        for directory in {self.directory / Path(e.path).parent for e in self.version.layout.files}:
            with disk_errors(directory, "syncing"):
                fsync_directory(directory)

    def _distrust(self, file: int) -> None:
        """Look at a file again whose sync failed.

        Linux marks pages that it could not write as clean, and a second fsync succeeds although
        the bytes are lost (fsync(2), lwn.net/Articles/752063). So the cache is dropped and the
        disk is asked; what it does not have is missing, and is written again.
        """
        forget_cached(self.directory / self.version.layout.files[file].path)
        for shard in self.version.layout.file_shards(file):
            try:
                self.look_again(shard)
            except DiskError as error:
                log.warning("version %d, shard %d: %s", self.version.number, shard, error)
                with contextlib.suppress(DiskError):
                    self.discard(shard, "it cannot be read")


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"

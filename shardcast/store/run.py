"""One run's directory: a store's ``{run}`` or a worker's ``OUT``.

::

    head.json                the newest accepted head, verbatim
    current -> versions/N    on a worker: the version to use
    versions/{N:06d}/        committed versions: the checkpoint directories themselves
    blobs/{digest}.bin       documents and delta blobs
    state/trust.json         what is trusted and was last seen (protocol.trust)
    state/{N:06d}.json       which documents describe version N (StoredState)
    state/{N:06d}.shards     its journal
    state/staging/{N:06d}/   a version that is not complete
    state/spare/             files of an evicted version, to be overwritten (store.recycling)
    state/tmp/ state/trash/  leftovers of a crash; removed at the next start
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import Final

from shardcast.errors import NotFoundError, StateError
from shardcast.protocol.manifest import Version, contradicts
from shardcast.store.abandoned import is_hidden_temporary, remove_abandoned
from shardcast.store.files import (
    FULL,
    disk_error,
    disk_errors,
    fsync_directory,
    is_there,
    names_in,
    remove_tree,
)
from shardcast.store.journal import ShardJournal
from shardcast.store.locks import FileLock, try_lock
from shardcast.store.records import RunRecords
from shardcast.store.recycling import Spares, has_room
from shardcast.store.stored import Durability, StoredVersion
from shardcast.store.version_files import make_files

log = logging.getLogger("shardcast.store")

_NUMBER: Final = re.compile(r"^[0-9]{6,16}\Z", re.ASCII)
_VERSION_STATE: Final = re.compile(r"^([0-9]{6,16})\.(?:json|shards)\Z", re.ASCII)
_TRASH: Final = ".trash."
_STALE_SECONDS: Final = 3600.0
_STALE_PAST_SECONDS: Final = 60.0
"""Nobody publishes a number below a committed one; an upload may be about to describe it."""
_unique = itertools.count()


class RunStore(RunRecords):
    """One run's directory. Thread-safe; nothing is created before the first write.

    Attributes:
        root: The directory.
        run: The run's name.
        spares: Files to recycle; for the process that holds the run's lock.
    """

    def __init__(self, root: Path, run: str) -> None:
        super().__init__(root, run)
        self.spares = Spares(root / "state" / "spare")
        self._lock = threading.RLock()
        self._cache: dict[int, StoredVersion] = {}
        self._followed: dict[int, StoredVersion] = {}
        self._retired: list[StoredVersion] = []
        self._writer = True

    # --- versions ---------------------------------------------------------------------------

    def committed(self) -> list[int]:
        """Return the numbers of the committed versions, newest first."""
        return self._numbers(self.root / "versions")

    def staged(self) -> list[int]:
        """Return the numbers of the staged versions, newest first."""
        return self._numbers(self.root / "state" / "staging")

    def version_directory(self, number: int) -> Path:
        """Return where a committed version lies."""
        return self.root / "versions" / f"{number:06d}"

    def staging_directory(self, number: int) -> Path:
        """Return where a staged version lies."""
        return self.root / "state" / "staging" / f"{number:06d}"

    def stage(
        self, version: Version, *, files: bool = True, replace: bool = False
    ) -> StoredVersion:
        """Begin or resume a version: its files get their full size, its journal is opened.

        What another layout left under the same number in staging is removed.

        Args:
            version: What its documents say; the documents must lie in ``blobs/`` already.
            files: False where the caller makes the files (links, clones) before it calls.
            replace: Remove what contradicts it, also committed, unless it is being read.

        Raises:
            StateError: If a committed version of that number has another layout, and stays.
            DiskFullError: If there is no room.
        """
        number = version.number
        with self._lock:
            here = self.stored(number) or self._adopt(version)
            if replace and here is not None and contradicts(here.version, version):
                here = None if self.evict(number) else here
            if here is not None and here.version.layout_digest == version.layout_digest:
                here.update(version)
                self.save_state(here.version)
                if not here.committed and files:
                    make_files(version, here.directory)
                return here
            if here is not None and here.committed:
                raise StateError(
                    f"version {number} on disk has layout {here.version.layout_digest}, "
                    f"the publisher's has {version.layout_digest}",
                    source=str(here.directory),
                )
            directory = self.staging_directory(number)
            if here is not None or (files and directory.exists()):
                self._remove(number, directory)
            if files:
                make_files(version, directory)
            self.save_state(version)
            return self._open(version, directory, committed=False)

    def begin(self, version: Version) -> StoredVersion:
        """Open a version whose files the caller has staged, to record shards before it is whole.

        Nothing describes it yet, so to every other process it is not there, but to those that
        follow it by the head that names it (``followed``); ``stage`` makes it a version.
        """
        with self._lock:
            directory = self.staging_directory(version.number)
            return self._open(version, directory, committed=False)

    def followed(self, version: Version) -> StoredVersion | None:
        """Return an open version that another process is writing, to be read; None if there is none.

        Its journal belongs to that process: nothing is written here.

        Args:
            version: What the newest head says of it.

        Raises:
            DiskError: If the system refuses.
        """
        number = version.number
        with self._lock:
            here = self._followed.get(number)
            if here is not None and (
                not here.alive or here.version.layout_digest != version.layout_digest
            ):
                self._retire(self._followed.pop(number))
                here = None
            directory = self.staging_directory(number)
            if here is None:
                if self.state_path(number).exists() or not is_there(directory, stat.S_ISDIR):
                    return None
                here = StoredVersion(
                    version,
                    directory,
                    self._journal_of(version, read_only=True),
                    committed=False,
                    target=self.version_directory(number),
                )
                self._followed[number] = here
            here.catch_up(version)
            return here

    def stored(self, number: int) -> StoredVersion | None:
        """Return a version that is on disk, committed or staged, or None.

        The same object is returned as long as the directory lives. A version whose documents
        are gone or damaged counts as not there.
        """
        with self._lock:
            cached = self._cache.get(number)
            if cached is not None:
                if cached.alive:
                    return cached
                self._cache.pop(number).close()
            for directory, committed in (
                (self.version_directory(number), True),
                (self.staging_directory(number), False),
            ):
                if is_there(directory, stat.S_ISDIR):
                    version = self.load_state(number)
                    if version is not None:
                        followed = self._followed.pop(number, None)
                        if followed is not None:  # it has been described: followed no longer
                            self._retire(followed)
                        return self._open(version, directory, committed=committed)
            return None

    def forget_gone(self) -> None:
        """Let go of versions that another process has removed: descriptors, memory."""
        with self._lock:
            for number in [n for n, stored in self._cache.items() if not stored.alive]:
                self._cache.pop(number).close()
            for number in [n for n, followed in self._followed.items() if not followed.alive]:
                self._followed.pop(number).close()
            retired, self._retired = self._retired, []
            for stored in retired:
                if stored.alive:
                    self._retire(stored)
                else:
                    stored.close()

    def commit(self, number: int, durability: Durability = Durability.SYNC) -> StoredVersion:
        """Give a complete staged version its final name (``StoredVersion.commit_to``).

        Raises:
            NotFoundError: If it is not on disk.
        """
        stored = self.stored(number)
        if stored is None:
            raise NotFoundError(f"version {number} is not on disk", source=str(self.root))
        stored.commit_to(self.version_directory(number), durability)
        return stored

    def evict(self, number: int, *, spare_within: int | None = None) -> bool:
        """Remove a version; False while any process holds a lease on it, or it is ``current``.

        Also where the system does not even let it be opened now.

        The directory is renamed first, so that no crash leaves half a version under its name.

        Args:
            number: The version.
            spare_within: Keep its files as spares if no more than so many versions stay.
        """
        with self._lock:
            if self.current() == number:
                return False
            directory = self.version_directory(number)
            if not directory.is_dir():
                directory = self.staging_directory(number)
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._remove(number, None)
                return True
            except OSError as error:  # out of descriptors, EIO: it is still there, perhaps read
                log.warning("version %d stays: %s", number, disk_error(error, directory, "opening"))
                return False
            try:
                if not try_lock(fd, exclusive=True):
                    return False
                self._remove(number, directory, spare_within)
            finally:
                os.close(fd)
            return True

    def set_writer(self, writer: bool) -> None:
        """Say whether this process, or another one, records which shards are good from now on.

        Who begins to write looks at the disk again: the process before wrote to it until now.
        """
        with self._lock:
            if writer and not self._writer:
                for stored in self._cache.values():
                    self._retire(stored)
                self._cache.clear()
            self._writer = writer
            for stored in self._cache.values():
                stored.set_read_only(not writer)

    # --- current ----------------------------------------------------------------------------

    def switch_current(self, number: int) -> None:
        """Point ``current`` at a committed version: atomic, never absent, never half.

        Raises:
            StateError: As ``require_link``.
            DiskError: If the system refuses.
        """
        self.require_link()
        link = self.root / "current"
        temporary = self.root / f".current.{os.getpid()}.{next(_unique)}.tmp"
        with disk_errors(link, "switching"):
            os.symlink(f"versions/{number:06d}", temporary)
            try:
                os.replace(temporary, link)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            fsync_directory(self.root)

    def require_link(self) -> None:
        """Check that ``current`` may be switched.

        Raises:
            StateError: If it is something else than a link, which is not ours to remove.
        """
        link = self.root / "current"
        if os.path.lexists(link) and not os.path.islink(link):
            kind = "directory" if os.path.isdir(link) else "file"
            raise StateError(
                f"{link} is a {kind}, and a link to the version in use belongs there: move it "
                "away or remove it; it is made again",
                source=str(link),
            )

    def current(self) -> int | None:
        """Return the number of the version that ``current`` names, or None."""
        try:
            name = os.path.basename(os.readlink(self.root / "current"))
        except OSError:
            return None
        return int(name) if _NUMBER.match(name) else None

    # --- housekeeping -----------------------------------------------------------------------

    def lock(self, purpose: str = "run", *, what: str | None = None) -> FileLock:
        """Return the lock file ``state/{purpose}.lock``, not yet taken."""
        label = what or f"run {self.run!r}"
        return FileLock(self.root / "state" / f"{purpose}.lock", what=label)

    def clean_leftovers(self) -> None:
        """Remove what crashed processes left: trash, and temporary files that nobody writes.

        Also the state of versions that are gone, and what was staged an hour ago by a publisher
        that died before it knew what it publishes, or a minute ago for a number that is history.
        """
        remove_tree(self.root / "state" / "trash")
        for directory in (self.root / "versions", self.root / "state" / "staging"):
            for name in names_in(directory):
                if name.startswith(_TRASH):
                    remove_tree(directory / name)
        self.clean_version_state()
        for number in self.staged():
            if not self.state_path(number).exists() and self._is_stale(number):
                self.evict(number)
        for directory in (self.root, self.root / "state", self.root / "blobs"):
            remove_abandoned(directory, is_hidden_temporary)
        remove_abandoned(self.root / "state" / "tmp", lambda _name: True)

    def close(self) -> None:
        """Close every descriptor that this object holds."""
        with self._lock:
            for stored in (*self._cache.values(), *self._followed.values(), *self._retired):
                stored.close()
            self._cache.clear()
            self._followed.clear()
            self._retired.clear()

    # --- inner workings ---------------------------------------------------------------------

    def clean_version_state(self) -> None:
        """Remove journals and descriptions whose version is gone.

        The order matters: a version's directory is there before its state, and moves from staging
        to versions; so none that appears or moves meanwhile is taken for gone.
        """
        with contextlib.suppress(OSError):
            names = os.listdir(self.root / "state")
            staged = self.staged()
            here = {*staged, *self.committed()}
            for name in names:
                match = _VERSION_STATE.match(name)
                if match is not None and int(match[1]) not in here:
                    os.unlink(self.root / "state" / name)

    def _is_stale(self, number: int) -> bool:
        try:
            modified = self.staging_directory(number).stat().st_mtime
        except OSError:
            return False
        past = number < max(self.committed(), default=0)
        return time.time() - modified > (_STALE_PAST_SECONDS if past else _STALE_SECONDS)

    def _journal_path(self, number: int) -> Path:
        return self.root / "state" / f"{number:06d}.shards"

    def _retire(self, stored: StoredVersion) -> None:
        """Another object takes its place; whoever uses it at this moment may go on."""
        stored.let_go()  # it opens itself again for who still has it: looked at again later
        self._retired.append(stored)

    def _open(self, version: Version, directory: Path, *, committed: bool) -> StoredVersion:
        journal = self._journal_of(version, read_only=not self._writer)
        stored = StoredVersion(version, directory, journal, committed=committed)
        self._cache[version.number] = stored
        return stored

    def _journal_of(self, version: Version, *, read_only: bool) -> ShardJournal:
        journal = ShardJournal(
            self._journal_path(version.number), version.layout_digest, version.layout.shard_count
        )
        journal.read_only = read_only
        return journal

    def _adopt(self, version: Version) -> StoredVersion | None:
        """Take over a committed directory whose description was lost; its shards say the rest.

        One that holds other files than the version has is removed: it is something else.
        """
        directory = self.version_directory(version.number)
        if not is_there(directory, stat.S_ISDIR):
            return None
        with disk_errors(directory, "listing"):
            found = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
        if not found <= {entry.path for entry in version.layout.files}:
            self._remove(version.number, directory)
            return None
        self.save_state(version)
        return self._open(version, directory, committed=True)

    def _remove(self, number: int, directory: Path | None, spare_within: int | None = None) -> None:
        """Remove a version's directory, state and journal, in an order that no crash can spoil.

        First it loses its name, then its journal: whatever is written to its files afterwards,
        nobody takes for shards of it.
        """
        cached = self._cache.pop(number, None)
        if cached is not None:
            cached.close()
        trash = None if directory is None else self._trash(number, directory)
        gone = True
        for path in (self.state_path(number), self._journal_path(number)):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                gone = False
        if (
            gone
            and trash is not None
            and cached is not None
            and spare_within is not None
            and cached.committed
        ):
            here = {"committed": len(self.committed()), "staged": len(self.staged())}
            if has_room(**here, keep=spare_within):
                self.spares.keep(trash, [entry.path for entry in cached.version.layout.files])
        if trash is not None:
            remove_tree(trash)

    def _trash(self, number: int, directory: Path) -> Path:
        """Take a directory's name away; on a full disk without making another directory."""
        name = f"{number}.{os.getpid()}.{next(_unique)}"
        trash = self.root / "state" / "trash" / name
        with disk_errors(directory, "evicting"):
            try:
                trash.parent.mkdir(parents=True, exist_ok=True)
                os.rename(directory, trash)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                trash = directory.with_name(f"{_TRASH}{name}")
                os.rename(directory, trash)
        return trash

    def _numbers(self, directory: Path) -> list[int]:
        names = names_in(directory)
        return sorted((int(name) for name in names if _NUMBER.match(name)), reverse=True)

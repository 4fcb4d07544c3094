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
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import IntegrityError, MalformedError, NotFoundError, StateError
from shardcast.protocol import manifest as manifests
from shardcast.protocol import trust
from shardcast.protocol.digest import digest_of, is_digest
from shardcast.protocol.documents import Digest, Document, Positive, check_run, decode, encode
from shardcast.protocol.head import OpenRef, VersionRef
from shardcast.protocol.layout import decode_layout, decode_part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_PARTS, MAX_HEAD_BYTES
from shardcast.protocol.manifest import Version
from shardcast.store.abandoned import is_hidden_temporary, remove_abandoned
from shardcast.store.files import FULL, atomic_write, disk_errors, fsync_directory, remove_tree
from shardcast.store.journal import ShardJournal
from shardcast.store.locks import FileLock, try_lock
from shardcast.store.recycling import Spares, has_room
from shardcast.store.stored import Durability, StoredVersion
from shardcast.store.version_files import make_files

STORED_FORMAT: Final = "shardcast.stored/1"
_NUMBER: Final = re.compile(r"^[0-9]{6,16}\Z", re.ASCII)
_VERSION_STATE: Final = re.compile(r"^([0-9]{6,16})\.(?:json|shards)\Z", re.ASCII)
_TRASH: Final = ".trash."
_STALE_SECONDS: Final = 3600.0
_STALE_PAST_SECONDS: Final = 60.0
"""Nobody publishes a number below a committed one; an upload may be about to describe it."""
_unique = itertools.count()


class StoredState(Document, frozen=True, kw_only=True):
    """Which documents describe a version on disk; they lie in ``blobs/``."""

    format: Literal["shardcast.stored/1"] = STORED_FORMAT
    run: str
    version: Positive
    layout: Digest
    manifest: Digest | None
    parts: Annotated[list[Digest], msgspec.Meta(max_length=MAX_DOCUMENT_PARTS)]


class RunStore:
    """One run's directory. Thread-safe; nothing is created before the first write.

    Attributes:
        root: The directory.
        run: The run's name.
        spares: Files to recycle; for the process that holds the run's lock.
    """

    def __init__(self, root: Path, run: str) -> None:
        self.root = root
        self.run = check_run(run)
        self.spares = Spares(root / "state" / "spare")
        self._lock = threading.RLock()
        self._cache: dict[int, StoredVersion] = {}
        self._writer = True

    # --- head and trust ---------------------------------------------------------------------

    def read_head(self) -> bytes | None:
        """Return the stored head envelope, or None."""
        return self._read(self.root / "head.json", MAX_HEAD_BYTES)

    def write_head(self, envelope: bytes) -> None:
        """Replace the stored head: the commit point of a publication."""
        atomic_write(self.root / "head.json", envelope)

    def head_stamp(self) -> tuple[int, int, int] | None:
        """Return something cheap that changes whenever the head does; None without a head."""
        try:
            found = os.stat(self.root / "head.json")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def read_trust(self) -> trust.TrustState | None:
        """Return what is trusted and was last seen, or None.

        Raises:
            StateError: If it is damaged. Forgetting it would accept a rollback, so a person
                must decide.
        """
        path = self.root / "state" / "trust.json"
        data = self._read(path, MAX_DOCUMENT_BYTES)
        if data is None:
            return None
        try:
            state = trust.decode_state(data)
        except MalformedError as error:
            raise StateError(
                f"remembered trust is damaged ({error.message}); remove the file to start anew "
                "with --pubkey, after checking the publisher's head",
                source=str(path),
            ) from error
        if state.run != self.run:
            raise StateError(f"this directory belongs to run {state.run!r}", source=str(self.root))
        return state

    def write_trust(self, state: trust.TrustState) -> None:
        """Remember ``state`` durably; call it before acting on the head it came from."""
        atomic_write(self.root / "state" / "trust.json", trust.encode_state(state))

    # --- documents and delta blobs ----------------------------------------------------------

    def blob_path(self, digest: str) -> Path:
        """Return where a document or delta blob lies, if it is here."""
        return self.root / "blobs" / f"{digest}.bin"

    def has_blob(self, digest: str) -> bool:
        """Say whether a document or delta blob is here (by name; ``read_blob`` verifies)."""
        return _is_there(self.blob_path(digest), stat.S_ISREG)

    def blobs(self) -> list[str]:
        """Return the digests of all documents and delta blobs that are here."""
        names = _listing(self.root / "blobs")
        return [name[:-4] for name in names if name.endswith(".bin") and is_digest(name[:-4])]

    def read_blob(self, digest: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes | None:
        """Return a blob's verified bytes; None if it is not here, or was damaged (and removed)."""
        path = self.blob_path(digest)
        try:
            data = self._read(path, limit)
        except StateError:
            data = b""
        if data is not None and digest_of(data) != digest:
            self.remove_blob(digest)
            return None
        return data

    def write_blob(self, digest: str, data: bytes) -> None:
        """Keep a document or delta blob.

        Raises:
            IntegrityError: If ``data`` does not have that digest.
        """
        found = digest_of(data)
        if found != digest:
            raise IntegrityError(f"blob has digest {found}, not {digest}")
        if not self.has_blob(digest):
            atomic_write(self.blob_path(digest), data)

    def temporary(self, name: str) -> Path:
        """Return a fresh path under ``state/tmp`` to fill and then keep."""
        directory = self.root / "state" / "tmp"
        with disk_errors(directory, "making the directory"):
            directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{name}.{os.getpid()}.{next(_unique)}"

    def keep_blob(self, digest: str, temporary: Path) -> None:
        """Move a complete and verified temporary file to its place in ``blobs/``."""
        path = self.blob_path(digest)
        with disk_errors(path, "keeping"):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
            fsync_directory(path.parent)

    def remove_blob(self, digest: str) -> None:
        """Remove a blob; what is gone already is fine."""
        with contextlib.suppress(OSError):
            os.unlink(self.blob_path(digest))

    def load_version(self, ref: VersionRef) -> Version | None:
        """Assemble a complete version from ``blobs/``; None while a document is missing.

        Raises:
            MalformedError, TrustError: If its documents are not what they should be.
        """
        data = self.read_blob(ref.manifest)
        if data is None:
            return None
        manifest = manifests.decode_manifest(data)
        layout = self.read_blob(manifest.layout)
        parts = [self.read_blob(digest) for digest in manifest.parts]
        if layout is None or None in parts:
            return None
        return manifests.assemble(
            ref,
            self.run,
            manifest,
            decode_layout(layout),
            [decode_part(part) for part in parts if part is not None],
        )

    def load_open(self, ref: OpenRef) -> Version | None:
        """Assemble an open version with the parts that are here; None without its layout.

        Raises:
            MalformedError, TrustError: If its documents are not what they should be.
        """
        layout = self.read_blob(ref.layout)
        if layout is None:
            return None
        parts = [part for digest in ref.parts if (part := self.read_blob(digest)) is not None]
        return manifests.assemble_open(
            ref, self.run, decode_layout(layout), [decode_part(part) for part in parts]
        )

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

    def stage(self, version: Version, *, files: bool = True) -> StoredVersion:
        """Begin or resume a version: its files get their full size, its journal is opened.

        What another layout left under the same number in staging is removed.

        Args:
            version: What its documents say; the documents must lie in ``blobs/`` already.
            files: False where the caller makes the files (links, clones) before it calls.

        Raises:
            StateError: If a committed version of that number has another layout.
            DiskFullError: If there is no room.
        """
        number = version.number
        with self._lock:
            here = self.stored(number) or self._adopt(version)
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
                if _is_there(directory, stat.S_ISDIR):
                    version = self._load_state(number)
                    if version is not None:
                        return self._open(version, directory, committed=committed)
            return None

    def forget_gone(self) -> None:
        """Let go of versions that another process has removed: descriptors, memory."""
        with self._lock:
            for number in [n for n, stored in self._cache.items() if not stored.alive]:
                self._cache.pop(number).close()

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
            except OSError:
                self._remove(number, None)
                return True
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
                    stored.let_go()  # not closed: they may be read at this moment
                self._cache.clear()
            self._writer = writer
            for stored in self._cache.values():
                stored.set_read_only(not writer)

    # --- current ----------------------------------------------------------------------------

    def switch_current(self, number: int) -> None:
        """Point ``current`` at a committed version: atomic, never absent, never half."""
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
            for name in _listing(directory):
                if name.startswith(_TRASH):
                    remove_tree(directory / name)
        self._clean_version_state()
        for number in self.staged():
            if not self._state_path(number).exists() and self._is_stale(number):
                self.evict(number)
        for directory in (self.root, self.root / "state", self.root / "blobs"):
            remove_abandoned(directory, is_hidden_temporary)
        remove_abandoned(self.root / "state" / "tmp", lambda _name: True)

    def save_state(self, version: Version) -> None:
        """Remember which documents describe a version."""
        parts = version.documents[1:] if version.manifest is None else version.documents[2:]
        state = StoredState(
            run=self.run,
            version=version.number,
            layout=version.layout_digest,
            manifest=version.manifest,
            parts=list(parts),
        )
        atomic_write(self._state_path(version.number), encode(state))

    def close(self) -> None:
        """Close every descriptor that this object holds."""
        with self._lock:
            for stored in self._cache.values():
                stored.close()
            self._cache.clear()

    # --- inner workings ---------------------------------------------------------------------

    def _clean_version_state(self) -> None:
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

    def _state_path(self, number: int) -> Path:
        return self.root / "state" / f"{number:06d}.json"

    def _journal_path(self, number: int) -> Path:
        return self.root / "state" / f"{number:06d}.shards"

    def _open(self, version: Version, directory: Path, *, committed: bool) -> StoredVersion:
        journal = ShardJournal(
            self._journal_path(version.number), version.layout_digest, version.layout.shard_count
        )
        journal.read_only = not self._writer
        stored = StoredVersion(version, directory, journal, committed=committed)
        self._cache[version.number] = stored
        return stored

    def _adopt(self, version: Version) -> StoredVersion | None:
        """Take over a committed directory whose description was lost; its shards say the rest.

        One that holds other files than the version has is removed: it is something else.
        """
        directory = self.version_directory(version.number)
        if not _is_there(directory, stat.S_ISDIR):
            return None
        with disk_errors(directory, "listing"):
            found = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
        if not found <= {entry.path for entry in version.layout.files}:
            self._remove(version.number, directory)
            return None
        self.save_state(version)
        return self._open(version, directory, committed=True)

    def _load_state(self, number: int) -> Version | None:
        try:
            data = self._read(self._state_path(number), MAX_DOCUMENT_BYTES)
            if data is None:
                return None
            state = decode(data, StoredState, limit=MAX_DOCUMENT_BYTES, what="stored state")
            if (state.run, state.version) != (self.run, number):
                return None
            layout_data = self.read_blob(state.layout)
            if layout_data is None:
                return None
            layout = decode_layout(layout_data)
            if state.manifest is not None:
                ref = VersionRef(
                    version=state.version,
                    step=layout.step,
                    manifest=state.manifest,
                    bytes=layout.total_bytes,
                    deltas=[],
                )
                return self.load_version(ref)
            return self.load_open(
                OpenRef(
                    version=state.version,
                    step=layout.step,
                    layout=state.layout,
                    parts=state.parts,
                    deltas=[],
                )
            )
        except (MalformedError, StateError):
            return None

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
        for path in (self._state_path(number), self._journal_path(number)):
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
        names = _listing(directory)
        return sorted((int(name) for name in names if _NUMBER.match(name)), reverse=True)

    def _read(self, path: Path, limit: int) -> bytes | None:
        with disk_errors(path, "reading"):
            try:
                with open(path, "rb") as file:
                    data = file.read(limit + 1)
            except FileNotFoundError:
                return None
        if len(data) > limit:
            raise StateError(f"file is longer than {limit} bytes", source=str(path))
        return data


def _listing(directory: Path) -> list[str]:
    """Return the names in a directory; none where it is not there.

    Raises:
        DiskError: If the system does not say.
    """
    with disk_errors(directory, "listing"):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []


def _is_there(path: Path, kind: Callable[[int], bool]) -> bool:
    """Say whether there is something of a kind under a name.

    Raises:
        DiskError: If the system does not say.
    """
    with disk_errors(path, "looking at"):
        try:
            return kind(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

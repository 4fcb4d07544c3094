"""Where fills put their bytes: the extent of a staged version, or a file that becomes a blob."""

from __future__ import annotations

import os
from pathlib import Path

from relay.catalog import DataBlob, DocumentBlob, Parsed, Place, ShardBlob
from relay.runs import RelayRun
from relay.shelf import remove_quietly
from shardcast.errors import BusyError, DiskFullError, NotFoundError
from shardcast.protocol.manifest import Version
from shardcast.store.abandoned import create_temporary
from shardcast.store.files import disk_errors
from shardcast.store.stored import ShardState, StoredVersion


class ShardTarget:
    """A shard's extent in a version that is staged when the fill begins."""

    def __init__(self, run: RelayRun, blob: ShardBlob, version: Version, place: Place) -> None:
        self._run = run
        self._version = version
        self._place = place
        self._stored: StoredVersion | None = None
        self._lacking: int | None = None
        self.digest = blob.digest
        self.length: int | None = blob.length
        self.limit = blob.length

    @property
    def run(self) -> str:
        """The run."""
        return self._run.name

    def open(self) -> tuple[int, int]:
        """Stage the version if need be and open the file. Nothing was asked of a parent yet."""
        stored = self._run.stored.get(self._version.number)
        if stored is None or not stored.alive:
            try:
                stored = self._run.stage(self._version)
            except DiskFullError:
                self._lacking = self._version.layout.total_bytes
                raise
        extent = self._version.layout.extent(self._place.shard)
        stored.acquire_lease()
        try:
            try:
                stored.require_room(self._place.shard)
            except DiskFullError:
                lacking = (self._version.layout.extent(shard) for shard in stored.missing())
                self._lacking = extent.length + sum(one.length for one in lacking)
                raise
            if stored.damaged is not None:
                stored.restore_files()
            if stored.state(self._place.shard) is not ShardState.MISSING:
                stored.discard(self._place.shard, "it is fetched again")
            fd = stored.open_file(extent.file, writable=True)
        except BaseException:
            stored.release_lease()
            raise
        self._stored = stored
        return fd, extent.offset

    def finish(self, xxh3: bytes, length: int) -> None:
        """Record the shard as verified."""
        del length  # the extent's
        assert self._stored is not None
        self._stored.record(self._place.shard, xxh3)
        self.discard()

    def landed(self) -> None:
        """Commit the version if this was its last shard."""
        self._run.claims.discard((self._version.number, self._place.shard))
        stored = self._run.stored.get(self._version.number)
        if stored is not None and not stored.committed and stored.complete:
            self._run.spawn(self._run.commit_complete())

    def lost(self) -> None:
        """Let others write the extent; ask for room if that is what was lacking."""
        self._run.claims.discard((self._version.number, self._place.shard))
        if self._lacking is not None:
            self._run.short(self._version.number, self._lacking)

    def discard(self) -> None:
        """Give the lease back."""
        if self._stored is not None:
            self._stored.release_lease()
            self._stored = None


class BlobTarget:
    """A temporary file that is moved to ``blobs/`` once it is verified."""

    def __init__(self, run: RelayRun, blob: DocumentBlob | DataBlob) -> None:
        self._run = run
        self._blob = blob
        self._path: Path | None = None
        self._fd = -1
        self._parsed: Parsed | None = None
        self.digest = blob.digest
        self.length: int | None = blob.length if isinstance(blob, DataBlob) else None
        self.limit = blob.length if isinstance(blob, DataBlob) else blob.limit

    @property
    def run(self) -> str:
        """The run."""
        return self._run.name

    def open(self) -> tuple[int, int]:
        """Create the temporary file."""
        self._path = self._run.store.temporary(self.digest)
        with disk_errors(self._path, "creating"):
            self._fd = create_temporary(self._path)
        return self._fd, 0

    def finish(self, xxh3: bytes, length: int) -> None:
        """Parse a document, and move the file to its place."""
        del xxh3
        if self._path is None:
            raise NotFoundError(f"temporary file of blob {self.digest} was never made")
        with disk_errors(self._path, "shortening"):
            os.ftruncate(self._fd, length)  # a wrong one that came before may have been longer
        if isinstance(self._blob, DocumentBlob):
            with disk_errors(self._path, "reading"):
                data = os.pread(self._fd, length, 0)
            self._parsed = self._run.parse(self._blob, data)
        self._run.shelf.keep(self.digest, self._path, self._fd)
        self._path = None

    def landed(self) -> None:
        """Take a document into the catalog."""
        if isinstance(self._blob, DocumentBlob):
            self._run.learn(self.digest, self._parsed)
            self._parsed = None

    def lost(self) -> None:
        """Nothing to tell."""

    def discard(self) -> None:
        """Remove the temporary file."""
        if self._path is not None:
            remove_quietly(self._path)
            self._path = None


class SpareTarget:
    """A file without a name, for a shard whose extent another process may be writing.

    Its readers are served from it, and then it is gone.
    """

    def __init__(self, run: RelayRun, blob: ShardBlob) -> None:
        self._store = run.store
        self.run = run.name
        self.digest = blob.digest
        self.length: int | None = blob.length
        self.limit = blob.length

    def open(self) -> tuple[int, int]:
        """Create the file."""
        path = self._store.temporary(self.digest)
        with disk_errors(path, "creating"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        remove_quietly(path)
        return fd, 0

    def finish(self, xxh3: bytes, length: int) -> None:
        """Nothing is kept."""

    def landed(self) -> None:
        """Nothing to tell."""

    def lost(self) -> None:
        """Nothing to tell."""

    def discard(self) -> None:
        """Nothing to forget."""


def target_for(
    run: RelayRun, known: DocumentBlob | DataBlob | ShardBlob
) -> ShardTarget | BlobTarget:
    """Return where a fill of ``known`` goes: a shard into the newest version that has it.

    Raises:
        NotFoundError: If the head has just moved on and dropped it.
        DiskFullError: If its version would be beyond the quota.
        BusyError: If somebody else writes that extent at the moment.
    """
    if not isinstance(known, ShardBlob):
        return BlobTarget(run, known)
    place = known.places[0]
    version = run.catalog.version(place.version)
    if version is None:
        raise NotFoundError(f"version {place.version} of run {run.name!r} is gone")
    if place.version not in run.stored:
        run.admit(version)
    claim = (place.version, place.shard)
    if claim in run.claims:
        raise BusyError(f"shard {place.shard} of version {place.version} is being written")
    run.claims.add(claim)
    return ShardTarget(run, known, version, place)

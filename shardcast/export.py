"""A run as plain files, for static web servers and buckets.

``out/v1/{run}/head`` and ``out/v1/{run}/blobs/{digest}.bin`` are the two kinds of resource of the
protocol. Blobs are written before the head and removed after it, so whoever syncs or serves the
directory never sees a head whose blobs are not there. Every blob is verified while it is copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from shardcast.errors import IntegrityError, NotFoundError
from shardcast.hashing import default_threads
from shardcast.protocol.digest import is_digest
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.protocol.manifest import Version
from shardcast.salvage import salvage
from shardcast.sharing import Stopping, share_out
from shardcast.store.files import (
    atomic_write,
    disk_errors,
    read_into,
    require_space,
    temporary_beside,
    write_all,
)
from shardcast.store.locks import FileLock
from shardcast.store.retention import referenced_documents
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion

CHUNK_BYTES: Final = 1 << 20

Progress = Callable[[int], None]
"""Called with bytes written since the last call, from several threads."""


@dataclass(frozen=True, slots=True)
class BlobCopy:
    """A blob to write: ``length`` bytes at ``offset`` of ``source``."""

    digest: str
    source: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export has to do.

    Attributes:
        envelope: The head, verbatim.
        head: What it says.
        copies: Blobs that are not there yet.
        kept: How many are there already.
        gone: Digests of blobs there that the head does not reach any more.
    """

    envelope: bytes
    head: Head
    copies: tuple[BlobCopy, ...]
    kept: int
    gone: tuple[str, ...]

    @property
    def copy_bytes(self) -> int:
        """The bytes to write."""
        return sum(copy.length for copy in self.copies)


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did."""

    directory: Path
    head: Head
    written: int
    written_bytes: int
    kept: int
    removed: int


def export_run(
    run: RunStore,
    out: Path,
    *,
    begin: Callable[[ExportPlan], None] = lambda plan: None,
    progress: Progress = lambda count: None,
    threads: int | None = None,
) -> Exported:
    """Write ``out/v1/{run}``; what is there already is not written again.

    An interrupted export is continued by the next one; until then the old head stays.

    Raises:
        NotFoundError: If the run has no head, or the store lacks a version that it lists.
        IntegrityError: If bytes in the store do not have their digest.
        BusyError: If another export writes there.
        DiskError: If something cannot be read or written.
    """
    directory = out / "v1" / run.run
    blobs = directory / "blobs"
    with disk_errors(blobs, "making the directory"):
        blobs.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / f".{run.run}.lock", what=f"export of run {run.run!r}")
    with lock, contextlib.ExitStack() as leases:
        with disk_errors(blobs, "removing what a killed export left"):
            for name in os.listdir(blobs):
                if name.startswith(".") and name.endswith(".tmp"):
                    (blobs / name).unlink(missing_ok=True)
        plan = plan_export(run, blobs, leases)
        begin(plan)
        require_space(blobs, plan.copy_bytes, what=f"export of run {run.run!r}")
        _copy_all(plan.copies, blobs, progress, threads or default_threads())
        atomic_write(directory / "head", plan.envelope)
        for digest in plan.gone:
            with disk_errors(blobs, "removing an old blob"):
                (blobs / f"{digest}.bin").unlink(missing_ok=True)
    return Exported(
        directory, plan.head, len(plan.copies), plan.copy_bytes, plan.kept, len(plan.gone)
    )


def plan_export(run: RunStore, blobs: Path, leases: contextlib.ExitStack) -> ExportPlan:
    """Compare what the head reaches with what lies in ``blobs``.

    The versions that are read from are kept from eviction until ``leases`` is closed.
    """
    envelope = run.read_head()
    if envelope is None:
        raise NotFoundError(f"run {run.run!r} has no head yet", source=str(run.root))
    head = decode_head(open_unverified(envelope)[1])
    reached: dict[str, BlobCopy] = {}
    for ref in head.versions:
        version = run.load_version(ref)
        stored = run.stored(ref.version)
        if stored is not None and not stored.complete:
            salvage(stored)
        if stored is not None and stored.damaged is not None:
            raise IntegrityError(stored.damaged, source=str(stored.directory))
        if version is None or stored is None or not stored.complete:
            raise NotFoundError(
                f"the store holds version {ref.version} of run {run.run!r} only in part",
                source=str(run.root),
            )
        leases.enter_context(stored.lease())
        reached |= _shards(version, stored)
    if head.open is not None:
        opened, staged = run.load_open(head.open), run.stored(head.open.version)
        if opened is not None and staged is not None:
            leases.enter_context(staged.lease())
            present = staged.present()
            shards = _shards(opened, staged)
            reached |= {d: c for d, c in shards.items() if opened.shards_of()[d].shard in present}
    for digest in referenced_documents(run):
        path = run.blob_path(digest)
        with disk_errors(path, "looking at"), contextlib.suppress(FileNotFoundError):
            reached[digest] = BlobCopy(digest, path, 0, path.stat().st_size)
    there = dict(_blobs_in(blobs))
    copies = tuple(copy for digest, copy in reached.items() if there.get(digest, -1) != copy.length)
    gone = tuple(sorted(there.keys() - reached.keys()))
    return ExportPlan(envelope, head, copies, len(reached) - len(copies), gone)


def _shards(version: Version, stored: StoredVersion) -> dict[str, BlobCopy]:
    return {
        digest: BlobCopy(digest, stored.directory / extent.path, extent.offset, extent.length)
        for digest, extent in version.shards_of().items()
    }


def _blobs_in(directory: Path) -> Iterator[tuple[str, int]]:
    with disk_errors(directory, "listing"):
        for entry in os.scandir(directory):
            digest = entry.name.removesuffix(".bin")
            if is_digest(digest):
                yield digest, entry.stat().st_size


def _copy_all(copies: tuple[BlobCopy, ...], blobs: Path, progress: Progress, threads: int) -> None:
    def write(buffer: memoryview, copy: BlobCopy, stopping: Stopping) -> None:
        _copy(copy, blobs, buffer, progress, stopping)

    share_out(
        copies,
        write,
        threads=min(threads, len(copies)),
        tool=lambda: contextlib.nullcontext(memoryview(bytearray(CHUNK_BYTES))),
        name="export",
    )


def _copy(
    copy: BlobCopy, blobs: Path, buffer: memoryview, progress: Progress, stopping: Stopping
) -> None:
    """Write one blob under its name, once all its bytes have its digest."""
    target = blobs / f"{copy.digest}.bin"
    temporary = temporary_beside(target)
    hasher = blake3()
    with contextlib.ExitStack() as cleanup, disk_errors(target, "exporting"):
        source_fd = os.open(copy.source, os.O_RDONLY | os.O_CLOEXEC)
        cleanup.callback(os.close, source_fd)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        cleanup.callback(os.close, fd)
        cleanup.callback(_remove_quietly, temporary)
        done = 0
        while done < copy.length and not stopping():
            piece = buffer[: min(len(buffer), copy.length - done)]
            got = read_into(source_fd, piece, copy.offset + done)
            hasher.update(piece[:got])
            write_all(fd, piece[:got], done)
            progress(got)
            done += got
            if got < len(piece):
                break
        if stopping():
            return
        if hasher.hexdigest() != copy.digest:
            raise IntegrityError(
                f"bytes {copy.offset}-{copy.offset + copy.length - 1} of {copy.source} do not have "
                f"digest {copy.digest}",
                source=str(copy.source),
            )
        os.replace(temporary, target)


def _remove_quietly(temporary: Path) -> None:
    with contextlib.suppress(OSError):  # it is not the trouble to report
        temporary.unlink()

"""Hash everything in a directory again and compare it with the signed digests.

Reads only: nothing is repaired, removed or remembered. What is hashed: every document and delta
blob against its name, every shard of every committed version, and of a staged version those
shards that its journal says were verified. And whether what the head's deltas are made of is here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from shardcast.announced_deltas import Lacking, lacking_deltas
from shardcast.errors import MalformedError, NotFoundError
from shardcast.hashing import default_threads
from shardcast.protocol import trust
from shardcast.protocol.documents import check_run, decode
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_HEAD_BYTES
from shardcast.store.files import disk_errors, read_into
from shardcast.store.records import StoredState
from shardcast.store.roles import Role, role_of
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion

CHUNK_BYTES: Final = 1 << 20
_NUMBER: Final = re.compile(r"^[0-9]{6,16}\Z", re.ASCII)

Progress = Callable[[int], None]
"""Called with bytes that were hashed since the last call, from several threads."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not what a signed digest says.

    Attributes:
        run: The run.
        version: The version, None for a document or delta blob.
        path: The file, relative to the directory of the version or run.
        shard: The shard, None where the whole file is meant.
        start: First byte of the range in the file.
        stop: First byte after it.
        reason: What is wrong with it.
    """

    run: str
    version: int | None
    path: str
    shard: int | None
    start: int
    stop: int
    reason: str


@dataclass
class Report:
    """What was found.

    Attributes:
        runs: Names of the runs that were looked at.
        versions: ``(run, version)`` of the versions that were hashed.
        shards: How many shards were hashed.
        documents: How many documents and delta blobs were hashed.
        bytes: How many bytes were hashed.
        damage: All damage, in the order of versions, files and bytes.
        unsigned: ``(run, version)`` of versions whose manifest no accepted head names, and that
            therefore could only be compared with their own documents.
        unknown: Files beside a version's own, relative to the directory that was verified.
        absent: ``(run, version)`` of newest versions, by the head, that are not here (yet).
        lacking: ``(run, delta)`` of deltas that are announced and not whole in a relay's store, which
            fetches them when they are asked for. In an origin's store they are damage.
    """

    runs: list[str] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    shards: int = 0
    documents: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)
    unsigned: list[tuple[str, int]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    absent: list[tuple[str, int]] = field(default_factory=list)
    lacking: list[tuple[str, Lacking]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    """What a directory turned out to be: the runs in it, and the one version meant, or None."""

    runs: tuple[RunStore, ...]
    version: int | None


def locate(directory: Path) -> Target:
    """Recognise a store, a run's directory (a worker's OUT) or a version inside one.

    Raises:
        NotFoundError: If it is none of these.
    """
    path = Path(os.path.realpath(directory))
    if not path.is_dir():
        raise NotFoundError(f"no directory {directory}", source=str(directory))
    if _NUMBER.match(path.name) and path.parent.name == "versions":
        return Target((open_run(path.parent.parent),), int(path.name))
    if _is_run(path):
        return Target((open_run(path),), None)
    with disk_errors(path, "listing"):
        inside = sorted(entry for entry in path.iterdir() if _is_run(entry))
    if not inside:
        raise NotFoundError(
            f"{directory} is neither a store nor a worker's directory nor a version in one",
            source=str(directory),
        )
    return Target(tuple(open_run(entry) for entry in inside), None)


def _is_run(path: Path) -> bool:
    return (path / "head.json").is_file() or (path / "state" / "trust.json").is_file()


def open_run(root: Path) -> RunStore:
    """Open a run's directory whose run is not known by name: the head says it, or the trust.

    Raises:
        NotFoundError: If nothing there says which run it is.
        MalformedError: If its head is not one.
    """
    with disk_errors(root, "reading"):
        try:
            with open(root / "head.json", "rb") as file:
                data = file.read(MAX_HEAD_BYTES + 1)
            name = decode_head(open_unverified(data)[1]).run
        except FileNotFoundError:
            try:
                state = trust.decode_state((root / "state" / "trust.json").read_bytes())
            except FileNotFoundError:
                raise NotFoundError(
                    f"{root} has no head: it is not a run's directory", source=str(root)
                ) from None
            name = state.run
    return RunStore(root, check_run(name))


@dataclass(frozen=True, slots=True)
class Work:
    """One extent to hash: where, and what it should be."""

    run: str
    version: int | None
    directory: Path
    path: str
    shard: int | None
    offset: int
    length: int
    digest: str


def verify_directory(
    directory: Path,
    keys: Iterable[bytes] = (),
    *,
    begin: Callable[[int], None] = lambda total: None,
    progress: Progress = lambda count: None,
    threads: int | None = None,
) -> Report:
    """Hash everything in a directory on all cores.

    Args:
        directory: A store, a worker's OUT, or a version in one.
        keys: Raw public keys to trust; without, those that the directory remembers.
        begin: Called with the bytes to hash, once documents are known to be good.
        progress: Called with bytes hashed since the last call, from several threads.
        threads: Other than one per core.

    Raises:
        NotFoundError: If the directory is nothing of ours, or lacks the version.
        TrustError: If a head is not signed by a trusted key, or contradicts what is remembered.
        MalformedError: If a document that has the right digest is malformed all the same.
    """
    target = locate(directory)
    pinned = frozenset(keys)
    report = Report()
    for run in target.runs:
        report.runs.append(run.run)
        _execute(_documents(run), report, lambda count: None, threads)
    bad = {damage.path for damage in report.damage}
    with contextlib.ExitStack() as leases:
        work: list[Work] = []
        for run in target.runs:
            leases.callback(run.close)
            work += _versions(run, target, pinned, bad, report, leases)
            _deltas(run, target, bad, report)
        begin(sum(one.length for one in work))
        _execute(work, report, progress, threads)
    report.damage.sort(key=lambda one: (one.run, one.version or 0, one.path, one.start))
    return report


def _documents(run: RunStore) -> list[Work]:
    return [
        Work(run.run, None, run.root, f"blobs/{digest}.bin", None, 0, _size(path), digest)
        for digest in sorted(run.blobs())
        for path in [run.blob_path(digest)]
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _versions(
    run: RunStore,
    target: Target,
    pinned: frozenset[bytes],
    bad: set[str],
    report: Report,
    leases: contextlib.ExitStack,
) -> list[Work]:
    signed = _signed_manifests(run, pinned)
    numbers = [*sorted(run.committed()), *sorted(run.staged())]
    if target.version is not None:
        numbers = [target.version]
    elif (newest := _newest(run)) is not None and newest not in run.committed():
        report.absent.append((run.run, newest))
    work: list[Work] = []
    for number in numbers:
        damaged = _damaged_documents(run, number, bad)
        if damaged:
            reason = f"cannot be checked: its document {damaged[0]} is damaged"
            report.damage.append(Damage(run.run, number, ".", None, 0, 0, reason))
        else:
            work += _version(run, number, signed, report, leases)
    return work


def _deltas(run: RunStore, target: Target, bad: set[str], report: Report) -> None:
    """Look for what the announced deltas are made of, where that should be."""
    role = role_of(run.root.parent)
    if role is None:
        return  # a worker's directory: it keeps no deltas
    damaged = {Path(name).stem for name in bad}
    for delta in lacking_deltas(run, target.version, damaged):
        if role is Role.RELAY:
            report.lacking.append((run.run, delta))
            continue
        reason = f"missing: {delta} needs it"
        report.damage += [
            Damage(run.run, delta.version, f"blobs/{digest}.bin", None, 0, length, reason)
            for digest, length in delta.blobs
        ]


def _newest(run: RunStore) -> int | None:
    data = run.read_head()
    return None if data is None else decode_head(open_unverified(data)[1]).version


def _damaged_documents(run: RunStore, number: int, bad: set[str]) -> list[str]:
    """Return the damaged ones among a version's documents; the store would remove them."""
    try:
        data = run.state_path(number).read_bytes()
        state = decode(data, StoredState, limit=MAX_DOCUMENT_BYTES, what="stored state")
    except (OSError, MalformedError):
        return []
    named = [state.layout, *state.parts, *([state.manifest] if state.manifest else [])]
    return [name for name in (f"blobs/{digest}.bin" for digest in named) if name in bad]


def _signed_manifests(run: RunStore, pinned: frozenset[bytes]) -> dict[int, str]:
    """Return version to manifest as accepted heads name them."""
    state = run.read_trust()
    known = {} if state is None else dict(state.manifests)
    data = run.read_head()
    if data is None:
        return known
    first_use = state is None and not pinned
    begun = trust.begin(run.run, pinned=pinned, first_use=first_use, remembered=state)
    # The clock plays no part: a head lies here because it was accepted once.
    head = trust.accept(_without_sequence(begun), data, _issued(data)).head
    return known | {ref.version: ref.manifest for ref in head.versions}


def _issued(data: bytes) -> int:
    head: Head = decode_head(open_unverified(data)[1])
    return max(head.sequence, head.issued_at)


def _without_sequence(state: trust.TrustState) -> trust.TrustState:
    """A crash may leave the head one step behind the trust state: that is no rollback here."""
    return msgspec.structs.replace(state, sequence=None, payload=None, layouts={})


def _version(
    run: RunStore,
    number: int,
    signed: dict[int, str],
    report: Report,
    leases: contextlib.ExitStack,
) -> Iterator[Work]:
    stored = run.stored(number)
    if stored is None:
        if run.staging_directory(number).is_dir():
            return  # a publication that was killed before it knew what it publishes
        if not run.version_directory(number).is_dir():
            raise NotFoundError(f"version {number} is not there", source=str(run.root))
        reason = "cannot be checked: its documents are missing or malformed"
        report.damage.append(Damage(run.run, number, ".", None, 0, 0, reason))
        return
    leases.enter_context(stored.lease())  # nobody evicts it while it is hashed
    report.versions.append((run.run, number))
    if stored.committed and signed.get(number) != stored.version.manifest:
        report.unsigned.append((run.run, number))
    if stored.committed:
        report.unknown += _unknown_files(stored)
    present = range(stored.version.layout.shard_count) if stored.committed else stored.present()
    for shard in sorted(present):
        digest = stored.version.digests[shard]
        if digest is not None:
            extent = stored.version.layout.extent(shard)
            yield Work(
                run.run, number, stored.directory, extent.path, shard,
                extent.offset, extent.length, digest,
            )  # fmt: skip
    if stored.committed:
        report.damage += _wrong_sizes(run.run, stored)


def _wrong_sizes(run: str, stored: StoredVersion) -> Iterator[Damage]:
    """Yield what hashing cannot see: missing empty files, bytes beyond the end."""
    for entry in stored.version.layout.files:
        path = stored.directory / entry.path
        if not path.is_file():
            if entry.bytes == 0:
                yield Damage(run, stored.version.number, entry.path, None, 0, 0, "missing")
        elif (size := path.stat().st_size) > entry.bytes:
            yield Damage(
                run, stored.version.number, entry.path, None, entry.bytes, size, "too long"
            )


def _unknown_files(stored: StoredVersion) -> list[str]:
    known = {entry.path for entry in stored.version.layout.files}
    found = (
        path.relative_to(stored.directory).as_posix()
        for path in stored.directory.rglob("*")
        if not path.is_dir()
    )
    return sorted(f"{stored.version.number:06d}/{name}" for name in found if name not in known)


def _execute(work: list[Work], report: Report, progress: Progress, threads: int | None) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(
        threads or default_threads(), thread_name_prefix="verify"
    )
    try:
        reasons = list(pool.map(lambda one: _reason(one, progress), work))
    finally:
        pool.shutdown(cancel_futures=True)
    for one, reason in zip(work, reasons, strict=True):
        report.bytes += one.length
        if one.version is None:
            report.documents += 1
        else:
            report.shards += 1
        if reason is not None:
            stop = one.offset + one.length
            report.damage.append(
                Damage(one.run, one.version, one.path, one.shard, one.offset, stop, reason)
            )


def _reason(work: Work, progress: Progress) -> str | None:
    """Return what is wrong with an extent, or None."""
    hasher = blake3()
    try:
        fd = os.open(work.directory / work.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return (
            "missing" if isinstance(error, FileNotFoundError) else f"unreadable: {error.strerror}"
        )
    try:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(work.length, 1))))
        done = 0
        while done < work.length:
            piece = buffer[: min(len(buffer), work.length - done)]
            if (got := read_into(fd, piece, work.offset + done)) != len(piece):
                return f"the file ends at byte {work.offset + done + got}"
            hasher.update(piece)
            progress(len(piece))
            done += len(piece)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    finally:
        os.close(fd)
    found = hasher.hexdigest()
    return None if found == work.digest else f"digest is {found}, not {work.digest}"

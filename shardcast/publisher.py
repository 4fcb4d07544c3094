"""Publish a checkpoint directory into a store on this machine.

Order, and what a crash leaves behind: files are staged and hashed (leftovers in
``state/staging``), documents are written to ``blobs/`` (harmless), the version is renamed to
``versions/N`` (not announced: the next publication removes it), ``head.json`` is replaced (the
commit point), trust is remembered (a head newer than it is accepted), old versions are removed.
So a kill at any point leaves the previous head or the new one, both whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from shardcast.errors import (
    BusyError,
    ModifiedError,
    NotFoundError,
    ShardcastError,
    UnknownKeyError,
    UsageError,
)
from shardcast.hashing import ShardJob, hash_shards
from shardcast.protocol import succession, trust
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import Signer, encode_key, key_id, seal
from shardcast.protocol.head import Head, VersionRef, encode_head
from shardcast.protocol.layout import (
    FileEntry,
    Layout,
    choose_shard_bytes,
    encode_layout,
    encode_part,
    split_parts,
)
from shardcast.protocol.limits import (
    MAX_BYTES,
    MAX_METADATA_BYTES,
    MAX_METADATA_ITEMS,
    MAX_TEXT_CHARS,
    ONE_SHOT_EXPIRY_MS,
)
from shardcast.protocol.manifest import Version, encode_manifest
from shardcast.sources import Selection, require_unchanged, select_files
from shardcast.store.files import (
    MEMORY_FILE_SYSTEMS,
    disk_error,
    file_system_of,
    preallocate,
    reflink,
    require_space,
)
from shardcast.store.retention import Collected, collect, unreachable_versions
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, StoredVersion

DEFAULT_KEEP: Final = 4
LOCK_WAIT_S: Final = 600.0
"""How long a publisher waits for another one of the same run."""
_TICKS_NS: Final = 20_000_000


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """What to publish and how.

    Attributes:
        source: The checkpoint directory.
        step: The trainer's step, or None.
        link: Hard-link instead of copying; for directories that are written once.
        include: Globs of files to publish although they are left out by default.
        exclude: Globs of files to leave out.
        lineage: A new string when a trainer restarts from an older step; None: as before.
        metadata: Strings that travel in the layout.
        keep: How many versions the head retains.
        durability: Whether files are synced before the version is announced.
        threads: Threads that hash; None: all cores.
        expiry_ms: How long the head is fresh.
    """

    source: Path
    step: int | None = None
    link: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    lineage: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    keep: int = DEFAULT_KEEP
    durability: Durability = Durability.SYNC
    threads: int | None = None
    expiry_ms: int = ONE_SHOT_EXPIRY_MS

    def __post_init__(self) -> None:
        """Check what would otherwise be found out after everything was hashed.

        Raises:
            UsageError: Naming the option.
        """
        if self.step is not None and not 0 <= self.step <= MAX_BYTES:
            raise UsageError(f"--step {self.step} is not from 0 to {MAX_BYTES}")
        if self.lineage is not None and not 0 < len(self.lineage) <= MAX_TEXT_CHARS:
            raise UsageError(f"--lineage has 1 to {MAX_TEXT_CHARS} characters")
        texts = [text for item in self.metadata.items() for text in item]
        try:
            weight = len("".join(texts).encode())
            (self.lineage or "").encode()
        except UnicodeEncodeError:
            raise UsageError("--metadata and --lineage must be text in UTF-8") from None
        if weight > MAX_METADATA_BYTES or len(self.metadata) > MAX_METADATA_ITEMS:
            raise UsageError(
                f"--metadata: {len(self.metadata)} items of {weight} bytes; at most "
                f"{MAX_METADATA_ITEMS} of {MAX_METADATA_BYTES} bytes in all"
            )


class PublishObserver(Protocol):
    """Hears how a publication goes; called from several threads."""

    def selected(self, selection: Selection) -> None:
        """The files are known."""
        ...

    def hashed(self, count: int) -> None:
        """``count`` more bytes were hashed (and copied)."""
        ...

    def uploading(self, total: int) -> None:
        """A remote origin lacks ``total`` bytes."""
        ...

    def uploaded(self, count: int) -> None:
        """``count`` more bytes were uploaded."""
        ...

    def waiting(self, message: str) -> None:
        """Another publisher is at work."""
        ...


class SilentObserver:
    """Hears everything and says nothing."""

    def selected(self, selection: Selection) -> None:
        """Do nothing."""

    def hashed(self, count: int) -> None:
        """Do nothing."""

    def uploading(self, total: int) -> None:
        """Do nothing."""

    def uploaded(self, count: int) -> None:
        """Do nothing."""

    def waiting(self, message: str) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Published:
    """What was announced.

    Attributes:
        ref: The head's entry: version, step, manifest, bytes.
        path: The version's directory in the store, or None at a remote origin.
        selection: What was published and left out.
        uploaded_bytes: What a remote origin lacked; 0 in a local store.
        method: ``clone``, ``copy``, ``link`` or ``upload``.
        collected: What retention removed, or None.
    """

    run: str
    ref: VersionRef
    path: Path | None
    selection: Selection
    uploaded_bytes: int
    method: str
    collected: Collected | None


@dataclass(frozen=True, slots=True)
class Documents:
    """A version's documents as bytes, by digest, in upload order; and the version itself."""

    version: Version
    blobs: Mapping[str, bytes]


def publish_directory(
    options: PublishOptions,
    run: RunStore,
    signers: Sequence[Signer],
    now_ms: Callable[[], int],
    observer: PublishObserver | None = None,
) -> Published:
    """Publish a directory into a local store and announce it.

    Args:
        options: What and how.
        run: The run in the store.
        signers: The run's key first; during a rotation the old key too.
        now_ms: The clock, Unix milliseconds.
        observer: Hears the progress.

    Raises:
        UsageError: If there is nothing to publish, or linking is not possible.
        BusyError: If another publisher of the run does not end within ten minutes.
        ModifiedError: If the directory changed meanwhile; nothing was announced.
        TrustError: If the run belongs to another key.
        DiskError: If the system refuses.
    """
    watch = observer or SilentObserver()
    require_apart(options.source, run.root)
    with publishing(run, watch):
        selection = settled_selection(options)
        head = last_head(run, signers, now_ms())
        number = _free_number(run, head)
        watch.selected(selection)
        previous = _previous_layout(run, head)
        layout = plan_layout(options, selection, run.run, number, previous, now_ms())
        method, stored, documents = _fill(options, run, layout, selection, watch)
        try:
            run.commit(number, options.durability)
        except BaseException:
            run.evict(number)
            raise
        ref = reference(documents.version)
        issue = issue_for(run.run, signers, now_ms(), options.expiry_ms)
        announce(run, succession.with_version(head, issue, ref, keep=options.keep), signers, issue)
        collected = _collect(run)
    return Published(run.run, ref, stored.directory, selection, 0, method, collected)


def require_apart(checkpoint: Path, store: Path) -> None:
    """Check that a store does not lie within the checkpoint, where it would publish itself.

    Raises:
        UsageError: If it does.
    """
    if store.resolve().is_relative_to(checkpoint.resolve()):
        raise UsageError(
            f"the store {store} lies within the checkpoint {checkpoint}: choose another --store",
            source=str(store),
        )


@contextlib.contextmanager
def publishing(run: RunStore, watch: PublishObserver) -> Iterator[None]:
    """Keep other publishers of the run out, waiting for the one that is at work."""
    lock = run.lock("publish", what=f"publishing to run {run.run!r}")
    try:
        lock.acquire()
    except BusyError as busy:
        watch.waiting(f"{busy.message}; waiting for it")
        lock.acquire(wait_s=LOCK_WAIT_S)
    try:
        yield
    finally:
        lock.release()


# --- heads ------------------------------------------------------------------------------------


def last_head(run: RunStore, signers: Sequence[Signer], now_ms: int) -> Head | None:
    """Return the run's head, after checking that our keys may sign the next one.

    Raises:
        UnknownKeyError: If the run belongs to another key.
        MalformedError, TrustError: If the stored head is not what was accepted last.
    """
    state = run.read_trust()
    data = run.read_head()
    if data is None:
        return None
    if state is None:  # killed between the first head and its trust
        state = trust.fresh(run.run, [signer.public_key for signer in signers])
    accepted = trust.accept(state, data, now_ms)
    require_owner(accepted.state, signers, source=str(run.root))
    return accepted.head


def require_owner(state: trust.TrustState, signers: Sequence[Signer], *, source: str) -> None:
    """Check that one of our keys is trusted for the run.

    Raises:
        UnknownKeyError: If none is: readers would refuse the head.
    """
    if any(encode_key(signer.public_key) in state.keys for signer in signers):
        return
    ours = key_id(signers[0].public_key)[:16]
    if encode_key(signers[0].public_key) in state.retired:
        raise UnknownKeyError(
            f"key {ours} was rotated out of run {state.run!r}: use the key it was rotated to",
            source=source,
        )
    raise UnknownKeyError(
        f"run {state.run!r} belongs to another key than {ours}: give it with --key, "
        "or publish under another run name",
        source=source,
    )


def issue_for(run: str, signers: Sequence[Signer], now_ms: int, expiry_ms: int) -> succession.Issue:
    """Return what the next head takes from us: the first signer's key is the one to trust."""
    return succession.Issue(
        run=run, now_ms=now_ms, keys=(signers[0].public_key,), expiry_ms=expiry_ms
    )


def announce(
    run: RunStore, head: Head, signers: Sequence[Signer], issue: succession.Issue
) -> bytes:
    """Sign a head, check it as a reader will, and replace the stored one: the commit point.

    Raises:
        TrustError: If readers that follow this store would refuse it; nothing is changed then.
    """
    envelope = seal(encode_head(head), signers)
    state = run.read_trust() or trust.fresh(run.run, [s.public_key for s in signers])
    accepted = trust.accept(state, envelope, issue.now_ms)
    run.write_head(envelope)
    run.write_trust(accepted.state)
    return envelope


def amend(
    run: RunStore,
    signers: Sequence[Signer],
    now_ms: Callable[[], int],
    change: Callable[[Head, succession.Issue], Head],
) -> Head:
    """Replace the head of a local run by a changed one (withdraw, hold, renew).

    Raises:
        NotFoundError: If the run has no head.
        TrustError: If the run belongs to another key.
        BusyError: If a publisher of the run does not end within ten minutes.
    """
    with publishing(run, SilentObserver()):
        now = now_ms()
        head = last_head(run, signers, now)
        if head is None:
            raise NotFoundError(f"run {run.run!r} has no head yet", source=str(run.root))
        issue = issue_for(run.run, signers, now, ONE_SHOT_EXPIRY_MS)
        changed = change(head, issue)
        announce(run, changed, signers, issue)
        return changed


# --- documents --------------------------------------------------------------------------------


def plan_layout(
    options: PublishOptions,
    selection: Selection,
    run: str,
    number: int,
    previous: Layout | None,
    now_ms: int,
) -> Layout:
    """Return the layout of the version to publish."""
    shard_bytes = choose_shard_bytes(
        selection.total_bytes, None if previous is None else previous.shard_bytes
    )
    lineage = options.lineage
    if lineage is None:
        lineage = previous.lineage if previous is not None else f"{run}-{now_ms}"
    return Layout(
        run=run,
        version=number,
        step=options.step,
        lineage=lineage,
        created_at=now_ms,
        shard_bytes=shard_bytes,
        metadata=dict(options.metadata),
        files=[FileEntry(path=f.path, bytes=f.stamp.bytes) for f in selection.files],
    )


def documents_of(layout: Layout, digests: Sequence[str]) -> Documents:
    """Return layout, parts and manifest of a complete version."""
    layout_data = encode_layout(layout)
    layout_digest = digest_of(layout_data)
    blobs = {layout_digest: layout_data}
    parts = []
    for first, some in split_parts(list(digests)):
        data = encode_part(layout_digest, first, some)
        parts.append(digest_of(data))
        blobs[parts[-1]] = data
    manifest_data = encode_manifest(layout_digest, parts)
    manifest = digest_of(manifest_data)
    blobs[manifest] = manifest_data
    version = Version(
        layout=layout,
        layout_digest=layout_digest,
        digests=tuple(digests),
        manifest=manifest,
        documents=(manifest, layout_digest, *parts),
    )
    return Documents(version, blobs)


def reference(version: Version) -> VersionRef:
    """Return the head's entry for a complete version."""
    if version.manifest is None:
        raise UsageError(f"version {version.number} is not complete")
    return VersionRef(
        version=version.number,
        step=version.layout.step,
        manifest=version.manifest,
        bytes=version.layout.total_bytes,
        deltas=[],
    )


def settled_selection(options: PublishOptions) -> Selection:
    """List the directory so that every later modification changes a stamp.

    Clocks of file systems tick every few milliseconds (jiffies): a file modified within the
    tick of its own mtime would look untouched, so a file that fresh is given two ticks.

    Raises:
        UsageError, MalformedError, DiskError: As ``select_files``.
    """
    selection = select_files(options.source, include=options.include, exclude=options.exclude)
    newest = max(file.stamp.mtime_ns for file in selection.files)
    if abs(time.time_ns() - newest) < _TICKS_NS:
        time.sleep(_TICKS_NS / 1e9)
        return select_files(options.source, include=options.include, exclude=options.exclude)
    return selection


# --- files ------------------------------------------------------------------------------------


def _free_number(run: RunStore, head: Head | None) -> int:
    state = run.read_trust()
    seen = () if state is None else (*state.manifests, *state.layouts)
    number = succession.next_version(head, seen)
    while number in {*run.committed(), *run.staged()}:  # never announced: a killed publication
        if not run.evict(number):
            number += 1
    return number


def _previous_layout(run: RunStore, head: Head | None) -> Layout | None:
    newest = head.newest() if head is not None else None
    if newest is None:
        return None
    try:
        version = run.load_version(newest)
    except ShardcastError:
        return None
    return None if version is None else version.layout


def _fill(
    options: PublishOptions,
    run: RunStore,
    layout: Layout,
    selection: Selection,
    watch: PublishObserver,
) -> tuple[str, StoredVersion, Documents]:
    """Bring all files into staging, hash them, and write the documents."""
    directory = run.staging_directory(layout.version)
    try:
        method = _place_files(options, selection, directory)
        hashes = hash_shards(
            _jobs(layout, selection, directory, method),
            threads=options.threads,
            progress=watch.hashed,
        )
        again = select_files(options.source, include=options.include, exclude=options.exclude)
        require_unchanged(selection, again, options.source)
        documents = documents_of(layout, [found.digest for found in hashes])
        for digest, data in documents.blobs.items():
            run.write_blob(digest, data)
        stored = run.stage(documents.version, files=False)
        stored.record_all({shard: found.xxh3 for shard, found in enumerate(hashes)})
    except BaseException:
        run.evict(layout.version)
        raise
    return method, stored, documents


def _jobs(layout: Layout, selection: Selection, directory: Path, method: str) -> list[ShardJob]:
    """Return one job a shard: copies hash what they read, links and clones what is in staging."""
    jobs = []
    for extent in layout.extents():
        here = directory / extent.path
        if method == "copy":
            source = selection.files[extent.file].location
            jobs.append(ShardJob(source, extent.offset, extent.length, target=here))
        else:
            jobs.append(ShardJob(here, extent.offset, extent.length))
    return jobs


def _place_files(options: PublishOptions, selection: Selection, directory: Path) -> str:
    """Link, clone or preallocate every file; return how."""
    if options.link:
        for file in selection.files:
            _link(file.location, directory / file.path)
        return "link"
    if _clone_all(selection, directory):
        return "clone"
    directory.mkdir(parents=True, exist_ok=True)
    require_space(directory, selection.total_bytes, what=f"publishing {options.source}")
    reserve = file_system_of(directory) not in MEMORY_FILE_SYSTEMS
    for file in selection.files:
        path = directory / file.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                preallocate(fd, file.stamp.bytes, reserve=reserve)
            finally:
                os.close(fd)
        except OSError as error:
            raise disk_error(error, path, "writing") from error
    return "copy"


def _link(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise UsageError(
                f"--link: {source} cannot be hard-linked into {target.parent} "
                f"({error.strerror}); publish without --link, or put --store on the same "
                "file system",
                source=str(source),
            ) from error
        raise disk_error(error, target, "linking") from error


def _clone_all(selection: Selection, directory: Path) -> bool:
    """Clone every file (FICLONE); False where one cannot be: copy all then."""
    for file in selection.files:
        path = directory / file.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            source = os.open(file.location, os.O_RDONLY | os.O_CLOEXEC)
            try:
                target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                try:
                    cloned = file.stamp.bytes == 0 or reflink(source, target)
                    size = os.fstat(target).st_size
                finally:
                    os.close(target)
            finally:
                os.close(source)
        except OSError as error:
            raise disk_error(error, path, "cloning") from error
        if not cloned:
            return False
        if size != file.stamp.bytes:
            raise ModifiedError(
                f"checkpoint file {file.path} was modified while it was published; "
                "nothing was announced",
                source=str(file.location),
            )
    return any(file.stamp.bytes for file in selection.files)


def _collect(run: RunStore) -> Collected | None:
    """Remove what the new head does not retain; trouble there does not undo a publication."""
    with contextlib.suppress(ShardcastError):
        return collect(run, unreachable_versions(run))
    return None

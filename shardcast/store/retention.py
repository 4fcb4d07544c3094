"""What to remove, and when: a pure choice, then a short runner."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from shardcast.errors import BusyError, ShardcastError
from shardcast.protocol import envelope, head, manifest
from shardcast.store.locks import DirectoryLock
from shardcast.store.run import RunStore

UPLOAD_WAIT_S: Final = 1.0
"""An uploaded document is named by nothing for moments only, but for what comes before its layout."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What to retain.

    Attributes:
        count: Most versions; None: any number.
        quota_bytes: Most bytes of versions; None: any.
        max_age_ms: Oldest a version may be (by when it came here); None: any.
    """

    count: int | None = None
    quota_bytes: int | None = None
    max_age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A version on disk: its number, its size, how long it has been here."""

    number: int
    bytes: int
    age_ms: int


def choose_evictions(
    held: Iterable[Held], keep: Keep, protected: Collection[int]
) -> tuple[int, ...]:
    """Return the versions to evict, oldest first.

    The newest version is never evicted, nor is a protected one (current, being fetched).
    """
    newest_first = sorted(held, key=lambda version: version.number, reverse=True)
    evict: list[int] = []
    count = total = 0
    for position, version in enumerate(newest_first):
        count, total = count + 1, total + version.bytes
        over = (
            (keep.count is not None and count > keep.count)
            or (keep.quota_bytes is not None and total > keep.quota_bytes)
            or (keep.max_age_ms is not None and version.age_ms > keep.max_age_ms)
        )
        if over and position > 0 and version.number not in protected:
            evict.append(version.number)
            count, total = count - 1, total - version.bytes
    return tuple(reversed(evict))


def referenced_documents(run: RunStore, *, without: Collection[int] = ()) -> set[str]:
    """Return the digests that the head or a version on disk names, as far as documents are here.

    Versions ``without`` are taken as gone from the disk.
    """
    named: set[str] = set()
    data = run.read_head()
    if data is not None:
        named |= _named_by_head(run, data)
    for number in {*run.committed(), *run.staged()}.difference(without):
        stored = run.stored(number)
        if stored is not None:
            named.update(stored.version.documents)
    return named


def _named_by_head(run: RunStore, data: bytes) -> set[str]:
    named: set[str] = set()
    current = head.decode_head(envelope.open_unverified(data)[1])
    for ref in current.versions:
        named.add(ref.manifest)
        document = run.read_blob(ref.manifest)
        if document is not None:
            listed = manifest.decode_manifest(document)
            named.update((listed.layout, *listed.parts))
        for delta in ref.deltas:
            named |= _delta_blobs(run, delta.parts)
    if current.open is not None:
        named.update((current.open.layout, *current.open.parts))
        for open_delta in current.open.deltas:
            named |= _delta_blobs(run, open_delta.parts)
    return named


def _delta_blobs(run: RunStore, parts: Iterable[str]) -> set[str]:
    from shardcast.protocol.delta import decode_delta_part

    named = set(parts)
    for digest in parts:
        document = run.read_blob(digest)
        if document is not None:
            named.update(blob.digest for blob in decode_delta_part(document).blobs)
    return named


class _Blob(msgspec.Struct):
    digest: str


class _Member(msgspec.Struct):
    """What any document says of the version that it belongs to; a layout says nothing."""

    layout: str = ""
    blobs: list[_Blob] = []


def on_their_way(
    run: RunStore, digests: Iterable[str], *, without: Collection[int] = ()
) -> set[str]:
    """Return which of the blobs belong to staged versions that are newer than any in the head.

    Their documents come one by one, and the last of them names the others. Versions ``without``
    are taken as gone from the disk.
    """
    newest = _newest(run)
    numbers = [n for n in run.staged() if n > newest and n not in without]
    stored = [found for n in numbers if (found := run.stored(n)) is not None]
    layouts = {found.version.layout_digest for found in stored}
    if not layouts:
        return set()
    documents, blobs = set[str](), set[str]()
    looked = set(digests)
    for digest in looked:
        data = run.read_document(digest)
        if data is None:
            continue
        try:
            member = msgspec.json.decode(data, type=_Member)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            continue  # a delta blob
        if digest in layouts or member.layout in layouts:
            documents.add(digest)
            blobs.update(blob.digest for blob in member.blobs)
    return documents | (looked & blobs)


def _newest(run: RunStore) -> int:
    data = run.read_head()
    if data is None:
        return 0
    current = head.decode_head(envelope.open_unverified(data)[1])
    return max((ref.version for ref in current.versions), default=0)


def unnamed_lock(run: RunStore, *, exclusive: bool) -> DirectoryLock:
    """Return the lock on ``blobs/``, not yet taken; the directory must be there.

    Who writes a document that nothing on disk names yet shares it until something does;
    ``collect`` removes documents while nobody has it.
    """
    what = f"documents of run {run.run!r} are being {'uploaded' if exclusive else 'removed'}"
    return DirectoryLock(run.root / "blobs", exclusive=exclusive, what=what)


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed (or would remove): versions, blobs, bytes; and what was busy.

    Attributes:
        uploading: Whether documents stay because some that nothing names yet are being uploaded.
    """

    versions: tuple[int, ...]
    blobs: int
    bytes: int
    busy: tuple[int, ...]
    uploading: bool = False


def collect(
    run: RunStore,
    evict: Iterable[int],
    *,
    dry_run: bool = False,
    spare_within: int | None = None,
    keep: Collection[str] = (),
) -> Collected:
    """Evict versions, then remove documents and delta blobs that nothing names any more.

    Call it while holding the lock that keeps local publishers out: documents of a version that is
    being published are not named by anything yet. Those that are being uploaded stay.

    Args:
        run: The run.
        evict: The versions.
        dry_run: Only say what would be removed.
        spare_within: Files of evicted versions become spares if no more than so many versions
            stay (``RunStore.evict``); None drops all spares.
        keep: Documents and delta blobs that stay although nothing on disk names them.

    Raises:
        ShardcastError: If the head cannot be read; nothing is removed then.
    """
    referenced_documents(run)  # raises before anything is removed
    gone: list[int] = []
    busy: list[int] = []
    freed = 0
    for number in evict:
        stored = run.stored(number)
        size = 0 if stored is None else stored.version.layout.total_bytes
        if dry_run or run.evict(number, spare_within=spare_within):
            gone.append(number)
            freed += size
        else:
            busy.append(number)
    blobs, size, uploading = _remove_unnamed(run, gone, keep, dry_run=dry_run)
    if not dry_run:
        if spare_within is None:
            run.spares.drop()
        run.clean_leftovers()
    return Collected(tuple(gone), blobs, freed + size, tuple(busy), uploading)


def _remove_unnamed(
    run: RunStore, gone: Collection[int], keep: Collection[str], *, dry_run: bool
) -> tuple[int, int, bool]:
    """Remove blobs that nothing names; return how many, their bytes, whether uploads prevent it."""
    if not run.blobs():
        return 0, 0, False
    lock = unnamed_lock(run, exclusive=True)
    try:
        if not dry_run:
            lock.acquire(wait_s=UPLOAD_WAIT_S)
        # Listed before it is asked what is named: what comes later, with its head, is not looked at.
        here = run.blobs()
        named = referenced_documents(run, without=gone).union(keep)
        unnamed = [digest for digest in here if digest not in named]
        spared = on_their_way(run, unnamed, without=gone)
        blobs, size = [digest for digest in unnamed if digest not in spared], 0
        for digest in blobs:
            try:
                size += run.blob_path(digest).stat().st_size
            except OSError:
                continue
            if not dry_run:
                run.remove_blob(digest)
    except BusyError:
        return 0, 0, True
    finally:
        lock.release()
    return len(blobs), size, False


def unreachable_versions(run: RunStore) -> tuple[int, ...]:
    """Return versions on disk that the head does not retain, oldest first; staged newer ones stay.

    Raises:
        ShardcastError: If the head cannot be read.
    """
    data = run.read_head()
    if data is None:
        raise ShardcastError("run has no head", source=str(run.root))
    current = head.decode_head(envelope.open_unverified(data)[1])
    kept = {ref.version for ref in current.versions}
    newest = max(kept, default=0)
    on_disk = {*run.committed(), *(n for n in run.staged() if n <= newest)}
    return tuple(sorted(on_disk - kept))

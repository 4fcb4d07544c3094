"""Publish a checkpoint directory to a remote origin, sending only what it lacks.

Nothing is visible there before the head, and every blob is verified by the origin before it is
kept, so an upload that was cut off is continued by publishing the same directory again: the
layout of an unfinished publication is remembered (``state/pending.json``) and used again while
the files are the same, so that shards which arrived already count.

A delta needs the bytes of the version before. So a publisher keeps what it published last in a cache: a
run's directory like any other, whose version counts as a base if its manifest is the one that the
origin's head names. Losing it costs one delta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shardcast.announcing import issue_for, publishing, require_owner
from shardcast.delta_publishing import delta_bases, further_deltas, leased
from shardcast.deltas import Delta
from shardcast.errors import (
    ClockError,
    DiskError,
    IntegrityError,
    MalformedError,
    ModifiedError,
    NetworkError,
    NotFoundError,
    RefusedError,
    ShardcastError,
    about,
)
from shardcast.hashing import ShardJob, hash_shards
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol import succession, trust
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import Signer, seal
from shardcast.protocol.head import Head, VersionRef, encode_head
from shardcast.protocol.layout import Extent, Layout, decode_layout, encode_layout
from shardcast.protocol.limits import MAX_FUTURE_MS, ONE_SHOT_EXPIRY_MS
from shardcast.publishing import (
    Documents,
    Published,
    PublishObserver,
    PublishOptions,
    SilentObserver,
    documents_of,
    plan_layout,
    reference,
    settled_selection,
)
from shardcast.sharing import Stopping, share_out
from shardcast.sources import Selection, require_unchanged, select_files
from shardcast.staging import Staged, stage_files
from shardcast.store.files import atomic_write
from shardcast.store.retention import collect
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, StoredVersion

UPLOAD_THREADS: Final = 4
"""Connections to the origin: enough to fill a long path, few enough for a small server."""

ClientFactory = Callable[[], OriginClient]


def publish_remote(
    options: PublishOptions,
    memory: RunStore,
    client_factory: ClientFactory,
    signers: Sequence[Signer],
    now_ms: Callable[[], int],
    observer: PublishObserver | None = None,
    cache: RunStore | None = None,
) -> Published:
    """Publish a directory to a remote origin and announce it.

    Args:
        options: What to publish; ``link`` is about the cache, ``durability`` does not matter here.
        memory: Where this machine remembers trust and unfinished uploads for that origin and run.
        client_factory: Makes one client a thread.
        signers: The run's key first; during a rotation the old key too.
        now_ms: The clock, Unix milliseconds.
        observer: Hears the progress.
        cache: Where the last version's bytes are kept, to make the next delta from; None: nowhere.

    Raises:
        UsageError: If there is nothing to publish.
        ModifiedError: If the directory changed meanwhile; nothing was announced.
        TrustError: If the run belongs to another key.
        RefusedError: If the origin does not take it (token, or another publisher was faster).
        NetworkError: If the origin cannot be reached.
    """
    watch = observer or SilentObserver()
    client = client_factory()
    try:
        with publishing(memory, watch):
            selection = settled_selection(options)
            envelope, head = _remote_head(client, memory, signers, now_ms())
            watch.selected(selection)
            layout = _layout(client, options, memory, selection, head, now_ms())
            kept = cache if options.delta or options.compress else None
            bases = {} if kept is None else _bases(options, kept, head)
            made = _hash(options, kept, layout, selection, bases.get(1), watch)
            upload = _Upload(client, client_factory, watch)
            sent = upload.send(made, selection)
            if made.staged is None:
                again = select_files(
                    options.source, include=options.include, exclude=options.exclude
                )
                require_unchanged(selection, again, options.source)
            deltas = made.deltas
            ref = reference(made.documents.version, deltas)
            issue = issue_for(memory.run, signers, now_ms(), options.expiry_ms)
            head = succession.with_version(head, issue, ref, keep=options.keep)
            envelope = _announce(client, memory, head, signers, envelope, issue.now_ms)
            (memory.root / "state" / "pending.json").unlink(missing_ok=True)
            if kept is not None and made.staged is not None:
                stored = kept.commit(ref.version, Durability.NONE)
                further = further_deltas(options, stored, bases, kept.write_blob, watch)
                if further:
                    try:
                        upload.send_deltas(further, kept)
                        issue = issue_for(memory.run, signers, now_ms(), options.expiry_ms)
                        refs = [delta.ref for delta in further]
                        head = succession.with_deltas(head, issue, ref.version, refs)
                        _announce(client, memory, head, signers, envelope, issue.now_ms)
                    except (NetworkError, RefusedError) as error:  # the version was announced
                        watch.noticed(f"no further deltas: {error}")
                    else:
                        deltas, ref = (*deltas, *further), head.ref(ref.version) or ref
                _shrink(kept, options)
    finally:
        client.close()
    return Published(memory.run, ref, None, selection, sent, "upload", None, deltas)


def amend_remote(
    memory: RunStore,
    client: OriginClient,
    signers: Sequence[Signer],
    now_ms: Callable[[], int],
    change: Callable[[Head, succession.Issue], Head],
) -> Head:
    """Replace a remote run's head by a changed one (withdraw, hold, renew).

    Raises:
        NotFoundError: If the run has no head.
        TrustError: If the run belongs to another key.
        RefusedError, NetworkError: As ``publish_remote``.
    """
    with publishing(memory, SilentObserver()):
        now = now_ms()
        envelope, head = _remote_head(client, memory, signers, now)
        if head is None:
            raise NotFoundError(f"run {memory.run!r} has no head yet", source=client.url)
        changed = change(head, issue_for(memory.run, signers, now, ONE_SHOT_EXPIRY_MS))
        _announce(client, memory, changed, signers, envelope, now)
        return changed


def _remote_head(
    client: OriginClient, memory: RunStore, signers: Sequence[Signer], now_ms: int
) -> tuple[bytes | None, Head | None]:
    envelope = client.head()
    _require_clock(client, now_ms)
    if envelope is None:
        return None, None
    keys = [signer.public_key for signer in signers]
    state = memory.read_trust() or trust.fresh(memory.run, keys)
    with about(client.url):
        accepted = trust.accept(state, envelope, now_ms)
    require_owner(accepted.state, signers, source=client.url)
    memory.write_trust(accepted.state)
    return envelope, accepted.head


def _require_clock(client: OriginClient, now_ms: int) -> None:
    """Check that readers would not refuse what this clock signs, before anything is hashed.

    Raises:
        ClockError: If the origin's clock is more than a day behind ours.
    """
    ahead_ms = 0 if client.date_ms is None else now_ms - client.date_ms
    if ahead_ms > MAX_FUTURE_MS:
        raise ClockError(
            f"this machine's clock is {ahead_ms / 3_600_000:.1f} hours ahead of the origin's, so "
            "readers would refuse what it signs; set the clock that is wrong. Nothing was published",
            source=client.url,
        )


def _announce(
    client: OriginClient,
    memory: RunStore,
    head: Head,
    signers: Sequence[Signer],
    previous: bytes | None,
    now_ms: int,
) -> bytes:
    envelope = seal(encode_head(head), signers)
    keys = [signer.public_key for signer in signers]
    state = memory.read_trust() or trust.fresh(memory.run, keys)
    accepted = trust.accept(state, envelope, now_ms)
    client.put_head(envelope, previous)
    memory.write_trust(accepted.state)
    return envelope


# --- unfinished publications ------------------------------------------------------------------


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A publication that was not announced: which files it was about, and its layout."""

    fingerprint: str
    layout: str


def _layout(
    client: OriginClient,
    options: PublishOptions,
    memory: RunStore,
    selection: Selection,
    head: Head | None,
    now_ms: int,
) -> Layout:
    """Return the layout of an unfinished publication of the same files, else a new one."""
    state = memory.read_trust()
    seen = () if state is None else (*state.manifests, *state.layouts)
    number = succession.next_version(head, seen)
    previous = _previous_layout(client, head)
    layout = plan_layout(options, selection, memory.run, number, previous, now_ms)
    same_moment = msgspec.structs.replace(layout, created_at=0, lineage=options.lineage or "")
    stamps = [(str(f.location), f.stamp.mtime_ns, f.stamp.inode) for f in selection.files]
    fingerprint = digest_of(msgspec.json.encode((same_moment, stamps)))
    path = memory.root / "state" / "pending.json"
    try:
        pending = msgspec.json.decode(path.read_bytes(), type=Pending)
        if pending.fingerprint == fingerprint:
            return decode_layout(memory.read_blob(pending.layout) or b"")
    except (OSError, msgspec.MsgspecError, MalformedError):
        pass
    data = encode_layout(layout)
    digest = digest_of(data)
    memory.write_blob(digest, data)
    atomic_write(path, msgspec.json.encode(Pending(fingerprint=fingerprint, layout=digest)))
    return layout


def _previous_layout(client: OriginClient, head: Head | None) -> Layout | None:
    newest = head.newest() if head is not None else None
    return None if newest is None else client.layout_of(newest.manifest)


# --- the cache --------------------------------------------------------------------------------


def _bases(
    options: PublishOptions, cache: RunStore, head: Head | None
) -> Mapping[int, VersionRef | StoredVersion]:
    """Return which versions in the cache a delta can start from.

    The last one is committed first if the publisher was killed after it had announced it.
    """
    newest = None if head is None else head.newest()
    if newest is not None:
        with contextlib.suppress(ShardcastError):
            stored = cache.stored(newest.version)
            if stored is not None and stored.complete and not stored.committed:
                cache.commit(newest.version, Durability.NONE)
    return delta_bases(options, cache, head)


def _shrink(cache: RunStore, options: PublishOptions) -> None:
    """Keep the versions that the next publication may start from, by default the last one."""
    keep = max((1, *options.delta_bases))
    with contextlib.suppress(ShardcastError):
        here = sorted({*cache.committed(), *cache.staged()}, reverse=True)
        collect(cache, here[keep:])


# --- transfer ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A checkpoint that was hashed, and perhaps staged in the cache with a delta."""

    documents: Documents
    cache: RunStore | None = None
    staged: Staged | None = None

    @property
    def deltas(self) -> tuple[Delta, ...]:
        """The delta that was made."""
        delta = None if self.staged is None else self.staged.delta
        return () if delta is None else (delta,)


def _hash(
    options: PublishOptions,
    cache: RunStore | None,
    layout: Layout,
    selection: Selection,
    base: VersionRef | StoredVersion | None,
    watch: PublishObserver,
) -> _Hashed:
    """Hash everything, into the cache if there is one and it has room."""
    if cache is not None:
        try:
            cache.clean_leftovers()
            cache.evict(layout.version)
            with leased(base, watch) as here:
                staged = stage_files(options, cache, layout, selection, here, watch)
            return _Hashed(staged.documents, cache, staged)
        except DiskError as error:
            watch.noticed(f"without a delta, now and next time: {cache.root}: {error}")
            watch.selected(selection)  # from the start again
    jobs = [
        ShardJob(selection.files[extent.file].location, extent.offset, extent.length)
        for extent in layout.extents()
    ]
    hashes = hash_shards(jobs, threads=options.threads, progress=watch.hashed)
    return _Hashed(documents_of(layout, [found.digest for found in hashes]))


class _Upload:
    """Sends what an origin lacks."""

    def __init__(
        self, client: OriginClient, client_factory: ClientFactory, watch: PublishObserver
    ) -> None:
        self._client = client
        self._factory = client_factory
        self._watch = watch

    def send(self, made: _Hashed, selection: Selection) -> int:
        """Send documents, deltas, then the shards that are lacking; return the bytes of both.

        Deltas go first: an origin that can rebuild shards from them need not be sent the shards.
        """
        self._send_documents(made.documents.blobs)
        before = 0 if made.cache is None else self.send_deltas(made.deltas, made.cache)
        extents = made.documents.version.shards_of()
        staged = made.staged

        def place(extent: Extent) -> Path:
            if staged is not None:
                return staged.stored.directory / extent.path
            return selection.files[extent.file].location

        bodies = {
            digest: Body(
                extents[digest].length, path=place(extents[digest]), offset=extents[digest].offset
            )
            for digest in self._client.missing(list(extents))
        }
        total = sum(body.length for body in bodies.values())
        self._watch.uploading(total)
        self._send_all(bodies, self._watch.uploaded)
        return before + total

    def send_deltas(self, deltas: Sequence[Delta], cache: RunStore) -> int:
        """Send the parts and blobs of deltas that lie in the cache; return the bytes of the blobs."""
        for delta in deltas:
            self._send_documents(delta.parts)
        blobs = {digest: size for delta in deltas for digest, size in delta.blobs.items()}
        bodies = {
            digest: Body(blobs[digest], path=cache.blob_path(digest))
            for digest in self._client.missing(list(blobs))
        }
        self._send_all(bodies, lambda count: None)
        return sum(body.length for body in bodies.values())

    def _send_documents(self, documents: Mapping[str, bytes]) -> None:
        for digest in self._client.missing(list(documents)):
            data = documents[digest]
            self._client.put_blob(digest, Body(len(data), data))

    def _send_all(self, bodies: Mapping[str, Body], sent: Callable[[int], None]) -> None:
        def send(own: OriginClient, item: tuple[str, Body], stopping: Stopping) -> None:
            del stopping  # a shard is short
            _send(own, *item)
            sent(item[1].length)

        share_out(
            bodies.items(),
            send,
            threads=min(UPLOAD_THREADS, len(bodies)),
            tool=lambda: contextlib.closing(self._factory()),
            name="upload",
        )


def _send(client: OriginClient, digest: str, body: Body) -> None:
    try:
        client.put_blob(digest, body)
    except IntegrityError as error:
        raise ModifiedError(
            f"checkpoint file {body.path} changed while it was uploaded "
            f"(offset {body.offset}, {body.length} bytes); nothing was announced",
            source=str(body.path),
        ) from error

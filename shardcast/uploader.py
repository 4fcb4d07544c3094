"""Publish a checkpoint directory to a remote origin, sending only what it lacks.

Nothing is visible there before the head, and every blob is verified by the origin before it is
kept, so an upload that was cut off is continued by publishing the same directory again: the
layout of an unfinished publication is remembered (``state/pending.json``) and used again while
the files are the same, so that shards which arrived already count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from shardcast.announcing import issue_for, publishing, require_owner
from shardcast.errors import (
    ClockError,
    IntegrityError,
    MalformedError,
    ModifiedError,
    NotFoundError,
    about,
)
from shardcast.hashing import ShardJob, hash_shards
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol import succession, trust
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import Signer, seal
from shardcast.protocol.head import Head, encode_head
from shardcast.protocol.layout import Layout, decode_layout, encode_layout
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
from shardcast.store.files import atomic_write
from shardcast.store.run import RunStore

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
) -> Published:
    """Publish a directory to a remote origin and announce it.

    Args:
        options: What to publish; ``link`` and ``durability`` do not matter here.
        memory: Where this machine remembers trust and unfinished uploads for that origin and run.
        client_factory: Makes one client a thread.
        signers: The run's key first; during a rotation the old key too.
        now_ms: The clock, Unix milliseconds.
        observer: Hears the progress.

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
            documents = _hash(options, layout, selection, watch)
            sent = _upload(client, client_factory, documents, selection, watch)
            again = select_files(options.source, include=options.include, exclude=options.exclude)
            require_unchanged(selection, again, options.source)
            ref = reference(documents.version)
            issue = issue_for(memory.run, signers, now_ms(), options.expiry_ms)
            following = succession.with_version(head, issue, ref, keep=options.keep)
            _announce(client, memory, following, signers, envelope, issue.now_ms)
            (memory.root / "state" / "pending.json").unlink(missing_ok=True)
    finally:
        client.close()
    return Published(memory.run, ref, None, selection, sent, "upload", None)


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
) -> None:
    envelope = seal(encode_head(head), signers)
    keys = [signer.public_key for signer in signers]
    state = memory.read_trust() or trust.fresh(memory.run, keys)
    accepted = trust.accept(state, envelope, now_ms)
    client.put_head(envelope, previous)
    memory.write_trust(accepted.state)


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


# --- transfer ---------------------------------------------------------------------------------


def _hash(
    options: PublishOptions, layout: Layout, selection: Selection, watch: PublishObserver
) -> Documents:
    jobs = [
        ShardJob(selection.files[extent.file].location, extent.offset, extent.length)
        for extent in layout.extents()
    ]
    hashes = hash_shards(jobs, threads=options.threads, progress=watch.hashed)
    return documents_of(layout, [found.digest for found in hashes])


def _upload(
    client: OriginClient,
    client_factory: ClientFactory,
    documents: Documents,
    selection: Selection,
    watch: PublishObserver,
) -> int:
    """Send documents, then the shards that the origin lacks; return how many bytes went."""
    for digest in client.missing(list(documents.blobs)):
        data = documents.blobs[digest]
        client.put_blob(digest, Body(len(data), data))
    extents = documents.version.shards_of()
    lacking = client.missing(list(extents))
    bodies = {
        digest: Body(
            extents[digest].length,
            path=selection.files[extents[digest].file].location,
            offset=extents[digest].offset,
        )
        for digest in lacking
    }
    total = sum(body.length for body in bodies.values())
    watch.uploading(total)

    def send(own: OriginClient, item: tuple[str, Body], stopping: Stopping) -> None:
        del stopping  # a shard is short
        _send(own, *item)
        watch.uploaded(item[1].length)

    share_out(
        bodies.items(),
        send,
        threads=min(UPLOAD_THREADS, len(bodies)),
        tool=lambda: contextlib.closing(client_factory()),
        name="upload",
    )
    return total


def _send(client: OriginClient, digest: str, body: Body) -> None:
    try:
        client.put_blob(digest, body)
    except IntegrityError as error:
        raise ModifiedError(
            f"checkpoint file {body.path} changed while it was uploaded "
            f"(offset {body.offset}, {body.length} bytes); nothing was announced",
            source=str(body.path),
        ) from error

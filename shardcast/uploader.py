"""Publish a checkpoint directory to a remote origin, sending only what it lacks.

Nothing is visible there before the head, and every blob is verified by the origin before it is
kept, so an upload that was cut off is continued by publishing the same directory again: the
layout of an unfinished publication is remembered (``unfinished.py``) and used again while
the files are the same, so that shards which arrived already count.

A delta needs the bytes of the version before. So a publisher keeps what it published last in a cache: a
run's directory like any other, whose version counts as a base if its manifest is the one that the
origin's head names. Losing it costs one delta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardcast import unfinished
from shardcast.announcing import publishing, remembered, require_owner
from shardcast.delta_publishing import delta_bases, further_deltas, leased
from shardcast.deltas import Delta
from shardcast.errors import (
    ClockError,
    DiskError,
    NetworkError,
    NotFoundError,
    ShardcastError,
    about,
)
from shardcast.hashing import ShardJob, hash_shards
from shardcast.origin_client import OriginClient
from shardcast.protocol import succession, trust
from shardcast.protocol.envelope import Signer
from shardcast.protocol.head import Head, VersionRef
from shardcast.protocol.layout import Extent, Layout
from shardcast.protocol.limits import MAX_FUTURE_MS, ONE_SHOT_EXPIRY_MS
from shardcast.publishing import (
    Documents,
    Published,
    PublishObserver,
    PublishOptions,
    SilentObserver,
    documents_of,
    reference,
    settled_selection,
)
from shardcast.sources import Selection, require_unchanged, select_files
from shardcast.staging import Staged, stage_files
from shardcast.store.retention import collect
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, StoredVersion
from shardcast.stream_publishing import Stream
from shardcast.uploading import Announcer, ClientFactory, OriginHead, Place, RemoteOutlet, Upload


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
        ModifiedError: If the directory changed meanwhile; what was announced as open is given up.
        TrustError: If the run belongs to another key.
        RefusedError: If the origin does not take it (token, or another publisher was faster).
        NetworkError: If the origin cannot be reached.
    """
    watch = observer or SilentObserver()
    with (
        contextlib.closing(client_factory()) as client,
        contextlib.closing(client_factory()) as second,
        publishing(memory, watch),
    ):
        selection = settled_selection(options)
        envelope, head = _remote_head(client, memory, signers, now_ms())
        watch.selected(selection)
        layout = unfinished.layout_for(
            options, memory, selection, head, _previous_layout(client, head), now_ms()
        )
        kept = cache if options.delta or options.compress else None
        bases = {} if kept is None else _bases(options, kept, head)
        announcer = Announcer(
            client, memory, signers, now_ms, options.expiry_ms, OriginHead(head, envelope)
        )
        place = _placed(kept, layout, selection)
        pace = None if options.stream is None else options.stream.uploading(layout.total_bytes)
        streamed = Upload(second, client_factory, place)
        outlet = RemoteOutlet(
            replace(announcer, client=second),
            streamed,
            layout,
            kept,
            steps=1 if pace is None else pace.steps,
        )
        stream = Stream(layout, outlet, pace, watch, drains=True)
        upload = Upload(client, client_factory, place)
        with _or_given_up(stream, outlet):
            made = _hash(options, kept, layout, selection, bases.get(1), watch, stream)
            _send(made, upload, stream, streamed, watch)
            if made.staged is None:
                again = select_files(
                    options.source, include=options.include, exclude=options.exclude
                )
                require_unchanged(selection, again, options.source)
            sent, deltas = streamed.bytes + upload.bytes, made.deltas
            ref = reference(made.documents.version, deltas)
            announcer.announce(
                lambda last, issue: succession.with_version(last, issue, ref, keep=options.keep)
            )
        unfinished.forget(memory, watch)
        if kept is not None and made.staged is not None:
            further, ref = _bring_further(options, kept, bases, ref, announcer, upload, watch)
            deltas = (*deltas, *further)
            _shrink(kept, options)
    return Published(memory.run, ref, None, selection, sent, "upload", None, deltas, stream.heads)


def _bring_further(
    options: PublishOptions,
    cache: RunStore,
    bases: Mapping[int, VersionRef | StoredVersion],
    ref: VersionRef,
    announcer: Announcer,
    upload: Upload,
    watch: PublishObserver,
) -> tuple[tuple[Delta, ...], VersionRef]:
    """Make, send and announce the deltas that follow the announcement of ``ref``.

    Whatever goes wrong is said: the version has been announced.
    """
    try:
        stored = cache.commit(ref.version, Durability.NONE)
        further = further_deltas(options, stored, bases, cache.write_blob, watch)
        if not further:
            return (), ref
        upload.send_deltas(further, cache)

        def grown(last: Head | None, issue: succession.Issue) -> Head:
            assert last is not None
            return succession.with_deltas(last, issue, ref.version, [one.ref for one in further])

        head = announcer.announce(grown)
    except ShardcastError as error:
        watch.noticed(f"no further deltas: {error}")
        return (), ref
    return further, head.ref(ref.version) or ref


def amend_remote(
    memory: RunStore,
    client: OriginClient,
    signers: Sequence[Signer],
    now_ms: Callable[[], int],
    change: Callable[[Head, succession.Issue], Head],
    watch: PublishObserver | None = None,
) -> Head:
    """Replace a remote run's head by a changed one (withdraw, hold, renew).

    Args:
        memory: Where this machine remembers trust for that origin and run.
        client: The origin.
        signers: The run's key first; during a rotation the old key too.
        now_ms: The clock, Unix milliseconds.
        change: Makes the new head from the last one.
        watch: Hears if a publisher must be waited for.

    Raises:
        NotFoundError: If the run has no head.
        TrustError: If the run belongs to another key.
        RefusedError, NetworkError: As ``publish_remote``.
    """
    with publishing(memory, watch or SilentObserver()):
        now = now_ms()
        envelope, head = _remote_head(client, memory, signers, now)
        if head is None:
            raise NotFoundError(f"run {memory.run!r} has no head yet", source=client.url)
        found = head
        announcer = Announcer(
            client, memory, signers, now_ms, ONE_SHOT_EXPIRY_MS, OriginHead(head, envelope)
        )
        return announcer.announce(lambda _, issue: change(found, issue))


def _remote_head(
    client: OriginClient, memory: RunStore, signers: Sequence[Signer], now_ms: int
) -> tuple[bytes | None, Head | None]:
    envelope = client.head()
    _require_clock(client, now_ms)
    if envelope is None:
        return None, None
    state = remembered(memory, signers)
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
    stream: Stream,
) -> _Hashed:
    """Hash everything, into the cache if there is one and it has room."""
    if cache is not None:
        try:
            cache.clean_leftovers()
            cache.evict(layout.version)
            with leased(base, watch) as here:
                staged = stage_files(options, cache, layout, selection, here, watch, stream)
            return _Hashed(staged.documents, cache, staged)
        except DiskError as error:
            watch.noticed(f"without a delta, now and next time: {cache.root}: {error}")
            watch.selected(selection)  # from the start again, and nothing streams
            stream = Stream.silent(layout, watch)
    jobs = [
        ShardJob(selection.files[extent.file].location, extent.offset, extent.length)
        for extent in layout.extents()
    ]
    with stream.during(None) as done:
        hashes = hash_shards(jobs, threads=options.threads, progress=watch.hashed, done=done)
    return _Hashed(documents_of(layout, [found.digest for found in hashes]))


def _placed(cache: RunStore | None, layout: Layout, selection: Selection) -> Place:
    """Return where shards lie: in the cache, if the version is staged there, else in the checkpoint."""

    def place(extent: Extent) -> Path:
        staged = None if cache is None else cache.staging_directory(layout.version) / extent.path
        if staged is not None and staged.is_file():
            return staged
        return selection.files[extent.file].location

    return place


@contextlib.contextmanager
def _or_given_up(stream: Stream, outlet: RemoteOutlet) -> Iterator[None]:
    """End the stream if the block fails, and say as far as possible that its version will not come."""
    try:
        yield
    except NetworkError:  # nobody there to tell
        stream.abort()
        raise
    except BaseException:
        stream.abort()
        with contextlib.suppress(ShardcastError):
            outlet.give_up()
        raise


def _send(
    made: _Hashed, upload: Upload, stream: Stream, streamed: Upload, watch: PublishObserver
) -> None:
    """Send what the stream has not: all of it, where there is none.

    Deltas go first: an origin that can rebuild shards from them need not be sent the shards.
    """
    left = stream.left_bytes
    if stream.running:
        watch.uploading(left)
        streamed.sent = watch.uploaded
        stream.finish()
    upload.send_documents(made.documents.blobs)
    if made.cache is not None:
        upload.send_deltas(made.deltas, made.cache)
    bodies = upload.lacking(made.documents.version.shards_of())
    if bodies or not stream.heads:
        watch.uploading(sum(body.length for body in bodies.values()))
    upload.sent = watch.uploaded
    upload.send_shards(bodies)

"""Publish a checkpoint directory into a store on this machine.

Order, and what a crash leaves behind: files are staged and hashed (leftovers in
``state/staging``), documents are written to ``blobs/`` (harmless), the version is renamed to
``versions/N`` (not announced: the next publication removes it), ``head.json`` is replaced (the
commit point), trust is remembered (a head newer than it is accepted), old versions are removed.
So a kill at any point leaves the previous head or the new one, both whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from shardcast.announcing import announce, issue_for, last_head, publishing
from shardcast.errors import (
    ShardcastError,
    UsageError,
)
from shardcast.hashing import ShardJob, hash_shards
from shardcast.placing import place_files
from shardcast.protocol import succession
from shardcast.protocol.envelope import Signer
from shardcast.protocol.head import Head
from shardcast.protocol.layout import (
    Layout,
)
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
from shardcast.sources import Selection, require_unchanged, select_files
from shardcast.store.retention import Collected, collect, unreachable_versions
from shardcast.store.roles import claim_for_publishing
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion


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
        UsageError: If there is nothing to publish, linking is not possible, or the store is a
            relay's.
        BusyError: If another publisher of the run does not end within ten minutes.
        ModifiedError: If the directory changed meanwhile; nothing was announced.
        TrustError: If the run belongs to another key.
        DiskError: If the system refuses.
    """
    watch = observer or SilentObserver()
    require_apart(options.source, run.root)
    claim_for_publishing(run.root.parent, take_over=options.take_over)
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
            _take_back(run, number)
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
        method = place_files(options, selection, directory)
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
        _take_back(run, layout.version)
        raise
    return method, stored, documents


def _take_back(run: RunStore, number: int) -> None:
    """Remove what nobody was told of; where the disk refuses even that, the next publication does."""
    with contextlib.suppress(ShardcastError):
        run.evict(number)


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


def _collect(run: RunStore) -> Collected | None:
    """Remove what the new head does not retain; trouble there does not undo a publication."""
    with contextlib.suppress(ShardcastError):
        return collect(run, unreachable_versions(run))
    return None

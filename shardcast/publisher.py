"""Publish a checkpoint directory into a store on this machine.

Order, and what a crash leaves behind: files are staged and hashed (leftovers in
``state/staging``); meanwhile heads say what is ready of the open version, if that takes longer than a
moment (the next publication says that it was given up, and uses another number); and what changed since the version before becomes delta blobs (in ``blobs/``, named by
nothing yet: the next publication collects them); delta parts, then the version's own documents are
written to ``blobs/`` (harmless), the version is renamed to ``versions/N`` (not announced: the next
publication removes it), its number is noted if no head named it before (from here on it is not used
again: a head can be read before it is durable), ``head.json`` is replaced (the commit point), trust is
remembered (a head newer than it is accepted). Deltas from older bases and a compressed copy follow, announced by a second
head. Last, old versions are removed. So a kill at any point leaves the previous head or a new one, whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from shardcast.announcing import announce, give_up_open, issue_for, last_head, publishing
from shardcast.delta_publishing import delta_bases, further_deltas, leased
from shardcast.errors import (
    ShardcastError,
    UsageError,
)
from shardcast.protocol import succession
from shardcast.protocol.envelope import Signer
from shardcast.protocol.head import Head
from shardcast.protocol.layout import Layout
from shardcast.publishing import (
    Published,
    PublishObserver,
    PublishOptions,
    SilentObserver,
    plan_layout,
    reference,
    settled_selection,
)
from shardcast.staging import stage_files, take_back
from shardcast.store.retention import Collected, collect, unreachable_versions
from shardcast.store.roles import claim_for_publishing
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from shardcast.stream_publishing import LocalOutlet, Stream


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
        ModifiedError: If the directory changed meanwhile; what was announced as open is given up.
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
        if head is not None and head.open is not None:  # its publisher was killed
            given_up = head.open.version
            head = give_up_open(run, signers, now_ms(), options.expiry_ms)
            run.evict(given_up)
        watch.selected(selection)
        previous = _previous_layout(run, head)
        layout = plan_layout(options, selection, run.run, number, previous, now_ms())
        bases = delta_bases(options, run, head)
        outlet = LocalOutlet(options, run, signers, now_ms, layout, head)
        stream = Stream(layout, outlet, options.stream, watch)
        with outlet.or_given_up():
            with leased(bases.get(1), watch) as base:
                staged = stage_files(options, run, layout, selection, base, watch, stream)
            stored = staged.stored
            try:
                if options.durability is Durability.SYNC:
                    stream.settle()
                run.commit(number, options.durability)
            except BaseException:
                take_back(run, number)
                raise
        deltas = () if staged.delta is None else (staged.delta,)
        ref = reference(staged.documents.version, deltas)
        issue = issue_for(run.run, signers, now_ms(), options.expiry_ms)
        head = succession.with_version(outlet.head, issue, ref, keep=options.keep)
        announce(run, head, signers, issue, watch)
        further = further_deltas(options, stored, bases, run.write_blob, watch)
        if further:
            try:
                issue = issue_for(run.run, signers, now_ms(), options.expiry_ms)
                refs = [one.ref for one in further]
                head = succession.with_deltas(head, issue, number, refs)
                announce(run, head, signers, issue, watch)
                ref = head.ref(number) or ref
            except ShardcastError as error:  # the version was announced
                watch.noticed(f"no further deltas: {error}")
                further = ()
        collected = _collect(run)
    return Published(
        run.run,
        ref,
        stored.directory,
        selection,
        0,
        staged.method,
        collected,
        (*deltas, *further),
        stream.heads,
    )


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
    if head is not None:
        for left in {*run.committed(), *run.staged()}:
            if left >= succession.next_version(head):  # its publisher was killed, or its head lost
                run.evict(left)
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


def _collect(run: RunStore) -> Collected | None:
    """Remove what the new head does not retain; trouble there does not undo a publication."""
    with contextlib.suppress(ShardcastError):
        return collect(run, unreachable_versions(run))
    return None

"""Which deltas a publication has: from which of the versions that lie here, and what it says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from shardcast.delta_making import DeltaMaker, KeepBlob, make_delta
from shardcast.deltas import Delta
from shardcast.errors import ShardcastError
from shardcast.protocol.head import Head, VersionRef
from shardcast.protocol.manifest import Version
from shardcast.publishing import PublishObserver, PublishOptions
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion


def bases_wanted(head: Head | None, distances: Sequence[int]) -> dict[int, VersionRef]:
    """Return the versions so far back, counted among those that a new version would follow.

    The first is what workers run now (``version``); those before it count that are not withdrawn.
    """
    newest = None if head is None else head.newest()
    if head is None or newest is None:
        return {}
    usable = [
        ref
        for ref in head.versions
        if ref.version <= newest.version and ref.version not in head.withdrawn
    ]
    return {n: usable[n - 1] for n in sorted(set(distances)) if n <= len(usable)}


def delta_bases(
    options: PublishOptions, run: RunStore, head: Head | None
) -> Mapping[int, VersionRef | StoredVersion]:
    """Return the bases of a publication that lie whole in the store, by how far back they are.

    One that is wanted and does not lie there is returned as the head names it.
    """
    if not options.delta:
        return {}
    found: dict[int, VersionRef | StoredVersion] = {}
    for distance, ref in bases_wanted(head, (1, *options.delta_bases)).items():
        found[distance] = ref
        with contextlib.suppress(ShardcastError):
            stored = run.stored(ref.version)
            if stored is not None and stored.committed and stored.version.manifest == ref.manifest:
                found[distance] = stored
    return found


@contextlib.contextmanager
def leased(
    base: VersionRef | StoredVersion | None, watch: PublishObserver
) -> Iterator[StoredVersion | None]:
    """Keep a base from being evicted meanwhile; without one that is here, say so and go on."""
    with contextlib.ExitStack() as leases:
        if isinstance(base, VersionRef):
            watch.noticed(f"without a delta from version {base.version}: it is not here")
            base = None
        if base is not None:
            try:
                leases.enter_context(base.lease())
            except ShardcastError as error:
                watch.noticed(f"without a delta from version {base.version.number}: {error}")
                base = None
        yield base


def finished(
    maker: DeltaMaker, version: Version, keep: KeepBlob, watch: PublishObserver
) -> Delta | None:
    """Return a delta whose blobs and parts are kept; None, and why is said, if it came to nothing."""
    delta = maker.finish(version)
    notes = maker.notes()
    try:
        for digest, data in {} if delta is None else delta.parts.items():
            keep(digest, data)
    except ShardcastError as error:
        delta, notes = None, [f"without a delta: {error}"]
    for note in notes:
        watch.noticed(note)
    return delta


def further_deltas(
    options: PublishOptions,
    target: StoredVersion,
    bases: Mapping[int, VersionRef | StoredVersion],
    keep: KeepBlob,
    watch: PublishObserver,
) -> tuple[Delta, ...]:
    """Make the deltas that follow the announcement: from older bases, and the compressed copy.

    Whatever goes wrong is said: the version has been announced.
    """
    made: list[Delta] = []
    wanted = [bases[distance] for distance in sorted(bases) if distance != 1]
    for base in [*wanted, None] if options.compress else wanted:
        with contextlib.ExitStack() as leases:
            here = leases.enter_context(leased(base, watch))
            if here is None and base is not None:
                continue
            try:
                leases.enter_context(target.lease())
                delta, notes = make_delta(target, here, keep, threads=options.threads)
                for digest, data in {} if delta is None else delta.parts.items():
                    keep(digest, data)
            except ShardcastError as error:
                watch.noticed(f"no further delta: {error}")
                continue
            for note in notes:
                watch.noticed(note)
            if delta is not None:
                made.append(delta)
    return tuple(made)

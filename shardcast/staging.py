"""Bringing a checkpoint's files into a store: placed, hashed, a delta made of them, documents written.

Nothing here is announced. Local publications stage what they will serve; remote ones what they keep
to make the next delta from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardcast.delta_making import DeltaMaker, tensors_of
from shardcast.delta_publishing import finished
from shardcast.deltas import Delta, frame_runs
from shardcast.errors import ShardcastError
from shardcast.hashing import Done, ShardHash, ShardJob, hash_runs, hash_shards
from shardcast.placing import place_files
from shardcast.protocol.digest import digest_of
from shardcast.protocol.layout import Layout, encode_layout
from shardcast.publishing import Documents, PublishObserver, PublishOptions, documents_of
from shardcast.sources import Selection, require_unchanged, select_files
from shardcast.store.run import RunStore
from shardcast.store.stored import ShardState, StoredVersion


class Streams(Protocol):
    """Hears which shards are ready while the others are made."""

    def during(self, maker: DeltaMaker | None) -> AbstractContextManager[Done | None]:
        """Return a block to hash in; it gives what must hear of each shard."""
        ...


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that lies whole in staging.

    Attributes:
        method: How its files came there: ``clone``, ``copy`` or ``link``.
        stored: The version.
        documents: Its documents; they lie in ``blobs/``.
        delta: What changed since the base; its blobs and parts lie in ``blobs/``, too.
    """

    method: str
    stored: StoredVersion
    documents: Documents
    delta: Delta | None


def stage_files(
    options: PublishOptions,
    run: RunStore,
    layout: Layout,
    selection: Selection,
    base: StoredVersion | None,
    watch: PublishObserver,
    stream: Streams | None = None,
) -> Staged:
    """Bring all files into staging, hash them, make the delta, and write the documents.

    Args:
        options: What and how.
        run: The run in the store; what lies there under the same number has been evicted.
        layout: The version's layout.
        selection: The files, as listed before.
        base: The version to make a delta from, leased; None: none is made.
        watch: Hears the progress.
        stream: Hears what is ready while it goes on; None: nobody does.

    Raises:
        ModifiedError: If the files changed meanwhile; nothing is left then.
        UsageError: If linking is not possible.
        DiskError: If the system refuses.
    """
    directory = run.staging_directory(layout.version)
    try:
        method = place_files(options, selection, directory)
        jobs = _jobs(layout, selection, directory, method)
        maker = None if base is None else _maker(options, run, layout, selection, base)
        with nullcontext(None) if stream is None else stream.during(maker) as done:
            hashes = hash_files(jobs, layout, maker, options.threads, watch, done)
        again = select_files(options.source, include=options.include, exclude=options.exclude)
        require_unchanged(selection, again, options.source)
        documents = documents_of(layout, [found.digest for found in hashes])
        delta = None if maker is None else finished(maker, documents.version, run.write_blob, watch)
        for digest, data in documents.blobs.items():
            run.write_blob(digest, data)
        stored = run.stage(documents.version, files=False)
        stored.record_all(
            {
                shard: found.xxh3
                for shard, found in enumerate(hashes)
                if stored.state(shard) is not ShardState.VERIFIED
            }
        )
    except BaseException:
        take_back(run, layout.version)
        raise
    return Staged(method, stored, documents, delta)


def hash_files(
    jobs: Sequence[ShardJob],
    layout: Layout,
    maker: DeltaMaker | None,
    threads: int | None,
    watch: PublishObserver,
    done: Done | None = None,
) -> list[ShardHash]:
    """Hash all shards, and let a delta be made of the same bytes while they are in memory.

    Raises:
        ModifiedError, DiskError: As ``hash_shards``.
    """
    if maker is None:
        return hash_shards(jobs, threads=threads, progress=watch.hashed, done=done)
    runs = frame_runs(layout)
    return hash_runs(jobs, runs, maker.use, threads=threads, progress=watch.hashed, done=done)


def take_back(run: RunStore, number: int) -> None:
    """Remove what nobody was told of; where the disk refuses even that, the next publication does."""
    with contextlib.suppress(ShardcastError):
        run.evict(number)


def _maker(
    options: PublishOptions,
    run: RunStore,
    layout: Layout,
    selection: Selection,
    base: StoredVersion,
) -> DeltaMaker:
    return DeltaMaker(
        digest_of(encode_layout(layout)),
        tensors_of(layout, lambda file: selection.files[file].location),
        base,
        run.write_blob,
        threads=options.threads,
    )


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

"""Bytes that another version has already: copied on this disk, verified on the way."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import xxhash
from blake3 import blake3

from relay.runs import RelayRun
from relay.threads import in_thread
from shardcast.errors import BusyError, ShardcastError
from shardcast.protocol.layout import Extent
from shardcast.protocol.plan import FileReuse, Holding, Plan, ShardCopy, plan_version
from shardcast.store.files import COPY_CHUNK_BYTES, disk_errors, read_into, reflink, write_all
from shardcast.store.stored import ShardState, StoredVersion

log = logging.getLogger("relay.copies")


def plan_for(target: StoredVersion, others: Iterable[StoredVersion]) -> Plan:
    """Plan how a staged version gets whole from what is on this disk and what is not.

    For a version of many shards this takes a while: call it in a thread.
    """
    holdings = [Holding(other.version, other.present()) for other in others if other is not target]
    return plan_version(target.version, target.present(), holdings)


async def copy_local(run: RelayRun, target: StoredVersion, others: Sequence[StoredVersion]) -> int:
    """Copy into ``target`` what other versions, or itself, have already; return the bytes.

    A shard that turns out to be bad at its source counts as missing there from then on. A
    cancellation leaves whole shards only.
    """
    copied = 0
    sources = {other.version.number: other for other in (*others, target)}
    for reuse in (await in_thread(partial(plan_for, target, others))).files:
        shards = list(target.version.layout.file_shards(reuse.file))
        work = partial(_reuse_file, target, sources[reuse.source_version], reuse)
        copied += await _claimed(run, target, shards, work)
    # Again: repeats within the target come after their first.
    plan = await in_thread(partial(plan_for, target, others))
    for copy in (*plan.copies, *plan.repeats):
        work = partial(_copy_shard, target, sources[copy.source_version], copy)
        copied += await _claimed(run, target, [copy.target.shard], work)
    return copied


async def _claimed(
    run: RelayRun, target: StoredVersion, shards: list[int], work: Callable[[], int]
) -> int:
    claims = {(target.version.number, shard) for shard in shards}
    if not run.claims.isdisjoint(claims):
        return 0
    run.claims |= claims
    try:
        return await in_thread(work)
    except BusyError:
        return 0  # the source is being evicted
    except ShardcastError as error:
        log.warning("run %s: copying within the disk: %s", run.name, error)
        return 0
    finally:
        run.claims -= claims


@contextlib.contextmanager
def _files(
    source: StoredVersion, source_file: int, target: StoredVersion, target_file: int
) -> Iterator[tuple[int, int]]:
    """Yield descriptors to read from and to write to, both versions leased."""
    with source.lease(), target.lease():
        here = source.open_file(source_file)
        try:
            there = target.open_file(target_file, writable=True)
            try:
                yield here, there
            finally:
                os.close(there)
        finally:
            os.close(here)


def _reuse_file(target: StoredVersion, source: StoredVersion, reuse: FileReuse) -> int:
    """Clone a whole file and verify it, or copy it shard by shard. Blocking."""
    layout, paths = target.version.layout, [e.path for e in source.version.layout.files]
    source_file = paths.index(reuse.source_path)
    done = 0
    with _files(source, source_file, target, reuse.file) as (here, there):
        with disk_errors(target.directory, "cloning"):
            cloned = reflink(here, there)
        pairs = zip(
            layout.file_shards(reuse.file),
            source.version.layout.file_shards(source_file),
            strict=True,
        )
        for shard, original in pairs:
            extent = layout.extent(shard)
            if _place(target, extent, None if cloned else here, there, extent.offset):
                done += extent.length
            else:
                source.discard(original, "its bytes are not what they were")
    return done


def _copy_shard(target: StoredVersion, source: StoredVersion, copy: ShardCopy) -> int:
    """Copy one shard and verify it. Blocking."""
    if target.state(copy.target.shard) is not ShardState.MISSING:
        return 0
    with _files(source, copy.source.file, target, copy.target.file) as (here, there):
        if _place(target, copy.target, here, there, copy.source.offset):
            return copy.target.length
        source.discard(copy.source.shard, "its bytes are not what they were")
    return 0


def _place(target: StoredVersion, extent: Extent, here: int | None, there: int, at: int) -> bool:
    """Bring a shard from ``at`` of ``here`` into its extent (None: it is there), verify, record."""
    digest, fast = blake3(), xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(COPY_CHUNK_BYTES, extent.length)))
    done = 0
    with disk_errors(target.directory / extent.path, "copying"):
        while done < extent.length:
            piece = buffer[: min(len(buffer), extent.length - done)]
            got = read_into(there if here is None else here, piece, at + done)
            if got != len(piece):
                break
            digest.update(piece)
            fast.update(piece)
            if here is not None:
                write_all(there, piece, extent.offset + done)
            done += got
    if digest.hexdigest() != target.version.digests[extent.shard]:
        log.error("shard %d of %s: its source on disk is bad", extent.shard, target.directory)
        return False
    target.record(extent.shard, fast.digest())
    return True

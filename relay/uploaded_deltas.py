"""An origin rebuilds shards from a delta that is being uploaded: they need not be sent.

A publisher sends documents, deltas, and then asks which shards are missing. Before that is answered,
what the deltas give from a version that lies here whole is rebuilt, each shard verified against the
digest that the upload's parts name. So a step costs the trainer's uplink the delta only. Whatever
does not come out is missing, and is sent as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from relay.rebuild import Outcome, rebuild, shards_to_rebuild
from relay.runs import RelayRun
from relay.threads import in_thread
from shardcast.errors import BusyError, ShardcastError
from shardcast.protocol.delta import CODECS, DeltaPart, FrameAt
from shardcast.store.stored import StoredVersion

log = logging.getLogger("relay.uploaded_deltas")


@dataclass(frozen=True, slots=True)
class Rebuildable:
    """A delta blob that is here, its frames, and the version that they start from."""

    digest: str
    frames: tuple[FrameAt, ...]
    base: StoredVersion | None


def rebuildable(
    parts: Iterable[DeltaPart], target: StoredVersion, others: Iterable[StoredVersion]
) -> list[Rebuildable]:
    """Return the blobs of delta parts whose base lies here whole. Pure but for what ``others`` know."""
    bases = {s.version.manifest: s for s in others if s is not target and s.complete}
    found: list[Rebuildable] = []
    for part in parts:
        fits = part.shards.stop <= target.version.layout.shard_count
        here = part.base is None or part.base in bases
        if part.codec not in CODECS or not fits or not here:
            continue
        base = None if part.base is None else bases[part.base]
        found += [Rebuildable(blob.digest, frames, base) for blob, frames in part.placed()]
    return found


async def rebuild_all(run: RelayRun, target: StoredVersion, blobs: Iterable[Rebuildable]) -> int:
    """Rebuild what is missing of a staged version; return the bytes.

    A cancellation leaves whole shards only.
    """
    turns = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(blob: Rebuildable) -> int:
        async with turns:
            return await _rebuild(run, target, blob)

    return sum(await asyncio.gather(*(one(blob) for blob in blobs)))


async def _rebuild(run: RelayRun, target: StoredVersion, blob: Rebuildable) -> int:
    number = target.version.number
    wanted = shards_to_rebuild(blob.frames, target, run.claims)
    claims = {(number, shard) for shard in wanted}
    if not wanted:
        return 0
    run.claims |= claims
    try:
        outcome = await in_thread(partial(_blocking, run, target, blob, wanted))
    except ShardcastError as error:
        log.warning("run %s: version %d: %s", run.name, number, error)
        return 0
    finally:
        run.claims -= claims
    for failure in outcome.failures:
        log.warning(
            "run %s: version %d: %d shards are not rebuilt from the delta that was uploaded: %s",
            run.name,
            number,
            len(failure.shards),
            failure.reason,
        )
    return outcome.bytes


def _blocking(
    run: RelayRun, target: StoredVersion, blob: Rebuildable, wanted: frozenset[int]
) -> Outcome:
    opened = run.shelf.open(blob.digest)
    if opened is None:
        return Outcome()
    try:
        with target.lease():
            if blob.base is None:
                return rebuild(opened[0], blob.frames, wanted, target, None)
            with blob.base.lease():
                return rebuild(opened[0], blob.frames, wanted, target, blob.base)
    except BusyError:
        return Outcome()  # the base is being evicted
    finally:
        os.close(opened[0])

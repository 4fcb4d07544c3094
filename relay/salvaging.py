"""Salvaging beside readers: a part of a version at a time, so that nobody waits for all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from relay.runs import RelayRun
from relay.threads import in_thread
from shardcast.protocol.layout import Layout
from shardcast.protocol.limits import MIB
from shardcast.salvage import salvage
from shardcast.store.stored import ShardState, StoredVersion

PART_BYTES: Final = 128 * MIB
"""Read and hashed in a fraction of a second, within what a request waits (``node.CLAIM_WAIT_S``)."""


async def salvage_missing(run: RelayRun, stored: StoredVersion) -> int:
    """Record what is good of a version although nothing says so; return how many shards are.

    Shards that somebody writes meanwhile are left to him.

    Raises:
        DiskError: If the journal cannot be written.
    """
    number, found = stored.version.number, 0
    written = await in_thread(lambda: [s for s in stored.missing() if stored.written(s)])
    for part in parts(written, stored.version.layout):
        missing = {shard for shard in part if stored.state(shard) is ShardState.MISSING}
        claims = {(number, shard) for shard in missing} - run.claims
        run.claims |= claims
        try:
            found += await in_thread(partial(salvage, stored, [shard for _, shard in claims]))
        finally:
            run.claims -= claims
    return found


def parts(shards: Sequence[int], layout: Layout) -> Iterator[list[int]]:
    """Cut a list of shards into parts of about ``PART_BYTES``, in order. Pure."""
    part: list[int] = []
    size = 0
    for shard in shards:
        length = layout.extent(shard).length
        if part and size + length > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(shard)
        size += length
    if part:
        yield part

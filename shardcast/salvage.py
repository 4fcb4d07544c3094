"""Shards whose record was lost although their bytes are good: hash them against their digests.

The journal says which shards were verified; without it a version counts as lacking them. Before
they are fetched again, and where nobody can be asked for them (an origin, an export), the bytes
themselves are asked: BLAKE3 against the signed digests, on all cores. What nobody ever wrote (a
hole, reserved space) is not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from shardcast.errors import ShardcastError
from shardcast.hashing import ShardJob, hash_shards
from shardcast.protocol.layout import Extent
from shardcast.store.stored import StoredVersion

log = logging.getLogger("shardcast.salvage")


def salvage(stored: StoredVersion, shards: Iterable[int] | None = None) -> int:
    """Record the shards of a version that are missing and yet good on disk. Blocking.

    Args:
        stored: The version.
        shards: Look at these only; nobody may write to them meanwhile. None: all that are missing.

    Returns:
        How many were recorded. A file that is gone, short or unreadable gives none of its own.

    Raises:
        DiskError: If the journal cannot be written.
    """
    version = stored.version
    by_file: dict[int, list[Extent]] = {}
    for shard in stored.missing() if shards is None else sorted(shards):
        extent = version.layout.extent(shard)
        if not stored.written(shard):
            continue
        by_file.setdefault(extent.file, []).append(extent)
    found: dict[int, bytes] = {}
    for extents in by_file.values():
        path = stored.directory / extents[0].path
        try:
            hashes = hash_shards([ShardJob(path, e.offset, e.length) for e in extents])
        except ShardcastError as error:
            log.warning("%s", error)
            continue
        for extent, hashed in zip(extents, hashes, strict=True):
            if hashed.digest == version.digests[extent.shard]:
                found[extent.shard] = hashed.xxh3
    if found:
        stored.record_all(found)
        log.info(
            "version %d: %d shards are good although nothing said so", version.number, len(found)
        )
    return len(found)

"""Blobs ready to be sent: an open file, a range of it, and a lease so that nobody evicts it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from shardcast.errors import BusyError, ShardcastError
from shardcast.store.stored import StoredVersion

log = logging.getLogger("relay.opened")


@dataclass(slots=True)
class Opened:
    """A blob ready to be sent: ``length`` bytes at ``offset`` of ``fd``. Close it."""

    fd: int
    offset: int
    length: int
    stored: StoredVersion | None = None

    def close(self) -> None:
        """Close the descriptor and give the lease back. Further calls do nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if self.stored is not None:
                self.stored.release_lease()


def open_extent(stored: StoredVersion, shard: int, *, read: bool) -> Opened | None:
    """Open a shard's file, leased; then see whether its bytes are good.

    Without ``read`` only where that is known: a file that was written to is not read here.
    """
    extent = stored.version.layout.extent(shard)
    try:
        stored.acquire_lease()
    except (BusyError, OSError, ValueError):
        return None
    try:
        fd = stored.open_file(extent.file)
    except (ShardcastError, OSError):
        stored.release_lease()
        return None
    opened = Opened(fd, extent.offset, extent.length, stored)
    try:
        good = stored.confirm(shard, read=read)
    except (ShardcastError, OSError) as error:
        log.warning("version %d, shard %d: %s", stored.version.number, shard, error)
        good = False
    if not good:
        if read:
            log.error(
                "version %d, shard %d is not good on disk: %s",
                stored.version.number,
                shard,
                stored.damaged or "to be fetched again",
            )
        opened.close()
        return None
    return opened

"""Keeping collections out while documents lie in a store that nothing there names yet.

A document is written first, and then its version is described on disk. In between, and as long as its
layout has not come, a collection (retention, ``gc``, a local publisher's) would take it for a leftover.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from relay.threads import in_thread
from shardcast.store.files import disk_errors
from shardcast.store.retention import unnamed_lock
from shardcast.store.run import RunStore

WAIT_S: Final = 30.0
"""A collection reads the documents of every version, and removes files: seconds on a slow disk."""


class Sparing:
    """What uploads to one run hold of its store. Used on the event loop.

    Args:
        store: The run's directory.
        needed: Says whether something unnamed is here beyond the requests that are being answered.
    """

    def __init__(self, store: RunStore, needed: Callable[[], bool]) -> None:
        self._store = store
        self._needed = needed
        self._lock = unnamed_lock(store, exclusive=False)
        self._taking = asyncio.Lock()
        self._using = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def during(self) -> AsyncIterator[None]:
        """Keep collections out while the block runs, and after it while that is needed.

        Raises:
            BusyError: If one does not end in time.
            DiskError: If the system refuses.
        """
        self._using += 1
        try:
            async with self._taking:
                if not self._lock.held:
                    await in_thread(self._take)
            yield
        finally:
            self._using -= 1
            self.look_again()

    def look_again(self) -> None:
        """Let collections in if nothing keeps them out any more."""
        if not self._using and (self._closed or not self._needed()):
            self._lock.release()

    def close(self) -> None:
        """Need nothing any more."""
        self._closed = True
        self.look_again()

    def _take(self) -> None:
        directory = self._store.root / "blobs"
        with disk_errors(directory, "making the directory"):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock.acquire(wait_s=WAIT_S)

"""Which versions somebody is fetching: they stay for a while after the head has dropped them.

A worker on a slow link may need longer for a version than the head lists it. As long as it keeps
asking, the version stays where it is on disk, and its blobs are served (ADR 7).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from shardcast.errors import ShardcastError
from shardcast.store.stored import StoredVersion

RECENT_S: Final = 60.0


class Leases:
    """Leases that are held for long, over all runs of a relay.

    Each takes a descriptor, so only so many are held, of what was asked for last. Without one,
    another process may remove the version: then its readers go on elsewhere.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[StoredVersion, None] = OrderedDict()

    def take(self, stored: StoredVersion) -> None:
        """Lease a version, unless it is being removed already; give the oldest lease back."""
        if stored in self._held:
            self._held.move_to_end(stored)
            return
        with suppress(ShardcastError, OSError, ValueError):  # it is being removed already
            stored.acquire_lease()
            self._held[stored] = None
        while len(self._held) > self._most:
            self._held.popitem(last=False)[0].release_lease()

    def give_back(self, stored: StoredVersion) -> None:
        """Give a version's lease back, if it is held."""
        if stored in self._held:
            del self._held[stored]
            stored.release_lease()


class Readers:
    """Remembers, for one run, when each version was last asked for. Used on the event loop.

    Where another process removes versions (a publisher beside its origin), a shared lease keeps it
    from removing one under its readers.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        recent_s: float = RECENT_S,
        *,
        leases: Leases | None = None,
    ) -> None:
        """Remember nothing yet.

        Args:
            clock: Monotonic seconds.
            recent_s: How long a version counts as being fetched after it was asked for.
            leases: Where to lease what is being fetched; None: nobody else removes it.
        """
        self._clock = clock
        self._recent_s = recent_s
        self._leases = leases
        self._asked: dict[int, float] = {}
        self._leased: dict[int, StoredVersion] = {}

    def saw(self, number: int, stored: StoredVersion | None) -> None:
        """A version was asked for, or an answer for it has just ended."""
        self._asked[number] = self._clock()
        if self._leases is not None and stored is not None:
            before = self._leased.get(number)
            if before is not None and before is not stored:
                self._leases.give_back(before)  # it was removed, and is here again
            self._leased[number] = stored
            self._leases.take(stored)

    def versions(self) -> set[int]:
        """Return the versions that are being fetched; forget the others and give leases back."""
        now = self._clock()
        for number, asked in list(self._asked.items()):
            if now - asked >= self._recent_s:
                del self._asked[number]
                self._release(number)
        return set(self._asked)

    def close(self) -> None:
        """Give all leases back."""
        for number in list(self._leased):
            self._release(number)

    def _release(self, number: int) -> None:
        stored = self._leased.pop(number, None)
        if stored is not None and self._leases is not None:
            self._leases.give_back(stored)

"""Which versions somebody is fetching: they stay for a while after the head has dropped them.

A worker on a slow link may need longer for a version than the head lists it. As long as it keeps
asking, the version stays where it is on disk, and its blobs are served (ADR 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from shardcast.errors import ShardcastError
from shardcast.store.stored import StoredVersion

RECENT_S: Final = 60.0


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
        lease: bool = False,
    ) -> None:
        """Remember nothing yet.

        Args:
            clock: Monotonic seconds.
            recent_s: How long a version counts as being fetched after it was asked for.
            lease: Whether to lease what is being fetched.
        """
        self._clock = clock
        self._recent_s = recent_s
        self._lease = lease
        self._asked: dict[int, float] = {}
        self._leased: dict[int, StoredVersion] = {}

    def saw(self, number: int, stored: StoredVersion | None) -> None:
        """A version was asked for, or an answer for it has just ended."""
        self._asked[number] = self._clock()
        if self._lease and stored is not None and number not in self._leased:
            with suppress(ShardcastError, OSError, ValueError):  # it is being removed already
                stored.acquire_lease()
                self._leased[number] = stored

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
        if stored is not None:
            stored.release_lease()

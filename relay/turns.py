"""Turns: slots that all runs share, so that no run takes them all from another."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

RESERVED_SHARE: Final = 4
"""One slot in so many stays free for other runs, as soon as there is more than one run."""


class Turns:
    """Hands out slots by runs and ranks.

    The run that has the fewest comes first, in it the lowest rank, then whoever asked first. A run whose blobs do not come, or come a byte a second, holds its slots for long. It gets all
    but a quarter of them, so the others go on at once. A relay of a single run uses them all.
    For one event loop.

    Args:
        slots: How many there are.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = slots
        self._reserved = slots // RESERVED_SHARE
        self._held: Counter[str] = Counter()
        self._runs: set[str] = set()
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {}
        self._asked = itertools.count()

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        return self._free

    @asynccontextmanager
    async def turn(self, run: str, rank: int = 0) -> AsyncIterator[None]:
        """Hold a slot while the block runs. A cancellation leaves nothing behind."""
        await self.take(run, rank)
        try:
            yield
        finally:
            self.give(run)

    async def take(self, run: str, rank: int = 0) -> None:
        """Wait for a slot; ``give`` it back. A cancellation leaves nothing behind.

        Args:
            run: Whose slot it is.
            rank: Lower ones come first within the run.
        """
        self._runs.add(run)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(run, []), (rank, next(self._asked), turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(run)
            raise

    def give(self, run: str) -> None:
        """Give a slot back."""
        self._free += 1
        self._held[run] -= 1
        if not self._held[run]:
            del self._held[run]
        self._grant()

    def _grant(self) -> None:
        while self._free:
            run = self._next()
            if run is None:
                return
            _rank, _asked, turn = heapq.heappop(self._waiting[run])
            if not turn.done():  # else who waited has left
                self._free -= 1
                self._held[run] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        for run in [run for run, queue in self._waiting.items() if not queue]:
            del self._waiting[run]
        most = self._slots - (self._reserved if len(self._runs) > 1 else 0)
        able = [run for run in self._waiting if self._held[run] < most]
        return min(able, key=self._held.__getitem__, default=None)

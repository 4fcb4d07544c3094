"""Claims: which extents somebody works on at the moment, and waiting until one is free again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, MutableSet

Claim = tuple[int, int]
"""A version and a shard."""


class Claims(MutableSet[Claim]):
    """A set whose removals can be waited for. Used on the event loop."""

    def __init__(self) -> None:
        self._taken: set[Claim] = set()
        self._waiters: dict[Claim, list[asyncio.Future[None]]] = {}

    @classmethod
    def _from_iterable(cls, it: Iterable[Claim]) -> set[Claim]:  # type: ignore[override]
        return set(it)  # what `claims - others` gives is no claim of its own

    def __contains__(self, claim: object) -> bool:
        return claim in self._taken

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._taken)

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, value: Claim) -> None:
        """Claim an extent."""
        self._taken.add(value)

    def discard(self, value: Claim) -> None:
        """Let go of an extent; wake who waits for it."""
        self._taken.discard(value)
        for waiter in self._waiters.pop(value, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def freed(self, claim: Claim, seconds: float) -> bool:
        """Wait until nobody claims an extent; False once the time is up.

        A cancellation leaves nothing behind.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while claim in self._taken:
                    await self._let_go(claim)
        return claim not in self._taken

    async def _let_go(self, claim: Claim) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(claim, []).append(waiter)
        try:
            await waiter
        finally:
            waiters = self._waiters.get(claim)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[claim]

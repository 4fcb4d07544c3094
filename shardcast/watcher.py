"""Asking several sources for one run's head, all the time.

``HeadWatcher`` keeps one long poll at each source, so that a new head crosses a hop in about one
round trip whichever source has it first. It judges nothing: every envelope goes to a callback,
which decides what is accepted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from shardcast.config import NetConfig
from shardcast.errors import (
    MalformedError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    StallError,
)
from shardcast.upstream import HeadAnswer, HeadSource

EARLY_S: Final = 1.0
"""An unchanged answer this much before the end of the wait means a server that does not wait."""


@dataclass(frozen=True, slots=True)
class UpstreamState:
    """What the watcher knows of one source.

    Attributes:
        live: Whether its last answer was one (also 404), False before the first.
        depth: As it last said, None before.
        node: Its node id, None before or where it has none.
        waits: Whether it holds long polls, None before the first one ended.
        error: Why it is not live.
        path: The nodes between the origin and it, as it last said.
    """

    live: bool = False
    depth: int | None = None
    node: str | None = None
    waits: bool | None = None
    error: ShardcastError | None = None
    path: tuple[str, ...] = ()


OnHead = Callable[[HeadAnswer], Awaitable[int | None]]
"""Called with each head that differs from the source's last good one. Returns the newest accepted
sequence of the run, from whatever source, or None if this head was refused."""

OnChange = Callable[[str, UpstreamState], None]
"""Called with URL and state when a source became live, moved in the tree or failed (each failure)."""


class WaitSlots:
    """How many watchers may let a source hold their request: each takes a connection for long.

    A watcher without a slot asks again and again (every ``head_poll_s``).
    """

    def __init__(self, most_per_source: int) -> None:
        self._most = most_per_source
        self._taken: Counter[str] = Counter()

    def take(self, url: str) -> bool:
        """Take a slot at a source; False if there is none."""
        if self._taken[url] >= self._most:
            return False
        self._taken[url] += 1
        return True

    def give_back(self, url: str) -> None:
        """Give a slot back."""
        self._taken[url] -= 1


class HeadWatcher:
    """Keeps asking several sources for one run's head until ``watch`` is cancelled."""

    def __init__(  # noqa: PLR0913 - clock, chance and sleep are for tests
        self,
        run: str,
        sources: Sequence[HeadSource],
        config: NetConfig,
        on_head: OnHead,
        *,
        on_change: OnChange | None = None,
        slots: WaitSlots | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._run = run
        self._sources = tuple(sources)
        self._config = config
        self._on_head = on_head
        self._on_change = on_change
        self._slots = slots
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._clock = clock
        self._sleep = sleep
        self._after: int | None = None
        self._last: dict[str, bytes] = {}
        self._states = {source.url: UpstreamState() for source in self._sources}
        self._doubts = {source.url: asyncio.Event() for source in self._sources}

    @property
    def states(self) -> Mapping[str, UpstreamState]:
        """What is known of each source, by URL."""
        return dict(self._states)

    async def watch(self) -> None:
        """Watch all sources. Ends only by cancellation, which leaves nothing behind."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._watch_one(source))

    def doubt(self, url: str) -> None:
        """Somebody found a source silent: give its long poll up, and ask it again right away."""
        if url in self._doubts:
            self._doubts[url].set()

    async def refresh(self) -> None:
        """Ask every source once, now, without waiting; heads go to the callback as always."""
        await asyncio.gather(*(self._ask(source, wait_s=0) for source in self._sources))

    async def _watch_one(self, source: HeadSource) -> None:
        failures = stale = 0
        while True:
            asked, before, newest = self._clock(), self._states[source.url], self._after
            # Asked at once after a failure: a long poll of a server that is back tells it too late.
            known = source.url in self._last and before.live
            with self._slot(source.url, wanted=known) as held:
                wait_s = self._config.head_wait_s if held else 0
                changed, error = await self._ask(source, wait_s=wait_s)
            if error is not None:
                failures += 1
                await self._sleep(self._backoff(failures, error))
                continue
            failures = 0
            stale = stale + 1 if changed and self._after == newest else 0
            if stale > 1:  # other heads again and again, and none is new: not asked as one waits
                await self._sleep(self._config.head_poll_s * self._rng.uniform(0.5, 1.0))
                continue
            if known and not held:
                if not changed:
                    await self._pause()
                continue
            early = self._clock() - asked < wait_s - EARLY_S
            now = self._states[source.url]
            moved = (now.depth, now.path) != (before.depth, before.path)
            if early and not changed and moved:
                await self._sleep(self._config.backoff_first_s)  # it waits, but had news of itself
                continue
            if wait_s and not changed:
                self._set(source.url, replace(self._states[source.url], waits=not early))
            if early and not changed:
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a source that does not hold requests is asked again."""
        await self._sleep(self._config.head_poll_s * self._rng.uniform(0.9, 1.1))

    @contextmanager
    def _slot(self, url: str, *, wanted: bool) -> Iterator[bool]:
        """Hold a slot while the block runs, if one is wanted and to be had."""
        if not wanted or self._slots is None:
            yield wanted
            return
        held = self._slots.take(url)
        try:
            yield held
        finally:
            if held:
                self._slots.give_back(url)

    def _backoff(self, failures: int, error: ShardcastError) -> float:
        config = self._config
        if isinstance(error, SourceStatusError) and error.status == 404:
            return config.head_poll_s * self._rng.uniform(0.5, 1.0)
        cap = min(config.backoff_first_s * 2.0 ** min(failures, 16), config.backoff_cap_s)
        pause = self._rng.uniform(0.0, cap)
        asked_for = error.retry_after if isinstance(error, SourceStatusError) else None
        # A refused head stays refused: no hurry to see it again.
        least = 0.0 if isinstance(error, NetworkError) else config.head_poll_s
        return max(pause, least) + min(asked_for or 0.0, config.retry_after_cap_s)

    async def _ask(self, source: HeadSource, *, wait_s: int) -> tuple[bool, ShardcastError | None]:
        """Ask once; return whether the head changed, and what went wrong."""
        url = source.url
        after = self._after if wait_s else None
        try:
            answer = await self._head(source, after, wait_s if after else 0)
        except ShardcastError as error:
            alive = isinstance(error, SourceStatusError) and error.status == 404
            state = replace(self._states[url], live=alive, error=error)
            self._set(url, state, tell=True)
            return False, error
        known = self._states[url]
        state = replace(
            known,
            live=True,
            depth=answer.depth,
            node=answer.node,
            path=answer.path,
            error=None,
        )
        moved = (known.depth, known.path) != (state.depth, state.path)
        self._set(url, state, tell=moved or not known.live)
        if self._last.get(url) == answer.envelope:
            return False, None
        sequence = await self._on_head(answer)
        if sequence is None:  # asked again after a pause: a clock may be set right meanwhile
            self._last.pop(url, None)
            return False, MalformedError("its head was refused", source=url)
        self._last[url] = answer.envelope
        self._after = max(self._after or 0, sequence)
        return True, None

    async def _head(self, source: HeadSource, after: int | None, wait_s: int) -> HeadAnswer:
        """Ask for the head; a long poll ends when the source is doubted."""
        doubt = self._doubts[source.url]
        doubt.clear()
        asked = asyncio.ensure_future(source.head(self._run, after=after, wait_s=wait_s))
        doubted = asyncio.ensure_future(doubt.wait())
        try:
            await asyncio.wait({asked, doubted}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() and wait_s:
                raise StallError("does not answer", source=source.url)
            return await asked
        finally:
            doubted.cancel()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    def _set(self, url: str, state: UpstreamState, *, tell: bool = False) -> None:
        self._states[url] = state
        if tell and self._on_change is not None:
            self._on_change(url, state)

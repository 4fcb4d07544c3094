"""Watching fills: nobody waits for a server that cannot answer.

A fill may wait long for a server that itself waits for its parent, so patience with a silent one is
long (``NetConfig.header_timeout_s``). Two kinds of silence are told apart from it early, for fills
that got no byte for a moment: the server stands no longer where it did when it was asked (its own
parents died, or it turned out to be part of a ring), or it does not even answer ``/healthz``
(stopped, or behind a network that loses everything). Such fills go on elsewhere, with what they
have. A fill that gets bytes is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from relay.fill import Fill
from shardcast.asyncget import HttpSession
from shardcast.connection import parse_endpoint
from shardcast.errors import NetworkError, ShardcastError

log = logging.getLogger("relay.watching")

LOOK_S: Final = 0.5
STUCK_LOOKS: Final = 2
"""A fill that looked the same so often is stuck: no byte for a second."""
PULSE_S: Final = 1.5
"""Any server that lives answers a line within that, however busy it is."""
PULSE_AGAIN_S: Final = 3.0
PULSE_BYTES: Final = 64 * 1024

_Mark = tuple[int, int]


class Watch:
    """Looks at all open fills twice a second and moves on those that wait in vain.

    Args:
        fills: Returns the open fills.
        leads_up: Whether the server that a fill waits for may still be asked.
        pulse: Asks a server whether it lives.
        silent: Called with the URL of a server that does not.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        fills: Callable[[], list[Fill]],
        leads_up: Callable[[Fill], bool],
        pulse: Callable[[str], Awaitable[bool]],
        silent: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._fills = fills
        self._leads_up = leads_up
        self._pulse = pulse
        self._silent = silent
        self._clock = clock
        self._seen: dict[Fill, tuple[_Mark, int]] = {}
        self._felt: dict[str, float] = {}
        self._feeling: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for url in self.look():
                    group.create_task(self._feel(url))
                await asyncio.sleep(LOOK_S)

    def look(self) -> list[str]:
        """Move on who waits in vain; return the servers whose pulse is to be felt."""
        seen: dict[Fill, tuple[_Mark, int]] = {}
        doubtful: set[str] = set()
        for fill in self._fills():
            mark = (fill.attempts, fill.watermark)
            before, looks = self._seen.get(fill, (mark, -1))
            looks = looks + 1 if mark == before else 0
            seen[fill] = mark, looks
            source = fill.source
            if source is None or looks < 1:
                continue
            if not self._leads_up(fill):
                fill.move_on()
            elif looks >= STUCK_LOOKS:
                doubtful.add(source)
        self._seen = seen
        now = self._clock()
        due = {url for url in doubtful if now - self._felt.get(url, 0.0) >= PULSE_AGAIN_S}
        due -= self._feeling
        self._felt = {url: at for url, at in self._felt.items() if now - at < PULSE_AGAIN_S}
        self._felt.update(dict.fromkeys(due, now))
        self._feeling |= due
        return sorted(due)

    async def _feel(self, url: str) -> None:
        try:
            if await self._pulse(url):
                return
        finally:
            self._feeling.discard(url)
        log.warning("%s does not answer: its blobs are asked for elsewhere", url)
        self._silent(url)
        for fill in self._fills():
            looks = self._seen.get(fill, ((0, 0), 0))[1]
            if fill.source == url and looks >= 1:
                fill.move_on()


async def feel(session: HttpSession, url: str) -> bool:
    """Ask a server for its health; any answer at all is a pulse."""
    try:
        async with asyncio.timeout(PULSE_S):
            await session.get(parse_endpoint(url), "/healthz", limit=PULSE_BYTES, timeout_s=PULSE_S)
    except (NetworkError, TimeoutError):
        return False
    except ShardcastError:
        return True
    return True

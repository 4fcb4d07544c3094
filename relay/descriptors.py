"""File descriptors: as many as the system gives, and shared out so that none of them run out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from shardcast.store.descriptors import OUT_OF_DESCRIPTORS

log = logging.getLogger("relay.descriptors")

_BASE: Final = 24
"""Standard streams, event loop, listeners, logs, libraries."""
_PER_FILL: Final = 3
"""A fill has a connection, a file and a lease on its version's directory."""
_MOST_FILLS: Final = 16
_FEW: Final = 1024
_TELL_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a number of descriptors is enough for.

    Attributes:
        descriptors: How many there are.
        polls: Connections to parents and siblings for heads, over all runs; half of them may be
            held there.
        fills: Blobs fetched at once from parents; as many again from siblings.
        connections: Clients' connections; each takes one, and one more while a blob is sent.
        refused: Connections over that number that are told so.
        leases: Versions that are leased for long.
    """

    descriptors: int
    polls: int
    fills: int
    connections: int
    refused: int
    leases: int


def share_out(descriptors: int) -> Budget:
    """Share descriptors out; an eighth is for directories (``shardcast.store.descriptors``). Pure."""
    directories, polls = max(8, descriptors // 8), max(4, descriptors // 16)
    fills, leases = max(2, descriptors // 32), max(4, min(1024, descriptors // 16))
    left = descriptors - _BASE - directories - polls - leases
    left -= 2 * _PER_FILL * min(fills, _MOST_FILLS)
    refused = max(2, left // 8)
    return Budget(descriptors, polls, fills, max(16, (left - refused) // 2), refused, leases)


def budget() -> Budget:
    """Return what this process may open now; says so where that is little."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = share_out(1 << 20 if soft == resource.RLIM_INFINITY else min(soft, 1 << 20))
    if found.descriptors < _FEW:
        log.warning(
            "only %d file descriptors: at most %d connections of clients, and heads of at most %d "
            "runs without delay; raise the limit (ulimit -n, LimitNOFILE=) for more",
            found.descriptors,
            found.connections,
            found.polls // 2,
        )
    return found


@contextlib.contextmanager
def telling_shortage(
    loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """While the block runs, say in one line a minute that connections wait for descriptors.

    asyncio stops accepting for a second then, and whoever connects waits in the kernel's queue. It
    tells each try with a trace, up to 16 at once, which would fill a log in no time.
    """
    before = loop.get_exception_handler()
    told_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        error = context.get("exception")
        short = isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS
        if not short or "accept" not in context.get("message", ""):
            (before or _default)(loop, context)
        elif clock() - told_at >= _TELL_EVERY_S:
            told_at = clock()
            log.warning(
                "out of file descriptors: new connections wait until others are closed; raise the "
                "limit (ulimit -n, LimitNOFILE=)"
            )

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)


def _default(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)

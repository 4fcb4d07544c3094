"""Blocking work in threads: nothing that it uses or returns is lost by a cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from relay.whole import to_its_end

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread. A cancellation is delivered once the thread is done.

    So whoever owns what the thread uses (descriptors, claims) can clean up safely afterwards.
    """
    return await to_its_end(asyncio.to_thread(work))


async def in_thread_or(
    work: Callable[[], T], undo: Callable[[T], None], executor: Executor | None = None
) -> T:
    """Run ``work``, whose result somebody must close, in a thread.

    A cancellation is delivered at once. What the thread returns after it, or has returned without
    anyone seeing it, is given to ``undo``; work that has not begun yet is dropped.

    Args:
        work: Blocks.
        undo: Takes a moment, and does not raise. Called in the thread or on the event loop.
        executor: Whose thread; None: the loop's own.
    """
    lock = threading.Lock()
    returned: list[T] = []
    left = False

    def kept() -> None:
        result = work()
        with lock:
            if not left:
                returned.append(result)
                return
        undo(result)

    try:
        await asyncio.get_running_loop().run_in_executor(executor, kept)
    except asyncio.CancelledError:
        with lock:
            left = True
        for result in returned:
            undo(result)
        raise
    return returned[0]

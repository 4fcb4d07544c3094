"""Blocking work in threads, waited for even when the waiter is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread. A cancellation is delivered once the thread is done.

    So whoever owns what the thread uses (descriptors, claims) can clean up safely afterwards.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # seen
        raise cancelled
    return task.result()

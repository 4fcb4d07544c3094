"""Coroutines as commands: SIGTERM cancels them and they end cleanly."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class TerminatedError(Exception):
    """SIGTERM came; everything has ended in order."""


def run_until_terminated(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine, with all the descriptors there are; SIGTERM cancels it, as Ctrl-C does.

    Raises:
        TerminatedError: After SIGTERM, when the coroutine has ended.
        KeyboardInterrupt: After SIGINT, likewise.
    """
    import asyncio

    from shardcast.store.descriptors import raise_limit

    raise_limit()
    return asyncio.run(_terminable(work))


async def _terminable(work: Coroutine[Any, Any, _T]) -> _T:
    import asyncio

    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    came = asyncio.Event()

    def terminate() -> None:
        # The second time, what still cleans up (a server that drains) is cut short.
        for running in asyncio.all_tasks(loop) if came.is_set() else [task]:
            running.cancel()
        came.set()

    with contextlib.suppress(NotImplementedError, ValueError):  # not in the main thread
        loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if came.is_set():
            raise TerminatedError from None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise

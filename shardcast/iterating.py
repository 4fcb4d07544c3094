"""Following for code without asyncio: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FollowThread(threading.Thread, Generic[Item]):
    """Puts what ``follow`` yields, or the error that ends it, into a box."""

    def __init__(
        self,
        follow: Callable[[], AsyncIterator[Item]],
        box: queue.Queue[Item | BaseException],
    ) -> None:
        super().__init__(name="follow", daemon=True)
        self._follow = follow
        self._box = box
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._entered = threading.Event()

    def run(self) -> None:
        """Follow until ``stop`` or an error."""
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._box.put(error)
        finally:
            self._entered.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._entered.set()
        async for update in self._follow():
            self._box.put(update)

    def stop(self) -> None:
        """End following, in order, and wait for it."""
        self._entered.wait()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()

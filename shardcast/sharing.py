"""Share a list of work out to a few threads: the first error stops them all and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

Item = TypeVar("Item")
Tool = TypeVar("Tool")
Stopping = Callable[[], bool]
"""Says whether the others have stopped, so that long work may stop in its middle."""


def share_out(
    items: Iterable[Item],
    work: Callable[[Tool, Item, Stopping], None],
    *,
    threads: int,
    tool: Callable[[], AbstractContextManager[Tool]],
    name: str,
) -> None:
    """Do ``work`` for every item, each item once, in ``threads`` threads; return when all is done.

    Args:
        items: What to do; taken from one at a time.
        work: Gets the thread's tool, an item, and a function that says whether to stop.
        threads: How many threads.
        tool: Makes what a thread needs for itself (a buffer, a connection); closed at its end.
        name: Prefix of the threads' names.

    Raises:
        BaseException: What the first failing work raised; also an interrupt of the caller, after
            every thread has ended.
    """
    crew = _Crew(items, work, tool)
    members = [threading.Thread(target=crew.run, name=f"{name}-{n}") for n in range(threads)]
    for member in members:
        member.start()
    try:
        for member in members:
            member.join()
    except BaseException:
        crew.stop.set()
        for member in members:
            member.join()
        raise
    if crew.error is not None:
        raise crew.error


class _Crew:
    def __init__(
        self,
        items: Iterable[Item],
        work: Callable[[Tool, Item, Stopping], None],
        tool: Callable[[], AbstractContextManager[Tool]],
    ) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._items = iter(items)
        self._work: Callable[..., None] = work
        self._tool = tool
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            with self._tool() as tool:
                while not self.stop.is_set():
                    with self._lock:
                        try:
                            item = next(self._items)
                        except StopIteration:
                            return
                    self._work(tool, item, self.stop.is_set)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
            self.stop.set()

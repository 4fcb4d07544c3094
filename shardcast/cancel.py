"""Cancelling blocking work in threads: a flag that also wakes whoever is waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardcast.errors import ShardcastError


class TransferCancelledError(ShardcastError):
    """The caller cancelled the transfer. Says nothing about the source."""

    code = "cancelled"


class Cancel:
    """A flag that is set once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._hooks: dict[int, Callable[[], None]] = {}
        self._next = 0

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """Set the flag and run every hook that is in effect. Further calls do nothing."""
        with self._lock:
            if self._event.is_set():
                return
            self._event.set()
            hooks = list(self._hooks.values())
        for hook in hooks:
            hook()

    def wait(self, seconds: float) -> bool:
        """Sleep up to ``seconds``; return whether it was cancelled."""
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise if it was cancelled.

        Raises:
            TransferCancelledError: If it was.
        """
        if self._event.is_set():
            raise TransferCancelledError("cancelled")

    @contextmanager
    def hook(self, action: Callable[[], None]) -> Iterator[None]:
        """Call ``action`` (from the cancelling thread; it must not block) if it is cancelled.

        If it already was, ``action`` is called at once.
        """
        with self._lock:
            self._next += 1
            key = self._next
            late = self._event.is_set()
            if not late:
                self._hooks[key] = action
        if late:
            action()
        try:
            yield
        finally:
            with self._lock:
                self._hooks.pop(key, None)

    @contextmanager
    def child(self) -> Iterator[Cancel]:
        """Yield a flag of its own that is also set when this one is."""
        inner = Cancel()
        with self.hook(inner.cancel):
            yield inner

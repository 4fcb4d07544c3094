"""A fill: one upstream read per blob, however many readers wait, and never a wrong blob passed on.

Threads read from one source after another into its target and move the watermark
(``relay/filling.py``). Readers live on the event loop and follow the watermark with sendfile. Rules:

- A fill is *truncated* until length and digest prove otherwise.
- The last ``HELD_BACK_BYTES`` are released only after the digest was verified and the target
  kept the blob, so nobody ever holds a complete wrong blob.
- When the bytes so far turn out to be wrong or are fetched anew, the generation goes up; readers
  that got bytes of an older generation are cut off.
- A fill belongs to the relay. Readers come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from shardcast.cancel import Cancel
from shardcast.errors import NetworkError, ShardcastError, SourceStatusError
from shardcast.fetch import BlobSource, Fetched, Transfer
from shardcast.protocol.limits import HELD_BACK_BYTES
from shardcast.store.files import disk_errors, write_all

_WAKE_S: Final = 0.002
"""Readers are woken at most this often: a little latency for much less work per byte."""


class Target(Protocol):
    """Where a fill puts its bytes. The methods block and are called from the fill's thread."""

    @property
    def run(self) -> str:
        """The run."""
        ...

    @property
    def digest(self) -> str:
        """The blob."""
        ...

    @property
    def length(self) -> int | None:
        """Its length, None for a document."""
        ...

    @property
    def limit(self) -> int:
        """The most bytes it may have."""
        ...

    def open(self) -> tuple[int, int]:
        """Return a readable and writable descriptor (the fill closes it) and the base offset."""
        ...

    def finish(self, xxh3: bytes, length: int) -> None:
        """Keep the verified blob: the first ``length`` bytes. What follows is of a wrong one."""
        ...

    def landed(self) -> None:
        """Tell whoever must know before the last bytes go out. On the event loop."""
        ...

    def lost(self) -> None:
        """Tell whoever must know that the fill failed. On the event loop."""
        ...

    def discard(self) -> None:
        """Forget a blob that did not come."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A source to try.

    Attributes:
        source: The server.
        lateral: Whether it is a sibling, or another relay that is not nearer to the origin.
    """

    source: BlobSource
    lateral: bool


class Route(Protocol):
    """The order in which one fill tries its sources. Called from one thread at a time."""

    @property
    def lateral(self) -> bool:
        """Whether it goes on at a sibling."""
        ...

    def next(self, received: int) -> Choice | float | None:
        """Return a source, or seconds to wait before asking again, or None: give up.

        Args:
            received: Bytes that are here: while they grow, patience is not spent.
        """
        ...

    def succeeded(self, choice: Choice, fetched: Fetched) -> None:
        """The blob, or its last piece, came from there."""
        ...

    def failed(self, choice: Choice, error: NetworkError) -> None:
        """That source could not give it."""
        ...

    def wrong(self, choice: Choice, *, stitched: bool) -> None:
        """It gave wrong bytes; if they were stitched from several answers, nobody is."""
        ...

    def dropped(self, choice: Choice) -> None:
        """The transfer ended for a reason that says nothing about the source."""
        ...

    def renew(self) -> None:
        """There is news: what the sources said before counts no more."""
        ...


class State(enum.Enum):
    """How a fill stands."""

    TRUNCATED = "truncated"
    VERIFIED = "verified"
    FAILED = "failed"


class Fill:
    """One blob on its way here. Attributes are read on the event loop.

    Attributes:
        target: Where it goes.
        state: Truncated until proven otherwise.
        error: Why it failed.
        generation: Goes up whenever bytes that readers may have got are void.
        watermark: Bytes of this generation that are in the file.
        total: The blob's length, None while unknown.
        fd: Descriptor of the file that it is written to, -1 before it is open.
        base: Where in that file it begins.
        lateral: Whether it reads from a sibling at the moment, or may come to.
        source: URL that it reads from at the moment, None while it waits.
        attempts: How many requests it has made.
    """

    def __init__(self, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self.state = State.TRUNCATED
        self.error: ShardcastError | None = None
        self.generation = 0
        self.watermark = 0
        self.total = target.length
        self.fd = -1
        self.base = 0
        self.lateral = False
        self.started = time.monotonic()
        self.source: str | None = None
        self.attempts = 0
        self.cancel = Cancel()
        self._attempt: Cancel | None = None
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []
        self._users = 1  # the fill itself
        self._wake_pending = False
        self._woken = 0.0
        self._end = asyncio.Event()
        self._news: asyncio.Event | None = None

    # --- readers, on the event loop -------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self.state is not State.TRUNCATED

    @property
    def released(self) -> int:
        """How many bytes may be passed on now."""
        if self.total is None:
            return 0
        if self.state is State.VERIFIED:
            return self.total
        return max(0, min(self.watermark, self.total - HELD_BACK_BYTES))

    @property
    def mark(self) -> tuple[int, int, bool, State]:
        """What readers look at, as one value to compare."""
        return self.generation, self.watermark, self.lateral, self.state

    async def changed(self, seen: tuple[int, int, bool, State]) -> None:
        """Wait until ``mark`` is not ``seen`` any more. A cancellation leaves nothing behind."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            # Looked at again only now: the thread wakes nobody while nobody waits.
            if self.mark == seen and not self.done:
                await waiter
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    @property
    def readers(self) -> int:
        """How many read it now: it is not for prefetching alone."""
        return self._users - (0 if self.done else 1)

    def move_on(self) -> None:
        """Give the request up that goes on now, and ask the next source. What came is kept."""
        attempt = self._attempt
        if attempt is not None:
            attempt.cancel()

    async def pause(self, seconds: float) -> bool:
        """Wait, or be cancelled meanwhile; say whether news ended it."""
        self._news = woken = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(woken.set)

        with self.cancel.hook(wake), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await woken.wait()
        self._news = None
        return woken.is_set() and not self.cancel.cancelled

    def hasten(self) -> None:
        """End a pause: a source may know by now what it did not know when it was asked."""
        if self._news is not None:
            self._news.set()

    async def finished(self) -> None:
        """Wait for the end, without being woken on the way."""
        await self._end.wait()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the descriptor open while the block runs."""
        self._users += 1
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self._users -= 1
        if self._users == 0 and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _wake(self) -> None:
        self._wake_pending = False
        self._woken = self._loop.time()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _soon(self) -> None:
        wait = self._woken + _WAKE_S - self._loop.time()
        if wait > 0:
            self._loop.call_later(wait, self._wake)
        else:
            self._wake()

    def end(self, error: ShardcastError | None) -> None:
        """Note the end; readers get the rest, or are cut off."""
        self.error = error
        self.state = State.VERIFIED if error is None else State.FAILED
        self._end.set()
        self._wake()
        self._release()

    # --- the filling thread -------------------------------------------------------------------

    @contextlib.contextmanager
    def asking(self, choice: Choice) -> Iterator[Cancel]:
        """Note who is asked while the block runs; yield what ends this request alone."""
        with self.cancel.child() as attempt:
            self.attempts += 1
            self.lateral = choice.lateral
            self.source = choice.source.url
            self._attempt = attempt
            self.notify()
            try:
                yield attempt
            finally:
                self._attempt = None
                self.source = None

    def opened(self, fd: int, base: int) -> None:
        """Take over the descriptor to write to."""
        self.base = base
        self.fd = fd

    def advance(self, transfer: Transfer, offset: int, data: memoryview) -> None:
        """Write the next bytes and move the watermark."""
        if offset < self.watermark:
            self.void()
        with disk_errors(self.target.digest, "writing blob"):
            write_all(self.fd, data, self.base + offset)
        self.total = transfer.total
        self.watermark = offset + len(data)
        self.notify()

    def void(self) -> None:
        """Declare all bytes so far void."""
        self.watermark = 0
        self.generation += 1
        self.notify()

    def notify(self) -> None:
        """Wake the readers, from any thread."""
        if self._waiters and not self._wake_pending:
            self._wake_pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._soon)


def status_of(error: ShardcastError | None) -> int | None:
    """Return the HTTP status a source answered with, if that is what went wrong."""
    return error.status if isinstance(error, SourceStatusError) else None

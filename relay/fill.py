"""Fills: one upstream read per blob, however many readers wait, and never a wrong blob passed on.

A fill runs in a thread: it reads from one source after another into its target and moves the
watermark. Readers live on the event loop and follow the watermark with sendfile. Rules:

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
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from relay.metrics import Metrics
from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.errors import (
    IntegrityError,
    LimitError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
)
from shardcast.fetch import BlobSource, Fetched, Transfer
from shardcast.protocol.limits import HELD_BACK_BYTES
from shardcast.store.files import disk_errors, write_all

log = logging.getLogger("relay.fill")

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

    def finish(self, xxh3: bytes) -> None:
        """Keep the verified blob."""
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
    """The order in which one fill tries its sources. Called from the fill's thread."""

    @property
    def lateral(self) -> bool:
        """Whether it begins at a sibling."""
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
        """It gave wrong bytes; if they were stitched from several, nobody is to blame."""
        ...

    def dropped(self, choice: Choice) -> None:
        """The transfer ended for a reason that says nothing about the source."""
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
        self.cancel = Cancel()
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []
        self._users = 1  # the fill itself
        self._wake_pending = False
        self._woken = 0.0
        self._end = asyncio.Event()

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


class _Sink:
    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self.transfer: Transfer | None = None

    def write(self, offset: int, data: memoryview) -> None:
        assert self.transfer is not None
        self._fill.advance(self.transfer, offset, data)


def run_fill(fill: Fill, route: Route, metrics: Metrics) -> None:
    """Fetch the blob into the fill's target. Blocking; runs in a thread.

    Raises:
        NetworkError: If no source gave it.
        IntegrityError: If the sources gave wrong bytes.
        DiskError: If it could not be kept.
        TransferCancelledError: If the relay stops.
    """
    target = fill.target
    fill.cancel.check()
    fill.opened(*target.open())
    try:
        sink = _Sink(fill)
        transfer = Transfer(target.run, target.digest, target.length, sink, limit=target.limit)
        sink.transfer = transfer
        _fetch(fill, route, transfer, metrics)
        target.finish(transfer.xxh3)
    except BaseException:
        target.discard()
        raise


def _fetch(fill: Fill, route: Route, transfer: Transfer, metrics: Metrics) -> None:
    last: ShardcastError | None = None
    whole = False  # after a stitched blob was wrong: from one source only
    while True:
        choice = route.next(transfer.offset)
        if isinstance(choice, float):
            if fill.cancel.wait(choice):
                fill.cancel.check()
            continue
        if choice is None:
            raise last or NetworkError(f"no source for blob {transfer.digest} at the moment")
        if whole and transfer.offset:
            transfer.restart()
        fill.lateral = choice.lateral
        fill.source = choice.source.url
        fill.notify()
        try:
            fetched = choice.source.fetch(transfer, fill.cancel)
        except IntegrityError as error:
            stitched = transfer.stitched
            log.warning("wrong blob: %s%s", error, " (nobody is to blame)" if stitched else "")
            metrics.wrong.inc()
            route.wrong(choice, stitched=stitched)
            transfer.restart()
            fill.void()
            whole = whole or stitched
            last = error
        except (NetworkError, LimitError) as error:
            log.info("%s: %s", choice.source.url, error)
            route.failed(choice, _as_network(error))
            last = error
        except BaseException:
            route.dropped(choice)
            raise
        else:
            route.succeeded(choice, fetched)
            return


def _as_network(error: NetworkError | LimitError) -> NetworkError:
    return error if isinstance(error, NetworkError) else NetworkError(error.message)


class Fills:
    """All fills of a relay: single flight by run and digest.

    Fills that wait for a sibling have threads of their own. Otherwise two siblings could have all
    their threads wait for blobs of each other that wait for a thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
        *,
        threads: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._clock = clock
        self._most = most
        self._direct = ThreadPoolExecutor(threads, thread_name_prefix="fill")
        self._lateral = ThreadPoolExecutor(threads, thread_name_prefix="fill-lateral")
        self._open: dict[tuple[str, str], Fill] = {}

    def get(self, run: str, digest: str) -> Fill | None:
        """Return the fill of a blob that is on its way, or None."""
        return self._open.get((run, digest))

    def open(self) -> list[Fill]:
        """Return what is on its way, oldest first."""
        return list(self._open.values())

    @property
    def full(self) -> bool:
        """Whether no further fill may be started."""
        return len(self._open) >= self._most

    def start(self, target: Target, route: Route) -> Fill:
        """Start fetching a blob that is not on its way yet."""
        fill = Fill(target, self._loop)
        key = (target.run, target.digest)
        self._open[key] = fill
        self._metrics.open_fills.set(len(self._open))
        executor = self._lateral if route.lateral else self._direct
        future = self._loop.run_in_executor(executor, run_fill, fill, route, self._metrics)
        future.add_done_callback(lambda done: self._ended(key, fill, done))
        return fill

    def _ended(self, key: tuple[str, str], fill: Fill, done: asyncio.Future[None]) -> None:
        self._open.pop(key, None)
        self._metrics.open_fills.set(len(self._open))
        error: ShardcastError | None = None
        if done.cancelled():
            error = TransferCancelledError("cancelled")
        elif (problem := done.exception()) is not None:
            if isinstance(problem, ShardcastError):
                error = problem
            else:
                log.error("fill of %s broke", fill.target.digest, exc_info=problem)
                error = ShardcastError(f"fill broke: {problem}")
        result = "verified" if error is None else error.code
        self._metrics.fills.labels(result=result).inc()
        if error is None:
            self._metrics.received.labels(origin="fill").inc(fill.total or 0)
            self._metrics.fill_seconds.observe(self._clock() - fill.started)
            fill.target.landed()
        else:
            fill.target.lost()
            if not isinstance(error, TransferCancelledError):
                log.warning("run %s: blob %s did not come: %s", *key, error)
        fill.end(error)

    def close(self) -> None:
        """Cancel everything and wait for the threads."""
        for fill in self.open():
            fill.cancel.cancel()
        self._lateral.shutdown(wait=True, cancel_futures=True)
        self._direct.shutdown(wait=True, cancel_futures=True)


def status_of(error: ShardcastError | None) -> int | None:
    """Return the HTTP status a source answered with, if that is what went wrong."""
    return error.status if isinstance(error, SourceStatusError) else None

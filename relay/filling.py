"""Filling: attempts in threads, pauses on the event loop, and nobody waits for who cannot answer.

One fill asks one source after another, as its route says. A request takes a thread, a pause takes
none. Requests to siblings (``lateral``) have threads of their own: otherwise two siblings could
have all their threads wait for blobs of each other that wait for a thread. Threads are shared by
turns between runs, so one run whose blobs do not come never holds up another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from relay.fill import Choice, Fill, Route, Target
from relay.metrics import Metrics
from relay.turns import Turns
from shardcast.cancel import TransferCancelledError
from shardcast.errors import (
    IntegrityError,
    LimitError,
    NetworkError,
    ShardcastError,
    StallError,
    said_of,
)
from shardcast.fetch import Transfer

log = logging.getLogger("relay.filling")

_RUN_SHARE: Final = 0.75
"""A single run never has more than this share of all fills that may be open."""


class _Sink:
    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self.transfer: Transfer | None = None

    def write(self, offset: int, data: memoryview) -> None:
        assert self.transfer is not None
        self._fill.advance(self.transfer, offset, data)


class Filling:
    """The work of one fill, in steps. ``step`` blocks; the others run on the event loop."""

    def __init__(self, fill: Fill, route: Route, metrics: Metrics) -> None:
        self.fill = fill
        self.route = route
        self._metrics = metrics
        self._open = False
        self._transfer: Transfer | None = None
        self._chosen: Choice | None = None
        self._last: ShardcastError | None = None
        self._whole = False  # after a stitched blob was wrong: in one answer only

    @property
    def lateral(self) -> bool:
        """Whether the next step asks a sibling."""
        return self.route.lateral if self._chosen is None else self._chosen.lateral

    def begin(self) -> Transfer:
        """Open the target. Blocking."""
        target = self.fill.target
        self._open = True
        self.fill.opened(*target.open())
        sink = _Sink(self.fill)
        transfer = Transfer(target.run, target.digest, target.length, sink, limit=target.limit)
        sink.transfer = self._transfer = transfer
        return transfer

    def step(self, *, lateral: bool) -> float | None:
        """Ask sources until the blob is kept (None), or a pause is due: return its seconds.

        A pause of 0 means that the next request is one for the other threads.

        Raises:
            NetworkError: If no source gave it.
            IntegrityError: If the sources gave wrong bytes.
            DiskError: If it could not be kept.
            TransferCancelledError: If nobody wants it any more.
        """
        fill = self.fill
        fill.cancel.check()
        transfer = self._transfer or self.begin()
        while True:
            choice = self._chosen or self.route.next(transfer.offset)
            self._chosen = None
            if isinstance(choice, float):
                return choice
            if choice is None:
                raise self._last or NetworkError(
                    f"no source for blob {transfer.digest} at the moment"
                )
            if choice.lateral != lateral:
                self._chosen = choice
                return 0.0
            if self._ask(choice, transfer):
                fill.target.finish(transfer.xxh3, transfer.offset)
                return None

    def _ask(self, choice: Choice, transfer: Transfer) -> bool:
        """Ask one source; say whether the blob is whole."""
        fill, route = self.fill, self.route
        if self._whole and transfer.offset:
            transfer.restart()
        try:
            with fill.asking(choice) as attempt:
                try:
                    fetched = choice.source.fetch(transfer, attempt)
                except TransferCancelledError:
                    if fill.cancel.cancelled or not attempt.cancelled:
                        raise
                    raise StallError(
                        f"gave nothing of blob {transfer.digest}, and is silent or leads nowhere",
                        source=choice.source.url,
                    ) from None
        except IntegrityError as error:
            stitched = transfer.stitched
            log.warning("wrong blob: %s%s", error, " (nobody is to blame)" if stitched else "")
            self._metrics.wrong.inc()
            route.wrong(choice, stitched=stitched)
            transfer.restart()
            fill.void()
            self._whole = self._whole or stitched
            self._last = error
        except (NetworkError, LimitError) as error:
            log.info("%s", said_of(choice.source.url, error))
            route.failed(choice, _as_network(error))
            self._last = error
        except BaseException:
            route.dropped(choice)
            raise
        else:
            route.succeeded(choice, fetched)
            return True
        return False

    def abandon(self) -> None:
        """Give back what was chosen or opened, after a failure. Blocking."""
        if self._chosen is not None:
            self.route.dropped(self._chosen)
            self._chosen = None
        if self._open:
            self.fill.target.discard()


def _as_network(error: NetworkError | LimitError) -> NetworkError:
    return error if isinstance(error, NetworkError) else NetworkError(error.message)


class Fills:
    """All fills of a relay: single flight by run and digest.

    Args:
        loop: The event loop.
        metrics: Counters.
        threads: Requests at once to parents, and as many to siblings.
        most: Fills that may be open at once.
        clock: Monotonic seconds.
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
        self._pools = {
            False: ThreadPoolExecutor(threads, thread_name_prefix="fill"),
            True: ThreadPoolExecutor(threads, thread_name_prefix="fill-lateral"),
        }
        self._turns = {lateral: Turns(threads) for lateral in self._pools}
        self._open: dict[tuple[str, str], Fill] = {}
        self._by_run: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, run: str, digest: str) -> Fill | None:
        """Return the fill of a blob that is on its way, or None."""
        return self._open.get((run, digest))

    def hasten(self, run: str) -> None:
        """End the pauses of a run's fills: there is a new head, or a version's documents are here.

        Whoever told that knows more by now than when he was asked for a blob.
        """
        for fill in self.open():
            if fill.target.run == run:
                fill.hasten()

    def open(self) -> list[Fill]:
        """Return what is on its way, oldest first."""
        return list(self._open.values())

    def full(self, run: str) -> bool:
        """Whether no further fill of a run may be started."""
        return len(self._open) >= self._most or self._by_run[run] >= max(
            1, int(self._most * _RUN_SHARE)
        )

    def start(self, target: Target, route: Route, rank: int = 0) -> Fill:
        """Start fetching a blob that is not on its way yet.

        Args:
            target: Where it goes.
            route: Whom to ask for it.
            rank: Of the run's fills that wait for a thread, lower ones come first.
        """
        fill = Fill(target, self._loop)
        fill.lateral = route.lateral
        key = (target.run, target.digest)
        self._open[key] = fill
        self._by_run[target.run] += 1
        self._metrics.open_fills.set(len(self._open))
        task = self._loop.create_task(self._fill(fill, Filling(fill, route, self._metrics), rank))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return fill

    async def _fill(self, fill: Fill, filling: Filling, rank: int) -> None:
        try:
            await self._steps(fill, filling, rank)
        except ShardcastError as error:
            problem: ShardcastError | None = error
        except Exception as error:
            log.exception("fill of %s broke", fill.target.digest)
            problem = ShardcastError(f"fill broke: {error}")
        else:
            problem = None
        self._ended(fill, problem)

    async def _steps(self, fill: Fill, filling: Filling, rank: int) -> None:
        run = fill.target.run
        try:
            while True:
                lateral = filling.lateral
                async with self._turns[lateral].turn(run, rank):
                    seconds = await self._step(fill, filling, lateral)
                if seconds is None:
                    return
                if seconds and await fill.pause(seconds):
                    filling.route.renew()
        except BaseException:
            await self._loop.run_in_executor(None, filling.abandon)
            raise

    async def _step(self, fill: Fill, filling: Filling, lateral: bool) -> float | None:
        """Run one step in a thread; a cancellation is delivered once the thread is done."""
        step = partial(filling.step, lateral=lateral)
        future = self._loop.run_in_executor(self._pools[lateral], step)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            fill.cancel.cancel()
            await asyncio.wait([future])
            future.exception()  # seen
            raise

    def _ended(self, fill: Fill, error: ShardcastError | None) -> None:
        run, digest = fill.target.run, fill.target.digest
        self._open.pop((run, digest), None)
        self._by_run[run] -= 1
        self._metrics.open_fills.set(len(self._open))
        try:
            self._account(fill, error)
        except Exception:
            log.exception("fill of %s broke at its end, in run %s", digest, run)
        finally:  # whatever breaks there, nobody waits for ever
            fill.end(error)

    def _account(self, fill: Fill, error: ShardcastError | None) -> None:
        """Count a fill that has ended, and tell whoever must know before its readers do."""
        run, digest = fill.target.run, fill.target.digest
        result = "verified" if error is None else error.code
        self._metrics.fills.labels(result=result).inc()
        if error is None:
            self._metrics.received.labels(origin="fill").inc(fill.total or 0)
            self._metrics.fill_seconds.observe(self._clock() - fill.started)
            fill.target.landed()
        else:
            fill.target.lost()
            if not isinstance(error, TransferCancelledError):
                log.warning("run %s: blob %s did not come: %s", run, digest, error)

    async def stop(self) -> None:
        """Cancel everything and wait for it."""
        while self._tasks:
            for fill in self.open():
                fill.cancel.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Wait for the threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

"""Threads that perform a ``Schedule``: many blobs from many sources at once.

Jobs can be added while it runs, so that fetching starts while local copies are still being made
and a copy that turns out bad can be fetched.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from xxhash import xxh3_128_digest

from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.config import NetConfig
from shardcast.errors import DiskError, ShardcastError
from shardcast.fetch import BlobSink, BlobSource, Branch, Fetched, Transfer
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.schedule import Finished, Flight, Job, Notice, Schedule, Wait
from shardcast.selector import Selector
from shardcast.store.abandoned import create_temporary
from shardcast.store.files import disk_errors, read_into, write_all
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion


class PoolSink(BlobSink, Protocol):
    """A sink that can rest between two attempts."""

    def close(self) -> None:
        """Give back what is held open, until more bytes come."""
        ...


_Entry: TypeAlias = tuple[PoolSink, Callable[[Transfer], None]]
"""Where a job's bytes go, and what is called when they are there."""


class ExtentSink:
    """Writes a blob into a shard's extent. Holds a descriptor only while bytes are coming."""

    def __init__(self, stored: StoredVersion, shard: int) -> None:
        self._stored = stored
        self._extent = stored.version.layout.extent(shard)
        self._fd = -1

    def write(self, offset: int, data: memoryview) -> None:
        """Write the next bytes.

        Raises:
            DiskError: If the system refuses.
        """
        if self._fd < 0:
            self._fd = self._stored.open_file(self._extent.file, writable=True)
        with disk_errors(self._stored.directory / self._extent.path, "writing"):
            write_all(self._fd, data, self._extent.offset + offset)

    def close(self) -> None:
        """Give the descriptor back until more bytes come."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


class AsideSink:
    """Takes a shard of a *committed* version into a file of its own, to be put in place when right.

    Engines read a committed version's files and check nothing. So a repair may only ever write the
    bytes that should be there: at every instant each byte is the right one, or as wrong as before.

    The file stays open, and so locked, between two attempts: one that nobody has open is taken for
    a dead process's and removed.
    """

    def __init__(self, store: RunStore, stored: StoredVersion, shard: int) -> None:
        self._stored = stored
        self._extent = stored.version.layout.extent(shard)
        self._path = store.temporary(f"shard-{shard}")
        self._fd = -1

    def write(self, offset: int, data: memoryview) -> None:
        """Write the next bytes.

        Raises:
            DiskError: If the system refuses.
        """
        with disk_errors(self._path, "writing"):
            if self._fd < 0:
                self._fd = create_temporary(self._path, 0o600)
            write_all(self._fd, data, offset)

    def close(self) -> None:
        """Keep what came until more bytes come."""

    def place(self, xxh3: bytes) -> None:
        """Write the verified shard to where it belongs, durably, and remove the file.

        Raises:
            DiskError: If the system refuses, or it reads back as something else than what came.
        """
        path, data = self._stored.directory / self._extent.path, bytearray(self._extent.length)
        try:
            with disk_errors(self._path, "reading"):
                read_into(self._fd, memoryview(data), 0)
            if xxh3_128_digest(data) != xxh3:
                raise DiskError(
                    "a shard reads back as something else than was written: check this machine's "
                    "disk and memory",
                    source=str(self._path),
                )
            fd = self._stored.open_file(self._extent.file, writable=True)
            try:
                with disk_errors(path, "repairing"):
                    write_all(fd, memoryview(data), self._extent.offset)
                    os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            self.remove()

    def remove(self) -> None:
        """Remove the file, if there is one; nothing is written after that."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                self._path.unlink()
            with suppress(OSError):
                os.close(fd)


class FetchPool:
    """Fetches blobs until ``finish``. Use as a context manager: leaving it ends every thread.

    Attributes:
        received_bytes: What came over the network so far, also what had to be thrown away.
    """

    def __init__(
        self,
        run: str,
        sources: Mapping[str, BlobSource],
        selector: Selector[str],
        config: NetConfig,
        cancel: Cancel,
        *,
        notify: Callable[[Notice], None] = lambda notice: None,
        rng: random.Random | None = None,
        listed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start nothing yet.

        Args:
            run: The run that the blobs belong to.
            sources: By URL.
            selector: What is known of them; its keys are the URLs.
            config: Bounds.
            cancel: Ends everything.
            notify: Called (from a fetching thread) when a source fails.
            rng: For pauses.
            listed: Whether sources that have not got a blob may come to have it. Called often, from
                fetching threads.
        """
        self._run = run
        self._sources = sources
        self._config = config
        self._cancel = cancel
        self._changed = threading.Condition()
        self._schedule = Schedule(
            sources,
            selector,
            config,
            clock=time.monotonic,
            rng=rng or random.Random(),  # noqa: S311 - spreads load, keeps no secret
            notify=notify,
            resumes=lambda source: sources[source].resumes,
            listed=listed,
        )
        self._jobs: dict[Job, _Entry] = {}
        self._optional: dict[Job, Callable[[ShardcastError], None]] = {}
        self._threads: list[threading.Thread] = []
        self._hook = cancel.hook(self._cancelled)
        self._error: BaseException | None = None
        self.received_bytes = 0

    # --- work -------------------------------------------------------------------------------

    def submit(
        self,
        digest: str,
        length: int | None,
        sink: PoolSink,
        *,
        name: str,
        done: Callable[[Transfer], None],
        limit: int = MAX_DOCUMENT_BYTES,
        lost: Callable[[ShardcastError], None] | None = None,
        instead: int | None = None,
    ) -> None:
        """Fetch a blob.

        Args:
            digest: Its digest.
            length: Its length, None where only ``limit`` is known.
            sink: Where the bytes go.
            name: What it is, for messages.
            done: Called from a fetching thread once the digest matched.
            limit: Most bytes that it may have.
            lost: The blob is optional; this is called, from a fetching thread, if it was given up.
            instead: How many bytes are to be fetched then, if that is known.
        """
        transfer = Transfer(self._run, digest, length, sink, limit=limit)
        job = Job(transfer, name, optional=lost is not None, instead=instead)
        with self._changed:
            self._jobs[job] = (sink, done)
            if lost is not None:
                self._optional[job] = lost
            self._schedule.add(job)
            self._changed.notify_all()
        self._start_threads()

    def finish(self) -> None:
        """Wait until every blob is there.

        Raises:
            GoneError: If no source has one of them, and none will come to have it.
            NetworkError: If no source delivered for too long; names each and its last failure.
            IntegrityError: If all they sent was wrong.
            DiskError: If the bytes could not be written.
            TransferCancelledError: If it was cancelled.
        """
        with self._changed:
            self._schedule.close()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        step = self._schedule.next()
        if isinstance(step, Finished) and step.error is not None:
            raise step.error

    @property
    def stopped(self) -> bool:
        """Whether it will fetch nothing any more, since something failed or it was cancelled."""
        with self._changed:
            return self._error is not None or self._schedule.stopped

    @property
    def hedged_bytes(self) -> int:
        """Bytes that came twice, because a slow request was raced by a second one."""
        with self._changed:
            return self._schedule.budget.wasted

    @property
    def unverified_bytes(self) -> int:
        """Bytes that are here but not yet part of a whole, verified blob."""
        with self._changed:
            return self._schedule.in_flight

    def __enter__(self) -> Self:
        self._hook.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._schedule.close()
            if kind is not None:
                self._schedule.abort(TransferCancelledError("cancelled"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._hook.__exit__(kind, value, trace)

    # --- threads ----------------------------------------------------------------------------

    def _start_threads(self) -> None:
        config, sources = self._config, len(self._sources)
        most = min(config.max_connections, config.connections_per_source * sources)
        with self._changed:
            # Two more than there are jobs: one notices a transfer that lags and races it, the
            # other watches both.
            wanted = min(most, self._schedule.unfinished + 2 * (sources > 1))
            for n in range(len(self._threads), wanted):
                name = f"fetch-{self._run}-{n}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()  # before it is known: who finishes joins all that are
                self._threads.append(thread)

    def _work(self) -> None:
        try:
            while (begun := self._next()) is not None:
                self._perform(*begun)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._schedule.abort(TransferCancelledError("another thread failed"))
                self._changed.notify_all()

    def _next(self) -> tuple[Flight, _Entry] | None:
        while True:
            with self._changed:
                step = self._schedule.next()
                lost = self._take_lost()
                # Looked up now: another flight may end the job at any moment.
                entry = self._jobs[step.job] if isinstance(step, Flight) else None
                if isinstance(step, Finished):
                    self._changed.notify_all()
                elif isinstance(step, Wait) and not lost:
                    self._changed.wait(step.seconds)
            for tell in lost:
                tell()
            if isinstance(step, Flight) and entry is not None:
                return step, entry
            if isinstance(step, Finished):
                return None

    def _perform(self, flight: Flight, entry: _Entry) -> None:
        sink, done = entry
        received = 0
        late = False
        outcome: Fetched | ShardcastError = TransferCancelledError("a thread failed")
        try:
            with self._cancel.hook(flight.cancel.cancel):
                transfer, before = self._transfer_of(flight)
                try:
                    fetched = self._sources[flight.source].fetch(transfer, flight.cancel)
                finally:
                    received = transfer.received - before
            if isinstance(transfer, Branch):
                late = not flight.job.transfer.adopt(transfer)
            if not late:
                done(flight.job.transfer)
            outcome = fetched
        except ShardcastError as error:
            outcome = error
        finally:
            with flight.job.transfer.lock:
                sink.close()
            with self._changed:
                self.received_bytes += received
                self._report(flight, outcome, late=late)
                lost = self._take_lost()
                self._changed.notify_all()
        for tell in lost:
            tell()

    def _take_lost(self) -> list[Callable[[], None]]:
        """Return what must be called, without the lock, for the blobs that were just given up."""
        calls: list[Callable[[], None]] = []
        for job in self._schedule.take_lost():
            self._jobs.pop(job, None)
            tell = self._optional.pop(job, None)
            if tell is not None and job.lost is not None:
                calls.append(partial(tell, job.lost))
        return calls

    def _transfer_of(self, flight: Flight) -> tuple[Transfer, int]:
        """Return where a flight's bytes go, and how many came there before."""
        transfer = flight.job.transfer
        if not flight.hedge:
            return transfer, transfer.received
        branch = transfer.branch(whole=flight.whole)
        with self._changed:
            self._schedule.branched(flight, branch)
        return branch, 0

    def _report(self, flight: Flight, outcome: Fetched | ShardcastError, *, late: bool) -> None:
        if isinstance(outcome, ShardcastError):
            self._schedule.failed(flight, outcome)
        elif late:
            self._schedule.late(flight, outcome)
        else:
            self._jobs.pop(flight.job, None)
            self._optional.pop(flight.job, None)
            self._schedule.succeeded(flight, outcome)

    def _cancelled(self) -> None:
        with self._changed:
            self._schedule.abort(TransferCancelledError("cancelled"))
            self._changed.notify_all()

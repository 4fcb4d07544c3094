"""Hash (and copy) the shards of many files on all cores, each byte read once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from blake3 import blake3

from shardcast.errors import ModifiedError
from shardcast.store.files import COPY_CHUNK_BYTES, disk_errors, read_into, write_all

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Hash ``length`` bytes at ``offset`` of ``source``; write them to ``target`` if given."""

    source: Path
    offset: int
    length: int
    target: Path | None = None


@dataclass(frozen=True, slots=True)
class ShardHash:
    """What a shard's bytes hash to: BLAKE3 in hex, xxh3-128 in 16 bytes."""

    digest: str
    xxh3: bytes


def default_threads() -> int:
    """Return how many threads hashing uses: the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hash_shards(
    jobs: Sequence[ShardJob], *, threads: int | None = None, progress: Progress | None = None
) -> list[ShardHash]:
    """Do all jobs and return their hashes in order.

    The bytes that are hashed are the bytes that are written, also if the source changes
    meanwhile. The first error stops all threads and is raised; an interrupt does too.

    Raises:
        ModifiedError: If a source is shorter than its job.
        DiskError: If the system refuses to read or write.
    """
    run = _Run(jobs, progress)
    count = max(1, min(threads or default_threads(), len(jobs)))
    workers = [threading.Thread(target=run.work, name=f"hash-{n}") for n in range(count)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException:
        run.stop = True
        for worker in workers:
            worker.join()
        raise
    if run.error is not None:
        raise run.error
    return [found for found in run.results if found is not None]


class _Run:
    def __init__(self, jobs: Sequence[ShardJob], progress: Progress | None) -> None:
        self.results: list[ShardHash | None] = [None] * len(jobs)
        self.error: BaseException | None = None
        self.stop = False
        self._jobs = jobs
        self._progress = progress
        self._next = iter(range(len(jobs)))
        self._lock = threading.Lock()

    def work(self) -> None:
        buffer = memoryview(bytearray(COPY_CHUNK_BYTES))
        try:
            while not self.stop:
                with self._lock:
                    number = next(self._next, None)
                if number is None:
                    return
                self.results[number] = self._one(self._jobs[number], buffer)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
            self.stop = True

    def _one(self, job: ShardJob, buffer: memoryview) -> ShardHash:
        digest, fast = blake3(), xxhash.xxh3_128()
        with disk_errors(job.source, "reading"):
            source = os.open(job.source, os.O_RDONLY | os.O_CLOEXEC)
        target = -1
        try:
            if job.target is not None:
                with disk_errors(job.target, "writing"):
                    target = os.open(job.target, os.O_WRONLY | os.O_CLOEXEC)
            done = 0
            while done < job.length and not self.stop:
                piece = buffer[: min(len(buffer), job.length - done)]
                self._read(job, source, piece, job.offset + done)
                digest.update(piece)
                fast.update(piece)
                if job.target is not None:
                    with disk_errors(job.target, "writing"):
                        write_all(target, piece, job.offset + done)
                done += len(piece)
                if self._progress is not None:
                    self._progress(len(piece))
        finally:
            os.close(source)
            if target >= 0:
                os.close(target)
        return ShardHash(digest.hexdigest(), fast.digest())

    def _read(self, job: ShardJob, source: int, piece: memoryview, offset: int) -> None:
        with disk_errors(job.source, "reading"):
            got = read_into(source, piece, offset)
        if got != len(piece):
            raise ModifiedError(
                f"{job.source} shrank to {offset + got} bytes while it was read",
                source=str(job.source),
            )

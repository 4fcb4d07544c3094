"""Hash (and copy) the shards of many files on all cores, each byte read once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash
from blake3 import blake3

from shardcast.errors import ModifiedError
from shardcast.sharing import Stopping, share_out
from shardcast.store.files import COPY_CHUNK_BYTES, disk_errors, read_into, write_all

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""

Done = Callable[[int, "ShardHash"], None]
"""Called with the number of a job and its hashes once it is done, from any thread."""


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
    jobs: Sequence[ShardJob],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    done: Done | None = None,
) -> list[ShardHash]:
    """Do all jobs and return their hashes in order.

    The bytes that are hashed are the bytes that are written, also if the source changes
    meanwhile. The first error stops all threads and is raised; an interrupt does too.

    Raises:
        ModifiedError: If a source is shorter than its job.
        DiskError: If the system refuses to read or write.
    """
    results: list[ShardHash | None] = [None] * len(jobs)

    def work(buffer: memoryview, number: int, stopping: Stopping) -> None:
        results[number] = found = _hash_one(jobs[number], buffer, stopping, progress)
        if done is not None and not stopping():
            done(number, found)

    share_out(
        range(len(jobs)),
        work,
        threads=max(1, min(threads or default_threads(), len(jobs))),
        tool=lambda: nullcontext(memoryview(bytearray(COPY_CHUNK_BYTES))),
        name="hash",
    )
    return [found for found in results if found is not None]


class UseOfRun(Protocol):
    """What is done with the bytes of consecutive shards right after they were hashed."""

    def __call__(
        self, run: range, data: memoryview, hashes: Sequence[ShardHash], stopping: Stopping
    ) -> None:
        """Called in the thread that hashed them; ``data`` is theirs only until it returns."""
        ...


def hash_runs(
    jobs: Sequence[ShardJob],
    runs: Sequence[range],
    use: UseOfRun,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    done: Done | None = None,
) -> list[ShardHash]:
    """Do all jobs as ``hash_shards`` does, a run at a time, and use the bytes of each run.

    Args:
        jobs: The jobs.
        runs: Numbers of jobs: consecutive ones, all of them, in order; a thread keeps one in memory.
        use: Gets exactly the bytes that were hashed, and written.
        threads: Other than one per core.
        progress: Called with bytes hashed since the last call.
        done: Called for each job after the bytes of its run were used.

    Raises:
        ModifiedError, DiskError: As ``hash_shards``; and whatever ``use`` raises.
    """
    results: list[ShardHash | None] = [None] * len(jobs)
    most = max((sum(jobs[n].length for n in run) for run in runs), default=0)

    def work(buffer: memoryview, run: range, stopping: Stopping) -> None:
        at = 0
        found: list[ShardHash] = []
        for number in run:
            job = jobs[number]
            piece = buffer[at : at + job.length]
            found.append(_hash_one(job, piece, stopping, progress, keep=True))
            results[number] = found[-1]
            at += job.length
        if not stopping():  # else some hashes may be of the beginnings of their shards
            use(run, buffer[:at], found, stopping)
            if done is not None:
                for number, one in zip(run, found, strict=True):
                    done(number, one)

    share_out(
        runs,
        work,
        threads=max(1, min(threads or default_threads(), len(runs))),
        tool=lambda: nullcontext(memoryview(bytearray(most))),
        name="hash",
    )
    return [found for found in results if found is not None]


def _hash_one(
    job: ShardJob,
    buffer: memoryview,
    stopping: Stopping,
    progress: Progress | None,
    *,
    keep: bool = False,
) -> ShardHash:
    """Do one job through ``buffer``; with ``keep`` it holds all the job's bytes afterwards."""
    digest, fast = blake3(), xxhash.xxh3_128()
    with disk_errors(job.source, "reading"):
        source = os.open(job.source, os.O_RDONLY | os.O_CLOEXEC)
    target = -1
    try:
        if job.target is not None:
            with disk_errors(job.target, "writing"):
                target = os.open(job.target, os.O_WRONLY | os.O_CLOEXEC)
        done = 0
        while done < job.length and not stopping():
            length = min(COPY_CHUNK_BYTES, job.length - done)
            piece = buffer[done : done + length] if keep else buffer[:length]
            _read(job, source, piece, job.offset + done)
            digest.update(piece)
            fast.update(piece)
            if job.target is not None:
                with disk_errors(job.target, "writing"):
                    write_all(target, piece, job.offset + done)
            done += len(piece)
            if progress is not None:
                progress(len(piece))
    finally:
        os.close(source)
        if target >= 0:
            os.close(target)
    return ShardHash(digest.hexdigest(), fast.digest())


def _read(job: ShardJob, source: int, piece: memoryview, offset: int) -> None:
    with disk_errors(job.source, "reading"):
        got = read_into(source, piece, offset)
    if got != len(piece):
        raise ModifiedError(
            f"{job.source} shrank to {offset + got} bytes while it was read",
            source=str(job.source),
        )

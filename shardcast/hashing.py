"""Hash (and copy) the shards of many files on all cores, each byte read once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import xxhash
from blake3 import blake3

from shardcast.errors import ModifiedError
from shardcast.sharing import Stopping, share_out
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
    results: list[ShardHash | None] = [None] * len(jobs)

    def work(buffer: memoryview, number: int, stopping: Stopping) -> None:
        results[number] = _hash_one(jobs[number], buffer, stopping, progress)

    share_out(
        range(len(jobs)),
        work,
        threads=max(1, min(threads or default_threads(), len(jobs))),
        tool=lambda: nullcontext(memoryview(bytearray(COPY_CHUNK_BYTES))),
        name="hash",
    )
    return [found for found in results if found is not None]


def _hash_one(
    job: ShardJob, buffer: memoryview, stopping: Stopping, progress: Progress | None
) -> ShardHash:
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
            piece = buffer[: min(len(buffer), job.length - done)]
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

"""Sizes that go wrong: nothing, a byte, a shard, a byte more, more than 32 bits can count.

From `publish` over an origin and a relay to a worker, byte for byte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from blake3 import blake3
from xxhash import xxh3_128

from relay.config import Prefetch
from shardcast.protocol.manifest import Version
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.store.stored import Durability
from shardcast.worker import Worker
from tests.contract.made import RUN, signer
from tests.contract.relays import config, running, wait_head
from tests.faults.criteria import SHARD, criteria, directories
from tests.faults.machine import small_tmpfs
from tests.faults.world import PATIENT
from tests.unit.worker.conftest import some_bytes

GIB: Final = 1 << 30
MIB: Final = 1 << 20


@asynccontextmanager
async def origin_and_relay(root: Path) -> AsyncIterator[tuple[str, str]]:
    """An origin of ``root/origin`` and a relay that fetches what it is asked for."""
    async with running(config(root / "origin")) as origin:
        settings = config(root / "relay", origin, net=PATIENT, prefetch=Prefetch.DEMAND)
        async with running(settings) as relay:
            await wait_head(relay)
            yield origin, relay


def publish(root: Path, *, link: bool = False) -> Version:
    """Publish ``root/ckpt``; return the version's documents."""
    store = Store(root / "origin")
    try:
        options = PublishOptions(source=root / "ckpt", durability=Durability.NONE, link=link)
        run = store.run(RUN, create=True)
        publish_directory(options, run, [signer()], lambda: time.time_ns() // 1_000_000)
        stored = run.stored(1)
        assert stored is not None
        return stored.version
    finally:
        store.close()


def worker(out: Path, *urls: str) -> Worker:
    return Worker(
        out, RUN, urls, keys=[signer().public_key], durability=Durability.NONE, config=PATIENT
    )


def documents(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "origin" / RUN / "blobs").iterdir())


@dataclass(frozen=True)
class Sizes:
    """Files of a version, by size."""

    sizes: tuple[int, ...]

    def write(self, directory: Path) -> int:
        """Write them; return their sum."""
        directory.mkdir()
        for number, size in enumerate(self.sizes):
            (directory / f"file-{number}").write_bytes(some_bytes(size, number))
        return sum(self.sizes)


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    "sizes",
    [
        (0,), (0, 0), (1,), (SHARD - 1,), (SHARD,), (SHARD + 1,), (2 * SHARD,), (2 * SHARD + 1,),
        (0, 1, SHARD - 1, SHARD, SHARD + 1, 2 * SHARD, 0),
    ],
    ids=lambda sizes: "+".join(map(str, sizes)),
)  # fmt: skip
async def test_every_size_arrives(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    total = Sizes(sizes).write(tmp_path / "ckpt")
    publish(tmp_path)
    out = tmp_path / "out"
    with criteria(directories({1: tmp_path / "ckpt"})) as verdict:
        verdict.watch(out, tmp_path / "relay" / RUN)
        async with origin_and_relay(tmp_path) as (_, relay):
            update = await worker(out, relay).apull()
        verdict.fetched(update.bytes_fetched, total + documents(tmp_path), failures=0)
        verdict.recovered(out, 1)
        verdict.waive("b", "nothing fails")
        verdict.waive("c", "nothing fails")


# --- over 4 GiB -------------------------------------------------------------------------------


def sparse_digest(path: Path) -> str:
    """A digest of size and data of a file, by which holes cost nothing and zeros count as holes."""
    hasher = blake3()
    size = path.stat().st_size
    hasher.update(size.to_bytes(8, "little"))
    with path.open("rb", buffering=0) as file:
        position = 0
        while position < size:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:
                break
            stop = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            for offset in range(start - start % MIB, stop, MIB):
                piece = os.pread(file.fileno(), MIB, offset)
                if piece.strip(b"\0"):
                    hasher.update(offset.to_bytes(8, "little") + piece)
            position = stop
    return hasher.hexdigest()


def write_big(directory: Path) -> int:
    """A file of 4 GiB, a shard and a byte: a few islands in a sea of zeros; return its size."""
    size = 4 * GIB + 16 * MIB + 1
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(size)
        for offset, count in ((0, 1000), (4 * GIB - 500, 1000), (size - 1, 1)):
            file.seek(offset)
            file.write(some_bytes(count, offset))
    return size


def staged_all_zeros(out: Path, version: Version, zeros: bytes) -> None:
    """What an earlier worker left behind: it had verified every shard that is nothing but zeros."""
    out.mkdir()
    store = RunStore(out, RUN)
    try:
        stored = store.stage(version)
        digest, fast = blake3(zeros).hexdigest(), xxh3_128(zeros).digest()
        for shard, wanted in enumerate(version.digests):
            if wanted == digest:
                stored.record(shard, fast)
    finally:
        store.close()


@pytest.mark.fault(23)
async def test_a_file_of_over_4_gib_arrives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its few shards that are not zeros travel, two of them from beyond 4 GiB.

    Nothing of it is ever held in memory or on disk as a whole: the file system is 300 MiB large.
    """
    caplog.set_level(logging.WARNING)
    with small_tmpfs(tmp_path / "disk", 32 * GIB) as root:
        size = write_big(root / "ckpt")
        version = await asyncio.to_thread(publish, root, link=True)
        assert version.layout.shard_bytes == 16 * MIB
        zeros = bytes(16 * MIB)
        needed = {
            digest: version.layout.extent(shard).length
            for shard, digest in enumerate(version.digests)
            if digest not in (None, blake3(zeros).hexdigest())
        }
        assert len(needed) == 4, "the islands"
        out = root / "out"
        staged_all_zeros(out, version, zeros)
        with criteria(directories({1: root / "ckpt"}, sparse_digest), sparse_digest) as verdict:
            verdict.watch(out)
            async with origin_and_relay(root) as (_, relay):
                update = await worker(out, relay).apull()
            assert (update.path / "model.safetensors").stat().st_size == size
            verdict.fetched(
                update.bytes_fetched, sum(needed.values()) + documents(root), failures=0
            )
            verdict.recovered(out, 1)
            verdict.waive("b", "nothing fails")
            verdict.waive("c", "nothing fails")
        used = os.statvfs(root)
        assert (used.f_blocks - used.f_bfree) * used.f_frsize < 300 * MIB

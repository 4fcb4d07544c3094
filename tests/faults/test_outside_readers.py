"""Programs that know nothing of Shardcast go on reading a version while newer ones replace it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from loadtest.processes import Process, Processes
from shardcast.cli.serving import make_view
from shardcast.errors import DiskFullError
from shardcast.events import EventKind
from shardcast.protocol.digest import digest_of
from shardcast.store import recycling
from shardcast.store.stored import Durability
from tests.fakes import KIB, FakeRun
from tests.faults.criteria import criteria, published
from tests.faults.machine import small_tmpfs
from tests.faults.outside_reader import WAYS
from tests.faults.upstream import Upstream
from tests.faults.world import following, needed_bytes
from tests.unit.worker.conftest import some_bytes

WAIT_S = 60
UNREAD = "unread.bin"
SIZE = 600 * KIB


def version(seed: int) -> dict[str, bytes]:
    """A version of which the reader reads all files but one."""
    generator = np.random.default_rng(seed)
    tensors = {
        "model.a": generator.integers(0, 255, (400, 1024), dtype=np.uint8),
        "model.b": generator.integers(0, 255, (200 * 1024,), dtype=np.uint8),
    }
    files = {name: some_bytes(SIZE, seed * 10 + n) for n, name in enumerate(WAYS)}
    return {
        **files,
        "model.safetensors": save(tensors),
        UNREAD: some_bytes(SIZE, seed * 10 + 9),
        "config.json": b'{"seed": %d}' % seed,
    }


def expected(files: dict[str, bytes]) -> dict[str, str]:
    """The digests that a reader prints: of tensors' bytes for safetensors, else of the file."""
    from safetensors.numpy import load

    tensors = load(files["model.safetensors"])
    joined = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    return {name: digest_of(files[name]) for name in WAYS} | {
        "model.safetensors": digest_of(joined)
    }


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "out"
        return
    made = Path(tempfile.mkdtemp(prefix="readers-", dir="/dev/shm"))
    try:
        yield made / "out"
    finally:
        shutil.rmtree(made)


@pytest.fixture
def recycled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were overwritten, also small ones and at once: versions are small and quick."""
    monkeypatch.setattr(recycling, "MIN_BYTES", KIB)
    monkeypatch.setattr(recycling, "REST_S", 0.0)
    claim = recycling.Spares.claim
    claimed: list[str] = []

    def noted(spares: recycling.Spares, directory: Path, wanted: dict[str, int]) -> dict[str, str]:
        found = claim(spares, directory, wanted)
        claimed.extend(found)
        return found

    monkeypatch.setattr(recycling.Spares, "claim", noted)
    return claimed


async def looks(reader: Process, count: int) -> dict[str, str]:
    """Let a reader read everything again; return what it found the ``count``-th time."""
    reader.say("")

    def read() -> dict[str, str]:
        while len(found := reader.events("read")) < count:
            reader.wait_event(
                "read", timeout=WAIT_S, where=lambda e: len(reader.events("read")) >= count
            )
        return {name: found[count - 1][name] for name in WAYS}

    return await asyncio.to_thread(read)


@pytest.mark.fault(16)
@pytest.mark.parametrize("durability", list(Durability))
async def test_readers_keep_their_bytes_while_versions_come_and_go(
    place: Path, tmp_path: Path, durability: Durability, recycled: list[str]
) -> None:
    run = FakeRun()
    run.publish(version(1))
    with (
        Upstream(run) as upstream,
        Processes(tmp_path / "logs") as processes,
        criteria(published(run)) as verdict,
    ):
        verdict.watch(place)
        readers: list[tuple[int, Process]] = []
        async with following(place, run, upstream.url, durability=durability, keep=1) as follower:
            for number in range(1, 8):
                if number > 1:
                    run.publish(version(number))
                update = await follower.reaches(number)
                if number in (1, 2, 4, 5):  # and nobody reads the others
                    argv = [sys.executable, "-m", "tests.faults.outside_reader", str(update.path)]
                    reader = processes.start(argv, name=f"reader-{number}", stdin=True)
                    await asyncio.to_thread(reader.wait_event, "ready", timeout=WAIT_S)
                    readers.append((number, reader))
                for seen, reader in readers:
                    count = len(reader.events("read")) + 1
                    assert await looks(reader, count) == expected(run.files[seen]), (seen, number)
            assert not follower.log.reports
        for _, reader in readers:
            assert reader.alive()
        verdict.recovered(place, 7)
        verdict.fetched(upstream.sent_for(run), needed_bytes(run), failures=0)
        verdict.waive("b", "nothing fails")
        verdict.waive("c", "nobody else is there")
    # Files that nobody read were overwritten again and again: that is what tempts fate.
    assert len(recycled) >= len(WAYS), recycled
    assert not list((place / "state").glob("spare/*"))


@pytest.mark.fault(16)
async def test_what_neighbours_are_served_is_not_overwritten(
    place: Path, recycled: list[str]
) -> None:
    run = FakeRun()
    run.publish(version(1))
    make_view(place, run.name)  # as `follow --serve` does
    with Upstream(run) as upstream:
        async with following(place, run, upstream.url, keep=1) as follower:
            for number in range(1, 5):
                if number > 1:
                    run.publish(version(number))
                await follower.reaches(number)
                assert not list((place / "state").glob("spare/*"))
    assert recycled == []


def test_why_served_files_are_not_overwritten(tmp_path: Path) -> None:
    """The kernel's doing: what ``sendfile`` took changes in the socket when the file does."""
    path = tmp_path / "file"
    path.write_bytes(b"A" * 64 * KIB)
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = socket.create_connection(server.getsockname())
        sender, _ = server.accept()
        with path.open("rb") as file:
            sent = os.sendfile(sender.fileno(), file.fileno(), 0, 64 * KIB)
        sender.close()
    with path.open("r+b") as file:
        assert recycling.take_write_lease(file.fileno())  # nobody has it open, says the kernel
        file.write(b"B" * 64 * KIB)
    with reader:
        assert b"B" in reader.recv(sent, socket.MSG_WAITALL)


@pytest.mark.fault(16)
@pytest.mark.usefixtures("recycled")
@pytest.mark.parametrize("keep", [1, 2])
async def test_a_follower_needs_room_for_one_version_more_than_it_keeps(
    tmp_path: Path, keep: int
) -> None:
    sizes = random.Random(keep)
    versions = [
        {
            "a.bin": some_bytes(1024 * KIB, n),
            "b.bin": some_bytes(sizes.randrange(KIB, 900 * KIB), -n),
        }
        for n in range(1, 8)
    ]
    largest = max(sum(map(len, files.values())) for files in versions)
    run = FakeRun()
    run.publish(versions[0])
    with small_tmpfs(tmp_path / "disk", (keep + 1) * largest + 512 * KIB) as disk:
        with Upstream(run) as upstream:
            async with following(disk / "out", run, upstream.url, keep=keep) as follower:
                for number, files in enumerate(versions, start=1):
                    if number > 1:
                        run.publish(files)
                    await follower.reaches(number)
                    free = os.statvfs(disk)
                    used = (free.f_blocks - free.f_bfree) * free.f_frsize
                    assert used <= (keep + 1) * largest + 512 * KIB
                errors = [event.error for event in follower.log.of(EventKind.ERROR)]
        assert not [error for error in errors if isinstance(error, DiskFullError)]
        assert len(os.listdir(disk / "out" / "versions")) == keep

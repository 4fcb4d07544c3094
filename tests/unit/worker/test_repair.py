"""A follower repairs a committed version while others use it: of bytes on the wire, and under mappings."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardcast import plan_work
from shardcast.errors import (
    BusyError,
    DiskError,
    GoneError,
    IntegrityError,
    NetworkError,
    NotFoundError,
)
from shardcast.events import EventKind
from shardcast.store import directory, files, renewing
from shardcast.store.directory import VersionDirectory
from shardcast.store.run import RunStore
from shardcast.verify import verify_directory
from shardcast.worker import Worker
from tests.contract.wire_client import eventually
from tests.fakes import Action, Close, FakeRun, Request, RunServer, response
from tests.observer import Log
from tests.tree import contents_of
from tests.unit.worker.conftest import with_config
from tests.unit.worker.test_pull import SHARD, shards_sent, worker

BIG = "model-00001-of-00002.safetensors"


@asynccontextmanager
async def following(
    out: Path, run: FakeRun, *servers: RunServer | str, **options: Any
) -> AsyncIterator[tuple[Worker, Log]]:
    """A worker that follows, with its first version committed."""
    log = Log()
    follower = worker(out, run, *servers, observer=log, **options)

    async def follow() -> None:
        async for _ in follower.follow():
            pass

    task = asyncio.create_task(follow())
    try:
        await eventually(lambda: (out / "current").is_symlink() and follower.head is not None)
        yield follower, log
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def manifest_of(run: FakeRun, version: int = 1) -> str:
    ref = None if run.head is None else run.head.ref(version)
    assert ref is not None
    return ref.manifest


def flip(path: Path, at: int = 9) -> None:
    """Change a bit and leave the times alone, as a disk does."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def zero(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))


def shorten(path: Path) -> None:
    os.truncate(path, SHARD + 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere").name)


@pytest.mark.parametrize(
    ("spoil", "fetched"),
    [
        (flip, SHARD),
        (zero, SHARD),
        (shorten, 3 * SHARD),
        (lengthen, 0),
        (Path.unlink, 4 * SHARD),
        (link, 4 * SHARD),
    ],
)
async def test_what_is_damaged_is_brought_again_and_nothing_else(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    spoil: Callable[[Path], object],
    fetched: int,
) -> None:
    out = tmp_path / "out"
    async with following(out, run, server) as (follower, log):
        directory = out / "versions" / "000001"
        spoil(directory / BIG)
        server.sent.clear()
        repaired = await follower.repair(1, manifest_of(run))
        assert BIG in repaired.damage
        assert (repaired.version, repaired.manifest) == (1, manifest_of(run))
        assert sum(shards_sent(server, run=run, version=1).values()) == fetched
        (told,) = log.of(EventKind.REPAIRED)
        assert (told.version, told.path, told.bytes_fetched) == (1, directory, fetched)
        (directory / BIG).with_suffix(".elsewhere").unlink(missing_ok=True)
        assert contents_of(directory) == run.files[1]
        assert verify_directory(out).damage == []
        assert (await follower.repair(1)).damage == ""
        assert len(log.of(EventKind.REPAIRED)) == 1
    assert not list((out / "state" / "tmp").iterdir())


async def test_what_came_of_a_shard_waits_for_the_rest_whoever_tidies_up_meanwhile(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    async with following(tmp_path, run, server) as (follower, log):
        flip(tmp_path / "versions" / "000001" / BIG)
        server.sent.clear()
        asked: list[str] = []

        def fault(request: Request, data: bytes) -> list[Action] | None:
            if request.digest != run.shard_digests(1)[0]:
                return None
            asked.append(request.headers.get("range", ""))
            if len(asked) == 1:
                return [response(200, data[: SHARD // 2], length=SHARD), Close()]
            waiting = list((tmp_path / "state" / "tmp").iterdir())
            assert len(waiting) == 1
            os.utime(waiting[0], (1, 1))
            store = RunStore(tmp_path, run.name)  # another version is committed: it tidies up
            store.clean_leftovers()
            store.close()
            return None

        server.fault = fault
        assert (await follower.repair(1)).damage
        assert asked == ["", f"bytes={SHARD // 2}-"]
        assert contents_of(tmp_path / "versions" / "000001") == run.files[1]
        assert not log.of(EventKind.BANNED)
        assert not list((tmp_path / "state" / "tmp").iterdir())


@pytest.mark.parametrize("spoil", [flip, shorten, lengthen])
async def test_whoever_has_the_old_file_mapped_keeps_it_as_it_is(
    tmp_path: Path, run: FakeRun, server: RunServer, spoil: Callable[[Path], object]
) -> None:
    async with following(tmp_path, run, server) as (follower, _):
        path = tmp_path / "versions" / "000001" / BIG
        spoil(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            had, before = bytes(view), os.fstat(file.fileno())
            assert (await follower.repair(1)).damage
            assert bytes(view) == had
            after = os.fstat(file.fileno())
            assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert path.read_bytes() == run.files[1][BIG]


async def test_a_version_that_is_whole_costs_nothing(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    async with following(tmp_path, run, server) as (follower, log):
        inode = (tmp_path / "versions" / "000001" / BIG).stat().st_ino
        asked = len(server.blob_requests)
        assert (await follower.repair(1)).damage == ""
        assert (tmp_path / "versions" / "000001" / BIG).stat().st_ino == inode
        assert len(server.blob_requests) == asked
        assert not log.of(EventKind.REPAIRED)
        assert not log.of(EventKind.DAMAGED)


async def test_the_whole_directory_may_be_gone(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    async with following(tmp_path, run, server) as (follower, _):
        directory = tmp_path / "versions" / "000001"
        shutil.rmtree(directory)
        repaired = await follower.repair(1, manifest_of(run))
        assert "directory is gone" in repaired.damage
        assert contents_of(directory) == run.files[1]
        assert (tmp_path / "current").resolve() == directory


@pytest.mark.parametrize("what", ["blobs", "state/000001.json"])
async def test_documents_that_are_gone_or_damaged_are_brought_again(
    tmp_path: Path, run: FakeRun, server: RunServer, what: str
) -> None:
    async with following(tmp_path, run, server) as (follower, log):
        found = tmp_path / what
        for path in [found] if found.is_file() else sorted(found.iterdir()):
            flip(path, 0)
        repaired = await follower.repair(1, manifest_of(run))
        assert "what describes it" in repaired.damage
        assert len(log.of(EventKind.REPAIRED)) == 1
        assert verify_directory(tmp_path).damage == []


async def test_a_version_that_left_the_head_is_repaired_as_long_as_its_bytes_are_anywhere(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    manifest = manifest_of(run)
    async with following(tmp_path, run, server, keep=3) as (follower, log):
        newer = {**files, "config.json": b"new"}
        ref = run.add_version(2, newer)
        run.amend(version=2, versions=[ref])
        await eventually(lambda: len(log.of(EventKind.COMMITTED)) == 2)
        first = tmp_path / "versions" / "000001"
        for digest in {*run.shard_digests(1)}:
            run.blobs.pop(digest)  # as relays do, some time later
        (first / BIG).unlink()
        assert BIG in (await follower.repair(1, manifest)).damage  # of version 2's bytes
        assert contents_of(first) == run.files[1]
        flip(first / "config.json", 0)
        with pytest.raises(GoneError):
            await follower.repair(1, manifest)
        with pytest.raises(NotFoundError):
            await follower.repair(1, "0" * 64)
        with pytest.raises(NotFoundError):
            await follower.repair(9)


async def test_without_a_network_it_says_so_and_goes_on_where_it_was(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    options = {"config": with_config(give_up_after_s=0.3)}
    async with following(tmp_path, run, server, **options) as (follower, log):
        path = tmp_path / "versions" / "000001" / BIG
        flip(path)
        server.fault = lambda request, data: []
        with pytest.raises(NetworkError, match="no source delivered shard 0"):
            await follower.repair(1)
        assert not log.of(EventKind.REPAIRED)
        server.fault = lambda request, data: None
        assert "shard 0" in (await follower.repair(1)).damage
        assert path.read_bytes() == run.files[1][BIG]


async def test_a_disk_that_damages_everything_is_not_repaired_for_ever(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, run, server) as (follower, log):
        flip(tmp_path / "versions" / "000001" / BIG)
        with monkeypatch.context() as patch:
            patch.setattr(VersionDirectory, "xxh3", lambda *_: b"other")
            with pytest.raises(IntegrityError, match="check this machine's disk"):
                await follower.repair(1)
        assert not log.of(EventKind.REPAIRED)
        await follower.repair(1)
        assert contents_of(tmp_path / "versions" / "000001") == run.files[1]


def unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second shard of a file lies on bad sectors."""
    inode, read = path.stat().st_ino, files.read_into

    def broken(fd: int, buffer: memoryview, offset: int) -> int:
        if os.fstat(fd).st_ino == inode and offset < 2 * SHARD and offset + len(buffer) > SHARD:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffer, offset)

    for module in (directory, plan_work, renewing):
        monkeypatch.setattr(module, "read_into", broken)


async def test_what_the_system_will_not_read_is_replaced(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, run, server) as (follower, _):
        path = tmp_path / "versions" / "000001" / BIG
        unreadable(path, monkeypatch)
        server.sent.clear()
        assert "cannot be read" in (await follower.repair(1)).damage
        assert server.sent == {run.shard_digests(1)[1]: SHARD}
        assert path.read_bytes() == run.files[1][BIG]


@pytest.mark.parametrize("how", ["follow", "pull"])
async def test_a_start_replaces_what_the_system_will_not_read(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = (await worker(tmp_path, run, server).apull()).path / BIG
    (tmp_path / "state" / "scanned.json").unlink()  # another boot
    unreadable(path, monkeypatch)
    server.sent.clear()
    if how == "follow":
        async with following(tmp_path, run, server) as (_, log):
            await eventually(lambda: bool(log.of(EventKind.COMMITTED)))
    else:
        log = Log()
        await worker(tmp_path, run, server, observer=log).apull()
    assert any("cannot be read" in str(event.error) for event in log.of(EventKind.DAMAGED))
    assert shards_sent(server, run=run, version=1) == {run.shard_digests(1)[1]: SHARD}
    assert contents_of(path.parent) == run.files[1]


@pytest.mark.parametrize("boot", ["the same", "another"])
async def test_an_older_version_that_becomes_current_again_is_looked_at(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes], boot: str
) -> None:
    path = (await worker(tmp_path, run, server).apull()).path
    run.publish({**files, BIG: bytes(reversed(files[BIG]))})
    if boot == "another":
        await worker(tmp_path, run, server).apull()
        (tmp_path / "state" / "scanned.json").unlink()
    async with following(tmp_path, run, server) as (follower, log):
        await eventually(lambda: follower.head is not None and follower.head.version == 2)
        await eventually(lambda: os.readlink(tmp_path / "current").endswith("2"))
        zero(path / BIG)
        run.withdraw(2)
        await eventually(lambda: os.readlink(tmp_path / "current").endswith("1"))
        assert contents_of(path) == run.files[1]
        assert [event.version for event in log.of(EventKind.DAMAGED)] == [1]


async def test_without_room_for_a_new_file_the_old_one_is_left(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, run, server) as (follower, _):
        path = tmp_path / "versions" / "000001" / BIG
        flip(path)
        had, inode = path.read_bytes(), path.stat().st_ino

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(renewing, "_fill", full)
        with pytest.raises(DiskError, match="No space left"):
            await follower.repair(1)
        assert (path.read_bytes(), path.stat().st_ino) == (had, inode)
        assert not list((tmp_path / "state" / "tmp").iterdir())


async def test_it_is_not_evicted_meanwhile_and_what_is_being_evicted_is_left(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    async with following(tmp_path, run, server) as (follower, _):
        store = RunStore(tmp_path, run.name)
        flip(tmp_path / "versions" / "000001" / BIG)
        evicted: list[bool] = []
        os.unlink(tmp_path / "current")  # which alone would keep it

        def fault(request: Any, data: bytes) -> None:
            evicted.append(store.evict(1))

        server.fault = fault
        assert (await follower.repair(1)).damage
        assert evicted == [False]
        store.close()


async def test_two_that_repair_at_once_do_it_once(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    async with following(tmp_path, run, server) as (follower, log):
        flip(tmp_path / "versions" / "000001" / BIG)
        server.sent.clear()
        both = await asyncio.gather(follower.repair(1), follower.repair(1))
        assert sorted(bool(one.damage) for one in both) == [False, True]
        assert server.sent == {run.shard_digests(1)[0]: SHARD}
        assert len(log.of(EventKind.REPAIRED)) == 1


async def test_a_worker_that_ends_ends_its_repairs(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    async with following(tmp_path, run, server) as (follower, _):
        flip(tmp_path / "versions" / "000001" / BIG)
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fault(request: Any, data: bytes) -> list[Any]:
            loop.call_soon_threadsafe(asked.set)
            return []

        server.fault = fault
        repairing = asyncio.create_task(follower.repair(1))
        await asyncio.wait_for(asked.wait(), 20)
    with pytest.raises(BusyError, match="the worker ends"):
        await repairing


async def test_a_guest_leaves_it_to_the_one_that_leads(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    guest = worker(tmp_path, run, server)
    with pytest.raises(BusyError, match="does not lead"):
        await guest.repair(1)

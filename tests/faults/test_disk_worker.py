"""A worker whose disk is full, read-only or refuses in the middle: told, nothing short, and it heals."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardcast.errors import DiskError, DiskFullError, ShardcastError
from shardcast.events import EventKind
from shardcast.store.stored import Durability
from tests.contract.wire_client import eventually
from tests.fakes import KIB, FakeRun, RunServer
from tests.faults.criteria import assert_version, published
from tests.faults.machine import fill_up, read_only, small_tmpfs
from tests.faults.refusals import refusing
from tests.faults.world import BRISK, following, small_version, worker

MIB = 1 << 20


def version(number: int, size: int = MIB) -> dict[str, bytes]:
    return {**small_version(number), "model-00001-of-00002.safetensors": os.urandom(size)}


@pytest.fixture
def run() -> FakeRun:
    made = FakeRun()
    made.publish(version(1))
    return made


def sent(server: RunServer, run: FakeRun, number: int) -> int:
    return sum(server.sent[digest] for digest in set(run.shard_digests(number)))


@pytest.mark.fault(15)
def test_a_pull_without_room_says_so_up_front_and_keeps_the_old_version(
    tmp_path: Path, run: FakeRun
) -> None:
    with RunServer(run) as server, small_tmpfs(tmp_path / "disk", 3 * MIB) as disk:
        out = disk / "out"
        worker(out, run, server.url).pull()
        run.publish(version(2, 2 * MIB))
        server.sent.clear()
        with pytest.raises(DiskFullError, match=r"needs \d+ bytes and \d+ are free") as raised:
            worker(out, run, server.url).pull()
        assert str(out) in str(raised.value)
        assert sent(server, run, 2) == 0  # nothing was fetched to be thrown away
        assert_version(out, published(run), 1)
    with RunServer(run) as server, small_tmpfs(tmp_path / "larger", 8 * MIB) as disk:
        worker(disk / "out", run, server.url).pull()
        assert_version(disk / "out", published(run), 2)


@pytest.mark.fault(15)
async def test_a_follower_on_a_full_disk_keeps_its_version_and_heals(
    tmp_path: Path, run: FakeRun
) -> None:
    with RunServer(run) as server, small_tmpfs(tmp_path / "disk", 8 * MIB) as disk:
        async with following(disk / "out", run, server.url) as follower:
            await follower.reaches(1)
            ballast = fill_up(disk)
            with ballast.open("r+b") as file:
                file.truncate(ballast.stat().st_size - 256 * KIB)
            run.publish(version(2))
            event = await follower.says(EventKind.ERROR)
            assert isinstance(event.error, DiskFullError)
            assert event.version == 2
            assert_version(disk / "out", published(run), 1)
            ballast.unlink()
            await follower.reaches(2)
            assert_version(disk / "out", published(run), 2)
            assert sent(server, run, 2) <= sum(map(len, run.files[2].values()))


@pytest.mark.fault(15)
def test_a_read_only_directory_is_a_clear_error(tmp_path: Path, run: FakeRun) -> None:
    with RunServer(run) as server, small_tmpfs(tmp_path / "disk", 8 * MIB) as disk:
        out = disk / "out"
        worker(out, run, server.url).pull()
        run.publish(version(2))
        with read_only(disk), pytest.raises(DiskError, match="Read-only file system") as raised:
            worker(out, run, server.url).pull()
        assert str(out) in str(raised.value)
        assert_version(out, published(run), 1)
        worker(out, run, server.url).pull()
        assert_version(out, published(run), 2)


@pytest.mark.fault(15)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EROFS, errno.EIO],
    ids=lambda number: errno.errorcode[number],
)
def test_every_refused_call_of_a_pull_is_told_and_the_next_pull_heals(
    tmp_path: Path, run: FakeRun, number: int
) -> None:
    """Each third file operation of an update in turn, to its end."""
    run.publish(version(2, 300 * KIB))
    first, failures = 1, 0
    with RunServer(run) as server:
        while True:
            out = tmp_path / str(first)
            worker(out, run, server.url, config=BRISK).pull(version=1)
            error: ShardcastError | None = None
            with refusing(number, first) as refusals:
                try:
                    worker(out, run, server.url, config=BRISK, durability=Durability.SYNC).pull()
                except ShardcastError as raised:
                    error = raised
            current = int((out / "current").resolve(strict=True).name)
            assert current in (1, 2)
            assert_version(out, published(run), current)
            assert {p.name for p in (out / "versions").iterdir()} <= {"000001", "000002"}
            if error is not None:
                failures += 1
                assert isinstance(error, DiskError), refusals.refused
                assert str(out) in str(error), str(error)
            else:
                assert current == 2
            worker(out, run, server.url, config=BRISK).pull()
            assert_version(out, published(run), 2)
            if not refusals.refused:
                break
            first += 3
    assert failures > 5


@pytest.mark.fault(15)
async def test_a_disk_full_of_everything_heals(tmp_path: Path, run: FakeRun) -> None:
    """Not even a head can be remembered: it is not acted on, and asked for again."""
    with RunServer(run) as server, small_tmpfs(tmp_path / "disk", 8 * MIB) as disk:
        async with following(disk / "out", run, server.url) as follower:
            await follower.reaches(1)
            ballast = fill_up(disk)
            run.publish(version(2))
            await eventually(
                lambda: any("No space left" in line for line in follower.log.reports),
                what="somebody says that the disk is full",
            )
            assert_version(disk / "out", published(run), 1)
            (told, *_) = follower.log.of(EventKind.ERROR)
            assert told.source is not None
            assert Path(told.source).is_relative_to(disk)  # not the source that it came from
            assert not follower.log.of(EventKind.SOURCE)
            ballast.unlink()
            await follower.reaches(2)

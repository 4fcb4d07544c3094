"""Reading what is on disk again: the pace, in virtual time, and what is read."""

import asyncio
import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relay.metrics import Metrics
from relay.scrub import BUSY_SHARE, IDLE_S, Scrubber, pause_s, rotated
from relay.shelf import Shelf
from shardcast.store.directory import VersionDirectory
from shardcast.store.files import disk_error
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from tests.faults.machine import flip_bit
from tests.unit.store.conftest import KIB, Sample, make_sample

RATE = 1_000_000


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.ten = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        if len(self.slept) == 10:
            self.ten.set()
        await asyncio.sleep(0)


class Fixed(random.Random):
    """Begins where it is told to."""

    def __init__(self, at: float) -> None:
        super().__init__(0)
        self._at = at

    def random(self) -> float:
        return self._at


def node(time: Time, *versions: StoredVersion, store: RunStore, fills: int = 0) -> Any:
    run = SimpleNamespace(
        name="test",
        stored={v.version.number: v for v in versions},
        claims=set(),
        store=store,
        shelf=Shelf(store),
        find=lambda digest: None,
    )
    return SimpleNamespace(
        clock=time,
        config=SimpleNamespace(scrub_rate_bytes_per_s=RATE, depth=None, on_damage=None),
        runs={"test": run},
        fills=SimpleNamespace(open=lambda: [None] * fills),
        sending=0,
        sources=None,
        metrics=Metrics(),
    )


@pytest.mark.parametrize(
    ("count", "took", "busy", "expected"),
    [
        (RATE, 0.0, False, 1.0),
        (RATE, 0.25, False, 0.75),  # the time that reading took is not waited for again
        (RATE, 2.0, False, 0.0),  # a disk slower than the rate sets the pace itself
        (RATE, 0.0, True, BUSY_SHARE),
        (0, 0.0, False, 4096 / RATE),  # an empty blob is not free
    ],
)
def test_the_pause_after_a_read(count: int, took: float, busy: bool, expected: float) -> None:
    assert pause_s(count, RATE, took, busy=busy) == pytest.approx(expected)


def test_a_pass_reads_everything_wherever_it_begins() -> None:
    for start in (0.0, 0.3, 0.99):
        assert sorted(rotated(range(7), start)) == list(range(7))
    assert rotated(range(4), 0.5) == [2, 3, 0, 1]
    assert rotated([], 0.5) == []


@pytest.mark.parametrize(("fills", "slower"), [(0, 1), (1, BUSY_SHARE)])
async def test_a_pass_keeps_the_rate_and_gives_way(
    run: RunStore, sample: Sample, fills: int, slower: int
) -> None:
    time = Time()
    stored = sample.fill(run)
    shared = node(time, stored, store=run, fills=fills)
    scrubber = Scrubber(shared, sleep=time.sleep, rng=Fixed(0.6))
    await scrubber.read_all()
    blobs = sum(max(4096, len(data)) for data in sample.blobs.values())
    shards = sum(max(4096, e.length) for e in sample.version.layout.extents())
    assert time.now - 100.0 == pytest.approx((blobs + shards) * slower / RATE)
    read = sum(map(len, sample.files.values())) + sum(map(len, sample.blobs.values()))
    assert scrubber.report()["bytes"] == read
    assert shared.metrics.scrubbed._value.get() == read
    assert scrubber.report()["damaged"] == 0
    assert scrubber.age_s == 0


async def test_the_age_of_the_last_pass_grows(run: RunStore, sample: Sample) -> None:
    time = Time()
    scrubber = Scrubber(node(time, sample.fill(run), store=run), sleep=time.sleep)
    time.now += 50
    assert scrubber.age_s == 50  # since the start: nothing was read yet
    assert scrubber.report()["last_pass_s"] is None
    await scrubber.read_all()
    time.now += 7
    assert scrubber.report()["last_pass_s"] == 7


async def test_an_empty_store_is_no_reason_to_spin(run: RunStore) -> None:
    time = Time()
    scrubber = Scrubber(node(time, store=run), sleep=time.sleep)
    task = asyncio.ensure_future(scrubber.run())
    async with asyncio.timeout(10):
        await time.ten.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert time.slept == [IDLE_S] * len(time.slept)


async def test_a_flip_that_neither_size_nor_time_shows_is_found(
    run: RunStore, sample: Sample, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    sample.fill(run)
    stored = run.commit(1)
    flip_bit(stored.directory / "a/model.safetensors", 300 * KIB)
    assert all(stored.confirm(shard) for shard in range(4))  # serving does not notice
    shared = node(time, stored, store=run)
    scrubber = Scrubber(shared, sleep=time.sleep)
    await scrubber.read_all()
    assert stored.missing() == [1]
    assert stored.damaged is not None
    assert scrubber.report()["damaged"] == 1
    assert shared.metrics.scrub_damaged._value.get() == 1
    assert "a/model.safetensors, shard 1" in caplog.text
    assert "nobody can repair it here: publish it again" in caplog.text
    await scrubber.read_all()  # known: not found again
    assert scrubber.report()["damaged"] == 1


async def test_a_damaged_document_is_found(run: RunStore, sample: Sample) -> None:
    time = Time()
    stored = sample.fill(run)
    digest = sample.version.layout_digest
    shared = node(time, stored, store=run)
    assert shared.runs["test"].shelf.holds(digest)
    flip_bit(run.blob_path(digest), 10)
    assert shared.runs["test"].shelf.holds(digest)  # size and times are as they were
    scrubber = Scrubber(shared, sleep=time.sleep)
    await scrubber.read_all()
    assert scrubber.report()["damaged"] == 1
    assert not run.has_blob(digest)


async def test_what_is_being_written_or_evicted_is_left_alone(
    run: RunStore, sample: Sample
) -> None:
    time = Time()
    sample.fill(run)
    stored = run.commit(1)
    (stored.directory / "a/model.safetensors").write_bytes(b"")
    shared = node(time, stored, store=run)
    shared.runs["test"].claims |= {(1, shard) for shard in range(4)}
    scrubber = Scrubber(shared, sleep=time.sleep)
    await scrubber.read_all()
    assert stored.missing() == []
    assert scrubber.report()["damaged"] == 0
    assert shared.runs["test"].claims == {(1, shard) for shard in range(4)}
    shared.runs["test"].claims.clear()
    other = RunStore(run.root, "test")
    assert other.evict(1)
    await scrubber.read_all()
    assert scrubber.report()["damaged"] == 0
    other.close()


@pytest.mark.parametrize("lacking", [False, True])
async def test_a_version_that_its_publisher_evicts_underneath_is_no_error(
    run: RunStore, sample: Sample, caplog: pytest.LogCaptureFixture, lacking: bool
) -> None:
    """The scrubber still has its directory open, so that the lease can be had."""
    time = Time()
    sample.fill(run)
    stored = run.commit(1)
    if lacking:
        stored.discard(2, "a test")
    shared = node(time, stored, store=run)
    publisher = RunStore(run.root, "test")
    looked = 0

    async def sleep(seconds: float) -> None:
        nonlocal looked
        looked += 1
        if looked == 1:
            assert publisher.evict(1)
        await time.sleep(seconds)

    scrubber = Scrubber(shared, sleep=sleep, rng=Fixed(0.0))
    with stored._directory._handle.use():
        caplog.clear()
        await scrubber.read_all()
        assert looked >= 1
        # Between two shards it is seen; within one, only by what the disk says.
        assert await scrubber._shard(shared.runs["test"], stored, 0)
        await scrubber._recall(shared.runs["test"], stored)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert scrubber.report()["damaged"] == 0
    publisher.close()


async def test_a_blob_that_its_publisher_removes_underneath_is_no_error(
    run: RunStore,
    sample: Sample,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample.fill(run)
    time = Time()
    shared = node(time, store=run)
    real = os.open

    def removed(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).parent == run.blob_path("0" * 64).parent:
            os.unlink(path)  # after it was listed
        return real(path, *arguments, **options)

    monkeypatch.setattr("relay.shelf.os.open", removed)
    scrubber = Scrubber(shared, sleep=time.sleep)
    await scrubber.read_all()
    assert scrubber.report()["damaged"] == 0
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_shard_that_cannot_be_read_counts_as_damaged(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    sample = make_sample()
    sample.fill(run)
    stored = run.commit(1)
    assert all(stored.confirm(shard) for shard in range(4))
    shared = node(time, stored, store=run)
    real, bad = VersionDirectory.xxh3, stored.version.layout.extent(2)

    def broken(self: VersionDirectory, path: str, offset: int, length: int) -> bytes | None:
        if (path, offset) == (bad.path, bad.offset):
            raise disk_error(OSError(5, "Input/output error"), path, "reading")
        return real(self, path, offset, length)

    monkeypatch.setattr(VersionDirectory, "xxh3", broken)
    scrubber = Scrubber(shared, sleep=time.sleep)
    await scrubber.read_all()
    assert stored.missing() == [2]
    assert scrubber.report()["damaged"] == 1

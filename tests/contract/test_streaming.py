"""A publisher that streams: what is announced of an open version is served, hop by hop, before it closes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcast.events import EventKind
from shardcast.protocol.digest import digest_of
from shardcast.publisher import publish_directory
from shardcast.publishing import Published, PublishOptions
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.worker import Update, Worker
from tests.contract.made import RUN, SHARD, noise, publish, signer
from tests.contract.relays import config, running, wait_ready
from tests.contract.wire_client import eventually, http
from tests.observer import Log
from tests.streams import AT_ONCE, StepByStep, head_in, wait_for

FILES = {"a": noise(6 * SHARD, 7)}
SHARDS = [digest_of(FILES["a"][n * SHARD : (n + 1) * SHARD]) for n in range(6)]


class Paused(StepByStep):
    """Stops once so many shards are listed, until it is told to go on, or to fail."""

    def __init__(self, run: RunStore, *at: int) -> None:
        super().__init__(run)
        self.at = at
        self.allowed = 0
        self.fails = False

    def reached(self, shards: int) -> None:
        if shards in self.at:
            wait_for(lambda: self.allowed >= shards or self.fails, f"leave to go on at {shards}")
        if self.fails:
            raise GaveUpError


class GaveUpError(Exception):
    """The trainer died."""


def write(source: Path) -> None:
    source.mkdir(exist_ok=True)
    for name, data in FILES.items():
        (source / name).write_bytes(data)


@asynccontextmanager
async def publishing(
    store: Path, source: Path, *at: int
) -> AsyncIterator[tuple[Paused, asyncio.Task[Published]]]:
    """A publisher in a thread that pauses where it is told to."""
    write(source)
    opened = Store(store)
    run = opened.run(RUN, create=True)
    watch = Paused(run, *at)
    options = PublishOptions(source=source, threads=1, stream=AT_ONCE, delta=False)
    work: Callable[[], Published] = lambda: publish_directory(  # noqa: E731
        options, run, [signer()], lambda: time.time_ns() // 1_000_000, watch
    )
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        yield watch, task
    finally:
        watch.allowed = len(SHARDS)
        await asyncio.gather(task, return_exceptions=True)
        opened.close()


async def body(url: str, digest: str) -> tuple[int, bytes]:
    answer = await http(url, f"/v1/{RUN}/blobs/{digest}.bin")
    return answer.status, answer.body


def staged_in(out: Path, number: int) -> set[int]:
    """The shards of an open version that a worker has verified."""
    assert not (out / "versions" / f"{number:06d}").exists()
    stored = RunStore(out, RUN).stored(number)
    return set() if stored is None else set(stored.present())


def on_disk(store: Path, number: int) -> set[int]:
    """The shards of a version that a relay has recorded."""
    stored = RunStore(store / RUN, RUN).stored(number)
    return set() if stored is None else set(stored.present())


async def test_an_origin_beside_a_publisher_serves_what_the_open_head_lists(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    async with running(config(store, pubkeys=(signer().public_key,))) as url:
        async with publishing(store, tmp_path / "ckpt", 2) as (watch, task):
            await eventually(lambda: len(watch.listed) == 3, what="two shards are listed")

            async def served() -> bool:
                return (await body(url, SHARDS[1]))[0] == 200

            await eventually(served, what="the second shard is served")
            for shard in (0, 1):
                assert await body(url, SHARDS[shard]) == (
                    200,
                    FILES["a"][shard * SHARD : (shard + 1) * SHARD],
                )
            assert (await body(url, SHARDS[2]))[0] == 404
            assert not (store / RUN / "versions").exists()
            # Only the publisher writes.
            assert not (store / RUN / "state" / "000001.json").exists()
            watch.allowed = 6
            done = await task
        await wait_ready(url)
        assert done.streamed >= 6

        async def all_served() -> bool:
            return [(await body(url, shard))[0] for shard in SHARDS[:6]] == [200] * 6

        await eventually(all_served, what="every shard of the closed version is served")
        assert (store / RUN / "versions" / "000001" / "a").read_bytes() == FILES["a"]


async def test_relays_have_what_is_listed_before_the_version_closes(tmp_path: Path) -> None:
    """Three hops: bytes are at the last one while the publisher is in the middle."""
    store, first, second = (tmp_path / name for name in ("store", "first", "second"))
    publish(store, tmp_path / "old", {"a": b"an old one"})
    async with (
        running(config(store, pubkeys=(signer().public_key,))) as origin,
        running(config(first, origin)) as upper,
        running(config(second, upper)) as lower,
    ):
        await wait_ready(lower)
        async with publishing(store, tmp_path / "ckpt", 2, 4) as (watch, task):
            await eventually(lambda: on_disk(second, 2) == {0, 1}, what="two at the last relay")
            watch.allowed = 2
            await eventually(lambda: on_disk(second, 2) == set(range(4)), what="four")
            head = head_in(RunStore(store / RUN, RUN))
            assert head is not None
            assert head.open is not None
            assert head.version == 1
            for place in (first, second):
                assert not (place / RUN / "versions" / "000002").exists()
            watch.allowed = 6
            await task
        await eventually((second / RUN / "versions" / "000002").is_dir, what="it is whole")
        assert (second / RUN / "versions" / "000002" / "a").read_bytes() == FILES["a"]


async def test_what_a_version_that_was_given_up_brought_is_not_fetched_again(
    tmp_path: Path,
) -> None:
    """The trainer fails in the middle and publishes again: the relay copies what it has."""
    store, below = tmp_path / "store", tmp_path / "relay"
    publish(store, tmp_path / "old", {"a": b"an old one"})
    async with (
        running(config(store, pubkeys=(signer().public_key,))) as origin,
        running(config(below, origin)) as relay,
    ):
        await wait_ready(relay)
        async with publishing(store, tmp_path / "ckpt", 4) as (watch, task):
            await eventually(lambda: on_disk(below, 2) == set(range(4)), what="four shards")
            watch.fails = True
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], GaveUpError)
        head = head_in(RunStore(store / RUN, RUN))
        assert head is not None
        assert (head.version, head.open) == (1, None)

        async def fetched() -> float:
            text = (await http(relay, "/metrics")).body.decode()
            name = 'shardcast_received_bytes_total{origin="fill"}'
            return sum(float(line.split()[-1]) for line in text.splitlines() if name in line)

        before = await fetched()
        async with publishing(store, tmp_path / "ckpt") as (watch, task):
            done = await task
        assert done.ref.version == 3
        await eventually((below / RUN / "versions" / "000003").is_dir, what="it is whole")
        assert (below / RUN / "versions" / "000003" / "a").read_bytes() == FILES["a"]
        assert await fetched() - before < 2 * SHARD + SHARD // 2


@asynccontextmanager
async def third_tier(tmp_path: Path) -> AsyncIterator[Following]:
    """A follower behind origin, relay and relay, that is on version 1."""
    store = tmp_path / "store"
    publish(store, tmp_path / "old", {"a": b"an old one"})
    async with (
        running(config(store, pubkeys=(signer().public_key,))) as origin,
        running(config(tmp_path / "first", origin)) as upper,
        running(config(tmp_path / "second", upper)) as lower,
    ):
        await wait_ready(lower)
        log = Log()
        worker = Worker(tmp_path / "out", RUN, [lower], keys=[signer().public_key], observer=log)
        updates: list[Update] = []

        async def follow() -> None:
            async for update in worker.follow():
                updates.append(update)

        task = asyncio.create_task(follow())
        try:
            await eventually(lambda: len(updates) == 1, what="version 1 at the worker")
            yield Following(updates, log, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@dataclass
class Following:
    """What a follower told and did."""

    updates: list[Update]
    log: Log
    task: asyncio.Task[None]

    def assert_on(self, out: Path, *versions: int) -> None:
        """Only these were ever ready, committed, or current."""
        assert RunStore(out, RUN).current() == versions[-1]
        for kind in (EventKind.READY, EventKind.COMMITTED):
            assert [event.version for event in self.log.of(kind)] == list(versions)


async def test_bytes_are_at_a_worker_of_the_third_tier_before_the_version_closes(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    async with third_tier(tmp_path) as follower:
        async with publishing(tmp_path / "store", tmp_path / "ckpt", 2, 5) as (watch, task):
            await eventually(lambda: staged_in(out, 2) == {0, 1}, what="two shards at the worker")
            follower.assert_on(out, 1)
            watch.allowed = 2
            await eventually(lambda: staged_in(out, 2) == set(range(5)), what="five shards")
            head = head_in(RunStore(tmp_path / "store" / RUN, RUN))
            assert head is not None
            assert head.version == 1  # it is not closed
            follower.assert_on(out, 1)
            watch.allowed = 6
            done = await task
        await eventually(lambda: len(follower.updates) == 2, what="version 2 at the worker")
        follower.assert_on(out, 1, 2)
        assert follower.updates[-1].manifest == done.ref.manifest
        assert (out / "versions" / "000002" / "a").read_bytes() == FILES["a"]
        ready = follower.log.of(EventKind.READY)[-1]
        assert ready.bytes_ahead is not None
        assert ready.bytes_fetched is not None
        assert ready.bytes_ahead >= 5 * SHARD
        assert ready.bytes_fetched < 6 * SHARD + SHARD // 2  # nothing came twice


@pytest.mark.fault(22)
async def test_a_version_whose_publisher_died_is_never_run_and_its_shards_serve_the_next(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    async with third_tier(tmp_path) as follower:
        async with publishing(tmp_path / "store", tmp_path / "ckpt", 4) as (watch, task):
            await eventually(lambda: staged_in(out, 2) == set(range(4)), what="four shards")
            watch.fails = True
            await asyncio.gather(task, return_exceptions=True)
        follower.assert_on(out, 1)
        async with publishing(tmp_path / "store", tmp_path / "ckpt", 2) as (watch, task):
            await eventually(lambda: len(watch.listed) == 3, what="version 3 is open")
            follower.assert_on(out, 1)
            watch.allowed = 6
            await task
        await eventually(lambda: len(follower.updates) == 2, what="version 3 at the worker")
        follower.assert_on(out, 1, 3)
        assert (out / "versions" / "000003" / "a").read_bytes() == FILES["a"]
        ready = follower.log.of(EventKind.READY)[-1]
        assert ready.bytes_fetched is not None
        assert ready.bytes_fetched < 2 * SHARD + SHARD // 2  # four shards were here
        await eventually(lambda: not RunStore(out, RUN).staged(), what="what was given up is gone")

"""``follow(current=True)``: what was current before is yielded too, once it is known to be whole."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shardcast.cancel import Cancel
from shardcast.events import EventKind
from shardcast.scans import Scans
from shardcast.store.run import RunStore
from shardcast.worker import Update, Worker
from tests.fakes import FakeRun, RunServer
from tests.observer import Log
from tests.unit.worker.conftest import some_bytes
from tests.unit.worker.test_pull import assert_is, worker

NOBODY = "http://127.0.0.1:1"
BIG = "model-00001-of-00002.safetensors"


@asynccontextmanager
async def following(
    followed: Worker, *, current: bool = True
) -> AsyncIterator[asyncio.Queue[Update]]:
    got: asyncio.Queue[Update] = asyncio.Queue()

    async def follow() -> None:
        async for update in followed.follow(current=current):
            got.put_nowait(update)

    task = asyncio.ensure_future(follow())
    try:
        yield got
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def soon(got: asyncio.Queue[Update]) -> Update:
    return await asyncio.wait_for(got.get(), 20)


class Heard(Log):
    """A log that can be waited for."""

    def __init__(self, kind: EventKind) -> None:
        super().__init__()
        self.kind = kind
        self.came = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def on_event(self, event: object) -> None:
        super().on_event(event)  # type: ignore[arg-type]
        if getattr(event, "kind", None) is self.kind:
            self.loop.call_soon_threadsafe(self.came.set)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which versions were looked at."""
    seen: list[int] = []
    scan = Scans.scan

    def counted(self: Scans, number: int, cancel: Cancel) -> bool:
        seen.append(number)
        return scan(self, number, cancel)

    monkeypatch.setattr(Scans, "scan", counted)
    return seen


async def test_it_comes_first_also_while_no_source_answers(
    tmp_path: Path, run: FakeRun, server: RunServer, scans: list[int]
) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    scans.clear()
    async with following(worker(out, run, NOBODY)) as got:
        update = await soon(got)
        assert_is(update, run, 1)
        assert (update.bytes_fetched, update.head) == (0, None)
    assert scans == [1]  # hashed once, if at all


async def test_the_next_one_follows_and_nothing_comes_twice(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    async with following(worker(out, run, server)) as got:
        assert (await soon(got)).version == 1
        run.publish({"a": some_bytes(1000, 7)})
        assert_is(await soon(got), run, 2)
        assert got.empty()
    async with following(worker(out, run, server), current=False) as got:
        run.publish({"a": some_bytes(1000, 8)})
        assert_is(await soon(got), run, 3)


async def test_a_damaged_one_comes_when_it_is_whole_and_is_not_looked_at_again_and_again(
    tmp_path: Path, run: FakeRun, server: RunServer, scans: list[int]
) -> None:
    out = tmp_path / "out"
    path = (await worker(out, run, server).apull()).path
    scans.clear()
    os.truncate(path / BIG, 10)
    shards = set(run.shard_digests(1))
    server.fault = lambda request, data: [] if request.digest in shards else None
    log = Heard(EventKind.ERROR)
    async with following(worker(out, run, server, observer=log)) as got:
        await asyncio.wait_for(log.came.wait(), 20)  # it was not to be had, and is tried again
        assert got.empty()
        tries = len(log.of(EventKind.STARTED))
        assert len(log.of(EventKind.DAMAGED)) == 1 + tries
        assert scans == [1]
        server.fault = lambda request, data: None
        assert_is(await soon(got), run, 1)


# --- beside a leader ------------------------------------------------------------------------------


async def test_a_guest_yields_it_too(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    with RunStore(out, "policy").lock():
        async with following(worker(out, run, NOBODY)) as got:
            assert_is(await soon(got), run, 1)


async def test_a_guest_that_is_not_asked_for_it_does_not_hash_it(
    tmp_path: Path, run: FakeRun, server: RunServer, scans: list[int]
) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    scans.clear()
    log = Heard(EventKind.HEAD)
    with RunStore(out, "policy").lock():
        async with following(worker(out, run, server, observer=log), current=False) as got:
            await asyncio.wait_for(log.came.wait(), 20)
            assert got.empty()
            assert scans == []


async def test_a_guest_does_not_go_back_to_what_is_not_current_any_more(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader commits the next version while the one before is being hashed."""
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    scan, loop, looked, goes_on = (
        Scans.scan, asyncio.get_running_loop(), asyncio.Event(), threading.Event(),
    )  # fmt: skip

    def slow(self: Scans, number: int, cancel: Cancel) -> bool:
        if number == 1:
            loop.call_soon_threadsafe(looked.set)
            assert goes_on.wait(20)
        return scan(self, number, cancel)

    async with following(worker(out, run, server)) as leading:
        assert (await soon(leading)).version == 1
        monkeypatch.setattr(Scans, "scan", slow)
        try:
            async with following(worker(out, run, server)) as got:
                await asyncio.wait_for(looked.wait(), 20)
                run.publish({"a": some_bytes(1000, 7)})
                assert (await soon(got)).version == 2
                goes_on.set()
                run.publish({"a": some_bytes(1000, 8)})
                assert (await soon(got)).version == 3
        finally:
            goes_on.set()

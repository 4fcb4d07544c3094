"""Second requests over real sockets: what ends up on disk, what came twice, what is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardcast.errors import IntegrityError
from shardcast.events import EventKind, WorkerEvent
from shardcast.fetch import Branch, MemorySink, Transfer, TransferCancelledError
from shardcast.protocol.digest import digest_of
from shardcast.protocol.wire import blob_etag
from tests.fakes import KIB, Action, FakeRun, Gone, Request, RunServer, Until, response
from tests.observer import Log
from tests.tree import contents_of
from tests.unit.worker.conftest import some_bytes, with_config
from tests.unit.worker.test_pull import worker

SHARD = 256 * KIB
SHARDS = 64
FILES = {"model.safetensors": some_bytes(SHARDS * SHARD, 7)}
PATIENT = with_config(
    read_timeout_s=20.0, header_timeout_s=20.0, rate_window_s=20.0, give_up_after_s=30.0,
    hedge_s=0.05, lag_s=0.3, silent_s=0.3,
)  # fmt: skip
"""Nothing but a second request ends a wait."""


@pytest.fixture
def long_run() -> FakeRun:
    run = FakeRun()
    run.publish(FILES)
    return run


class Stopping:
    """A server that goes on until it is told to stop: then it sends no more bytes, to anybody."""

    def __init__(self, server: RunServer, after: int, part: int) -> None:
        self.server = server
        self.go_on = threading.Event()
        self.stopped: list[str] = []
        self._after = after
        self._part = part
        server.fault = self.answer

    def answer(self, request: Request, data: bytes) -> Iterable[Action] | None:
        if len(data) < SHARD or len(self.server.blob_requests) < self._after:
            return None
        assert request.digest is not None
        self.stopped.append(request.digest)
        whole = response(200, data, {"ETag": blob_etag(request.digest)})
        head = len(whole) - len(data)
        return [whole[: head + self._part], Until(self.go_on), whole[head + self._part :]]


@pytest.mark.parametrize("part", [0, 1, 100_000, SHARD - 1])
def test_a_source_that_stops_keeps_no_shard(tmp_path: Path, long_run: FakeRun, part: int) -> None:
    log = Log()
    with RunServer(long_run) as good, RunServer(long_run) as bad:
        stopping = Stopping(bad, after=10, part=part)
        pull = worker(tmp_path / "out", long_run, good, bad, config=PATIENT, observer=log)
        update = pull.pull()
        sent = sum(good.sent.values()) + sum(bad.sent.values()) + part * len(stopping.stopped)
    assert contents_of(update.path) == FILES
    assert 1 <= len(stopping.stopped) <= 2  # what it had under way, and no more
    needed = sum(map(len, long_run.blobs.values()))
    assert update.bytes_fetched <= needed * 1.02
    assert sent <= needed * 1.02
    assert not log.of(EventKind.BANNED)
    ready = log.of(EventKind.READY)[0]
    assert ready.bytes_hedged is not None
    assert ready.bytes_hedged <= 0.02 * len(FILES["model.safetensors"])
    # What came twice is exactly what was fetched beyond what was needed.
    assert ready.bytes_hedged == update.bytes_fetched - needed


def test_wrong_bytes_in_a_race_ban_who_sent_them(tmp_path: Path, long_run: FakeRun) -> None:
    raced = threading.Event()

    class Judging(Log):
        """The slow one goes on once the wrong bytes were refused: it must not win before that."""

        def on_event(self, event: WorkerEvent) -> None:
            super().on_event(event)
            if isinstance(event.error, IntegrityError):
                raced.set()

    log = Judging()
    slow_digest: list[str] = []
    with RunServer(long_run) as good, RunServer(long_run) as bad:

        def slow(request: Request, data: bytes) -> Iterable[Action] | None:
            if len(data) < SHARD or len(good.blob_requests) < 10 or slow_digest:
                return None
            assert request.digest is not None
            slow_digest.append(request.digest)
            whole = response(200, data, {"ETag": blob_etag(request.digest)})
            return [whole[:2000], Until(raced), whole[2000:]]

        def poison(request: Request, data: bytes) -> Iterable[Action] | None:
            if request.digest not in slow_digest:
                return None
            answer = bad.good(request, data)
            assert isinstance(answer[0], bytes)
            return [answer[0][:-1] + bytes([answer[0][-1] ^ 1])]

        good.fault, bad.fault = slow, poison
        pull = worker(tmp_path / "out", long_run, good, bad, config=PATIENT, observer=log)
        update = pull.pull()
    assert raced.is_set()
    assert contents_of(update.path) == FILES
    # Together with the 2000 bytes of the other one it bans nobody; when those prove right, it does.
    assert [event.source for event in log.of(EventKind.BANNED)] == [bad.url]


async def test_cancellation_in_a_race_leaves_nothing_and_loses_nothing(
    tmp_path: Path, long_run: FakeRun
) -> None:
    """Both requests of the race hang when the pull is cancelled."""
    raced = threading.Event()
    with RunServer(long_run) as first, RunServer(long_run) as second:
        stopping = Stopping(first, after=10, part=1000)

        def hang(request: Request, data: bytes) -> Iterable[Action] | None:
            if request.digest not in stopping.stopped:
                return None
            raced.set()
            return [Gone()]

        second.fault = hang
        pull = worker(tmp_path / "out", long_run, first, second, config=PATIENT)
        task = asyncio.ensure_future(pull.apull())
        assert await asyncio.to_thread(raced.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = [thread.name for thread in threading.enumerate() if "fetch-" in thread.name]
        assert left == []
        stopping.go_on.set()
        first.fault = second.fault = lambda request, data: None
        update = await worker(tmp_path / "out", long_run, first, second, config=PATIENT).apull()
    assert contents_of(update.path) == FILES
    assert update.bytes_fetched <= 4 * SHARD  # only what was on its way


# --- the transfers of a race ------------------------------------------------------------------

DATA = some_bytes(100_000, 3)


class Kept(MemorySink):
    """A sink that says where it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []

    def write(self, offset: int, data: memoryview) -> None:
        self.offsets.append(offset)
        super().write(offset, data)


def transfer_of(sink: MemorySink) -> Transfer:
    return Transfer("policy", digest_of(DATA), len(DATA), sink)


def brought(branch: Branch, url: str, start: int) -> None:
    branch.receive(url, memoryview(DATA)[start:])
    branch.finish(url)


@pytest.mark.parametrize("start", [0, 1, 40_000, 99_999])
def test_a_branch_goes_on_from_the_hash_of_what_is_here(start: int) -> None:
    sink = Kept()
    transfer = transfer_of(sink)
    transfer.receive("a", memoryview(DATA)[:start])
    branch = transfer.branch()
    assert branch.offset == branch.start == start
    transfer.receive("a", memoryview(DATA)[start : start + 7])  # the first one goes on
    brought(branch, "b", start)
    assert len(branch.rest.data) == len(DATA) - start
    assert transfer.adopt(branch)
    assert bytes(sink.data) == DATA
    assert transfer.offset == transfer.total == len(DATA)
    assert transfer.twice == len(DATA[start : start + 7])
    assert transfer.xxh3 == branch.xxh3
    whole = transfer_of(MemorySink())
    whole.receive("c", memoryview(DATA))
    whole.finish("c")
    assert whole.xxh3 == transfer.xxh3


def test_nothing_is_written_once_the_blob_is_whole() -> None:
    sink = Kept()
    transfer = transfer_of(sink)
    transfer.receive("a", memoryview(DATA)[:10])
    branch = transfer.branch()
    brought(branch, "b", 10)
    assert transfer.adopt(branch)
    written = list(sink.offsets)
    for act in (
        lambda: transfer.receive("a", memoryview(DATA)[10:20]),
        lambda: transfer.finish("a"),
        transfer.restart,
        transfer.branch,
    ):
        with pytest.raises(TransferCancelledError):
            act()
    assert not transfer.adopt(branch)
    assert sink.offsets == written
    assert transfer.twice == 10  # those came, and went nowhere


def test_only_one_of_many_branches_is_adopted() -> None:
    """Threads that all have the blob at once: one writes it."""
    for _ in range(20):
        sink = Kept()
        transfer = transfer_of(sink)
        transfer.receive("a", memoryview(DATA)[:50_000])
        branches = [transfer.branch() for _ in range(4)]
        for n, branch in enumerate(branches):
            brought(branch, f"b{n}", 50_000)
        adopted: list[bool] = []
        barrier = threading.Barrier(5)

        def adopt(branch: Branch, transfer: Transfer = transfer) -> None:
            barrier.wait(10)  # noqa: B023 - this round's
            adopted.append(transfer.adopt(branch))  # noqa: B023

        def go_on(transfer: Transfer = transfer) -> None:
            barrier.wait(10)  # noqa: B023
            try:
                transfer.receive("a", memoryview(DATA)[50_000:])
                transfer.finish("a")
            except TransferCancelledError:
                return
            adopted.append(True)  # noqa: B023

        threads = [threading.Thread(target=adopt, args=(branch,)) for branch in branches]
        threads.append(threading.Thread(target=go_on))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert adopted.count(True) == 1
        assert bytes(sink.data) == DATA


def test_a_branch_of_bytes_that_were_thrown_away_is_not_adopted() -> None:
    sink = Kept()
    transfer = transfer_of(sink)
    transfer.receive("a", memoryview(DATA)[:10])
    branch, whole = transfer.branch(), transfer.branch(whole=True)
    transfer.restart()
    transfer.receive("a", memoryview(bytes(20)))
    brought(branch, "b", 10)
    assert not transfer.adopt(branch)
    brought(whole, "b", 0)
    assert transfer.adopt(whole)  # it needs nothing of the first one
    assert bytes(sink.data) == DATA

"""Beside a leader: what a guest may take, how long it waits, and that it writes nothing that counts."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from shardcast.errors import BusyError, DiskError, UsageError
from shardcast.events import EventKind, WorkerEvent
from shardcast.joining import (
    POLL_S,
    Guest,
    WaitingMark,
    lock_of,
    manifest_to_share,
    open_worker,
    remembered,
)
from shardcast.protocol import trust
from shardcast.protocol.head import Head, VersionRef
from shardcast.protocol.limits import SKEW_MS
from shardcast.store.run import RunStore
from shardcast.worker import Worker
from tests.fakes import FakeRun, RunServer
from tests.observer import Log
from tests.unit.worker.test_pull import assert_is, worker

M = {number: f"{number:064x}" for number in range(1, 9)}


def ref(number: int) -> VersionRef:
    return VersionRef(version=number, step=None, manifest=M[number], bytes=1, deltas=[])


HEAD = Head(
    run="policy",
    sequence=1,
    issued_at=1,
    expires_at=1000,
    keys=["A" * 44],
    version=5,
    versions=[ref(5), ref(4)],
    open=None,
    withdrawn=[3],
    hold=False,
)
STATE = msgspec.structs.replace(
    trust.fresh("policy"), manifests={2: M[2], 3: M[3], 4: M[4], 5: M[5]}
)


@pytest.mark.parametrize(
    ("head", "number", "now_ms", "accept_expired", "manifest"),
    [
        (HEAD, 5, 0, False, M[5]),
        (HEAD, 4, 0, False, M[4]),
        (HEAD, 2, 0, False, M[2]),  # a head that was accepted named it once
        (HEAD, 1, 0, False, None),
        (HEAD, 6, 0, False, None),
        (HEAD, 3, 0, False, None),  # withdrawn
        (None, 5, 0, False, None),
        (HEAD, 5, 1000 + SKEW_MS, False, M[5]),
        (HEAD, 5, 1001 + SKEW_MS, False, None),  # expired
        (HEAD, 5, 1001 + SKEW_MS, True, M[5]),
        (HEAD, 3, 0, True, None),
    ],
)
def test_what_may_be_taken_from_a_leader(
    head: Head | None, number: int, now_ms: int, accept_expired: bool, manifest: str | None
) -> None:
    found = manifest_to_share(head, STATE, number, now_ms=now_ms, accept_expired=accept_expired)
    assert found == manifest


class Clock:
    """Time that passes only while somebody sleeps; ``then`` happens after so many sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0
        self.then: dict[int, object] = {}

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        action = self.then.pop(self.sleeps, None)
        if callable(action):
            action()


@contextmanager
def led(out: Path) -> Iterator[None]:
    """Another object holds the lock, as another process does."""
    with RunStore(out, "policy").lock():
        yield


async def wait_for(
    out: Path, run: FakeRun, server: RunServer, number: int, clock: Clock, log: Log
) -> object:
    options = worker(out, run, server).options
    head = run.head
    assert head is not None
    wanted = next(r for r in head.versions if r.version == number)
    lock = lock_of(options)
    try:
        async with open_worker(options, log, leading=False) as session:
            return await Guest(session, lock, clock=clock, sleep=clock.sleep).wait_for(
                lambda: wanted
            )
    finally:
        lock.release()


async def test_patience_ends_without_a_sign_of_progress(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    clock, log = Clock(), Log()
    patience = worker(tmp_path / "out", run, server).options.config.give_up_after_s
    with led(tmp_path / "out"), pytest.raises(BusyError, match="version 1 and made no progress"):
        await wait_for(tmp_path / "out", run, server, 1, clock, log)
    assert patience <= clock.now < patience + 0.2
    (said,) = log.of(EventKind.WAITING)
    assert f"led by process {os.getpid()};" in str(said.error)


async def test_a_journal_that_grows_is_a_sign(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    clock, log, out = Clock(), Log(), tmp_path / "out"
    journal = out / "state" / "000001.shards"

    def grow() -> None:
        with journal.open("ab") as file:
            file.write(bytes(24))

    clock.then = dict.fromkeys(range(5, 60, 5), grow)
    patience = worker(out, run, server).options.config.give_up_after_s
    with led(out), pytest.raises(BusyError, match="no progress"):
        await wait_for(out, run, server, 1, clock, log)
    assert clock.now > patience + 5


async def test_what_a_leader_does_beyond_the_version_is_no_sign(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    """A follower never turns back for an older version."""
    clock, log, out = Clock(), Log(), tmp_path / "out"
    run.publish({**files, "config.json": b"{}"})
    await worker(out, run, server).apull()  # version 2
    journal = out / "state" / "000009.shards"
    clock.then = {n: lambda: journal.write_bytes(bytes(clock.sleeps)) for n in range(1, 1000)}
    patience = worker(out, run, server).options.config.give_up_after_s
    with led(out), pytest.raises(BusyError, match="version 1 and made no progress"):
        await wait_for(out, run, server, 1, clock, log)
    assert clock.now < patience + 0.2


async def test_a_version_that_is_not_switched_to_yet_is_not_taken(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    clock, log, out = Clock(), Log(), tmp_path / "out"
    run.publish({**files, "config.json": b"{}"})
    await worker(out, run, server).apull(1)
    await worker(out, run, server).apull(2)
    store = RunStore(out, "policy")
    store.switch_current(1)
    clock.then = {4: lambda: store.switch_current(2)}
    with led(out):
        found = await wait_for(out, run, server, 2, clock, log)
    assert isinstance(found, tuple)
    assert clock.sleeps == 4
    store.close()


async def test_a_lock_that_is_free_makes_the_guest_the_leader(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    clock, out = Clock(), tmp_path / "out"
    lock = RunStore(out, "policy").lock()
    lock.acquire()
    clock.then = {3: lock.release}
    assert await wait_for(out, run, server, 1, clock, Log()) is None
    assert clock.sleeps == 3


async def test_a_directory_that_turns_out_to_be_another_runs(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    clock, out = Clock(), tmp_path / "out"

    def other() -> None:
        RunStore(out, "other").write_trust(trust.fresh("other"))

    clock.then = {3: other}
    with led(out), pytest.raises(UsageError, match="belongs to run 'other'"):
        await wait_for(out, run, server, 1, clock, Log())
    with pytest.raises(UsageError):
        remembered(RunStore(out, "policy"))


async def test_a_guest_remembers_nothing(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    out = tmp_path / "out"
    with led(out), pytest.raises(BusyError):
        await worker(out, run, server).apull()
    assert sorted(os.listdir(out)) == ["state"]
    assert sorted(os.listdir(out / "state")) == ["guests.lock", "run.lock"]
    assert_is(await worker(out, run, server).apull(), run, 1)


async def test_a_guest_that_begins_to_lead_still_knows_the_newest_head(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of holding and withdrawing counts until the next one comes: an outage may last."""
    out, leads, accepted = tmp_path / "out", asyncio.Event(), asyncio.Event()

    async def lead(*_: object) -> None:
        leads.set()
        await asyncio.Event().wait()

    class Accepted(Log):
        def on_event(self, event: WorkerEvent) -> None:
            super().on_event(event)
            if event.kind is EventKind.HEAD:
                accepted.set()

    async def follow() -> None:
        async for _ in guest.follow():
            pass

    monkeypatch.setattr(Worker, "_lead", lead)
    guest = worker(out, run, server, observer=Accepted())
    with led(out):
        following = asyncio.ensure_future(follow())
        await asyncio.wait_for(accepted.wait(), 20)
        known = guest.head
        assert known is not None
        assert known.version == 1
    await asyncio.wait_for(leads.wait(), 20)
    assert guest.head == known
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_who_holds_a_lock_is_named(tmp_path: Path) -> None:
    store = RunStore(tmp_path, "policy")
    first, second = store.lock(), store.lock(what="it")
    assert first.holder == "another process"
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    assert second.holder == f"process {os.getpid()}"
    assert second.what == "it"
    first.release()
    assert second.try_acquire()
    second.release()


async def test_a_guest_leaves_what_is_staged_to_the_leader(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renamed at any moment; a guest that had begun to open it used to fail for that."""
    out = tmp_path / "out"

    def stored(store: RunStore, number: int) -> None:
        raise AssertionError("opened")

    (out / "state" / "staging" / "000001").mkdir(parents=True)
    monkeypatch.setattr(RunStore, "stored", stored)
    with led(out), pytest.raises(BusyError, match="no progress"):
        await wait_for(out, run, server, 1, Clock(), Log())


async def test_a_version_that_goes_while_a_guest_looks_at_it_is_not_there(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()

    def stored(store: RunStore, number: int) -> None:
        shutil.rmtree(store.version_directory(number))
        raise DiskError("opening failed")

    monkeypatch.setattr(RunStore, "stored", stored)
    with led(out), pytest.raises(BusyError, match="no progress"):
        await wait_for(out, run, server, 1, Clock(), Log())


async def test_who_gave_the_lead_away_rests_before_it_asks_again_and_calls_nobody_meanwhile(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    clock, log = Clock(), Log()
    options = worker(tmp_path / "out", run, server).options
    mark = WaitingMark(RunStore(options.out, options.run))
    assert not mark.shown()  # no guest was ever here
    called: list[bool] = []
    other, lock = lock_of(options), lock_of(options)
    other.acquire()
    clock.then = {
        1: lambda: called.append(mark.shown()),  # it rests
        5: lambda: called.append(mark.shown()),  # it waits
        6: other.release,
    }
    async with open_worker(options, log, leading=False) as session:
        guest = Guest(session, lock, rest_s=2.5 * POLL_S, clock=clock, sleep=clock.sleep)
        await guest.follow(lambda *_: None)
    assert (called, lock.held, mark.shown()) == ([False, True], True, False)
    lock.release()
    clock.then, before = {}, clock.now
    async with open_worker(options, log, leading=False) as session:
        guest = Guest(session, lock, rest_s=2.5 * POLL_S, clock=clock, sleep=clock.sleep)
        await guest.follow(lambda *_: None)
    assert clock.now - before >= 2.5 * POLL_S  # although nobody else wanted it
    lock.release()

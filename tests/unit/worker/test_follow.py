"""Following: the decision as a table, the loop with fakes, and real runs over loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcast.config import NetConfig
from shardcast.errors import EngineError, ExpiredError, NetworkError
from shardcast.events import EventKind, WorkerEvent
from shardcast.hooks import UpdateHook
from shardcast.protocol.head import Head, OpenRef, VersionRef
from shardcast.steps import Situation, Step, next_step, wanted
from shardcast.store.run import RunStore
from shardcast.worker import Update
from tests.fakes import KIB, Action, FakeRun, Request, RunServer, Until
from tests.observer import Log
from tests.unit.worker.conftest import QUICK, some_bytes, with_config
from tests.unit.worker.test_pull import assert_is, worker

WAIT_S = 20


def ref(number: int) -> VersionRef:
    return VersionRef(version=number, step=None, manifest=f"{number:064x}", bytes=1, deltas=[])


def head(
    version: int | None,
    versions: tuple[int, ...] = (),
    *,
    withdrawn: tuple[int, ...] = (),
    hold: bool = False,
) -> Head:
    return Head(
        run="policy",
        sequence=1,
        issued_at=1,
        expires_at=2,
        keys=["A" * 44],
        version=version,
        versions=[ref(n) for n in sorted({*versions, *((version,) if version else ())})[::-1]],
        open=None,
        withdrawn=list(withdrawn),
        hold=hold,
    )


def at(current: int | None, **changes: Any) -> Situation:
    manifest = None if current is None else ref(current).manifest
    return Situation(current=current, manifest=manifest, **changes)


# --- the decision -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "version"),
    [
        (at(None), None),
        (at(None, head=head(None)), None),
        (at(None, head=head(3)), 3),
        (at(2, head=head(3, (2,))), 3),
        (at(3, head=head(3)), None),
        # a version that was committed under another manifest is not the one that is wanted
        (Situation(head=head(3), current=3, manifest="f" * 64), None),
        # backwards only from a withdrawn version, or one that the head does not know
        (at(3, head=head(2, (3,))), None),
        (at(3, head=head(2, withdrawn=(3,))), 2),
        (at(3, head=head(2, (3,), withdrawn=(3,))), 2),
        (at(3, head=head(2)), 2),
        (at(3, head=head(None, withdrawn=(3,))), None),
        # an expired head keeps a follower where it is, except on a withdrawn version
        (at(2, head=head(3, (2,)), expired=True), None),
        (at(None, head=head(3), expired=True), None),
        (at(3, head=head(2, withdrawn=(3,)), expired=True), 2),
    ],
)
def test_which_version_is_wanted(situation: Situation, version: int | None) -> None:
    target = wanted(situation)
    assert (None if target is None else target.version) == version


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        (at(1, head=head(2, (1,))), Step(obtain=ref(2))),
        (at(1, head=head(2, (1,)), obtaining=2), Step()),
        (at(1, head=head(2, (1,)), ready=2), Step(activate=True)),
        (at(1, head=head(2, (1,)), activating=2), Step()),
        (at(2, head=head(2, (1,))), Step()),
        # newest wins, if it is worth it; it is weighed once
        (at(1, head=head(3, (1, 2)), obtaining=2), Step(weigh=ref(3))),
        (at(1, head=head(3, (1, 2)), obtaining=2, weighed=3, switch=True), Step(stop=True)),
        (at(1, head=head(3, (1, 2)), obtaining=2, weighed=3), Step()),
        (at(1, head=head(4, (1, 2, 3)), obtaining=2, weighed=3), Step(weigh=ref(4))),
        # the older one is finished even where the head does not list it any more
        (at(1, head=head(3, (1,)), obtaining=2), Step(weigh=ref(3))),
        (at(None, head=head(3), obtaining=2, weighed=3), Step()),
        # but not for nothing: it was withdrawn, or is no better than what is current
        (at(1, head=head(3, (1,), withdrawn=(2,)), obtaining=2), Step(stop=True)),
        (at(2, head=head(3, (1,)), obtaining=2), Step(stop=True)),
        (at(1, head=head(3, (1, 2)), obtaining=4), Step(stop=True)),
        (at(1, head=head(3, (1, 2)), activating=2), Step(obtain=ref(3))),
        # what is ready is used while the newer one is fetched, but not twice at once
        (at(1, head=head(3, (1, 2)), ready=2), Step(obtain=ref(3), activate=True)),
        (at(1, head=head(3, (1, 2)), ready=2, activating=1), Step(obtain=ref(3))),
        (at(1, head=head(3, (1, 2), withdrawn=(2,)), ready=2), Step(obtain=ref(3))),
        (at(1, head=head(3, (1,)), ready=2), Step(obtain=ref(3), activate=True)),
        (at(1, head=head(3, (1,)), ready=4), Step(obtain=ref(3))),
        (at(1, head=head(3, (1, 2)), ready=3, activating=2), Step()),
        # hold: fetch, make ready, do not activate
        (at(1, head=head(2, (1,), hold=True)), Step(obtain=ref(2))),
        (at(1, head=head(2, (1,), hold=True), ready=2), Step(held=True)),
        (at(1, head=head(3, (1, 2), hold=True), ready=2), Step(obtain=ref(3))),
        # the version that was being fetched was withdrawn
        (at(1, head=head(1, withdrawn=(2,)), obtaining=2), Step(stop=True)),
    ],
)
def test_what_is_done_next(situation: Situation, step: Step) -> None:
    assert next_step(situation) == step


def opened(number: int, *parts: str) -> OpenRef:
    return OpenRef(version=number, step=None, layout="0" * 64, parts=list(parts), deltas=[])


def streaming(version: int | None, open_version: int, *parts: str, **changes: Any) -> Head:
    return msgspec.structs.replace(head(version, **changes), open=opened(open_version, *parts))


SOME, MORE = opened(3, "1" * 64), opened(3, "1" * 64, "2" * 64)


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        # who is on the newest version fetches what is announced of the next one, each head once
        (at(2, head=streaming(2, 3, "1" * 64)), Step(ahead=SOME)),
        (at(2, head=streaming(2, 3, "1" * 64), gone_through=SOME), Step()),
        (at(2, head=streaming(2, 3, "1" * 64, "2" * 64), gone_through=SOME), Step(ahead=MORE)),
        (at(2, head=streaming(2, 3, "1" * 64, "2" * 64), ahead=3), Step()),
        # also the first version of a run, and while activations are held
        (at(None, head=streaming(None, 3, "1" * 64)), Step(ahead=SOME)),
        (at(2, head=streaming(2, 3, "1" * 64, hold=True)), Step(ahead=SOME)),
        # but only who has nothing else to do
        (at(1, head=streaming(2, 3)), Step(obtain=ref(2))),
        (at(1, head=streaming(2, 3), obtaining=2), Step()),
        (at(1, head=streaming(2, 3), ready=2), Step(activate=True)),
        (at(1, head=streaming(2, 3), activating=2), Step()),
        (at(1, head=streaming(2, 3, hold=True), ready=2), Step(held=True)),
        # and nothing of an expired head, or of what is no newer
        (at(2, head=streaming(2, 3, "1" * 64), expired=True), Step()),
        (at(4, head=streaming(2, 3, versions=(4,))), Step()),
        # it closes: what was begun of it ends by itself, then it is obtained
        (at(2, head=head(3, (2,)), ahead=3), Step()),
        (at(2, head=head(3, (2,))), Step(obtain=ref(3))),
        # it vanishes, or another version is there first
        (at(2, head=head(2), ahead=3), Step(drop=True)),
        (at(2, head=head(4, (2,)), ahead=3), Step(drop=True)),
        (at(2, head=streaming(2, 4), ahead=3), Step(drop=True)),
        (at(2, head=streaming(2, 3), ahead=3, expired=True), Step(drop=True)),
        (at(2, head=head(1, withdrawn=(2,)), ahead=3), Step(drop=True)),
    ],
)
def test_what_is_fetched_ahead(situation: Situation, step: Step) -> None:
    assert next_step(situation) == step


# --- over loopback ----------------------------------------------------------------------------


class Following:
    """A follower in a task of this loop, and what came of it."""

    def __init__(self, out: Path, run: FakeRun, *servers: RunServer | str, **options: Any) -> None:
        self.log = Log()
        self.worker = worker(out, run, *servers, observer=self.log, **options)
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self.worker.follow()) as updates:
            async for update in updates:
                self._updates.put_nowait(update)

    async def update(self) -> Update:
        taking = asyncio.ensure_future(self._updates.get())
        await asyncio.wait([taking, self.task], timeout=WAIT_S, return_when="FIRST_COMPLETED")
        if self.task.done():
            taking.cancel()
            self.task.result()
        if not taking.done():
            taking.cancel()
            told = [(e.kind.value, e.version, e.error) for e in self.log.events[-20:]]
            raise AssertionError(f"no update; the last that was told: {told}")
        return taking.result()

    async def event(self, kind: EventKind, count: int = 1) -> None:
        def told() -> bool:
            with self.log.changed:
                return self.log.changed.wait_for(
                    lambda: len(self.log.of(kind)) >= count, timeout=WAIT_S
                )

        assert await asyncio.to_thread(told), f"no {kind} among {self.log.kinds()}"

    async def told(self, wanted: Callable[[WorkerEvent], bool]) -> None:
        """Wait for an event."""

        def there() -> bool:
            with self.log.changed:
                return self.log.changed.wait_for(
                    lambda: any(wanted(event) for event in self.log.events), timeout=WAIT_S
                )

        assert await asyncio.to_thread(there), f"not among {self.log.kinds()}"

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task], timeout=WAIT_S)
        assert self.task.done()


@pytest.fixture
async def started() -> AsyncIterator[list[Following]]:
    all_of_them: list[Following] = []
    yield all_of_them
    for following in all_of_them:
        await following.stop()


async def test_each_newer_version_arrives(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    files: dict[str, bytes],
    started: list[Following],
) -> None:
    following = Following(tmp_path / "out", run, server)
    started.append(following)
    assert_is(await following.update(), run, 1)
    for number in (2, 3):
        run.publish({**files, "config.json": b"%d" % number}, step=number)
        update = await following.update()
        assert_is(update, run, number)
        assert update.step == number


async def test_a_run_that_has_no_version_yet_is_waited_for(
    tmp_path: Path, started: list[Following]
) -> None:
    run = FakeRun()
    with RunServer(run) as server:
        following = Following(tmp_path / "out", run, server)
        started.append(following)
        await following.event(EventKind.SOURCE)  # 404
        run.publish({"model": some_bytes(100_000)})
        assert_is(await following.update(), run, 1)
        await following.stop()


async def test_a_version_that_is_here_is_not_told_again(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    following = Following(out, run, server)
    started.append(following)
    await following.event(EventKind.HEAD)
    run.publish({"model": some_bytes(100_000)})
    assert_is(await following.update(), run, 2)


def holding_back(
    run: FakeRun, server: RunServer, version: int, *, first: int = 0
) -> threading.Event:
    """The server begins to answer for a version's shards when the event is set."""
    release, shards = threading.Event(), set(run.shard_digests(version)[first:])

    def fault(request: Request, data: bytes) -> Iterable[Action] | None:
        if request.digest not in shards:
            return None
        return [Until(release), *server.good(request, data)]

    server.fault = fault
    return release


async def test_newest_wins_while_an_older_one_is_on_its_way(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    files: dict[str, bytes],
    started: list[Following],
) -> None:
    patient = with_config(read_timeout_s=30, header_timeout_s=30, give_up_after_s=30)
    following = Following(tmp_path / "out", run, server, config=patient)
    started.append(following)
    await following.update()
    run.add_version(2, {"other": some_bytes(600_000, 7)})
    release = holding_back(run, server, 2)
    run.files.pop(2)
    second = run.publish({"other": some_bytes(600_000, 7)})
    await asyncio.to_thread(
        server.wait_for,
        lambda: bool(set(run.shard_digests(2)) & set(server.blob_requests)),
    )
    run.publish({**files, "config.json": b"3"})
    update = await following.update()
    assert_is(update, run, 3)
    release.set()
    superseded = following.log.of(EventKind.SUPERSEDED)
    assert [event.version for event in superseded] == [second.version]
    assert [e.version for e in following.log.of(EventKind.COMMITTED)] == [1, 3]
    await following.stop()
    assert RunStore(tmp_path / "out", "policy").staged() == []


PATIENT = with_config(
    read_timeout_s=30, header_timeout_s=30, give_up_after_s=30, lag_s=30, silent_s=30
)


async def nearly_there(
    out: Path,
    run: FakeRun,
    server: RunServer,
    started: list[Following],
    config: NetConfig = PATIENT,
) -> tuple[Following, threading.Event]:
    """A follower that has version 1 and lacks the last of eight shards of version 2."""
    following = Following(out, run, server, config=config)
    started.append(following)
    await following.update()
    second = {"model": some_bytes(8 * 256 * KIB, 2)}
    run.add_version(2, second)
    release = holding_back(run, server, 2, first=7)
    run.files.pop(2)
    run.publish(second)
    await following.told(lambda e: e.version == 2 and (e.bytes_done or 0) >= 7 * 256 * KIB)
    return following, release


async def test_what_is_nearly_there_is_finished_first(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    """A newer version that shares nothing with it comes after it: slow workers reach versions."""
    following, release = await nearly_there(tmp_path / "out", run, server, started)
    third = run.publish({"model": some_bytes(8 * 256 * KIB, 3)})
    await following.told(lambda e: e.kind is EventKind.HEAD and e.version == 3)
    await asyncio.to_thread(
        server.wait_for, lambda: third.manifest in server.blob_requests
    )  # its documents are looked at
    release.set()
    assert_is(await following.update(), run, 2)
    assert_is(await following.update(), run, 3)
    assert following.log.of(EventKind.SUPERSEDED) == []


async def test_a_newer_version_whose_documents_cannot_be_had_stops_nothing(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    following, release = await nearly_there(tmp_path / "out", run, server, started)
    third = run.publish({"model": some_bytes(300_000, 3)})
    manifest = run.blobs.pop(third.manifest)
    await asyncio.to_thread(server.wait_for, lambda: third.manifest in server.blob_requests)
    release.set()
    assert_is(await following.update(), run, 2)
    run.blobs[third.manifest] = manifest
    assert_is(await following.update(), run, 3)


async def test_a_version_that_left_the_head_and_its_sources_is_let_go(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    """It is no failure: the newest one is fetched at once."""
    hasty = replace(PATIENT, give_up_after_s=1.5)
    following, release = await nearly_there(tmp_path / "out", run, server, started, hasty)
    third = run.publish({"model": some_bytes(8 * 256 * KIB, 3)})
    run.amend(versions=[third])
    update = await following.update()
    assert_is(update, run, 3)
    (superseded,) = following.log.of(EventKind.SUPERSEDED)
    assert superseded.version == 2
    assert isinstance(superseded.error, NetworkError)
    assert following.log.of(EventKind.ERROR) == []
    release.set()


async def test_hold_makes_ready_and_waits(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    following = Following(tmp_path / "out", run, server)
    started.append(following)
    await following.update()
    run.amend(hold=True)
    run.publish({"model": some_bytes(100_000)})
    run.amend(hold=True)
    await following.event(EventKind.HELD)
    assert following.log.of(EventKind.READY)[-1].version == 2
    assert (tmp_path / "out" / "current").resolve().name == "000001"
    run.amend(hold=False)
    assert_is(await following.update(), run, 2)
    assert len(following.log.of(EventKind.HELD)) == 1


async def test_a_withdrawn_version_is_left_for_the_one_before(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    run.publish({"model": some_bytes(100_000)})
    following = Following(tmp_path / "out", run, server)
    started.append(following)
    assert_is(await following.update(), run, 2)
    run.withdraw(2)
    assert_is(await following.update(), run, 1)


async def test_an_expired_head_is_told_once_and_heals_by_itself(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    out = tmp_path / "out"
    await worker(out, run, server).apull()
    assert run.head is not None
    long_ago = run.head.issued_at
    run.announce(
        msgspec.structs.replace(
            run.head,
            sequence=run.head.sequence + 1,
            issued_at=long_ago - 10_000_000,
            expires_at=long_ago - 9_000_000,
        )
    )
    following = Following(out, run, server)
    started.append(following)
    await following.event(EventKind.FROZEN)
    (frozen,) = following.log.of(EventKind.FROZEN)
    assert frozen.version == 1
    assert isinstance(frozen.error, ExpiredError)
    run.publish({"model": some_bytes(100_000)})
    await following.event(EventKind.THAWED)
    assert_is(await following.update(), run, 2)
    assert len(following.log.of(EventKind.FROZEN)) == 1


async def test_a_cold_follower_takes_nothing_from_an_expired_head(
    tmp_path: Path, started: list[Following]
) -> None:
    run = FakeRun(expiry_ms=0)
    run.now_ms = lambda: 1_700_000_000_000
    run.publish({"model": some_bytes(100_000)})
    with RunServer(run) as server:
        following = Following(tmp_path / "a", run, server)
        started.append(following)
        await following.event(EventKind.FROZEN)
        assert server.blob_requests == []
        bold = Following(tmp_path / "b", run, server, accept_expired=True)
        started.append(bold)
        assert_is(await bold.update(), run, 1)
        await following.stop()
        await bold.stop()


async def test_a_source_that_dies_and_comes_back(
    tmp_path: Path, run: FakeRun, started: list[Following]
) -> None:
    with RunServer(run) as server:
        port = server.port
        following = Following(tmp_path / "out", run, server)
        started.append(following)
        await following.update()
    await following.event(EventKind.SOURCE)
    run.publish({"model": some_bytes(100_000)})
    with RunServer(run, port=port):
        assert_is(await following.update(), run, 2)
        await following.stop()


async def test_a_version_that_cannot_be_had_is_tried_again(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    started: list[Following],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardcast.follow.RETRY_FIRST_S", 0.01)
    broken = threading.Event()
    server.fault = lambda request, data: None if broken.is_set() else [b"junk\r\n\r\n"]
    following = Following(tmp_path / "out", run, server, config=with_config(give_up_after_s=0.2))
    started.append(following)
    await following.event(EventKind.ERROR, 2)
    error = following.log.of(EventKind.ERROR)[0].error
    assert isinstance(error, NetworkError)
    assert server.url in error.message
    broken.set()
    assert_is(await following.update(), run, 1)


async def test_the_hook_gets_the_version_and_a_failure_is_told(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    said = tmp_path / "said"
    command = (
        f'echo "$SHARDCAST_RUN $SHARDCAST_VERSION $SHARDCAST_STEP $SHARDCAST_MANIFEST '
        f'$SHARDCAST_PATH" >> {said}; test "$SHARDCAST_VERSION" != 1'
    )
    out = tmp_path / "out"
    following = Following(out, run, server, on_update=command)
    started.append(following)
    first = await following.update()
    assert_is(first, run, 1)
    run.publish({"model": some_bytes(100_000)})
    second = await following.update()
    assert said.read_text().splitlines() == [
        f"policy 1 10 {first.manifest} {first.path}",
        f"policy 2  {second.manifest} {second.path}",
    ]
    errors = following.log.of(EventKind.ERROR)
    assert [event.version for event in errors] == [1]
    assert isinstance(errors[0].error, EngineError)
    assert "status 1" in errors[0].error.message


async def test_fetching_goes_on_while_the_hook_runs_and_hooks_run_one_at_a_time(
    tmp_path: Path, run: FakeRun, server: RunServer, started: list[Following]
) -> None:
    import os

    gate = tmp_path / "gate"
    os.mkfifo(gate)
    following = Following(
        tmp_path / "out", run, server, on_update=UpdateHook(f"cat {gate} > /dev/null")
    )
    started.append(following)
    await following.event(EventKind.COMMITTED)
    run.publish({"model": some_bytes(100_000)})
    await following.event(EventKind.READY, 2)
    assert len(following.log.of(EventKind.COMMITTED)) == 1
    for number in (1, 2):
        await asyncio.to_thread(gate.write_text, "go")
        assert_is(await following.update(), run, number) if number == 2 else None
        if number == 1:
            await following.update()
            await following.event(EventKind.COMMITTED, 2)


async def test_stopping_ends_hook_threads_and_sockets_and_gives_the_lock_back(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    patient = with_config(read_timeout_s=60, header_timeout_s=60, give_up_after_s=60)
    before = set(threading.enumerate())
    release = holding_back(run, server, 1)
    following = Following(tmp_path / "out", run, server, config=patient)
    await asyncio.to_thread(
        server.wait_for, lambda: bool(set(run.shard_digests(1)) & set(server.blob_requests))
    )
    await following.stop()
    left = [
        t.name
        for t in set(threading.enumerate()) - before
        if t.name.startswith(("fetch-", "local", "progress"))
    ]
    assert left == []
    with RunStore(tmp_path / "out", "policy").lock():
        pass
    release.set()


async def test_of_updates_that_nobody_takes_only_the_newest_is_kept(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    log = Log()
    follower = worker(tmp_path / "out", run, server, observer=log)
    updates = follower.follow()
    assert_is(await anext(updates), run, 1)

    async def committed(count: int) -> None:
        def told() -> bool:
            with log.changed:
                return log.changed.wait_for(
                    lambda: len(log.of(EventKind.COMMITTED)) >= count, timeout=WAIT_S
                )

        assert await asyncio.to_thread(told)

    for number in (2, 3):
        run.publish({"model": some_bytes(100_000, number)})
        await committed(number)
    for _ in range(100):  # after the commit nothing but the loop's own turns is left
        await asyncio.sleep(0)
    assert_is(await anext(updates), run, 3)
    await updates.aclose()


def test_iterate_without_asyncio(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    updates = worker(tmp_path / "out", run, server).iterate()
    assert_is(next(updates), run, 1)
    run.publish({**files, "config.json": b"2"})
    assert_is(next(updates), run, 2)
    updates.close()
    with RunStore(tmp_path / "out", "policy").lock():
        pass


def test_iterate_raises_what_follow_raises(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    from shardcast.errors import UsageError

    worker(tmp_path / "out", run, server).pull()
    other = FakeRun("other")
    with RunServer(other) as second:
        updates = worker(tmp_path / "out", other, second, config=QUICK).iterate()
        with pytest.raises(UsageError, match="belongs to run 'policy'"):
            next(updates)

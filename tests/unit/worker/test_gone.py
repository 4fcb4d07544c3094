"""A version, or one on the way to it, left the head and the sources: what a worker does then."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from shardcast.errors import GoneError, NetworkError, SourceStatusError
from shardcast.events import EventKind
from shardcast.fetch import MemorySink, Transfer
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import Head
from shardcast.schedule import Finished, Flight, Job, Schedule, Wait
from tests.deltas import MadeDelta, checkpoint, publish, stepped
from tests.fakes import Action, FakeRun, Request, RunServer, Until, response
from tests.unit.worker.conftest import QUICK
from tests.unit.worker.test_follow import Following
from tests.unit.worker.test_schedule import CONFIG, DATA, SIZE, Play

# --- the schedule, in virtual time --------------------------------------------------------------


class Unlisted(Play):
    """A pull of a version that the head may have dropped."""

    def __init__(self, *sources: str, listed: bool = False) -> None:
        super().__init__(*sources)
        self.listed = listed
        self.schedule = Schedule(
            sources,
            self.selector,
            CONFIG,
            clock=lambda: self.now,
            rng=self.selector._rng,
            listed=lambda: self.listed,
        )

    def optional(self) -> Job:
        transfer = Transfer("run", digest_of(DATA), SIZE, MemorySink(), limit=SIZE)
        job = Job(transfer, "a delta", optional=True)
        self.schedule.add(job)
        return job

    def absent(self, flight: Flight, status: int = 404) -> None:
        error = SourceStatusError("has it not", source=flight.source, status=status)
        self.schedule.failed(flight, error)


def test_it_ends_at_once_when_all_sources_have_it_not() -> None:
    play = Unlisted("a", "b")
    play.add()
    first = play.start()
    play.absent(first)
    second = play.start()
    assert second.source != first.source  # the other one may have it
    play.absent(second)
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, GoneError)
    assert "shard 1" in str(step.error)
    assert play.now < 1.0


def test_while_the_head_lists_it_sources_may_come_to_have_it() -> None:
    play = Unlisted("a", listed=True)
    play.add()
    for _ in range(3):
        play.absent(play.start())
    assert isinstance(play.schedule.next(), Wait)
    play.listed = False  # said by the newest head, while it rests
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, GoneError)


def test_a_source_that_is_busy_or_gave_it_may_have_it() -> None:
    play = Unlisted("a")
    play.add()
    play.absent(play.start())
    play = Unlisted("a")
    play.add()
    play.absent(play.start(), status=503)
    assert isinstance(play.schedule.next(), Wait)
    play.finish(play.start())
    play.schedule.close()
    step = play.schedule.next()
    assert step == Finished(None)


def test_what_a_source_said_before_it_was_busy_counts_no_more() -> None:
    play = Unlisted("a", listed=True)
    play.add()
    play.absent(play.start())
    play.absent(play.start(), status=503)
    play.listed = False
    assert not isinstance(play.schedule.next(), Finished)


def test_a_dead_source_is_not_waited_for() -> None:
    play = Unlisted("a", "b")
    play.add()
    for _ in range(2):
        play.selector.failed("b")
    while (flight := play.start()).source != "a":
        play.schedule.failed(flight, NetworkError("down", source="b"))
    play.absent(flight)
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, GoneError)


def test_a_delta_that_is_gone_is_done_without() -> None:
    play = Unlisted("a")
    job = play.optional()
    play.absent(play.start())
    assert isinstance(play.schedule.next(), Wait)
    assert play.schedule.take_lost() == [job]
    play.add()
    play.finish(play.start())
    play.schedule.close()
    assert play.schedule.next() == Finished(None)


# --- a follower ---------------------------------------------------------------------------------


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.publish(checkpoint(), step=1)
    return run


@pytest.fixture
async def started() -> AsyncIterator[list[Following]]:
    all_of_them: list[Following] = []
    yield all_of_them
    for following in all_of_them:
        await following.stop()


PATIENT = replace(QUICK, give_up_after_s=600.0)


def only_in(run: FakeRun, *numbers: int) -> set[str]:
    """The shards that no other version has."""
    mine = {digest for number in numbers for digest in run.shard_digests(number)}
    others = {d for n in run.files if n not in numbers for d in run.shard_digests(n)}
    return mine - others


def three_more_steps(run: FakeRun) -> tuple[Head, dict[int, MadeDelta]]:
    """Publish versions 2 to 4, a delta from each to the next; nobody hears of them before all are there."""
    made = {}
    with run.changed:
        kept = run.envelope
        for number in (2, 3, 4):
            _, (made[number],) = publish(run, stepped(run.files[number - 1], number), number - 1)
        chain, run.envelope = run.head, kept
    assert chain is not None
    return chain, made


async def test_the_last_one_on_the_way_will_do_and_leads_on(
    tmp_path: Path, run: FakeRun, started: list[Following]
) -> None:
    """1 -> 2 -> 3 -> 4: once 2 is there, 3 and 4 are gone; the head leads from 2 to 5."""
    with RunServer(run) as server:
        following = Following(tmp_path / "out", run, server, config=PATIENT)
        started.append(following)
        assert (await following.update()).version == 1
        chain, made = three_more_steps(run)
        gone = {*made[3].blobs, *made[4].blobs}

        leaving, told = threading.Lock(), threading.Event()

        def leave(request: Request, data: bytes) -> Iterable[Action] | None:
            with leaving:
                if request.digest in gone and 5 not in run.files:
                    last, _ = publish(run, stepped(run.files[2], 5), 2)
                    run.amend(version=last.version, versions=[last])
                    for digest in (*gone, *only_in(run, 3, 4)):
                        run.blobs.pop(digest, None)
                if request.digest in gone:
                    return [response(404)]
                if run.head is not None and request.digest == run.head.versions[0].manifest:
                    weighed = run.head.version == 5
                    return [Until(told), *server.good(request, data)] if weighed else None
            return None

        server.fault = leave
        run.announce(chain)
        await following.event(EventKind.READY, 2)
        told.set()
        assert (await following.update()).version == 2
        update = await following.update()
    assert update.version == 5
    assert {path: (update.path / path).read_bytes() for path in run.files[5]} == run.files[5]
    ready = following.log.of(EventKind.READY)[1:]
    assert [event.version for event in ready] == [2, 5]
    assert all((event.bytes_delta or 0) > 0 for event in ready)
    assert sum(event.bytes_fetched or 0 for event in ready) < (ready[0].bytes_total or 0) / 5
    assert following.log.of(EventKind.ERROR) == []


async def test_a_way_is_looked_for_anew_while_the_target_is_listed(
    tmp_path: Path, run: FakeRun, started: list[Following]
) -> None:
    """1 -> 2 -> 3 -> 4: version 2 is gone; 4 is reached from 1 by the way that is left."""
    with RunServer(run) as server:
        following = Following(tmp_path / "out", run, server, config=PATIENT)
        started.append(following)
        assert (await following.update()).version == 1
        chain, made = three_more_steps(run)
        gone, leaving = {*made[2].blobs}, threading.Lock()

        def leave(request: Request, data: bytes) -> Iterable[Action] | None:
            if request.digest not in gone:
                return None
            with leaving:
                if run.head is not None and run.head.ref(2) is not None:
                    run.amend(versions=[ref for ref in run.head.versions if ref.version > 2])
                    for digest in only_in(run, 2):
                        run.blobs.pop(digest, None)
            return [response(404)]

        server.fault = leave
        run.announce(chain)
        update = await following.update()
    assert update.version == 4
    assert {path: (update.path / path).read_bytes() for path in run.files[4]} == run.files[4]
    assert following.log.of(EventKind.READY)[-1].via == ()
    assert following.log.of(EventKind.ERROR) == []
    assert following.log.of(EventKind.SUPERSEDED) == []

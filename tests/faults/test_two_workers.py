"""Several workers, as processes, on one directory: one leads, the others share or say why not."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.processes import Event, Process, Processes
from loadtest.topology import shardcast
from shardcast.errors import BusyError
from shardcast.keys import public_pem
from shardcast.protocol.head import VersionRef
from tests.fakes import Action, FakeRun, Request, Until, new_signer
from tests.faults.criteria import SHARD, assert_version, criteria, published
from tests.faults.machine import stopped
from tests.faults.upstream import Flipped, Head, Play, Upstream
from tests.faults.world import needed_bytes, small_version, worker
from tests.unit.worker.conftest import QUICK

WAIT_S = 60


@dataclass
class Place:
    """One directory and whoever works on it.

    Attributes:
        root: Everything lies below it.
        run: The run.
        upstream: Where all of them pull from.
        processes: Ends what was started.
    """

    root: Path
    run: FakeRun
    upstream: Upstream
    processes: Processes

    @property
    def out(self) -> Path:
        return self.root / "out"

    def start(
        self,
        command: str,
        name: str,
        *options: str,
        run: FakeRun | None = None,
        key: bytes = b"",
        upstream: Upstream | None = None,
    ) -> Process:
        """Start ``pull`` or ``follow`` on the directory; ``follow`` notes each hook's version."""
        run = run or self.run
        pem = self.root / f"{name}.pub"
        pem.write_bytes(public_pem(key or run.keys[0]))
        hook = ["--on-update", f"echo $SHARDCAST_VERSION >> {self.root / name}.hooks"]
        argv = shardcast(
            command, run.name, "--from", (upstream or self.upstream).url, "--out", self.out, "--pubkey", pem,
            "--durability", "none", "--json", *(hook if command == "follow" else ()), *options,
        )  # fmt: skip
        return self.processes.start(argv, name=name)

    def hooks(self, name: str) -> list[str]:
        path = self.root / f"{name}.hooks"
        return path.read_text().split() if path.exists() else []

    def wait_hook(self, process: Process, number: int) -> None:
        """Wait until a follower's hook has run for a version: that is after ``committed``."""
        deadline = time.monotonic() + WAIT_S
        while self.hooks(process.name)[-1:] != [str(number)]:
            assert time.monotonic() < deadline, self.hooks(process.name)
            assert not process.watch_exit(0.02), process.describe("ended")

    def hold(self, after: int, ref: VersionRef) -> threading.Event:
        """Answer no shard of a version after so many; return the event that lets go."""
        go, shards, given = threading.Event(), set(self.run.shard_digests(ref.version)), 0

        def fault(request: Request, data: bytes) -> Iterable[Action] | None:
            nonlocal given
            if request.digest not in shards or go.is_set():
                return None
            given += 1
            return None if given <= after else [Until(go), *self.upstream.good(request, data)]

        self.upstream.fault = fault
        return go

    def wait_blobs(self, condition: Callable[[list[str]], bool]) -> None:
        self.upstream.wait_for(lambda: condition(self.upstream.blob_requests))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    run = FakeRun()
    run.publish(small_version(1))
    with Upstream(run) as upstream, Processes(tmp_path / "logs") as processes:
        yield Place(tmp_path, run, upstream, processes)


def committed(process: Process, number: int) -> Event:
    return process.wait_event(
        "committed", timeout=WAIT_S, where=lambda event: event["version"] == number
    )


def waits_for(process: Process, leader: Process) -> None:
    event = process.wait_event(
        "waiting", timeout=WAIT_S, where=lambda e: f"process {leader.pid};" in e["message"]
    )
    assert event["code"] == "busy"


# --- sharing ----------------------------------------------------------------------------------


@pytest.mark.fault(20)
def test_a_pull_waits_for_another_and_shares_its_version(place: Place) -> None:
    newest = place.run.head
    assert newest is not None
    go = place.hold(2, newest.versions[0])
    with criteria(published(place.run)) as verdict:
        verdict.watch(place.out)
        leader = place.start("pull", "leader")
        place.wait_blobs(lambda asked: len(asked) > 5)
        guests = [place.start("pull", f"guest-{n}") for n in range(2)]
        for guest in guests:
            waits_for(guest, leader)
        go.set()
        assert [process.wait(timeout=WAIT_S) for process in (leader, *guests)] == [0, 0, 0]
        paths = {committed(process, 1)["path"] for process in (leader, *guests)}
        assert paths == {str(place.out / "versions" / "000001")}
        assert [committed(guest, 1)["bytes_fetched"] for guest in guests] == [0, 0]
        verdict.recovered(place.out, 1)
        verdict.fetched(place.upstream.sent_for(place.run), needed_bytes(place.run), failures=0)
        verdict.waive("b", "nothing fails")
        verdict.waive("c", "the guests are the others")


@pytest.mark.fault(20)
def test_followers_share_each_version_and_run_a_hook_of_their_own(place: Place) -> None:
    first = place.start("follow", "first")
    committed(first, 1)
    others = [place.start("follow", f"other-{n}") for n in range(2)]
    for other in others:
        waits_for(other, first)
    for number in (2, 3):
        place.run.publish(small_version(number))
        for process in (first, *others):
            event = committed(process, number)
            assert event["path"] == str(place.out / "versions" / f"{number:06d}")
            assert event["bytes_fetched"] == 0 or process is first
    pulled = place.start("pull", "pull")
    assert pulled.wait(timeout=WAIT_S) == 0
    assert committed(pulled, 3)["bytes_fetched"] == 0
    for process in (first, *others):
        place.wait_hook(process, 3)
    assert all(process.stop() for process in (*others, first))
    assert place.hooks("first") == ["1", "2", "3"]
    assert place.hooks("other-0") == place.hooks("other-1") == ["2", "3"]
    assert place.upstream.sent_for(place.run) == needed_bytes(place.run)


@pytest.mark.fault(20)
def test_a_leader_that_ends_hands_over(place: Place) -> None:
    first = place.start("follow", "first")
    committed(first, 1)
    second = place.start("follow", "second")
    waits_for(second, first)
    assert first.stop()
    place.run.publish(small_version(2))
    assert committed(second, 2)["bytes_fetched"] > 0
    place.wait_hook(second, 2)
    assert second.stop()
    assert place.hooks("second") == ["2"]
    assert_version(place.out, published(place.run), 2)


# --- a leader that dies, or stops -------------------------------------------------------------


@pytest.mark.fault(20)
@pytest.mark.parametrize("seed", range(3))
def test_a_leader_killed_at_any_moment_is_replaced(place: Place, seed: int) -> None:
    """By one of the two others, who goes on with the shards that were verified."""
    dice = random.Random(seed)
    with criteria(published(place.run)) as verdict:
        verdict.watch(place.out)
        workers = {"a": place.start("follow", "a")}
        committed(workers["a"], 1)
        for name in "bc":
            workers[name] = place.start("follow", name)
            waits_for(workers[name], workers["a"])
        leader, connections = "a", 0
        for number in (2, 3):
            before = len(place.upstream.blob_requests)
            ref = place.run.publish(small_version(number))
            moment = dice.randrange(1, 10)
            go = place.hold(max(moment - 3, 0), ref)  # three documents come first
            place.wait_blobs(lambda asked, n=before + moment: len(asked) >= n)  # type: ignore[misc]
            workers.pop(leader).kill()
            connections += 2
            go.set()
            for process in workers.values():
                committed(process, number)
            leader = next(
                name
                for name, process in workers.items()
                if any(e["bytes_fetched"] for e in process.events("committed"))
            )
        assert_version(place.out, published(place.run), 3)
        verdict.recovered(place.out, 3)
        verdict.fetched(
            place.upstream.sent_for(place.run), needed_bytes(place.run), failures=connections
        )
        verdict.waive("b", "nobody told of its own death")
        verdict.waive("c", "the others are in the same directory")
        (last,) = workers.values()
        place.wait_hook(last, 3)
        assert last.stop()
        assert place.hooks(last.name) == ["2", "3"]


@pytest.mark.fault(20)
def test_a_leader_that_is_stopped_is_waited_for_and_named(place: Place) -> None:
    newest = place.run.head
    assert newest is not None
    go = place.hold(1, newest.versions[0])
    with criteria(published(place.run)) as verdict:
        verdict.watch(place.out)
        leader = place.start("follow", "leader")
        place.wait_blobs(lambda asked: len(asked) > 4)
        with stopped(leader.pid):
            guest = place.start("follow", "guest")
            waits_for(guest, leader)
            with pytest.raises(BusyError, match=rf"process {leader.pid}, .* no progress") as busy:
                worker(place.out, place.run, place.upstream.url, config=QUICK).pull()
            assert not (place.out / "current").exists()
        go.set()
        committed(leader, 1)
        committed(guest, 1)
        verdict.named(
            [f"{busy.value.source}: {busy.value}"], str(place.out), f"process {leader.pid}"
        )
        verdict.recovered(place.out, 1)
        verdict.fetched(
            place.upstream.sent_for(place.run), needed_bytes(place.run), failures=0, hedged=0
        )
        verdict.waive("c", "the guest is the other")
        assert guest.stop()
        assert leader.stop()


# --- a leader that has only bad sources -------------------------------------------------------


@contextmanager
def lying(run: FakeRun, number: int) -> Iterator[Upstream]:
    """A source whose documents are right, and every shard of a version wrong."""
    with Upstream(run) as upstream:
        wrong = frozenset(run.shard_digests(number))
        upstream.play(Play((Head(), Flipped(0)), on=wrong, times=None))
        yield upstream


@pytest.mark.fault(20)
@pytest.mark.parametrize("command", ["pull", "follow"])
def test_a_leader_that_gets_nothing_gives_the_lead_to_who_waits(place: Place, command: str) -> None:
    shards = set(place.run.shard_digests(1))
    papers = sum(len(data) for digest, data in place.run.blobs.items() if digest not in shards)
    with lying(place.run, 1) as upstream, criteria(published(place.run)) as verdict:
        verdict.watch(place.out)
        first = place.start("follow", "first", upstream=upstream)
        first.wait_event("error", timeout=WAIT_S)
        second = place.start(command, "second")
        waits_for(second, first)
        assert committed(second, 1)["bytes_fetched"] > 0
        if command == "pull":
            assert second.wait(timeout=WAIT_S) == 0
        else:
            waits_for(first, second)
            assert committed(first, 1)["bytes_fetched"] == 0
            place.run.publish(small_version(2))  # and the second one leads on
            assert committed(second, 2)["bytes_fetched"] > 0
            assert committed(first, 2)["bytes_fetched"] == 0
            assert second.stop()
        verdict.named([str(first.events("error")[0])], upstream.url)
        verdict.recovered(place.out, 2 if command == "follow" else 1)
        needed = needed_bytes(place.run) - papers  # the first one has fetched them
        verdict.fetched(place.upstream.sent_for(place.run), needed, failures=0)
        verdict.waive("c", "the second one is the other")
        assert first.stop()


@pytest.mark.fault(20)
def test_two_that_get_nothing_take_turns_no_more_often_than_they_rest(place: Place) -> None:
    with lying(place.run, 1) as upstream:
        names = ("a", "b")
        workers = [place.start("follow", name, upstream=upstream) for name in names]
        for worker_ in workers:  # both have led, and have given the lead away
            worker_.wait_event("error", timeout=WAIT_S)
        for one, other in (workers, workers[::-1]):
            waits_for(one, other)
        upstream.heal()
        for worker_ in workers:
            committed(worker_, 1)
            errors, waits = worker_.events("error"), worker_.events("waiting")
            assert len(waits) <= len(errors) + 1
            assert {event["code"] for event in errors} == {"integrity"}
        assert all(worker_.stop() for worker_ in workers)
    assert_version(place.out, published(place.run), 1)


# --- what is never shared ---------------------------------------------------------------------


@pytest.mark.fault(20)
def test_a_guest_takes_nothing_that_its_own_keys_refuse(place: Place) -> None:
    stranger = new_signer().public_key
    leader = place.start("follow", "leader")
    committed(leader, 1)
    pulled = place.start("pull", "pull", key=stranger)
    following = place.start("follow", "following", key=stranger)
    waits_for(following, leader)
    place.run.publish(small_version(2))
    committed(leader, 2)
    assert pulled.wait(timeout=WAIT_S) == 12
    assert pulled.events("committed") == []
    following.wait_event(
        "source", timeout=WAIT_S, where=lambda e: e["source"] == str(place.out / "head.json")
    )
    assert following.stop()
    assert following.events("committed") == []
    assert place.hooks("following") == []
    assert leader.stop()
    trust = (place.out / "state" / "trust.json").read_bytes()
    assert stranger.hex().encode() not in trust
    assert worker(place.out, place.run, place.upstream.url).pull().version == 2


@pytest.mark.fault(20)
@pytest.mark.parametrize("command", ["pull", "follow"])
def test_another_run_is_a_usage_error_also_while_somebody_leads(place: Place, command: str) -> None:
    leader = place.start("follow", "leader")
    committed(leader, 1)
    other = FakeRun("other")
    other.publish(small_version(1))
    place.upstream.runs["other"] = other
    stray = place.start(command, "stray", run=other)
    assert stray.wait(timeout=WAIT_S) == 2
    error = stray.events("error")[-1]
    assert "belongs to run 'policy'" in error["message"]
    assert leader.stop()


@pytest.mark.fault(20)
def test_a_damaged_version_is_not_shared(place: Place) -> None:
    """A guest looks at the files as it does at its own, and the next leader mends them."""
    leader = place.start("follow", "leader")
    path = Path(committed(leader, 1)["path"])
    with open(path / "model-00001-of-00002.safetensors", "r+b") as file:
        file.write(os.urandom(64))
    guest = place.start("pull", "guest")
    waits_for(guest, leader)
    os.kill(leader.pid, signal.SIGKILL)
    assert guest.wait(timeout=WAIT_S) == 0
    assert 0 < committed(guest, 1)["bytes_fetched"] <= SHARD
    assert_version(place.out, published(place.run), 1)

"""The pull schedule, played with a fake clock: retries, bans, the end game, giving up."""

from __future__ import annotations

import random

import pytest

from shardcast.cancel import TransferCancelledError
from shardcast.config import NetConfig
from shardcast.errors import (
    DiskFullError,
    IntegrityError,
    LimitError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    StallError,
)
from shardcast.fetch import Branch, Fetched, MemorySink, Transfer
from shardcast.protocol.digest import digest_of
from shardcast.schedule import Finished, Flight, Job, Notice, Schedule, Wait
from shardcast.selector import Selector

SIZE = 1 << 20
DATA = bytes(SIZE)
CONFIG = NetConfig()


class Play:
    """A schedule over sources, a clock to turn, and what it told."""

    def __init__(self, *sources: str, config: NetConfig = CONFIG, seed: int = 1) -> None:
        self.now = 0.0
        rng = random.Random(seed)
        self.selector = Selector(
            sources, clock=lambda: self.now, rng=rng, limit=config.connections_per_source
        )
        self.notices: list[Notice] = []
        self.schedule = Schedule(
            sources,
            self.selector,
            config,
            clock=lambda: self.now,
            rng=rng,
            notify=self.notices.append,
        )

    def add(self, name: str = "shard 1", data: bytes = DATA) -> Job:
        self.sink = MemorySink()
        job = Job(Transfer("run", digest_of(data), len(data), self.sink, limit=SIZE), name)
        self.schedule.add(job)
        return job

    def start(self) -> Flight:
        """The next flight, however long one must wait for it."""
        for _ in range(10_000):
            step = self.schedule.next()
            if isinstance(step, Flight):
                return step
            assert isinstance(step, Wait), step
            self.now += step.seconds
        raise AssertionError("nothing ever starts")

    def receive(self, flight: Flight, count: int, data: bytes = DATA) -> None:
        transfer = flight.transfer
        assert transfer is not None
        transfer.total = SIZE
        transfer.receive(flight.source, memoryview(data)[:count])

    def finish(self, flight: Flight, seconds: float = 0.1, *, fill: bool = False) -> None:
        self.now += seconds
        transfer = flight.transfer
        assert transfer is not None
        count = SIZE - transfer.offset
        self.receive(flight, count)
        transfer.finish(flight.source)
        fetched = Fetched(count, seconds, fill)
        if isinstance(transfer, Branch) and not flight.job.transfer.adopt(transfer):
            self.schedule.late(flight, fetched)
        else:
            self.schedule.succeeded(flight, fetched)

    def hedge(self) -> Flight:
        """The second request that a free thread begins now."""
        flight = self.schedule.next()
        assert isinstance(flight, Flight)
        assert flight.hedge
        self.schedule.branched(flight, flight.job.transfer.branch(whole=flight.whole))
        return flight

    def lost(self, flight: Flight) -> None:
        """A request ends because it was cancelled."""
        assert flight.cancel.cancelled
        self.schedule.failed(flight, TransferCancelledError("cancelled", source=flight.source))

    def end(self) -> ShardcastError | None:
        """Play until it is finished, failing what starts; return the error."""
        for _ in range(100_000):
            step = self.schedule.next()
            if isinstance(step, Finished):
                return step.error
            if isinstance(step, Flight):
                self.now += 0.01
                self.schedule.failed(step, NetworkError("down", source=step.source))
            else:
                self.now += step.seconds
        raise AssertionError("it never ends")


def test_jobs_start_in_order_and_spread_over_sources() -> None:
    play = Play("a", "b")
    jobs = [play.add(f"shard {n}") for n in range(6)]
    flights = [play.start() for _ in range(4)]
    assert [flight.job for flight in flights] == jobs[:4]
    assert sorted(flight.source for flight in flights) == ["a", "a", "b", "b"]
    assert isinstance(play.schedule.next(), Wait)
    assert play.schedule.unfinished == 6


def test_it_finishes_when_all_is_done_and_no_more_comes() -> None:
    play = Play("a")
    play.add()
    play.finish(play.start())
    assert isinstance(play.schedule.next(), Wait)
    play.schedule.close()
    assert play.schedule.next() == Finished(None)


def test_a_failed_transfer_keeps_what_it_has_and_goes_on_elsewhere() -> None:
    play = Play("a", "b")
    job = play.add()
    first = play.start()
    play.receive(first, 1000)
    play.schedule.failed(first, NetworkError("reset", source=first.source))
    second = play.start()
    assert second.job is job
    assert second.source != first.source
    assert job.transfer.offset == 1000
    assert play.notices[0].source == first.source
    assert not play.notices[0].banned


def test_a_wrong_blob_bans_its_source_and_is_fetched_again_elsewhere() -> None:
    play = Play("a", "b")
    job = play.add()
    first = play.start()
    play.receive(first, SIZE)
    play.schedule.failed(first, IntegrityError("wrong", source=first.source))
    assert play.notices == [Notice(first.source, play.notices[0].error, banned=True)]
    assert job.transfer.offset == 0
    for _ in range(50):
        play.add()
    for _ in range(50):
        flight = play.start()
        assert flight.source != first.source
        play.finish(flight)


def test_a_wrong_blob_of_two_sources_bans_nobody_and_comes_from_one() -> None:
    play = Play("a", "b")
    job = play.add()
    first = play.start()
    play.receive(first, 1000)
    play.schedule.failed(first, NetworkError("reset", source=first.source))
    second = play.start()
    play.receive(second, SIZE - 1000)
    assert job.transfer.stitched
    play.schedule.failed(second, IntegrityError("wrong", source=second.source))
    assert not any(notice.banned for notice in play.notices)
    assert job.transfer.offset == 0
    # From now on it is not stitched again: half of it means from the start, whoever is asked.
    third = play.start()
    play.receive(third, 5000)
    play.schedule.failed(third, NetworkError("reset", source=third.source))
    play.start()
    assert job.transfer.offset == 0


def test_the_only_source_is_asked_again_after_a_wrong_blob() -> None:
    play = Play("a")
    play.add()
    first = play.start()
    play.receive(first, SIZE)
    play.schedule.failed(first, IntegrityError("flipped", source="a"))
    play.finish(play.start())
    play.schedule.close()
    assert play.schedule.next() == Finished(None)
    assert play.now < 5


def test_a_blob_that_is_not_there_yet_is_tried_elsewhere_and_again_with_growing_pauses() -> None:
    play = Play("a", "b")
    play.add()
    asked: list[tuple[float, str]] = []
    while play.now < 50:
        flight = play.start()
        asked.append((play.now, flight.source))
        error = SourceStatusError("answers 404", source=flight.source, status=404)
        play.schedule.failed(flight, error)
    assert {source for _, source in asked[:2]} == {"a", "b"}  # no pause before the other one
    assert len(asked) < 60  # two sources, pauses of 5 s on average at the end
    late = [now for now, _ in asked if now > 20]
    assert len({round(now, 3) for now in late}) == len(late)  # jitter
    assert play.selector.rating("a").failures == 0


def test_a_fast_source_that_refuses_a_blob_does_not_keep_a_slow_one_from_it() -> None:
    """Else one relay that is fast and withholds some shards holds up the whole pull."""
    play = Play("fast", "slow")
    play.selector.started("fast")
    play.selector.succeeded("fast", SIZE, 0.1)
    play.selector.started("slow")
    play.selector.succeeded("slow", SIZE, 2.0)
    play.add()
    refusals = 0
    while (flight := play.start()).source == "fast":
        refusals += 1
        error = SourceStatusError("not here", source="fast", status=404)
        play.schedule.failed(flight, error)
    assert refusals == 2


def test_a_404_of_one_blob_does_not_keep_others_waiting() -> None:
    play = Play("a")
    play.add("missing")
    other = play.add("other")
    flight = play.start()
    play.schedule.failed(flight, SourceStatusError("answers 404", source="a", status=404))
    second = play.schedule.next()
    assert isinstance(second, Flight)
    assert second.job is other


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured_for_the_blob_and_capped(status: int) -> None:
    play = Play("a")
    play.add()
    for asked_for, least, most in ((5.0, 5.0, 7.0), (60.0, 30.0, 32.0)):
        begun = play.now
        busy = SourceStatusError("busy", source="a", status=status, retry_after=asked_for)
        play.schedule.failed(play.start(), busy)
        flight = play.start()
        assert least <= play.now - begun <= most
        play.schedule.failed(flight, SourceStatusError("busy", source="a", status=status))


def test_a_source_that_is_always_busy_rests() -> None:
    play = Play("a")
    for n in range(100):
        play.add(f"shard {n}")
    for _ in range(10):
        busy = SourceStatusError("busy", source="a", status=503, retry_after=1.0)
        play.schedule.failed(play.start(), busy)
    assert play.now > 5  # without rests all ten would be refused at once


def test_errors_of_a_server_count_against_it() -> None:
    play = Play("a", "b")
    for n in range(200):
        play.add(f"shard {n}")
    asked = {"a": 0, "b": 0}
    for _ in range(200):
        flight = play.start()
        asked[flight.source] += 1
        if flight.source == "a":
            play.schedule.failed(flight, SourceStatusError("oops", source="a", status=500))
        else:
            play.finish(flight)
    assert asked["a"] < 6


def test_a_source_that_announces_too_much_is_at_fault_not_the_pull() -> None:
    play = Play("a", "b")
    play.add()
    first = play.start()
    play.schedule.failed(first, LimitError("endless", source=first.source))
    second = play.start()
    assert second.source != first.source


def test_a_full_disk_ends_it_at_once() -> None:
    play = Play("a", "b")
    for n in range(4):
        play.add(f"shard {n}")
    first, second = play.start(), play.start()
    play.schedule.failed(first, DiskFullError("full"))
    assert second.cancel.cancelled
    assert isinstance(play.schedule.next(), Wait)
    play.schedule.failed(second, TransferCancelledError("cancelled"))
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, DiskFullError)


def test_a_job_that_comes_after_the_end_changes_nothing() -> None:
    play = Play("a")
    play.schedule.abort(TransferCancelledError("cancelled"))
    play.add()
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, TransferCancelledError)


# --- giving up --------------------------------------------------------------------------------


def test_it_gives_up_without_gain_and_names_each_source_and_its_last_failure() -> None:
    play = Play("a", "b")
    play.add("shard 7 (model.safetensors) of version 3")
    play.add("shard 8")
    error = play.end()
    assert isinstance(error, NetworkError)
    assert 60 <= play.now < 75
    assert "shard 7 (model.safetensors) of version 3 and 1 more for 60 s" in error.message
    assert "a: down" in error.message
    assert "b: down" in error.message


def test_a_verified_blob_is_a_gain() -> None:
    play = Play("a")
    play.add("shard 1")
    play.add("shard 2")
    play.now = 50
    play.finish(play.start())
    assert isinstance(play.end(), NetworkError)
    assert 110 <= play.now < 125


def test_bytes_that_arrive_are_a_gain() -> None:
    """A slow link needs longer for a shard than the patience for one without any byte."""
    play = Play("a")
    play.add()
    flight = play.start()
    for _ in range(50):
        play.now += 10
        play.receive(flight, 1000)
        assert isinstance(play.schedule.next(), Wait)
    play.finish(flight)
    play.schedule.close()
    assert play.schedule.next() == Finished(None)


def test_a_transfer_without_bytes_is_no_gain() -> None:
    play = Play("a")
    play.add()
    flight = play.start()
    for _ in range(700):
        play.now += 0.1
        play.schedule.next()
    assert flight.cancel.cancelled
    play.schedule.failed(flight, TransferCancelledError("cancelled"))
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert "a: not asked" in str(step.error)


def test_a_link_that_breaks_often_is_resumed_for_as_long_as_it_gains() -> None:
    play = Play("a")
    play.add()
    while play.now < 500:
        flight = play.start()
        play.now += 30
        play.receive(flight, 40_000)
        play.schedule.failed(flight, StallError("stalled", source="a"))
    play.finish(play.start())


def test_gains_that_never_make_a_blob_do_not_keep_it_alive_for_ever() -> None:
    play = Play("a")
    play.add()
    step = play.schedule.next()
    while not isinstance(step, Finished):
        if isinstance(step, Flight):
            play.now += 5
            play.receive(step, 1)
            play.schedule.failed(step, NetworkError("closed", source="a"))
        else:
            play.now += step.seconds
        step = play.schedule.next()
    assert isinstance(step.error, NetworkError)
    assert 600 < play.now < 700


@pytest.mark.parametrize("sources", [["a"], ["a", "b", "c"]])
def test_where_all_sources_send_wrong_bytes_it_ends_soon_and_names_them(sources: list[str]) -> None:
    play = Play(*sources)
    for n in range(20):
        play.add(f"shard {n}")
    step = play.schedule.next()
    while not isinstance(step, Finished):
        if isinstance(step, Flight):
            play.now += 0.1
            play.receive(step, SIZE)
            error = IntegrityError(f"{step.source} is wrong", source=step.source)
            play.schedule.failed(step, error)
        else:
            play.now += step.seconds
        step = play.schedule.next()
    assert isinstance(step.error, IntegrityError)
    assert step.error.source in sources
    assert all(f"{source} is wrong" in step.error.message for source in sources)
    assert play.now < 5


def test_wrong_blobs_between_good_ones_do_not_end_it() -> None:
    play = Play("a")
    for n in range(10):
        play.add(f"shard {n}")
    for n in range(20):
        flight = play.start()
        if n % 2:
            play.finish(flight)
        else:
            play.now += 0.1
            play.receive(flight, SIZE)
            play.schedule.failed(flight, IntegrityError("wrong", source="a"))
    play.schedule.close()
    assert play.schedule.next() == Finished(None)


def test_wrong_blobs_that_came_at_once_do_not_end_it() -> None:
    play = Play("a")
    play.add("shard 1")
    play.add("shard 2")
    flights = [play.start(), play.start()]
    play.now += 0.1
    for flight in flights:
        play.receive(flight, SIZE)
        play.schedule.failed(flight, IntegrityError("wrong", source="a"))
    play.finish(play.start())
    play.finish(play.start())
    play.schedule.close()
    assert play.schedule.next() == Finished(None)


def test_a_new_job_begins_with_full_patience() -> None:
    play = Play("a")
    play.now = 1000
    play.add()
    assert isinstance(play.schedule.next(), Flight)


# --- the end game -----------------------------------------------------------------------------


def rated(play: Play, *sources: str, seconds: float = 0.1) -> None:
    """Let sources deliver something, so that their rate is known."""
    left = set(sources)
    while left:
        play.add("warm-up")
        flight = play.start()
        play.finish(flight, seconds)
        left.discard(flight.source)


def test_a_lagging_last_transfer_goes_on_elsewhere_without_a_byte_fetched_twice() -> None:
    play = Play("a", "b")
    rated(play, "a", "b")
    job = play.add()
    slow = play.start()
    play.receive(slow, 10_000)
    assert isinstance(play.schedule.next(), Wait)
    hurried = [slow.cancel.cancelled]
    play.now += 1.5
    play.schedule.next()
    assert [*hurried, slow.cancel.cancelled] == [False, True]
    play.schedule.failed(slow, TransferCancelledError("cancelled", source=slow.source))
    fast = play.start()
    assert fast.job is job
    assert fast.source != slow.source
    assert job.transfer.offset == 10_000
    play.finish(fast)
    assert job.transfer.received == SIZE
    rating = play.selector.rating(slow.source)
    assert rating.failures == 0
    assert (rating.bandwidth or 0) < 20_000


def test_a_silent_last_transfer_goes_on_elsewhere_and_counts_against_its_source() -> None:
    play = Play("a", "b")
    job = play.add()
    slow = play.start()
    play.now += 2.5
    play.schedule.next()
    assert slow.cancel.cancelled
    play.schedule.failed(slow, TransferCancelledError("cancelled", source=slow.source))
    assert play.selector.rating(slow.source).failures == 1
    fast = play.start()
    assert fast.source != slow.source
    assert fast.job is job


def test_nothing_is_overtaken_while_there_is_other_work() -> None:
    play = Play("a", "b")
    rated(play, "a", "b")
    for n in range(5):
        play.add(f"shard {n}")
    flights = [play.start() for _ in range(4)]
    play.now += 10
    play.schedule.next()
    assert not any(flight.cancel.cancelled for flight in flights)


def test_nothing_is_overtaken_where_no_other_source_works() -> None:
    play = Play("a", "b")
    rated(play, "a", "b")
    play.add()
    slow = play.start()
    other = "b" if slow.source == "a" else "a"
    play.selector.started(other)
    play.selector.failed(other)
    play.receive(slow, 1000)
    play.now += 10
    play.schedule.next()
    assert not slow.cancel.cancelled


def test_a_transfer_at_the_common_rate_is_not_overtaken() -> None:
    play = Play("a", "b")
    rated(play, "a", "b", seconds=10)
    play.add()
    flight = play.start()
    for _ in range(9):
        play.now += 1
        play.receive(flight, SIZE // 10)
        play.schedule.next()
    assert not flight.cancel.cancelled


def test_a_blob_is_taken_from_each_silent_source_once() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    play = Play(*names)
    play.add()
    asked = []
    for _ in names[1:]:
        flight = play.start()
        asked.append(flight.source)
        play.now += 3
        play.schedule.next()
        assert flight.cancel.cancelled
        play.schedule.failed(flight, TransferCancelledError("cancelled"))
    last = play.start()
    assert sorted([*asked, last.source]) == names
    play.now += 10
    play.schedule.next()
    assert not last.cancel.cancelled  # no other source works


def test_a_wrong_blob_is_wrong_also_when_it_was_just_overtaken() -> None:
    play = Play("a", "b")
    job = play.add()
    slow = play.start()
    play.now += 2.5
    play.schedule.next()
    assert slow.cancel.cancelled
    play.receive(slow, SIZE)
    play.schedule.failed(slow, IntegrityError("wrong", source=slow.source))
    assert job.transfer.offset == 0
    assert play.notices[-1].banned


def test_a_blob_that_came_after_all_is_taken() -> None:
    play = Play("a", "b")
    play.add()
    slow = play.start()
    play.now += 2.5
    play.schedule.next()
    play.finish(slow)
    play.schedule.close()
    assert play.schedule.next() == Finished(None)


def test_progress_counts_what_is_on_its_way() -> None:
    play = Play("a")
    play.add()
    flight = play.start()
    play.receive(flight, 1234)
    assert play.schedule.in_flight == 1234
    play.schedule.failed(flight, NetworkError("reset", source="a"))
    assert play.schedule.in_flight == 1234

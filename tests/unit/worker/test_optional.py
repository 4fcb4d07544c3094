"""When a delta blob is given up."""

from __future__ import annotations

import pytest

from shardcast.config import NetConfig
from shardcast.errors import (
    IntegrityError,
    LimitError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    WrongAnswerError,
)
from shardcast.fetch import MemorySink, Transfer
from shardcast.optional import fault, is_answer, is_lost, patience
from shardcast.protocol.digest import digest_of
from shardcast.schedule import Flight, Job, Wait
from shardcast.selector import Rating
from tests.unit.worker.test_schedule import DATA, SIZE, Play

CONFIG = NetConfig()


def rating(failures: int = 0, *, bandwidth: float | None = None) -> Rating:
    return Rating(1.0, bandwidth, 1.0, 0, failures, banned=False)


def status(code: int) -> SourceStatusError:
    return SourceStatusError("no", status=code)


@pytest.mark.parametrize(
    ("error", "in_a_row", "answered", "counts"),
    [
        (IntegrityError("wrong"), 5, True, 2),
        (status(404), 0, False, 1),
        (status(500), 9, False, 1),
        (status(503), 0, False, 0),
        (status(429), 0, False, 0),
        (LimitError("huge"), 3, False, 1),
        (WrongAnswerError("a part"), 3, False, 1),
        (NetworkError("reset"), 1, False, 1),
        (NetworkError("reset"), 2, False, 0),  # the source is gone
        (NetworkError("cut off"), 2, True, 1),
    ],
)
def test_what_counts(error: ShardcastError, in_a_row: int, answered: bool, counts: int) -> None:
    assert fault(error, in_a_row, answered=answered) == counts


@pytest.mark.parametrize(
    ("faults", "failures", "lost"),
    [
        ({"a": 3}, {"a": 0}, True),
        ({"a": 2}, {"a": 0}, False),
        ({"a": 3}, {"a": 0, "b": 0}, False),  # b has not been asked
        ({"a": 3, "b": 3}, {"a": 0, "b": 0}, True),
        ({"a": 3}, {"a": 0, "b": 2}, True),  # b is dead
        ({}, {"a": 2, "b": 9}, False),  # the network is gone: no fault of the blob
    ],
)
def test_every_live_source_has_its_say(
    faults: dict[str, int], failures: dict[str, int], lost: bool
) -> None:
    assert is_lost(faults, {url: rating(n) for url, n in failures.items()}) is lost


# --- who is put off ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instead", "sources", "seconds"),
    [
        (None, [rating()], 15.0),  # a quarter of the 60 s after which a pull fails
        (0, [rating()], 2.0),
        (50_000_000, [rating()], 5.0),  # nothing measured: 10 MB/s are believed
        (50_000_000, [rating(bandwidth=5e6)], 10.0),
        (50_000_000, [rating(bandwidth=5e6), rating(bandwidth=5e6)], 5.0),
        (50_000_000, [rating(bandwidth=5e6), rating(2, bandwidth=5e9)], 10.0),  # that one is dead
        (50_000_000, [rating(bandwidth=5e9)], 2.0),
        (62_000_000_000, [rating(bandwidth=70e6)], 15.0),
    ],
)
def test_it_is_waited_for_as_long_as_doing_without_takes(
    instead: int | None, sources: list[Rating], seconds: float
) -> None:
    assert patience(instead, sources, CONFIG) == seconds


def test_a_network_that_is_gone_has_said_nothing() -> None:
    assert is_answer(status(503))
    assert is_answer(IntegrityError("wrong"))
    assert not is_answer(NetworkError("unreachable"))


class PutOff(Play):
    """Sources, two delta blobs, and what it does with them."""

    def __init__(self, instead: int | None, *sources: str) -> None:
        super().__init__(*sources or ("a",))
        self.jobs = [self.optional(f"delta {n}", instead) for n in range(2)]
        self.given_up: list[Job] = []

    def optional(self, name: str, instead: int | None) -> Job:
        transfer = Transfer("run", digest_of(DATA), SIZE, MemorySink(), limit=SIZE)
        job = Job(transfer, name, optional=True, instead=instead)
        self.schedule.add(job)
        return job

    def play(self, error: ShardcastError, until: float) -> int:
        """Answers whatever is asked with an error; returns how often that was."""
        asked = 0
        while self.now < until and self.schedule.unfinished:
            step = self.schedule.next()
            self.given_up += self.schedule.take_lost()
            if isinstance(step, Flight):
                asked += 1
                self.schedule.failed(step, error)
                self.given_up += self.schedule.take_lost()
            elif isinstance(step, Wait) and self.schedule.unfinished:
                self.now += step.seconds
        return asked


@pytest.mark.parametrize(
    ("instead", "seconds"),
    [(10_000_000, 2.0), (25_000_000, 5.0), (400_000_000, 15.0), (None, 15.0)],
)
def test_all_that_is_put_off_is_given_up_in_time(instead: int | None, seconds: float) -> None:
    """Together, for what both cost together: one alone would be waited for half as long."""
    play = PutOff(instead)
    play.play(SourceStatusError("busy", status=503, retry_after=1.0), until=seconds - 0.5)
    assert play.given_up == []
    asked = play.play(SourceStatusError("busy", status=503, retry_after=1.0), until=100.0)
    assert set(play.given_up) == set(play.jobs)
    assert seconds < play.now < seconds + 1.0
    assert asked <= 4


def test_a_long_retry_after_makes_nobody_wait_longer() -> None:
    play = PutOff(10_000_000)
    assert play.play(SourceStatusError("full", status=503, retry_after=30.0), until=100.0) == 2
    assert set(play.given_up) == set(play.jobs)
    assert play.now < 3.0


def test_a_request_that_hangs_after_that_is_cancelled() -> None:
    play = PutOff(10_000_000)
    play.play(SourceStatusError("busy", status=503, retry_after=1.0), until=0.5)
    hanging = [play.start(), play.start()]
    play.now += 3.0
    assert isinstance(play.schedule.next(), Wait)
    assert set(play.schedule.take_lost()) == set(play.jobs)
    for flight in hanging:
        play.lost(flight)
    play.schedule.close()
    assert play.end() is None


def test_a_source_that_was_not_asked_yet_may_take_its_time() -> None:
    play = PutOff(10_000_000, "a", "b")
    put_off: set[Job] = set()
    asked: set[Job] = set()
    while not put_off & asked:  # a puts it off, b says nothing yet
        flight = play.start()
        if flight.source == "a":
            play.schedule.failed(flight, SourceStatusError("busy", status=503, retry_after=0.0))
            put_off.add(flight.job)
        else:
            asked.add(flight.job)
    play.now += 10.0
    play.schedule.next()
    assert not put_off & asked & set(play.schedule.take_lost())


def test_what_comes_on_is_not_given_up() -> None:
    play = PutOff(10_000_000)
    play.play(SourceStatusError("busy", status=503, retry_after=1.0), until=0.5)
    flight = play.start()
    play.receive(flight, SIZE // 2)
    play.now += 10.0
    play.schedule.next()
    assert flight.job not in play.schedule.take_lost()
    play.finish(flight)
    assert flight.job.done


def test_a_network_that_went_away_gives_up_nothing() -> None:
    play = PutOff(0)
    play.play(SourceStatusError("busy", status=503, retry_after=0.0), until=0.1)
    play.play(NetworkError("unreachable"), until=20.0)
    assert play.given_up == []

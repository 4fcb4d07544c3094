"""Second requests for what lags at the end: who wins, who is to blame, what comes twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.cancel import TransferCancelledError
from shardcast.endgame import HedgeBudget, too_slow
from shardcast.errors import DiskFullError, IntegrityError, NetworkError, SourceStatusError
from shardcast.fetch import Fetched
from shardcast.schedule import Finished, Flight, Job, Wait
from shardcast.selector import Rating
from tests.unit.worker.test_schedule import CONFIG, DATA, SIZE, Play, rated

PULLED = 100
"""Shards fetched before the last one: 2 % of them are two."""


def at_the_end(*sources: str, seconds: float = 0.1) -> tuple[Play, Job, Flight]:
    """A pull whose last shard is on its way; each took so many seconds before."""
    play = Play(*sources)
    rated(play, *sources, seconds=seconds)
    for n in range(PULLED):
        play.add(f"shard {n}")
        play.finish(play.start(), seconds)
    job = play.add("the last shard")
    return play, job, play.start()


def is_over(play: Play) -> bool:
    play.schedule.close()
    step = play.schedule.next()
    return isinstance(step, Finished) and step.error is None


def test_a_lagging_last_transfer_is_raced_for_the_rest_of_its_blob() -> None:
    play, job, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    assert isinstance(play.schedule.next(), Wait)  # too early to tell
    play.now += 0.6
    hedge = play.hedge()
    assert hedge.source != slow.source
    assert hedge.start_offset == 10_000
    hurried = [slow.cancel.cancelled]
    play.receive(slow, 5_000)  # it goes on meanwhile
    play.finish(hedge)
    assert [*hurried, slow.cancel.cancelled] == [False, True]
    play.lost(slow)
    assert bytes(play.sink.data) == DATA
    assert job.transfer.sources == (slow.source, hedge.source)
    assert play.schedule.budget.wasted == 5_000
    assert play.schedule.budget.reserved == 0
    assert is_over(play)


def test_both_sources_get_a_fair_verdict() -> None:
    play, _, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 1.5
    hedge = play.hedge()
    play.finish(hedge)
    play.lost(slow)
    loser, winner = play.selector.rating(slow.source), play.selector.rating(hedge.source)
    assert loser.failures == 0
    assert not loser.banned
    assert (loser.bandwidth or 0) < 20_000
    assert winner.failures == 0
    assert (winner.bandwidth or 0) > 1_000_000
    assert (loser.in_flight, winner.in_flight) == (0, 0)
    assert play.notices == []


def test_the_first_one_may_win_after_all() -> None:
    play, job, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(hedge, 300_000)
    play.finish(slow)
    assert hedge.cancel.cancelled
    play.lost(hedge)
    assert job.transfer.sources == (slow.source,)
    assert play.schedule.budget.wasted == 300_000
    assert play.schedule.budget.reserved == 0
    rating = play.selector.rating(hedge.source)
    assert (rating.failures, rating.banned, rating.in_flight) == (0, False, 0)
    assert is_over(play)


def test_a_silent_one_is_raced_after_two_seconds_and_counts_as_failed() -> None:
    play, _, silent = at_the_end("a", "b")
    play.now += 1.9
    assert isinstance(play.schedule.next(), Wait)
    play.now += 0.2
    hedge = play.hedge()
    assert hedge.start_offset == 0
    play.finish(hedge)
    play.lost(silent)
    assert play.selector.rating(silent.source).failures == 1
    assert play.schedule.budget.wasted == 0
    assert is_over(play)


def test_one_that_stops_in_the_middle_is_raced_two_seconds_later() -> None:
    """Its average rate is still good: silence is what tells."""
    play, _, flight = at_the_end("a", "b", seconds=1.0)
    for _ in range(9):
        play.now += 0.1
        play.receive(flight, SIZE // 10)
        assert isinstance(play.schedule.next(), Wait)
    stopped = play.now
    while isinstance(step := play.schedule.next(), Wait):
        play.now += step.seconds
    assert isinstance(step, Flight)
    assert step.hedge
    assert 2.0 <= play.now - stopped < 2.3


def test_one_that_was_late_to_begin_is_judged_by_what_it_does_now() -> None:
    """A relay that fetches the blob itself first may take its time."""
    play, _, flight = at_the_end("a", "b", seconds=1.0)
    play.now += 1.9
    play.schedule.next()
    for _ in range(9):
        play.now += 0.1
        play.receive(flight, SIZE // 10)
        assert isinstance(play.schedule.next(), Wait)
    play.finish(flight)


def test_all_bytes_at_one_place_come_from_one_writer() -> None:
    """The loser's bytes after the switch go nowhere, however late they are."""
    play, job, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.finish(hedge)
    with pytest.raises(TransferCancelledError):
        play.receive(slow, 1000, b"x" * 1000)
    with pytest.raises(TransferCancelledError):
        job.transfer.restart()
    with pytest.raises(TransferCancelledError):
        job.transfer.finish(slow.source)
    assert bytes(play.sink.data) == DATA
    play.lost(slow)
    assert play.schedule.budget.wasted == 1000


def test_a_loser_that_tells_of_it_before_the_winner_does_ends_nothing() -> None:
    """Between the last byte and the report of the winner, the other thread may report."""
    play, job, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    branch = hedge.transfer
    assert branch is not None
    play.receive(hedge, SIZE - 10_000)
    branch.finish(hedge.source)
    assert job.transfer.adopt(branch)  # type: ignore[arg-type]
    play.schedule.failed(slow, TransferCancelledError("came from elsewhere"))
    assert isinstance(play.schedule.next(), Wait)
    play.schedule.succeeded(hedge, Fetched(SIZE - 10_000, 0.1, from_fill=False))
    assert is_over(play)


def test_a_hedge_that_is_whole_a_moment_too_late_is_no_failure() -> None:
    play, job, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(slow, SIZE - 10_000)
    job.transfer.finish(slow.source)
    play.finish(hedge)  # late: not adopted
    assert not slow.cancel.cancelled
    play.schedule.succeeded(slow, Fetched(SIZE, 0.7, from_fill=False))
    assert play.schedule.budget.wasted == SIZE - 10_000
    assert play.selector.rating(hedge.source).failures == 0
    assert is_over(play)


# --- failures in a race -----------------------------------------------------------------------


def test_a_hedge_goes_on_where_the_first_one_fails() -> None:
    play, _, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.schedule.failed(slow, NetworkError("reset", source=slow.source))
    assert isinstance(play.schedule.next(), Wait)  # not begun a third time
    play.finish(hedge)
    assert bytes(play.sink.data) == DATA
    assert play.schedule.budget.reserved == 0
    assert is_over(play)


def test_where_both_fail_the_blob_is_continued_from_what_the_first_one_brought() -> None:
    play, job, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(hedge, 2_000)
    play.schedule.failed(slow, NetworkError("reset", source=slow.source))
    play.schedule.failed(hedge, NetworkError("reset", source=hedge.source))
    assert play.schedule.budget.wasted == 2_000
    again = play.start()
    assert not again.hedge
    assert job.transfer.offset == 10_000
    play.finish(again)
    assert is_over(play)


def test_a_hedge_that_fails_leaves_the_first_one_alone_and_another_may_race_it() -> None:
    play, _, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    error = SourceStatusError("answers 404", source=hedge.source, status=404)
    play.schedule.failed(hedge, error)
    assert not slow.cancel.cancelled
    second = play.hedge()
    assert second.source not in (slow.source, hedge.source)
    play.finish(second)
    play.lost(slow)
    assert is_over(play)


def test_a_hedge_that_is_silent_too_is_given_up_for_a_third_source() -> None:
    play, _, silent = at_the_end("a", "b", "c")
    play.now += 2.1
    hedge = play.hedge()
    play.now += 2.1
    play.schedule.next()
    assert hedge.cancel.cancelled
    assert not silent.cancel.cancelled
    play.lost(hedge)
    third = play.hedge()
    assert {silent.source, hedge.source, third.source} == {"a", "b", "c"}
    play.finish(third)
    play.lost(silent)
    assert is_over(play)


def test_a_full_disk_in_a_race_ends_the_pull_and_both_requests() -> None:
    play, _, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.schedule.failed(hedge, DiskFullError("full"))
    assert slow.cancel.cancelled
    play.lost(slow)
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, DiskFullError)


def test_cancellation_ends_both_requests_of_a_race() -> None:
    play, _, slow = at_the_end("a", "b")
    play.now += 2.1
    hedge = play.hedge()
    play.schedule.abort(TransferCancelledError("cancelled"))
    play.lost(slow)
    play.lost(hedge)
    step = play.schedule.next()
    assert isinstance(step, Finished)
    assert isinstance(step.error, TransferCancelledError)
    assert [play.selector.rating(s).in_flight for s in "ab"] == [0, 0]


# --- poison -----------------------------------------------------------------------------------


def wrong(flight: Flight) -> IntegrityError:
    return IntegrityError(f"wrong bytes from {flight.source}", source=flight.source)


def test_a_hedge_of_the_whole_blob_that_is_wrong_bans_only_its_source() -> None:
    play, job, silent = at_the_end("a", "b", "c")
    play.now += 2.1
    hedge = play.hedge()
    play.receive(hedge, SIZE, b"x" * SIZE)
    with pytest.raises(IntegrityError):
        hedge.transfer.finish(hedge.source)  # type: ignore[union-attr]
    play.schedule.failed(hedge, wrong(hedge))
    assert play.selector.rating(hedge.source).banned
    assert not play.selector.rating(silent.source).banned
    assert job.transfer.offset == 0
    assert not silent.cancel.cancelled
    play.finish(silent)
    assert bytes(play.sink.data) == DATA
    assert is_over(play)


def test_a_wrong_blob_of_two_in_a_race_bans_nobody_until_the_first_one_proves_right() -> None:
    play, _, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(hedge, SIZE - 10_000, b"x" * SIZE)
    assert hedge.transfer is not None
    assert hedge.transfer.stitched
    play.schedule.failed(hedge, wrong(hedge))
    assert not any(play.selector.rating(source).banned for source in "abc")
    assert [notice.banned for notice in play.notices] == [False]
    play.finish(slow)  # so the first 10,000 bytes were right
    assert play.selector.rating(hedge.source).banned
    assert [notice.source for notice in play.notices if notice.banned] == [hedge.source]
    assert not play.selector.rating(slow.source).banned


def test_a_wrong_blob_of_two_that_is_told_after_the_right_one_came_convicts_too() -> None:
    play, _, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(hedge, SIZE - 10_000, b"x" * SIZE)
    play.finish(slow)
    play.schedule.failed(hedge, wrong(hedge))
    assert [notice.source for notice in play.notices if notice.banned] == [hedge.source]
    assert not play.selector.rating(slow.source).banned


def test_a_wrong_blob_of_two_in_a_race_bans_nobody_if_the_first_one_was_wrong_too() -> None:
    play, job, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000, b"y" * 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(hedge, SIZE - 10_000)
    play.schedule.failed(hedge, wrong(hedge))
    play.receive(slow, SIZE - 10_000)
    play.schedule.failed(slow, wrong(slow))  # whole, and wrong: it is to blame
    assert play.selector.rating(slow.source).banned
    assert not play.selector.rating(hedge.source).banned
    assert job.transfer.offset == 0
    play.finish(play.start())
    assert not play.selector.rating(hedge.source).banned


def test_a_hedge_that_goes_on_from_bytes_that_turn_out_wrong_is_ended() -> None:
    play, job, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000, b"y" * 10_000)
    play.now += 0.6
    hedge = play.hedge()
    play.receive(slow, SIZE - 10_000)
    play.schedule.failed(slow, wrong(slow))
    play.lost(hedge)
    assert job.transfer.offset == 0
    again = play.start()
    assert again.source != slow.source
    play.finish(again)
    assert bytes(play.sink.data) == DATA


def test_bytes_of_a_hedge_are_not_joined_to_those_of_a_restarted_transfer() -> None:
    """The source of the first request began anew: what was hashed is not what lies there now."""
    play, job, slow = at_the_end("a", "b")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    job.transfer.restart()
    play.receive(slow, 20_000, b"y" * 20_000)
    play.finish(hedge)  # right, and of no use
    assert not slow.cancel.cancelled
    play.schedule.failed(slow, wrong(slow))
    play.finish(play.start())
    assert bytes(play.sink.data) == DATA


# --- the budget -------------------------------------------------------------------------------


def test_without_room_in_the_budget_it_is_cancelled_and_continued_elsewhere() -> None:
    play = Play("a", "b")
    rated(play, "a", "b")  # a few shards: 2 % of them is less than the rest of one
    job = play.add()
    slow = play.start()
    play.receive(slow, 10_000)
    play.now += 0.6
    assert isinstance(play.schedule.next(), Wait)  # such a cancellation needs more reason
    play.now += 1.0
    assert isinstance(play.schedule.next(), Wait)
    play.lost(slow)
    fast = play.start()
    assert not fast.hedge
    assert job.transfer.offset == 10_000
    play.finish(fast)
    assert job.transfer.received == SIZE
    assert play.schedule.budget.wasted == 0


def test_a_blob_that_is_nearly_there_may_be_raced_in_a_small_pull() -> None:
    play = Play("a", "b")
    rated(play, "a", "b")
    play.add()
    flight = play.start()
    play.receive(flight, SIZE - 20_000)
    play.now += 2.1
    play.schedule.next()
    play.now += 2.1
    hedge = play.hedge()
    assert hedge.start_offset == SIZE - 20_000
    assert hedge.reserved == 20_000


def test_a_source_that_only_sends_whole_blobs_costs_a_whole_one() -> None:
    play, _, slow = at_the_end("a", "b")
    play.schedule._resumes = lambda source: False
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    assert (hedge.whole, hedge.start_offset, hedge.reserved) == (True, 0, SIZE)
    play.receive(slow, 5_000)
    play.finish(hedge)
    play.lost(slow)
    assert play.schedule.budget.wasted == 15_000  # all that the first one brought


def test_a_hedge_whose_source_turns_out_to_send_whole_blobs_only_is_no_failure() -> None:
    play, _, slow = at_the_end("a", "b", "c")
    play.receive(slow, 10_000)
    play.now += 0.6
    hedge = play.hedge()
    assert hedge.transfer is not None
    with pytest.raises(TransferCancelledError) as caught:
        hedge.transfer.restart()
    play.schedule.failed(hedge, caught.value)
    assert play.selector.rating(hedge.source).failures == 0
    assert play.hedge().source not in (slow.source, hedge.source)


def test_no_more_than_two_are_raced_at_a_time() -> None:
    play = Play("a", "b", "c", config=replace(CONFIG, connections_per_source=4))
    rated(play, "a", "b", "c")
    for n in range(300):
        play.add(f"shard {n}")
        play.finish(play.start())
    for n in range(4):
        play.add(f"last {n}")
    last = [play.start() for _ in range(4)]
    play.now += 2.1
    hedges = [play.hedge(), play.hedge()]
    assert isinstance(play.schedule.next(), Wait)
    assert sum(flight.cancel.cancelled for flight in last) == 1  # a third is continued elsewhere
    assert len({hedge.job.name for hedge in hedges}) == 2


def test_documents_are_not_raced_but_continued_elsewhere() -> None:
    """Nobody knows how long they are before they come."""
    play, _, last = at_the_end("a", "b")
    play.finish(last)
    job = play.add()
    job.transfer.total = None
    flight = play.start()
    play.now += 2.1
    assert isinstance(play.schedule.next(), Wait)
    play.lost(flight)


@given(
    st.floats(0.0, 0.5),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1)), max_size=50),
)
def test_a_budget_is_never_exceeded(share: float, races: list[tuple[int, int, float]]) -> None:
    budget = HedgeBudget(share)
    open_races: list[int] = []
    for pulled, most, part in races:
        budget.pulled += pulled
        if budget.take(most):
            open_races.append(most)
        if part > 0.5 and open_races:
            reserved = open_races.pop()
            budget.settle(reserved, int(part * reserved))
        assert 0 <= budget.wasted + budget.reserved <= share * budget.pulled
        assert budget.reserved == sum(open_races)


# --- not begun where it would only be overtaken ------------------------------------------------


def rating(expected: float, in_flight: int = 0, failures: int = 0) -> Rating:
    return Rating(1.0, expected, expected, in_flight, failures, banned=False)


@pytest.mark.parametrize(
    ("ratings", "left", "expected"),
    [
        ({"fast": rating(100), "slow": rating(10)}, 10_000, set()),  # enough is left to do
        ({"fast": rating(100), "slow": rating(10)}, 500, {"slow"}),
        ({"fast": rating(100), "middling": rating(40)}, 100, set()),  # not so slow
        ({"slow": rating(10)}, 100, set()),  # nobody else
        ({"fast": rating(100, failures=1), "slow": rating(10)}, 100, set()),
        ({"fast": rating(100), "slow": rating(10, in_flight=1)}, 1500, {"slow"}),
        ({}, 100, set()),
    ],
)
def test_a_slow_source_is_not_asked_for_the_last_blobs(
    ratings: dict[str, Rating], left: int, expected: set[str]
) -> None:
    assert too_slow(ratings, 100, left, CONFIG) == expected

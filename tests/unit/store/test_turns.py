"""Whose turn it is to write a version's files."""

from __future__ import annotations

import threading

import pytest

from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.store.renewing import Turns


@pytest.mark.parametrize(
    ("number", "committed", "waits"),
    [(1, False, True), (1, True, True), (2, True, True), (2, False, False)],
)
def test_who_waits_for_whom(number: int, committed: bool, waits: bool) -> None:
    turns, began = Turns(), threading.Event()

    def other() -> None:
        with turns.mine(number, Cancel(), committed=committed):
            began.set()

    thread = threading.Thread(target=other)
    with turns.mine(1, Cancel(), committed=True):
        thread.start()
        if not waits:
            assert began.wait(20)
        assert began.is_set() is not waits
    assert began.wait(20)
    thread.join(20)


def test_who_writes_a_staged_version_stops_nobody_from_repairing_another() -> None:
    turns = Turns()
    with (
        turns.mine(1, Cancel(), committed=False),
        turns.mine(2, Cancel(), committed=True),
        turns.mine(3, Cancel(), committed=False),
    ):
        pass
    with turns.mine(1, Cancel(), committed=True):
        pass


def test_waiting_ends_with_a_cancellation_and_takes_nothing() -> None:
    turns, cancel = Turns(), Cancel()
    cancel.cancel()
    with (
        turns.mine(1, Cancel(), committed=True),
        pytest.raises(TransferCancelledError),
        turns.mine(2, cancel, committed=True),
    ):
        pass
    with turns.mine(2, Cancel(), committed=True):
        pass

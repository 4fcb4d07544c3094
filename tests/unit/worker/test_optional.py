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
from shardcast.optional import fault, is_lost, waited_enough
from shardcast.selector import Rating

CONFIG = NetConfig()


def rating(failures: int = 0) -> Rating:
    return Rating(1.0, None, 1.0, 0, failures, banned=False)


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


def test_who_is_put_off_waits_a_while() -> None:
    assert not waited_enough(status(503), 0.0, 14.0, CONFIG)
    assert waited_enough(status(503), 0.0, 16.0, CONFIG)
    assert not waited_enough(NetworkError("unreachable"), 0.0, 1000.0, CONFIG)

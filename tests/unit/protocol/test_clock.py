"""Which clock is wrong, by what the sources say."""

import pytest

from shardcast.protocol.clock import clock_error_ms, describe_clock
from shardcast.protocol.limits import SKEW_MS

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        ([], 0),
        ([0], 0),
        ([SKEW_MS], 0),
        ([-SKEW_MS], 0),
        ([SKEW_MS + 1], SKEW_MS + 1),
        ([-SKEW_MS - 1], -SKEW_MS - 1),
        # all agree about the direction: the least that all of them say
        ([24 * HOUR, 25 * HOUR], 24 * HOUR),
        ([-24 * HOUR, -25 * HOUR], -24 * HOUR),
        # one of them has our time, or they contradict each other: no verdict
        ([24 * HOUR, 1000], 0),
        ([24 * HOUR, -24 * HOUR], 0),
    ],
)
def test_a_clock_is_wrong_if_all_sources_say_so(offsets: list[int], error: int) -> None:
    assert clock_error_ms(offsets) == error


def test_it_is_said_in_hours() -> None:
    assert describe_clock(24 * HOUR) == (
        "this machine's clock is 24.0 hours ahead of all its sources'"
    )
    assert describe_clock(-HOUR) == "this machine's clock is 1.0 hours behind all its sources'"

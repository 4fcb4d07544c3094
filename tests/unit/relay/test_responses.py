"""Whose readers are waited for."""

import pytest

from relay.responses import overdue


@pytest.mark.parametrize(
    ("sent", "listed", "evicted", "lingering", "found"),
    [
        ([], [5], [], [], []),
        ([5, 4], [5, 4], [], [], []),
        ([5, 4, 3, 2, 1], [5, 4, 3, 2, 1], [], [], []),  # what the head lists is waited for
        ([5, 4, 3], [5], [3, 4], [], []),  # two beyond it as well
        ([5, 4, 3, 2], [5], [2, 3, 4], [], [2]),
        ([5, 4, 3, 2, 1], [5, 4, 3], [3, 4], [], [1, 2]),  # listed, and beyond --keep
        ([4, 3, 2], [5], [], [], [2]),  # gone from the disk but for who has its files open
        ([4, 3, 1], [5], [3, 4], [1, 2], [3, 4]),  # those that linger are the two
        ([4, 3], [5], [3, 4], [2], [3]),  # one lingers, though nobody reads it just now
        ([2], [5], [], [3, 4], [2]),
    ],
)
def test_readers_of_two_versions_past_their_time_are_waited_for(
    sent: list[int], listed: list[int], evicted: list[int], lingering: list[int], found: list[int]
) -> None:
    assert overdue(sent, listed, evicted, lingering) == found

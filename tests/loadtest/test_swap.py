"""What clients saw of a swap, and how it is judged."""

import pytest

from loadtest.swap.report import allowed_ms, checks
from loadtest.swap.tokens import Token, largest_gap, rate, recovery


def stream(client: int, *spans: tuple[float, float], every: float = 0.01) -> list[Token]:
    """Return tokens at an even pace within each span."""
    return [
        Token(begin + number * every, client)
        for begin, end in spans
        for number in range(round((end - begin) / every))
    ]


def test_the_rate_is_of_all_clients() -> None:
    tokens = stream(0, (0, 2)) + stream(1, (0, 2))
    assert rate(tokens, 0.5, 1.5) == pytest.approx(200, abs=2)


def test_a_gap_counts_from_the_last_token_before() -> None:
    tokens = stream(0, (0, 1), (1.5, 2)) + stream(1, (0, 2))
    assert largest_gap(tokens, 1.2, 2.0) == pytest.approx(0.51)
    assert largest_gap(tokens, 1.6, 2.0) < 0.03


def test_a_client_that_gets_nothing_more_waits_to_the_end() -> None:
    tokens = stream(0, (0, 1)) + stream(1, (0, 3))
    assert largest_gap(tokens, 0.9, 3.0) == pytest.approx(2.01)


def test_recovered_is_when_the_rate_is_back() -> None:
    slow = stream(0, (0, 1)) + stream(0, (1.2, 1.8), every=0.05) + stream(0, (1.8, 4))
    back = recovery(slow, 1.0, 100.0, 1.2)
    assert back is not None
    assert 0.75 < back <= 0.85  # seconds


def test_never_recovered() -> None:
    tokens = stream(0, (0, 1)) + stream(0, (1.2, 9), every=0.02)
    assert recovery(tokens, 1.0, 100.0, 1.2) is None


@pytest.mark.parametrize(
    ("pause_ms", "lost", "passed"),
    [(219.0, 0, [True, True]), (221.0, 0, [False, True]), (10.0, 1, [True, False])],
)
def test_the_goal_is_a_copy_and_a_fifth_and_a_tenth_of_a_second(
    pause_ms: float, lost: int, passed: list[bool]
) -> None:
    sample = {"pause_ms": pause_ms, "copy_one_ms": 100.0, "lost_tokens": lost}
    result = {"model": "4M", "pauses": {"shardcast": [sample]}}
    assert allowed_ms(result) == pytest.approx(220.0)
    assert [check["passed"] for check in checks([result])] == passed

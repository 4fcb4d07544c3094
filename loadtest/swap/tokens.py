"""What clients saw: when each token came. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

RECOVERED: Final = 0.95
"""Of the steady rate."""
_WINDOW_S: Final = 0.25
_WINDOW_TOKENS: Final = 60


class Token(NamedTuple):
    """One token: when it came (monotonic seconds), and to which client."""

    t: float
    client: int


def rate(tokens: Sequence[Token], since: float, until: float) -> float:
    """Return tokens a second of all clients together."""
    return sum(since <= token.t < until for token in tokens) / (until - since)


def largest_gap(tokens: Sequence[Token], since: float, until: float) -> float:
    """Return the longest time that a client waited for its next token, as far as it lies within.

    A client's silence counts from its last token before ``since``; one that got nothing
    afterwards counts up to ``until``.
    """
    worst = 0.0
    for client in {token.client for token in tokens}:
        times = sorted(token.t for token in tokens if token.client == client and token.t <= until)
        begins = max(0, bisect.bisect_right(times, since) - 1)
        seen = [*times[begins:], until]
        worst = max(worst, *(b - a for a, b in itertools.pairwise(seen)), 0.0)
    return worst


def recovery(tokens: Sequence[Token], since: float, steady: float, after: float) -> float | None:
    """Return how long after ``since`` the rate was back at 95 % of ``steady``; None if it never was.

    Args:
        tokens: What came.
        since: When the swap was asked for.
        steady: Tokens a second before it.
        after: From when on to look: the engine's pause is over.
    """
    times = sorted(token.t for token in tokens)
    length = max(_WINDOW_S, _WINDOW_TOKENS / steady)
    for start in [after, *(t for t in times if t > after)]:
        if not times or start + length > times[-1]:
            return None
        count = bisect.bisect_left(times, start + length) - bisect.bisect_left(times, start)
        if count / length >= RECOVERED * steady:
            return start - since
    return None

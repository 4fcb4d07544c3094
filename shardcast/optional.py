"""When a blob that a pull can do without is given up: pure.

Deltas are optional: plain shards do without them. A delta blob is given up after a few answers that
were about itself: 404, wrong bytes, cut off by a source that is well. One that is put off (503, 429) is
waited for about as long as doing without it would take: a relay whose own parents do not have it says
so for ever, but to one that is merely busy shards are far more work. So the wait at most doubles what
it costs (the rent-or-buy rule), and it never exceeds a quarter of the time after which a pull fails. A
network that is gone is no reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from shardcast.config import NetConfig
from shardcast.errors import (
    IntegrityError,
    MalformedError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    WrongAnswerError,
)
from shardcast.selector import DEAD_AFTER, Rating
from shardcast.verdicts import BUSY

_ENOUGH: Final = 3
"""Faults after which a source has had its say about a blob."""

_WAIT_SHARE: Final = 0.25
_SHORTEST_WAIT_S: Final = 2.0
"""Busy servers say "in a second": they are asked once more."""
_UNKNOWN_RATE: Final = 10e6
"""Bytes per second that sources are believed to give together before anything was measured."""

_ANSWERS: Final = (SourceStatusError, WrongAnswerError, IntegrityError, MalformedError)


def fault(error: ShardcastError, failures_in_row: int, *, answered: bool) -> int:
    """Return how much a failure counts against its blob; wrong bytes count for two.

    Args:
        error: The failure.
        failures_in_row: Of its source, this one included where it counts against it.
        answered: Bytes came before it failed.
    """
    if isinstance(error, IntegrityError):
        return 2
    if isinstance(error, SourceStatusError):
        return 0 if error.status in BUSY else 1
    if isinstance(error, WrongAnswerError):
        return 1
    if isinstance(error, NetworkError) and failures_in_row > 1 and not answered:
        return 0  # it fails for other blobs, too
    return 1


def is_answer(error: ShardcastError) -> bool:
    """Say whether a failure is something that a source said of the blob: it lives, and has it not."""
    return isinstance(error, _ANSWERS)


def is_alive(rating: Rating) -> bool:
    """Say whether a source is neither dead nor banned."""
    return rating.failures < DEAD_AFTER and not rating.banned


def patience(instead: int | None, ratings: Iterable[Rating], config: NetConfig) -> float:
    """Return for how many seconds blobs that sources put off are waited for.

    Args:
        instead: Bytes to fetch in place of all that is put off; None: not known.
        ratings: What is believed of the sources.
        config: Bounds.
    """
    longest = config.give_up_after_s * _WAIT_SHARE
    if instead is None:
        return longest
    rate = sum(r.bandwidth for r in ratings if r.bandwidth and is_alive(r)) or _UNKNOWN_RATE
    return min(longest, max(_SHORTEST_WAIT_S, instead / rate))


def is_lost(faults: Mapping[str, int], ratings: Mapping[str, Rating]) -> bool:
    """Say whether a blob is to be given up: no source that lives may still have it.

    Args:
        faults: What counts against the blob, by source.
        ratings: What is believed of each source.
    """
    said = {url for url in ratings if faults.get(url, 0) >= _ENOUGH}
    dead = {url for url, rating in ratings.items() if rating.failures >= DEAD_AFTER}
    return bool(said) and said | dead >= set(ratings)

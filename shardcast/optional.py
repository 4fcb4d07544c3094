"""When a blob that a pull can do without is given up: pure.

Deltas are optional: plain shards do without them. A delta blob is given up after a few answers that
were about itself: 404, wrong bytes, cut off by a source that is well; and when it has only been put
off (503) for a quarter of the time after which a pull fails: a relay whose own parents do not have it
says so for ever, but to one that is merely busy shards would be far more work. A network that is gone is no
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def waited_enough(error: ShardcastError, since: float, now: float, config: NetConfig) -> bool:
    """Say whether a blob that a source puts off, or fails to send, has been waited for enough.

    Args:
        error: How it failed now.
        since: When it failed first since it came on.
        now: The time.
        config: Bounds.
    """
    spoke = isinstance(error, _ANSWERS)
    return spoke and now - since > config.give_up_after_s * _WAIT_SHARE


def is_lost(faults: Mapping[str, int], ratings: Mapping[str, Rating]) -> bool:
    """Say whether a blob is to be given up: no source that lives may still have it.

    Args:
        faults: What counts against the blob, by source.
        ratings: What is believed of each source.
    """
    said = {url for url in ratings if faults.get(url, 0) >= _ENOUGH}
    dead = {url for url, rating in ratings.items() if rating.failures >= DEAD_AFTER}
    return bool(said) and said | dead >= set(ratings)

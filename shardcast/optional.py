"""When a blob that a pull can do without is given up: pure.

Deltas are optional: plain shards do without them. A delta blob is given up after a few answers that
were about itself: 404, wrong bytes, cut off by a source that is well. Neither a source that is busy
(shards would only make it busier) nor a network that is gone is a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardcast.errors import IntegrityError, NetworkError, ShardcastError, SourceStatusError
from shardcast.selector import DEAD_AFTER, Rating
from shardcast.verdicts import BUSY

_ENOUGH: Final = 3
"""Faults after which a source has had its say about a blob."""


def fault(error: ShardcastError, failures_in_row: int) -> int:
    """Return how much a failure counts against its blob; wrong bytes count for two.

    Args:
        error: The failure.
        failures_in_row: Of its source, this one included where it counts against it.
    """
    if isinstance(error, IntegrityError):
        return 2
    if isinstance(error, SourceStatusError) and error.status in BUSY:
        return 0
    if isinstance(error, NetworkError) and failures_in_row > 1:
        return 0  # it fails for other blobs, too
    return 1


def is_lost(faults: Mapping[str, int], ratings: Mapping[str, Rating]) -> bool:
    """Say whether a blob is to be given up: no source that lives may still have it.

    Args:
        faults: What counts against the blob, by source.
        ratings: What is believed of each source.
    """
    said = {url for url in ratings if faults.get(url, 0) >= _ENOUGH}
    dead = {url for url, rating in ratings.items() if rating.failures >= DEAD_AFTER}
    return bool(said) and said | dead >= set(ratings)

"""Whether this machine's clock is wrong, by what its sources' answers say: pure.

An HTTP answer carries the sender's time (``Date``, RFC 9110 section 6.6.1). It is not signed, so it
never decides whether a head is fresh; it only tells people which clock to look at.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from shardcast.protocol.limits import SKEW_MS

_HOUR_MS: Final = 3_600_000
_MINUTE_MS: Final = 60_000


def clock_error_ms(offsets_ms: Collection[int]) -> int:
    """Return by how much this machine's clock is wrong, 0 if nothing says that it is.

    It is where it differs from every source's by more than the allowed skew, in one direction: the
    smallest of the differences then.

    Args:
        offsets_ms: This clock minus each source's, in milliseconds.
    """
    if not offsets_ms:
        return 0
    low, high = min(offsets_ms), max(offsets_ms)
    if low > SKEW_MS:
        return low
    return high if high < -SKEW_MS else 0


def describe_clock(error_ms: int) -> str:
    """Say it for a message: ``this machine's clock is 24.0 hours ahead of all its sources'``."""
    direction = "ahead of" if error_ms > 0 else "behind"
    return f"this machine's clock is {describe_span(abs(error_ms))} {direction} all its sources'"


def describe_span(span_ms: int) -> str:
    """Say a time for a message: ``24.0 hours``, below one ``5.0 minutes``."""
    if span_ms >= _HOUR_MS:
        return f"{span_ms / _HOUR_MS:.1f} hours"
    return f"{span_ms / _MINUTE_MS:.1f} minutes"

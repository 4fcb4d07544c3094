"""Whether this machine's clock is wrong, by what its sources' answers say: pure.

An HTTP answer carries the sender's time (``Date``, RFC 9110 section 6.6.1). It is not signed, so it
never decides whether a head is fresh; it only tells people which clock to look at.
"""

from __future__ import annotations

from collections.abc import Collection

from shardcast.protocol.limits import SKEW_MS


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
    hours = abs(error_ms) / 3_600_000
    direction = "ahead of" if error_ms > 0 else "behind"
    return f"this machine's clock is {hours:.1f} hours {direction} all its sources'"

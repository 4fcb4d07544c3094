"""Sizes, rates and times as people write and read them."""

from __future__ import annotations

import re
from typing import Final

from shardcast.errors import UsageError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?(?:/s)?\s*$", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|w)?\s*$", re.IGNORECASE | re.ASCII)
_PREFIXES: Final = " kmgtp"
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_size(text: str, what: str = "size") -> int:
    """Return bytes: ``200GB`` is decimal, ``200GiB`` binary, a bare number is bytes.

    A rate may be written with ``/s`` and means bytes per second.

    Raises:
        UsageError: If it is no size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a size: write 500MB, 200GB or 16GiB")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    power: int = base ** _PREFIXES.index(prefix.lower() or " ")
    return round(float(number) * power)


def parse_time(text: str, what: str = "time") -> float:
    """Return seconds: ``90s``, ``30m``, ``2h``, ``7d``, ``1w``, a bare number is seconds.

    Raises:
        UsageError: If it is no time.
    """
    match = _TIME.match(text)
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a time: write 90s, 30m, 2h or 7d")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def size(count: float) -> str:
    """Return a byte count for people: three digits, decimal prefixes."""
    value, prefix = float(count), ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    digits = 0 if not prefix or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}B"


def rate(count: float, seconds: float) -> str:
    """Return bytes per second for people; a dash where there is nothing to divide."""
    return f"{size(count / seconds)}/s" if count and seconds > 0 else "-"


def duration(seconds: float) -> str:
    """Return a time span for people: ``850 ms``, ``12.3 s``, ``4 m 10 s``, ``3 h 05 m``, ``6.9 d``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} m {seconds % 60:02.0f} s"
    if seconds < 2 * 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} m"
    return f"{seconds / 86400:.1f} d"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"

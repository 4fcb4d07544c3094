"""The HTTP surface in pure form: paths, header names, ranges, validators (RFC 9110).

Both sides use it, so that a server and a client cannot disagree about a byte position.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import quote

from shardcast.errors import MalformedError
from shardcast.protocol.digest import is_digest
from shardcast.protocol.limits import MAX_DEPTH, MAX_WAIT_SECONDS

API_PREFIX: Final = "/v1"
DEPTH_HEADER: Final = "Shardcast-Depth"
NODE_HEADER: Final = "Shardcast-Node"
PATH_HEADER: Final = "Shardcast-Path"
SOURCE_HEADER: Final = "Shardcast-Source"
_LONGEST_DATE: Final = 64
SIBLING_HEADER: Final = "Shardcast-Sibling"
"""Set by a relay that asks its sibling: the asker's node id. That one then never asks a sibling."""

SOURCE_DISK: Final = "disk"
SOURCE_FILL: Final = "fill"

BLOB_CACHE_CONTROL: Final = "public, max-age=31536000, immutable, no-transform"
HEAD_CACHE_CONTROL: Final = "public, max-age=1"
ERROR_CACHE_CONTROL: Final = "no-store"
BLOB_CONTENT_TYPE: Final = "application/octet-stream"
MAX_RETRY_AFTER_SECONDS: Final = 60.0

# The unit in any case: RFC 9110 section 14.1.
_RANGE = re.compile(r"^bytes=(\d*)-(\d*)\Z", re.ASCII | re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"^bytes (\d{1,16})-(\d{1,16})/(\d{1,16})\Z", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"^\d{1,16}\Z", re.ASCII)
_MOST_DIGITS: Final = 16
_NODE = re.compile(r"^[0-9a-f]{8,64}\Z", re.ASCII)


def head_path(run: str, *, after: int | None = None, wait: int | None = None) -> str:
    """Return the path (and query) of a run's head."""
    query = ""
    if after is not None:
        query = f"?after={after}&wait={wait if wait is not None else MAX_WAIT_SECONDS}"
    return f"{API_PREFIX}/{quote(run, safe='')}/head{query}"


def blob_path(run: str, digest: str) -> str:
    """Return the path of a blob."""
    return f"{API_PREFIX}/{quote(run, safe='')}/blobs/{digest}.bin"


def missing_path(run: str) -> str:
    """Return the path that tells which digests an origin lacks."""
    return f"{API_PREFIX}/{quote(run, safe='')}/missing"


def parse_blob_name(name: str) -> str | None:
    """Return the digest of a blob's last path component, or None if it names no blob."""
    digest = name.removesuffix(".bin")
    return digest if name.endswith(".bin") and is_digest(digest) else None


def blob_etag(digest: str) -> str:
    """Return the strong ETag of a blob, the same on every relay."""
    return f'"blake3-{digest}"'


def head_etag(digest: str) -> str:
    """Return the ETag of a head envelope: the quoted digest of its bytes."""
    return f'"{digest}"'


def parse_wait(after: str | None, wait: str | None) -> tuple[int | None, float]:
    """Return the sequence to wait for and the seconds, clamped to 25.

    Raises:
        MalformedError: If one is not a plain number.
    """
    for name, text in (("after", after), ("wait", wait)):
        if text is not None and not _NUMBER.match(text):
            raise MalformedError(f"{name} is not a number: {text[:40]!r}")
    if after is None:
        return None, 0.0
    return int(after), float(min(int(wait or "0"), MAX_WAIT_SECONDS))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` up to, not including, ``stop`` of a representation of ``total`` bytes."""

    start: int
    stop: int
    total: int

    @property
    def length(self) -> int:
        """How many bytes it spans."""
        return self.stop - self.start

    @property
    def content_range(self) -> str:
        """The Content-Range of a 206 with it."""
        return f"bytes {self.start}-{self.stop - 1}/{self.total}"


class UnsatisfiableRangeError(MalformedError):
    """A range that begins beyond the representation: answer 416."""

    code = "range"


def parse_range(header: str | None, total: int) -> ByteRange | None:
    """Parse a Range header as RFC 9110 section 14 says.

    Returns None (answer 200 with the whole) where there is none, where the unit or syntax is
    another, and for several ranges, which a server may ignore.

    Raises:
        UnsatisfiableRangeError: If the single range lies outside the representation.
    """
    match = _RANGE.match(header.strip()) if header is not None else None
    if match is None:
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    if not first:
        suffix = _position(last)
        if suffix == 0 or total == 0:
            raise UnsatisfiableRangeError(f"range of the last {suffix} of {total} bytes")
        return ByteRange(max(0, total - suffix), total, total)
    start = _position(first)
    stop = _position(last) + 1 if last else total
    if last and stop <= start:
        return None
    if start >= total:
        raise UnsatisfiableRangeError(f"range begins at {start} of {total} bytes")
    return ByteRange(start, min(stop, total), total)


def _position(digits: str) -> int:
    """Return a byte position, or one beyond every blob where it has more digits than any of those."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


def parse_content_range(header: str | None) -> ByteRange | None:
    """Parse the Content-Range of a 206; None where it is missing, open (``*``) or inverted."""
    match = _CONTENT_RANGE.match(header) if header is not None else None
    if match is None:
        return None
    start, last, total = (int(group) for group in match.groups())
    if not start <= last < total:
        return None
    return ByteRange(start, last + 1, total)


def if_range_matches(header: str | None, etag: str) -> bool:
    """Say whether a Range may be honoured: no If-Range, or exactly our strong ETag."""
    return header is None or header.strip() == etag


def etag_in(header: str | None, etag: str, *, strong: bool = False) -> bool:
    """Say whether a list of entity tags holds ``etag`` or is ``*``.

    If-None-Match compares weakly, If-Match strongly (RFC 9110 section 13.1): there a tag
    marked ``W/`` matches nothing.
    """
    if header is None:
        return False
    entries = [entry.strip() for entry in header.split(",")]
    if not strong:
        entries = [entry.removeprefix("W/") for entry in entries]
    return "*" in entries or etag in entries


def parse_depth(header: str | None) -> int:
    """Return a server's distance from the origin; 0 where the header is absent.

    Raises:
        MalformedError: If it is no number up to 16.
    """
    if header is None:
        return 0
    if not _NUMBER.match(header) or int(header) > MAX_DEPTH:
        raise MalformedError(f"{DEPTH_HEADER} is not a number up to {MAX_DEPTH}: {header[:40]!r}")
    return int(header)


def parse_node(header: str | None) -> str | None:
    """Return a server's node id (8 to 64 hex digits), or None where it has none or a bad one."""
    return header if header is not None and _NODE.match(header) else None


def parse_path(header: str | None) -> tuple[str, ...]:
    """Return the node ids between the origin and a server; empty where it tells none."""
    if header is None or len(header) > MAX_DEPTH * 66:
        return ()
    nodes = tuple(part.strip() for part in header.split(","))
    return nodes if len(nodes) <= MAX_DEPTH and all(map(_NODE.match, nodes)) else ()


def parse_retry_after(header: str | None, now_s: float) -> float | None:
    """Return the seconds that Retry-After asks for, clamped to 0..60; None where unreadable.

    Both forms of RFC 9110 section 10.2.3: delta seconds and an HTTP date.
    """
    if header is None:
        return None
    text = header.strip()
    if _NUMBER.match(text):
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    when = parse_date(text)
    if when is None:
        return None
    return min(max(when - now_s, 0.0), MAX_RETRY_AFTER_SECONDS)


def parse_date(header: str | None) -> float | None:
    """Return an HTTP date (RFC 9110 section 5.6.7) in Unix seconds; None where unreadable."""
    if header is None or len(header) > _LONGEST_DATE:
        return None
    try:
        when = parsedate_to_datetime(header)
        if when.tzinfo is None:  # "-0000"; an HTTP date is always in GMT
            when = when.replace(tzinfo=UTC)
        return when.timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None

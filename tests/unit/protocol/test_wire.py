"""The HTTP surface against RFC 9110."""

from typing import Final

import pytest

from shardcast.errors import MalformedError
from shardcast.protocol.wire import (
    ByteRange,
    UnsatisfiableRangeError,
    blob_etag,
    blob_path,
    etag_in,
    head_etag,
    head_path,
    if_range_matches,
    missing_path,
    parse_blob_name,
    parse_content_range,
    parse_depth,
    parse_node,
    parse_range,
    parse_retry_after,
    parse_wait,
)
from tests.unit.protocol.facts import A, B

WHOLE: Final = None


def test_paths() -> None:
    assert head_path("demo") == "/v1/demo/head"
    assert head_path("demo", after=5) == "/v1/demo/head?after=5&wait=25"
    assert head_path("demo", after=0, wait=0) == "/v1/demo/head?after=0&wait=0"
    assert head_path("demo", wait=3) == "/v1/demo/head"
    assert blob_path("demo", A) == f"/v1/demo/blobs/{A}.bin"
    assert missing_path("demo") == "/v1/demo/missing"
    assert head_path("../x?#") == "/v1/..%2Fx%3F%23/head"


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        (f"{A}.bin", A),
        (A, None),
        (f"{A}.bin.bin", None),
        (f"{A.upper()}.bin", None),
        (f"{A}.BIN", None),
        (f"{A}.bin\n", None),
        (".bin", None),
        ("", None),
    ],
)
def test_blob_names(name: str, digest: str | None) -> None:
    assert parse_blob_name(name) == digest


# RFC 9110 section 14.1.2 gives these for a representation of 10000 bytes.
@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [
        ("bytes=0-499", 0, 500),
        ("bytes=500-999", 500, 1000),
        ("bytes=-500", 9500, 10000),
        ("bytes=9500-", 9500, 10000),
        ("bytes=0-0", 0, 1),
        ("bytes=-1", 9999, 10000),
        ("Bytes=0-0", 0, 1),
        ("bytes=9999-20000", 9999, 10000),
        ("bytes=-20000", 0, 10000),
        (" bytes=0- ", 0, 10000),
        ("bytes=0000-0009", 0, 10),
    ],
)
def test_ranges_of_rfc_9110(header: str, start: int, stop: int) -> None:
    parsed = parse_range(header, 10000)
    assert parsed == ByteRange(start, stop, 10000)
    assert parsed.length == stop - start
    assert parsed.content_range == f"bytes {start}-{stop - 1}/10000"
    assert parse_content_range(parsed.content_range) == parsed


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=5-4",
        "bytes=0-0,-1",
        "bytes=0-0, 5-6",
        "bytes =0-0",
        "bytes=0 -0",
        "bytes=--1",
        "bytes=+1-2",
        "bytes=1.0-2",
        "bytes=\u0661-\u0662",
        "items=0-1",
        "bytes=0-1\nX: y",
    ],
)
def test_what_is_answered_with_the_whole(header: str | None) -> None:
    assert parse_range(header, 10000) is None


@pytest.mark.parametrize(
    ("header", "total"),
    [
        ("bytes=10000-", 10000),
        ("bytes=10000-10001", 10000),
        ("bytes=-0", 10000),
        ("bytes=0-", 0),
        ("bytes=-1", 0),
        ("bytes=99999999999999999999-", 10000),
        ("bytes=99999999999999999999-199999999999999999999", 10000),
        ("bytes=" + "9" * 5000 + "-", 10000),
    ],
)
def test_what_is_answered_with_416(header: str, total: int) -> None:
    with pytest.raises(UnsatisfiableRangeError):
        parse_range(header, total)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes */10",
        "bytes 0-4/*",
        "bytes 5-4/10",
        "bytes 0-10/10",
        "bytes 0-4",
        "bytes=0-4/10",
        "bytes 0-4/10 ",
        "bytes a-4/10",
        "items 0-4/10",
        "bytes 0-4/10, 5-9/10",
    ],
)
def test_content_ranges_that_say_nothing(header: str | None) -> None:
    assert parse_content_range(header) is None


def test_etags() -> None:
    assert blob_etag(A) == f'"blake3-{A}"'
    assert head_etag(A) == f'"{A}"'
    tag = blob_etag(A)
    assert if_range_matches(None, tag)
    assert if_range_matches(f" {tag}", tag)
    for other in (blob_etag(B), f"W/{tag}", "", "*", "Thu, 01 Jan 2026 00:00:00 GMT"):
        assert not if_range_matches(other, tag)


def test_lists_of_etags() -> None:
    tag = head_etag(A)
    for header in (tag, f"W/{tag}", "*", f'"x", {tag}', f'"x",W/{tag} ,"y"'):
        assert etag_in(header, tag)
    for other in (None, "", '"x"', tag.strip('"'), f"w/{tag}"):
        assert not etag_in(other, tag)
    assert etag_in(f'"x", {tag}', tag, strong=True)
    assert etag_in("*", tag, strong=True)
    assert not etag_in(f"W/{tag}", tag, strong=True)


def test_waiting() -> None:
    assert parse_wait(None, None) == (None, 0.0)
    assert parse_wait(None, "9") == (None, 0.0)
    assert parse_wait("7", None) == (7, 0.0)
    assert parse_wait("7", "9") == (7, 9.0)
    assert parse_wait("7", "9999") == (7, 25.0)
    for text in ("", "-1", "1.5", "x", "9" * 17, "\u0661", "1\n"):
        with pytest.raises(MalformedError, match="after is not a number"):
            parse_wait(text, "1")
        with pytest.raises(MalformedError, match="wait is not a number"):
            parse_wait("1", text)


def test_depth() -> None:
    assert parse_depth(None) == 0
    assert parse_depth("0") == 0
    assert parse_depth("16") == 16
    for header in ("17", "-1", "", "x", "9" * 5000):
        with pytest.raises(MalformedError, match="Shardcast-Depth"):
            parse_depth(header)


def test_node() -> None:
    assert parse_node("0123456789abcdef") == "0123456789abcdef"
    for header in (None, "", "abc", "G" * 16, "a" * 65, "a" * 16 + "\n", "A" * 16):
        assert parse_node(header) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        (" 7 ", 7.0),
        ("120", 60.0),
        ("9999999999999999", 60.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 2026 00:00:10 GMT", 10.0),
        ("Thu, 01 Jan 2026 00:00:10 -0000", 10.0),
        ("Thu, 01 Jan 2026 00:00:10", 10.0),
        ("Thu, 01 Jan 2026 01:00:10 +0100", 10.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2027 00:00:00 GMT", 60.0),
        ("Thu, 99 Jan 2026 00:00:00 GMT", None),
        ("Thu, 01 Jan 99999 00:00:00 GMT", None),
        ("Thu, 01 Jan 2026 00:00:00 +9999999", None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, 1767225600.0) == seconds

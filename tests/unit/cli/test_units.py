import pytest

from shardcast.cli import units
from shardcast.errors import UsageError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("1234", 1234),
        ("500MB", 500_000_000),
        ("200GB", 200_000_000_000),
        ("1.5 GB", 1_500_000_000),
        ("16GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("1k", 1000),
        ("1ki", 1024),
        ("100MB/s", 100_000_000),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_is_decimal_unless_it_says_i(text: str, wanted: int) -> None:
    assert units.parse_size(text) == wanted


@pytest.mark.parametrize("text", ["", "GB", "-1MB", "1XB", "1 M M", "1e9", "٣MB/h"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--quota"):
        units.parse_size(text, "--quota")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604800), ("1w", 604800),
     ("250ms", 0.25), ("1.5h", 5400)],
)  # fmt: skip
def test_a_time_is_seconds(text: str, wanted: float) -> None:
    assert units.parse_time(text) == wanted


@pytest.mark.parametrize("text", ["", "h", "2 fortnights", "-2h"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-for"):
        units.parse_time(text, "--keep-for")


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (123_456, "123 kB"),
     (999_499, "999 kB"), (999_999, "1.00 MB"), (62e9, "62.0 GB"), (5e18, "5000 PB")],
)  # fmt: skip
def test_a_size_is_shown_in_three_digits(count: float, wanted: str) -> None:
    assert units.size(count) == wanted


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [(0, "0 ms"), (0.8504, "850 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"), (250, "4 m 10 s"),
     (11_100, "3 h 05 m"), (7 * 86400, "7.0 d")],
)  # fmt: skip
def test_a_duration_is_shown_in_the_unit_that_fits(seconds: float, wanted: str) -> None:
    assert units.duration(seconds) == wanted


def test_a_rate_without_time_or_bytes_is_a_dash() -> None:
    assert units.rate(0, 1) == "-"
    assert units.rate(1, 0) == "-"
    assert units.rate(3_000_000, 2) == "1.50 MB/s"


def test_nouns_are_counted() -> None:
    assert units.count(1, "file") == "1 file"
    assert units.count(2, "file") == "2 files"
    assert units.count(2, "entry", "entries") == "2 entries"

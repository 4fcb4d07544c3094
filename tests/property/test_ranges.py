"""Ranges against a model that knows only a list of positions (RFC 9110 section 14.1.2)."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcast.protocol.wire import UnsatisfiableRangeError, parse_content_range, parse_range

small = st.integers(0, 30)
maybe = st.none() | small


def model(first: int | None, last: int | None, total: int) -> list[int] | str:
    """Positions that a server sends, ``whole`` or ``416``."""
    positions = list(range(total))
    if first is None and last is None:
        return "whole"
    if first is None:
        return positions[-last:] or "416" if last else "416"
    if last is not None and last < first:
        return "whole"
    return [at for at in positions if at >= first and (last is None or at <= last)] or "416"


@given(first=maybe, last=maybe, total=small)
@settings(max_examples=1000)
@example(first=None, last=0, total=0)
@example(first=0, last=None, total=0)
@example(first=5, last=5, total=5)
def test_against_the_model(first: int | None, last: int | None, total: int) -> None:
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    expected = model(first, last, total)
    try:
        parsed = parse_range(header, total)
    except UnsatisfiableRangeError:
        assert expected == "416"
        return
    if parsed is None:
        assert expected == "whole"
        return
    assert expected == list(range(parsed.start, parsed.stop))
    assert parsed.total == total
    assert parse_content_range(parsed.content_range) == parsed


@given(start=small, last=small, total=small)
def test_content_range_is_taken_only_if_it_makes_sense(start: int, last: int, total: int) -> None:
    parsed = parse_content_range(f"bytes {start}-{last}/{total}")
    assert (parsed is not None) == (start <= last < total)

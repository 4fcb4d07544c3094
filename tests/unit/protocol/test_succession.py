"""The next head: what it keeps, what it drops, and that readers accept it."""

from __future__ import annotations

import msgspec
import pytest

from shardcast.errors import ClockError, NotFoundError, WithdrawnError
from shardcast.protocol import succession
from shardcast.protocol.envelope import encode_key, seal
from shardcast.protocol.head import DeltaRef, Head, OpenRef, VersionRef, encode_head
from shardcast.protocol.limits import HEAD_DELTA_PARTS, MAX_HEAD_BYTES, MAX_VERSIONS
from shardcast.protocol.succession import Issue
from tests.unit.protocol.facts import OLD

NOW = 1_800_000_000_000
KEY = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
DAY_MS = 24 * 3600 * 1000


def issue(now: int = NOW, expiry_ms: int = DAY_MS) -> Issue:
    return Issue(run="run", now_ms=now, keys=(KEY,), expiry_ms=expiry_ms)


def ref(version: int) -> VersionRef:
    return VersionRef(
        version=version, step=None, manifest=f"{version:064x}", bytes=version, deltas=[]
    )


def published(*versions: int, keep: int = 10) -> Head:
    head: Head | None = None
    for offset, version in enumerate(versions):
        head = succession.with_version(head, issue(NOW + offset), ref(version), keep=keep)
    assert head is not None
    return head


def opened(version: int) -> OpenRef:
    return OpenRef(version=version, step=None, layout="0" * 64, parts=[], deltas=[])


def test_an_open_version_is_named_until_it_closes_or_is_given_up() -> None:
    head = succession.with_open(published(1), issue(NOW + 5), opened(2))
    assert (head.version, head.open, head.sequence) == (1, opened(2), NOW + 5)
    given_up = succession.with_open(head, issue(NOW + 5), None)
    assert (given_up.version, given_up.open, given_up.sequence) == (1, None, NOW + 6)
    assert succession.next_version(given_up, [2]) == 3
    assert succession.with_open(None, issue(), opened(1)).versions == []


def test_the_first_head_has_no_version() -> None:
    head = succession.renewed(None, issue())
    assert (head.version, head.versions, head.open) == (None, [], None)
    assert (head.sequence, head.issued_at, head.expires_at) == (NOW, NOW, NOW + DAY_MS)
    assert head.keys == [encode_key(KEY)]


def test_a_renewal_keeps_the_statement_and_grows_the_sequence() -> None:
    head = published(1, 2)
    same_moment = succession.renewed(head, issue(head.sequence, expiry_ms=5))
    assert same_moment.sequence == head.sequence + 1
    assert same_moment.versions == head.versions
    assert same_moment.expires_at == head.sequence + 5
    assert succession.renewed(head, issue(NOW + 999)).sequence == NOW + 999


def test_a_clock_set_back_by_more_than_a_day_stops_the_publisher() -> None:
    head = published(1)
    succession.renewed(head, issue(NOW - DAY_MS))
    with pytest.raises(ClockError, match="more than a day ahead"):
        succession.renewed(head, issue(NOW - DAY_MS - 1))


def test_versions_are_newest_first_and_bounded() -> None:
    assert [r.version for r in published(1, 2, 3, keep=2).versions] == [3, 2]
    assert [r.version for r in published(1, 2, keep=0).versions] == [2]
    assert len(published(*range(1, 71), keep=1000).versions) == 64


def test_a_complete_version_closes_its_open_one_only() -> None:
    head = succession.renewed(published(1), issue())
    for open_version, left in ((2, None), (3, 3)):
        with_open = _replace(head, open_version)
        after = succession.with_version(with_open, issue(), ref(2), keep=5)
        assert (after.open.version if after.open else None) == left


def _replace(head: Head, open_version: int) -> Head:
    return msgspec.structs.replace(head, open=opened(open_version))


def test_further_deltas_join_those_of_other_bases() -> None:
    def delta(base: int, size: int) -> DeltaRef:
        return DeltaRef(base=f"{base:064x}", base_version=base, parts=[], bytes=size)

    head = published(1, 2, 3)
    one = succession.with_deltas(head, issue(NOW + 9), 3, [delta(2, 5)])
    two = succession.with_deltas(one, issue(NOW + 10), 3, [delta(1, 8), delta(2, 6)])
    assert (one.sequence, two.sequence, two.version) == (NOW + 9, NOW + 10, 3)
    assert two.versions[0].deltas == [delta(1, 8), delta(2, 6)]
    assert succession.with_deltas(one, issue(), 3, [delta(1, 8)]).versions[0].deltas == [
        delta(2, 5),
        delta(1, 8),
    ]
    assert two.versions[1:] == head.versions[1:]
    encode_head(two)
    with pytest.raises(NotFoundError, match="does not retain version 9"):
        succession.with_deltas(head, issue(), 9, [])


def test_deltas_of_old_versions_make_room_in_the_head() -> None:
    """64 versions with 14 deltas of 64 parts each would be twice what a head may be."""
    head: Head | None = None
    for version in range(1, MAX_VERSIONS + 1):
        parts = [f"{version:032x}{n:032x}" for n in range(64)]
        deltas = [
            DeltaRef(base=f"{base + 9000:064x}", base_version=base, parts=parts, bytes=1)
            for base in range(1 - 14, version)
            if version - 14 <= base and base > 0
        ]
        new = msgspec.structs.replace(ref(version + 100), deltas=[])
        head = succession.with_version(head, issue(NOW + version), new, keep=MAX_VERSIONS)
        head = succession.with_deltas(head, issue(NOW + version), version + 100, deltas)
    assert head is not None
    listed = [sum(len(delta.parts) for delta in one.deltas) for one in head.versions]
    assert sum(listed) <= HEAD_DELTA_PARTS
    assert listed[:9] == [14 * 64] * 9  # 8192 / 896
    assert not any(listed[9:])
    assert len(seal(encode_head(head), [OLD])) <= MAX_HEAD_BYTES


def test_a_killed_publisher_s_open_version_is_cleared_by_the_next_one() -> None:
    left = msgspec.structs.replace(published(1, 2), open=opened(3))
    number = succession.next_version(left)
    after = succession.with_version(left, issue(NOW + 50), ref(number), keep=10)
    assert (number, after.open, after.version) == (4, None, 4)


def test_withdrawing_moves_to_the_newest_that_is_left() -> None:
    head = succession.with_withdrawn(published(1, 2, 3), issue(), 3)
    assert (head.version, head.withdrawn) == (2, [3])
    head = succession.with_withdrawn(head, issue(), 1)
    assert (head.version, head.withdrawn) == (2, [3, 1])
    head = succession.with_withdrawn(head, issue(), 2)
    assert head.version is None
    with pytest.raises(WithdrawnError):
        succession.with_withdrawn(head, issue(), 2)
    with pytest.raises(NotFoundError, match="retained: 3, 2, 1"):
        succession.with_withdrawn(head, issue(), 4)
    with pytest.raises(NotFoundError, match="retained: none"):
        succession.with_withdrawn(succession.first_head(issue()), issue(), 4)


def test_hold_is_one_bit() -> None:
    head = published(1)
    held = succession.with_hold(head, issue(), hold=True)
    assert held.hold
    assert not succession.with_hold(held, issue(), hold=False).hold


def test_the_next_number_is_above_everything_ever_announced() -> None:
    assert succession.next_version(None) == 1
    assert succession.next_version(None, [7]) == 8
    head = published(1, 2, 5)
    assert succession.next_version(head) == 6
    assert succession.next_version(_replace(head, 9)) == 10
    gone = succession.with_withdrawn(head, issue(), 5)
    assert succession.next_version(succession.with_version(gone, issue(), ref(6), keep=1)) == 7

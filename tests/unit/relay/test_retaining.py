"""Which versions leave the disk."""

from types import SimpleNamespace
from typing import Any

import pytest

from relay.retaining import choose
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from shardcast.store.retention import Held
from tests.contract.made import make_head, make_version

HOUR_MS = 3_600_000


def node(*, origin: bool = False, now: float = 1000.0, **options: Any) -> Any:
    defaults = {"keep": None, "keep_for_s": None, "quota_bytes": None, "origin": origin}
    limits = SimpleNamespace(recent_s=60.0)
    return SimpleNamespace(
        config=SimpleNamespace(**{**defaults, **options, "limits": limits}), clock=lambda: now
    )


def run(named: list[int], *, whole: int | None, used: dict[int, float] | None = None) -> Any:
    head = decode_head(
        open_unverified(make_head(*(make_version(n, {"a": b"x"}) for n in named)))[1]
    )
    return SimpleNamespace(
        head=SimpleNamespace(head=head), used=used or {}, complete_version=lambda: whole
    )


def held(*numbers: int, size: int = 100, age_ms: int = 0) -> list[Held]:
    return [Held(number, size, age_ms) for number in numbers]


@pytest.mark.parametrize(
    ("options", "named", "whole", "on_disk", "evicted"),
    [
        ({}, [3, 2, 1], 3, [1, 2, 3], ()),
        ({}, [3, 2], 3, [1, 2, 3], (1,)),
        ({"keep": 1}, [3, 2, 1], 3, [1, 2, 3], (1, 2)),
        ({"keep": 2}, [3, 2, 1], 3, [1, 2, 3], (1,)),
        ({"keep": 1}, [3, 2], 2, [2, 3], ()),  # 3 is on its way, 2 the newest whole one
        ({"keep": 1}, [3, 2], None, [1, 2], ()),  # nothing whole yet
        ({"quota_bytes": 250}, [3, 2, 1], 3, [1, 2, 3], (1,)),
        ({"quota_bytes": 1}, [3, 2, 1], 3, [1, 2, 3], (1, 2)),
        ({}, [3], 3, [3, 4], ()),  # newer than the head: not ours to judge
    ],
)
def test_choice(
    options: dict[str, Any],
    named: list[int],
    whole: int | None,
    on_disk: list[int],
    evicted: tuple[int, ...],
) -> None:
    assert choose(node(**options), run(named, whole=whole), held(*on_disk), set()) == evicted


def test_what_was_asked_for_a_moment_ago_stays() -> None:
    used = {1: 950.0, 2: 900.0}
    state = run([3], whole=3, used=used)
    assert choose(node(), state, held(1, 2, 3), set()) == (2,)


def test_old_versions_go_by_age() -> None:
    state = run([3, 2], whole=3)
    old = held(2, 3, age_ms=2 * HOUR_MS)
    assert choose(node(keep_for_s=3600.0), state, old, set()) == (2,)


def test_an_origin_leaves_what_is_being_uploaded_or_published() -> None:
    state = run([3], whole=3)
    assert choose(node(origin=True), state, held(2, 3), {2}) == ()
    assert choose(node(), state, held(2, 3), {2}) == (2,)
    abandoned = held(2, 3, age_ms=2 * HOUR_MS)
    assert choose(node(origin=True), state, abandoned, {2}) == (2,)


def test_without_a_head_nothing_goes() -> None:
    state = SimpleNamespace(head=None, used={}, complete_version=lambda: None)
    assert choose(node(keep=1), state, held(1, 2, 3), set()) == ()  # type: ignore[arg-type]

"""Which versions make room, and in which order."""

from types import SimpleNamespace
from typing import Any

import pytest

from relay.room import Candidate, candidates, in_order
from tests.unit.relay.test_retaining import held, node, run


def numbers(found: list[Candidate]) -> list[int]:
    return [one.number for one in found]


def state(named: list[int], *, whole: int | None, **options: Any) -> Any:
    made = run(named, whole=whole, used=options.get("used"))
    made.name = options.get("name", "policy")
    made.claims = options.get("claims", set())
    return made


@pytest.mark.parametrize(
    ("named", "whole", "on_disk", "wanted", "go"),
    [
        ([3, 2, 1], 2, [1, 2, 3], 3, [1]),  # 2 is the newest whole one, 3 is coming
        ([3, 2, 1], 3, [1, 2, 3], 1, [2]),  # somebody wants 1
        ([3], 3, [1, 2, 3], None, [1, 2]),
        ([3, 2], None, [2], 3, [2]),  # half of an older one, and nothing whole yet
        ([3], 3, [3, 4], None, []),  # newer than the head: not ours to judge
        ([1], 1, [1], None, []),
    ],
)
def test_what_may_go(
    named: list[int], whole: int | None, on_disk: list[int], wanted: int | None, go: list[int]
) -> None:
    found = candidates(node(), state(named, whole=whole), held(*on_disk), set(), wanted)
    assert numbers(found) == go


def test_what_was_asked_for_or_is_written_stays() -> None:
    asked = state([5], whole=5, used={1: 990.0, 2: 900.0}, claims={(3, 7)})
    assert numbers(candidates(node(), asked, held(1, 2, 3, 4, 5), set(), None)) == [2, 4]


def test_an_origin_gives_up_only_what_no_head_retains() -> None:
    found = candidates(
        node(origin=True), state([4, 3], whole=4), held(1, 2, 3, 4), {2}, None
    )  # 2 is being uploaded
    assert numbers(found) == [1]


def test_nothing_goes_without_a_head() -> None:
    headless = SimpleNamespace(head=None)
    assert candidates(node(), headless, held(1, 2), set(), None) == []  # type: ignore[arg-type]


def test_the_order() -> None:
    def one(number: int, age_ms: int, *, dropped: bool = False, run: str = "a") -> Candidate:
        return Candidate(run, number, 100, age_ms, dropped)

    young_dropped, old_dropped = one(7, 10, dropped=True), one(1, 500, dropped=True)
    old, young, other = one(2, 9000), one(6, 20), one(3, 9000, run="b")
    assert in_order([young, old, young_dropped, other, old_dropped]) == [
        old_dropped,
        young_dropped,
        old,
        other,
        young,
    ]

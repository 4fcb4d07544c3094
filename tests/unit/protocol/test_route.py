"""Routes as values: sizes as a head tells them, what a worker holds, the hops that follow."""

from __future__ import annotations

import pytest

from shardcast.protocol.head import DeltaRef, VersionRef
from shardcast.protocol.route import Held, find_route, still_nearest

FULL = 62_000_000_000


def digest(version: int) -> str:
    return f"{version:064x}"


def version(number: int, deltas: dict[int | None, int], size: int = FULL) -> VersionRef:
    """A version with deltas of so many bytes, by the number of their base."""
    return VersionRef(
        version=number,
        step=None,
        manifest=digest(number),
        bytes=size,
        deltas=[
            DeltaRef(
                base=None if base is None else digest(base),
                base_version=base,
                parts=["f" * 64],
                bytes=weight,
            )
            for base, weight in deltas.items()
        ],
    )


def holding(*numbers: int, share: float = 1.0) -> dict[str, Held]:
    return {digest(number): Held(FULL, int(FULL * share)) for number in numbers}


SINGLE = 1_000_000_000
"""A step of the regime without fp32 master weights: 1.6 % of the bytes."""

SKIPS = {1: 1.0, 2: 1.75, 4: 2.95, 8: 4.6}
"""What skip deltas weigh in single ones: elements that change twice are told once."""


def run(last: int = 20, skips: dict[int, float] = SKIPS) -> list[VersionRef]:
    return [
        version(n, {n - k: int(SINGLE * w) for k, w in skips.items() if n > k})
        for n in range(last, 0, -1)
    ]


def numbers(refs: list[VersionRef], wanted: int, held: dict[str, Held], direct: int) -> list[int]:
    ref = next(ref for ref in refs if ref.version == wanted)
    route = find_route(ref, refs, held, direct)
    assert route.bytes <= direct
    return [hop.ref.version for hop in route.hops]


def test_eight_versions_behind_skip_deltas_are_worth_at_least_two_fifths() -> None:
    refs = run()
    route = find_route(refs[0], refs, holding(12), int(SINGLE * SKIPS[8]))
    assert route.bytes <= 0.6 * 8 * SINGLE
    assert [hop.ref.version for hop in route.hops] == [20]


@pytest.mark.parametrize(
    ("behind", "way"),
    [(1, [20]), (2, [20]), (3, [2, 3]), (9, [8, 9]), (16, [8, 16]), (12, [8, 12])],
)
def test_skips_are_chained(behind: int, way: list[int]) -> None:
    """Whole skips first or last: which is the same in bytes."""
    refs = run()
    held = holding(20 - behind)
    one = int(SINGLE * SKIPS[behind]) if behind in SKIPS else FULL
    found = numbers(refs, 20, held, one)
    assert len(found) == len(way)
    assert found[-1] == 20


def test_without_skips_single_deltas_are_chained() -> None:
    refs = run(skips={1: 1.0})
    assert numbers(refs, 20, holding(15), FULL) == [16, 17, 18, 19, 20]


def test_from_nothing_a_copy_comes_at_once() -> None:
    assert numbers(run(), 20, {}, FULL) == [20]


def test_a_chain_dearer_than_a_copy_is_not_gone() -> None:
    refs = [version(n, {n - 1: FULL // 2}) for n in (5, 4, 3, 2)]
    assert numbers(refs, 5, holding(1), FULL) == [5]


def test_a_compressed_copy_of_a_version_on_the_way_is_a_way() -> None:
    refs = [version(3, {2: 10}), version(2, {None: FULL // 2})]
    assert numbers(refs, 3, {}, FULL) == [2, 3]


def test_the_time_of_passes_is_worth_some_bytes() -> None:
    refs = [version(3, {2: 100, 1: 203}, 10_000), version(2, {1: 100}, 10_000)]
    held = {digest(1): Held(10_000, 10_000)}
    assert [h.ref.version for h in find_route(refs[0], refs, held, 190).hops] == [3]
    # ... but never more bytes than one delta after the other would weigh.
    assert [h.ref.version for h in find_route(refs[0], refs, held, 203).hops] == [2, 3]


def test_a_version_that_is_nearly_here_is_finished_on_the_way() -> None:
    refs = [version(3, {2: 10}), version(2, {1: FULL // 2})]
    held = holding(2, share=0.99)
    route = find_route(refs[0], refs, held, FULL // 10)
    assert [hop.ref.version for hop in route.hops] == [2, 3]
    assert route.hops[0].bytes == FULL - int(FULL * 0.99)


def test_half_a_base_on_the_way_is_worth_half_a_delta() -> None:
    """Version 2 comes from half of version 1 by half the delta and half a copy."""
    refs = [version(3, {2: 10}), version(2, {1: FULL // 10})]
    route = find_route(refs[0], refs, holding(1, share=0.5), FULL)
    assert [hop.bytes for hop in route.hops] == [FULL // 20 + FULL // 2, 10]


def test_versions_beyond_the_wanted_one_lead_nowhere() -> None:
    refs = run()
    assert numbers(refs, 10, holding(12), FULL) == [10]


def test_an_empty_version_costs_nothing() -> None:
    refs = [version(3, {2: 0}, 0), version(2, {1: 0}, 0)]
    assert find_route(refs[0], refs, {digest(1): Held(0, 0)}, 0).bytes == 0


def test_a_chain_with_a_step_missing_is_none() -> None:
    refs = [version(4, {3: 10}), version(3, {}), version(2, {1: 10})]
    assert numbers(refs, 4, holding(1), FULL) == [4]


@pytest.mark.parametrize(
    ("listed", "held", "direct", "goes_on"),
    [
        ((12, 11, 10), holding(8), FULL, True),  # the head lists it
        ((14, 13, 12), holding(8), FULL, False),  # a skip delta leads from 8 to 12, and on
        ((14, 13, 12), {}, FULL, True),  # the newest one costs a copy, too
        ((14, 13, 12), holding(8), SINGLE, True),  # it is nearly here
        ((10, 9), holding(8), FULL, True),  # nothing newer is known
        ((), holding(8), FULL, True),
    ],
)
def test_whether_to_go_on_when_the_way_is_cut_off(
    listed: tuple[int, ...], held: dict[str, Held], direct: int, goes_on: bool
) -> None:
    refs = {ref.version: ref for ref in run()}
    versions = [refs[number] for number in listed]
    assert still_nearest(refs[11], versions, held, direct) is goes_on

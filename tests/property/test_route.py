"""What holds for every route: it is the cheapest of all that there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.protocol.head import VersionRef
from shardcast.protocol.route import Held, Hop, Route, find_route
from tests.unit.protocol.test_route import digest, version

FULL = 1_000_000


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[VersionRef], dict[str, Held], int]:
    """Up to six versions with any deltas, some of them held, and the price of going directly."""
    last = draw(st.integers(1, 6))
    refs = []
    for number in range(last, 0, -1):
        bases = draw(st.sets(st.sampled_from([None, *range(1, number)]), max_size=4))
        refs.append(version(number, {b: draw(st.integers(0, 2 * FULL)) for b in bases}, FULL))
    held = {
        digest(number): Held(FULL, draw(st.sampled_from([1, FULL // 3, FULL - 1, FULL])))
        for number in draw(st.sets(st.integers(1, last - 1) if last > 1 else st.nothing()))
    }
    return refs, held, draw(st.integers(0, FULL))


def every_way(
    ref: VersionRef, refs: Sequence[VersionRef], held: dict[str, Held]
) -> Iterator[tuple[Hop, ...]]:
    """All ways to make a version whole that is not."""
    here = held.get(ref.manifest)
    missing = FULL - (here.verified_bytes if here else 0)
    yield (Hop(ref, missing),)
    for delta in ref.deltas:
        weight = delta.bytes * missing / FULL
        whole = min(missing, round(weight))
        if delta.base is None:
            yield (Hop(ref, whole),)
            continue
        base = held.get(delta.base)
        if base is not None:
            share = base.verified_bytes / FULL
            yield (Hop(ref, min(missing, round(share * weight + (1 - share) * missing))),)
        before = next((r for r in refs if r.manifest == delta.base), None)
        if before is not None and (base is None or base.verified_bytes < FULL):
            for way in every_way(before, refs, held):
                yield (*way, Hop(ref, whole))


def all_routes(
    wanted: VersionRef, refs: Sequence[VersionRef], held: dict[str, Held], direct: int
) -> list[Route]:
    return [
        Route((Hop(wanted, direct),)),
        *(Route(way) for way in every_way(wanted, refs, held) if len(way) > 1),
    ]


@given(worlds())
@settings(max_examples=300)
def test_no_route_carries_fewer_bytes(world: tuple[list[VersionRef], dict[str, Held], int]) -> None:
    refs, held, direct = world
    found = find_route(refs[0], refs, held, direct, pass_share=0.0)
    every = all_routes(refs[0], refs, held, direct)
    assert found in every
    assert found.bytes == min(route.bytes for route in every)


@given(worlds(), st.floats(0.0, 0.2))
@settings(max_examples=300)
def test_passes_are_priced_but_single_deltas_never_weigh_less(
    world: tuple[list[VersionRef], dict[str, Held], int], share: float
) -> None:
    refs, held, direct = world
    found = find_route(refs[0], refs, held, direct, pass_share=share)
    every = all_routes(refs[0], refs, held, direct)
    assert found in every
    assert found.bytes <= direct
    singles = list(single_deltas(refs, held))
    assert all(found.bytes <= weight for weight in singles)
    cheapest = min(route.bytes + share * FULL * (len(route.hops) - 1) for route in every)
    price = found.bytes + share * FULL * (len(found.hops) - 1)
    # Else single deltas from something whole weigh less than that: then bytes alone decide.
    whole = any(here == Held(FULL, FULL) for here in held.values())
    by_bytes = find_route(refs[0], refs, held, direct, pass_share=0.0)
    assert price <= cheapest + 1e-6 or (whole and found == by_bytes)


def single_deltas(refs: Sequence[VersionRef], held: dict[str, Held]) -> Iterator[int]:
    """What the deltas from the last whole version weigh, one by one, where that is two or more.

    One alone is a direct way, whose price is given.
    """
    whole = [n for n in range(1, len(refs)) if held.get(digest(n)) == Held(FULL, FULL)]
    for start in whole[-1:]:
        if start == len(refs) - 1:
            return
        weight = 0
        for ref in reversed(refs[: len(refs) - start]):
            here = held.get(ref.manifest)
            missing = FULL - (here.verified_bytes if here else 0)
            step = [d.bytes for d in ref.deltas if d.base_version == ref.version - 1]
            if not step:
                break
            weight += min(missing, round(step[0] * missing / FULL))
        else:
            yield weight

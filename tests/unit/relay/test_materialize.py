"""By which versions a relay gets to one with deltas alone: decided from the head and the disk."""

from relay.materialize import Step, steps_to
from shardcast.protocol.head import DeltaRef, Head, OpenDeltaRef, OpenRef, VersionRef
from shardcast.protocol.route import Held

BYTES = 1_000_000
WHOLE = Held(BYTES, BYTES)


def manifest(number: int) -> str:
    return f"{number:064x}"


def delta(base: int | None, cost: int = 2500) -> DeltaRef:
    return DeltaRef(
        base=None if base is None else manifest(base), base_version=base, parts=[], bytes=cost
    )


def version(number: int, *deltas: DeltaRef) -> VersionRef:
    return VersionRef(
        version=number, step=None, manifest=manifest(number), bytes=BYTES, deltas=list(deltas)
    )


def head(*versions: VersionRef, opened: OpenRef | None = None) -> Head:
    return Head(
        run="policy",
        sequence=1,
        issued_at=0,
        expires_at=1,
        keys=[],
        version=versions[0].version,
        versions=list(versions),
        open=opened,
        withdrawn=[],
        hold=False,
    )


CHAIN = head(version(4, delta(3)), version(3, delta(2)), version(2, delta(1)), version(1))


def held(*numbers: int) -> dict[str, Held]:
    return {manifest(number): WHOLE for number in numbers}


def test_one_step_from_the_version_before() -> None:
    assert steps_to(4, CHAIN, held(3)) == [Step(4, manifest(3))]


def test_a_chain_where_the_one_before_is_not_here() -> None:
    steps = [Step(2, manifest(1)), Step(3, manifest(2)), Step(4, manifest(3))]
    assert steps_to(4, CHAIN, held(1)) == steps


def test_a_skip_delta_that_weighs_less_than_the_chain() -> None:
    skipping = head(version(4, delta(3), delta(1, 4000)), *CHAIN.versions[1:])
    assert steps_to(4, skipping, held(1)) == [Step(4, manifest(1))]


def test_nothing_without_a_whole_base() -> None:
    assert steps_to(4, CHAIN, {}) == []
    assert steps_to(4, CHAIN, {manifest(3): Held(BYTES, BYTES - 1)}) == []
    assert steps_to(4, CHAIN, {manifest(9): WHOLE}) == []


def test_nothing_for_what_is_here_or_unknown() -> None:
    assert steps_to(4, CHAIN, held(3, 4)) == []
    assert steps_to(9, CHAIN, held(3)) == []


def test_nothing_where_the_delta_weighs_as_much_as_the_version() -> None:
    dear = head(version(2, delta(1, BYTES)), version(1))
    assert steps_to(2, dear, held(1)) == []


def test_a_compressed_copy_needs_no_base() -> None:
    packed = head(version(2, delta(None, 700_000)))
    assert steps_to(2, packed, {}) == [Step(2, None)]


def test_an_open_version_by_its_base_or_by_the_way_to_it() -> None:
    def opened(base: int | None) -> Head:
        told = OpenDeltaRef(
            base=None if base is None else manifest(base), base_version=base, parts=[]
        )
        return head(
            *CHAIN.versions,
            opened=OpenRef(version=5, step=None, layout="f" * 64, parts=[], deltas=[told]),
        )

    assert steps_to(5, opened(4), held(4)) == [Step(5, manifest(4))]
    assert steps_to(5, opened(4), held(3)) == [Step(4, manifest(3)), Step(5, manifest(4))]
    assert steps_to(5, opened(4), {}) == []
    assert steps_to(5, opened(None), {}) == [Step(5, None)]

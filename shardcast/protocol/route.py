"""By which versions to go to one: over one delta, a skip delta, a chain of them, or a copy.

Pure. What deltas weigh is known from the head alone, so a route is chosen before any document of a
version on the way is fetched. The last hop's exact price, shard by shard, is ``plan``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardcast.protocol.head import DeltaRef, VersionRef

PASS_SHARE: Final = 0.01
"""What making a version on the way costs in time, as a share of its bytes on the network: decoding,
hashing and writing take about a hundredth of the time that 590 Mb/s need for a copy."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version on this disk.

    Attributes:
        bytes: Its size.
        verified_bytes: How much of it is verified.
        base_bytes: Of that, what deltas can start from, since a frame needs all of its base; None: all.
    """

    bytes: int
    verified_bytes: int
    base_bytes: int | None = None

    @property
    def share(self) -> float:
        """Which share of it deltas can start from."""
        usable = self.verified_bytes if self.base_bytes is None else self.base_bytes
        return usable / self.bytes if self.bytes else 1.0


@dataclass(frozen=True, slots=True)
class Hop:
    """A version to obtain, and what the network is expected to carry for it."""

    ref: VersionRef
    bytes: int


@dataclass(frozen=True, slots=True)
class Route:
    """Versions to obtain one after the other; the last one is wanted, the others are only bases."""

    hops: tuple[Hop, ...]

    @property
    def bytes(self) -> int:
        """What the network is expected to carry in all."""
        return sum(hop.bytes for hop in self.hops)

    def leads_over(self, version: int) -> bool:
        """Say whether a version is obtained on the way."""
        return any(hop.ref.version == version for hop in self.hops[:-1])


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to make a version complete: its price with the time of its passes, and its hops."""

    price: float
    hops: tuple[Hop, ...]


def direct(wanted: VersionRef, price: int) -> Route:
    """Return the route without a version on the way."""
    return Route((Hop(wanted, price),))


def find_route(
    wanted: VersionRef,
    versions: Sequence[VersionRef],
    held: Mapping[str, Held],
    direct_bytes: int,
    *,
    pass_share: float = PASS_SHARE,
) -> Route:
    """Return the cheapest route: never dearer than going directly, nor than any chain of deltas.

    Versions on the way cost a pass over the disk, so a shorter route may be worth some bytes, but
    never more than the deltas from each version to the next weigh together.

    Args:
        wanted: The version wanted.
        versions: What the head retains.
        held: What is on this disk, by manifest.
        direct_bytes: What the network must carry if nothing else is obtained before.
        pass_share: What a version on the way costs in time, as a share of its bytes.
    """
    quick = _best(wanted, versions, held, direct_bytes, pass_share)
    steps = _single_steps(wanted, versions, held)
    if steps is not None and quick.bytes > steps:
        return _best(wanted, versions, held, direct_bytes, 0.0)
    return quick


def expected_bytes(ref: VersionRef, held: Mapping[str, Held]) -> int:
    """Return what a version costs from what is held now, by at most one delta for each shard."""
    return min([_missing(ref, held), *_from_held(ref, held)])


def still_nearest(
    wanted: VersionRef,
    versions: Sequence[VersionRef],
    held: Mapping[str, Held],
    direct_bytes: int,
) -> bool:
    """Say whether to go on to a version that may have left the head, now that its way is cut off.

    Yes while the head lists it; else only if going directly costs no more than going to the newest
    one that the head lists now: a version that nobody lists may vanish at any moment.

    Args:
        wanted: The version wanted.
        versions: What the head retains.
        held: What is on this disk, by manifest.
        direct_bytes: What the network must carry for it if nothing else is obtained before.
    """
    newest = max(versions, key=lambda ref: ref.version, default=wanted)
    if newest.version <= wanted.version or any(ref == wanted for ref in versions):
        return True
    fresh = find_route(newest, versions, held, expected_bytes(newest, held))
    return direct_bytes <= fresh.bytes


def _best(
    wanted: VersionRef,
    versions: Sequence[VersionRef],
    held: Mapping[str, Held],
    direct_bytes: int,
    pass_share: float,
) -> Route:
    """Return the route of least price: a delta's base is older, so one pass upwards finds it."""
    ways: dict[str, _Way] = {}
    for ref in _on_the_way(wanted, versions, held):
        price = expected_bytes(ref, held)
        choices = [_Way(price, (Hop(ref, price),)), *_over(ref, ways, held)]
        best = min(choices, key=lambda way: way.price)
        ways[ref.manifest] = _Way(best.price + pass_share * ref.bytes, best.hops)
    ends = [_Way(direct_bytes, direct(wanted, direct_bytes).hops), *_over(wanted, ways, held)]
    return Route(min(ends, key=lambda way: way.price).hops)


def _on_the_way(
    wanted: VersionRef, versions: Sequence[VersionRef], held: Mapping[str, Held]
) -> list[VersionRef]:
    """Return the versions that could be obtained before, oldest first: those not all here."""
    older = [ref for ref in versions if ref.version < wanted.version and not _whole(ref, held)]
    return sorted(older, key=lambda ref: ref.version)


def _over(ref: VersionRef, ways: Mapping[str, _Way], held: Mapping[str, Held]) -> list[_Way]:
    """Return the ways to a version over each base that would be obtained before."""
    found: list[_Way] = []
    for delta in ref.deltas:
        before = None if delta.base is None else ways.get(delta.base)
        if before is not None:
            price = _by_delta(ref, delta, held, 1.0)
            found.append(_Way(before.price + price, (*before.hops, Hop(ref, price))))
    return found


def _from_held(ref: VersionRef, held: Mapping[str, Held]) -> list[int]:
    """Return what a version costs by each delta from what is held, or from nothing."""
    return [
        _by_delta(ref, delta, held, 1.0 if delta.base is None else held[delta.base].share)
        for delta in ref.deltas
        if delta.base is None or delta.base in held
    ]


def _by_delta(ref: VersionRef, delta: DeltaRef, held: Mapping[str, Held], share: float) -> int:
    """Return what a delta costs from a base of which a share is there.

    Shards that lie where the base has gaps come as they are.
    """
    missing = _missing(ref, held)
    needed = delta.bytes * missing / ref.bytes if ref.bytes else 0.0
    return min(missing, round(share * needed + (1.0 - share) * missing))


def _missing(ref: VersionRef, held: Mapping[str, Held]) -> int:
    own = held.get(ref.manifest)
    return ref.bytes if own is None else max(ref.bytes - own.verified_bytes, 0)


def _whole(ref: VersionRef, held: Mapping[str, Held]) -> bool:
    return ref.manifest in held and held[ref.manifest].share >= 1.0


def _single_steps(
    wanted: VersionRef, versions: Sequence[VersionRef], held: Mapping[str, Held]
) -> int | None:
    """Return what single deltas from what is whole cost, one after the other; None without them."""
    total: int | None = None
    before: str | None = None
    older = (ref for ref in versions if ref.version < wanted.version)
    for ref in sorted((*older, wanted), key=lambda ref: ref.version):
        steps: list[int] = []
        for delta in ref.deltas:
            if total is not None and delta.base == before:
                steps.append(total + _by_delta(ref, delta, held, 1.0))
            elif delta.base is not None and delta.base in held and held[delta.base].share >= 1.0:
                steps.append(_by_delta(ref, delta, held, 1.0))
        total = 0 if _whole(ref, held) else min(steps, default=None)
        before = ref.manifest
    return total

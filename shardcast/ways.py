"""Which ways lead from what is on this disk to a version, and what they cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from shardcast.delta_documents import Base
from shardcast.protocol import route
from shardcast.protocol.head import VersionRef
from shardcast.protocol.layout import Layout
from shardcast.protocol.limits import MAX_SHARD_BYTES
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Delta, Holding, plan_version
from shardcast.protocol.route import Held, Route
from shardcast.store.files import disk_errors
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version to bring here: the head's entry, its documents, and the deltas that lead to it."""

    ref: VersionRef
    version: Version
    deltas: Sequence[Delta] = ()


class Ways:
    """Looks at one run's directory. Thread-safe; remembers nothing."""

    def __init__(self, store: RunStore, listed: Callable[[], Sequence[VersionRef]]) -> None:
        """Look at nothing yet.

        Args:
            store: The directory.
            listed: Returns what the newest head retains.
        """
        self._store = store
        self._listed = listed

    def bases(self, target: int) -> dict[str, Base]:
        """Return what deltas to a version may start from, by manifest."""
        found: dict[str, Base] = {}
        for stored in self._others(target):
            manifest, present = stored.version.manifest, stored.present()
            if manifest is not None and present:
                layout = stored.version.layout
                share = base_bytes(layout, present) / max(layout.total_bytes, 1)
                found[manifest] = Base(stored.version.number, share)
        return found

    def direct_bytes(self, wanted: Wanted) -> int:
        """Return what the network must carry for a version if nothing else is obtained before."""
        here = self._store.stored(wanted.version.number)
        done = frozenset[int]() if here is None else here.present()
        others = [Holding(s.version, s.present()) for s in self._others(wanted.version.number)]
        return plan_version(wanted.version, done, others, wanted.deltas).fetch_bytes

    def ahead(self, wanted: Wanted) -> Route:
        """Return the cheapest route to a version, also by deltas whose parts nobody has asked for yet.

        Its price is what the network must still carry.
        """
        held = self._held()
        direct = min(self.direct_bytes(wanted), route.expected_bytes(wanted.ref, held))
        return route.find_route(wanted.ref, self._listed(), held, direct)

    def find(self, wanted: Wanted) -> Route:
        """Return the cheapest route that the disk has room for."""
        direct = self.direct_bytes(wanted)
        here = self._store.stored(wanted.version.number)
        if here is None or not here.committed:  # else some shards are repaired: no detour for them
            found = route.find_route(wanted.ref, self._listed(), self._held(), direct)
            if len(found.hops) > 1 and self._fits(found):
                return found
        return route.direct(wanted.ref, direct)

    def still_nearest(self, wanted: Wanted) -> bool:
        """Say whether to go on to a version, now that its way is cut off (``route.still_nearest``)."""
        direct = self.direct_bytes(wanted)
        return route.still_nearest(wanted.ref, self._listed(), self._held(), direct)

    def lists(self, ref: VersionRef) -> bool:
        """Say whether the newest head lists a version."""
        return any(listed.manifest == ref.manifest for listed in self._listed())

    def _fits(self, found: Route) -> bool:
        """Say whether there is room for every two versions that follow each other on a route."""
        staged = set(self._store.staged())
        needs = [0 if h.ref.version in staged else h.ref.bytes for h in found.hops]
        with disk_errors(self._store.root, "looking for free space"):
            stat = os.statvfs(self._store.root)
        free = stat.f_bavail * stat.f_frsize
        return all(a + b <= free for a, b in pairwise(needs))

    def _others(self, target: int) -> list[StoredVersion]:
        numbers = [*self._store.committed(), *self._store.staged()]
        found = (self._store.stored(number) for number in numbers if number != target)
        return [stored for stored in found if stored is not None]

    def _held(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for stored in self._others(0):
            manifest, layout, present = (
                stored.version.manifest,
                stored.version.layout,
                stored.present(),
            )
            if manifest is not None:
                usable = base_bytes(layout, present)
                found[manifest] = Held(layout.total_bytes, _verified(layout, present), usable)
        return found


def _verified(layout: Layout, present: Set[int]) -> int:
    if len(present) == layout.shard_count:
        return layout.total_bytes
    return sum(layout.extent(shard).length for shard in present)


def base_bytes(layout: Layout, present: Set[int]) -> int:
    """Return of how many bytes of a version deltas can make use.

    A frame rebuilds consecutive shards, up to 16 MiB of them, and needs all of its base. So of a version
    that is here in part only whole runs of that length count: of a small model hardly anything, although
    most of it may be here.
    """
    if len(present) == layout.shard_count:
        return layout.total_bytes
    usable = length = 0
    whole = True
    for extent in layout.extents():
        if length + extent.length > MAX_SHARD_BYTES:
            usable += length if whole else 0
            length, whole = 0, True
        length += extent.length
        whole = whole and extent.shard in present
    return usable + (length if whole else 0)

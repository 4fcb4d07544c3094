"""Bringing a version here by its route: versions on the way first, each of them only a base.

A version on the way is staged and verified as any other, never activated, and removed once the next
one is whole: the disk holds two staged versions at most. Whatever goes wrong with it (it turns out
dearer than it is worth, does not fit), the wanted version then comes directly. If it left the head and
the sources, a way is looked for anew from what is here; if the wanted version did, the last one on the way
that is whole will do. What was verified of it stays until then, also over a cancellation: the next try goes on
from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from shardcast.errors import (
    BusyError,
    DiskFullError,
    GoneError,
    IntegrityError,
    MalformedError,
    NetworkError,
    TrustError,
)
from shardcast.obtain import Obtainer
from shardcast.plan_work import AllowanceError, Tally
from shardcast.protocol.head import VersionRef
from shardcast.protocol.route import Hop
from shardcast.rebuilding import DeltaFailure
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from shardcast.ways import Wanted, Ways

_DETOUR_ERRORS = (
    AllowanceError,
    BusyError,
    IntegrityError,
    MalformedError,
    NetworkError,
    TrustError,
)


class NewObtainer(Protocol):
    """Makes what obtains one version."""

    def __call__(self, hop: VersionRef, tally: Tally, allowance: int | None) -> Obtainer:
        """Return a new one; with an allowance it is for a version on the way."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version that is complete, and over which others it came."""

    ref: VersionRef
    stored: StoredVersion
    via: tuple[int, ...]


class Journey:
    """Goes to one version.

    Attributes:
        failures: What deltas did not bring, on all hops.
    """

    def __init__(
        self,
        store: RunStore,
        ways: Ways,
        new_obtainer: NewObtainer,
        documents: Callable[[VersionRef], Wanted],
    ) -> None:
        """Do nothing yet.

        Args:
            store: The run's directory.
            ways: Finds the route.
            new_obtainer: Makes what obtains one version.
            documents: Fetches a version's documents, and the deltas that lead to it now.
        """
        self._store = store
        self._ways = ways
        self._new_obtainer = new_obtainer
        self._documents = documents
        self.failures: list[DeltaFailure] = []

    def go(self, wanted: Wanted, tally: Tally, *, exact: bool = False) -> Arrived:
        """Make a version complete on disk, or the last one on the way if it cannot be had any more.

        Args:
            wanted: The version.
            tally: Counts.
            exact: No other version will do.

        Raises:
            GoneError: If it left the head, and it cannot be had or is not worth what it costs now.
            ShardcastError: As ``Obtainer.obtain`` says of the wanted version.
        """
        passed: list[VersionRef] = []
        with ExitStack() as lease:
            try:
                self._go_on_the_way(wanted, tally, lease, passed, exact=exact)
                stored = self._obtain_last(wanted, tally, lease, passed)
            except GoneError:
                if exact or not passed:
                    raise
                return self._settle(passed)
        self._remove([ref.version for ref in passed])
        return Arrived(wanted.ref, stored, tuple(ref.version for ref in passed))

    def _go_on_the_way(
        self,
        wanted: Wanted,
        tally: Tally,
        lease: ExitStack,
        passed: list[VersionRef],
        *,
        exact: bool,
    ) -> None:
        """Make all versions on the way whole, one after the other, as far as that goes.

        One that left the head is on no way that is found then; another that fails is done without.
        """
        hop: Hop | None = None
        while True:
            hops = self._ways.find(wanted).hops[:-1]
            try:
                for hop in hops:
                    self._go_over(hop, wanted, tally, lease)
                    self._remove([ref.version for ref in passed])
                    passed.append(hop.ref)
            except DiskFullError:
                lease.close()
                self._remove([ref.version for ref in (*passed, *(hop.ref for hop in hops))])
                passed.clear()
                return
            except _DETOUR_ERRORS as error:
                if not exact and not self._ways.still_nearest(wanted):
                    raise GoneError(
                        f"version {wanted.ref.version} left the head, and its way is cut off: "
                        f"{error.message}",
                        source=error.source,
                    ) from error
                if hop is not None and self._ways.lists(hop.ref):
                    return
            else:
                return

    def _obtain_last(
        self, wanted: Wanted, tally: Tally, lease: ExitStack, passed: list[VersionRef]
    ) -> StoredVersion:
        try:
            if passed:
                wanted = self._documents(wanted.ref)
            return self._obtain(wanted, tally, None)
        except DiskFullError:
            if not passed:
                raise
            lease.close()
            self._remove([ref.version for ref in passed])
            passed.clear()
            return self._obtain(wanted, tally, None)

    def _settle(self, passed: Sequence[VersionRef]) -> Arrived:
        """Arrive at the last version on the way: it is whole, and what it cost is not lost.

        Raises:
            GoneError: If it vanished from this disk.
        """
        *before, last = passed
        stored = self._store.stored(last.version)
        if stored is None or not stored.complete:
            raise GoneError(f"version {last.version} was on the way, and is not here any more")
        return Arrived(last, stored, tuple(ref.version for ref in before))

    def _go_over(self, hop: Hop, wanted: Wanted, tally: Tally, lease: ExitStack) -> None:
        """Make a version on the way whole, and hold it instead of the one before."""
        own = Tally()
        try:
            stored = self._obtain(self._documents(hop.ref), own, _worth(hop, wanted))
        finally:
            tally.fetched_bytes += own.fetched_bytes
            tally.hedged_bytes += own.hedged_bytes
            tally.delta_bytes += own.delta_bytes
        before = lease.pop_all()
        lease.enter_context(stored.lease())
        before.close()

    def _obtain(self, wanted: Wanted, tally: Tally, allowance: int | None) -> StoredVersion:
        obtainer = self._new_obtainer(wanted.ref, tally, allowance)
        try:
            return obtainer.obtain(wanted.version, wanted.deltas)
        finally:
            self.failures += obtainer.failures

    def _remove(self, numbers: Sequence[int]) -> None:
        """Give up versions that were only bases."""
        for number in numbers:
            stored = self._store.stored(number)
            if stored is not None and not stored.committed:
                self._store.evict(number)


def _worth(hop: Hop, wanted: Wanted) -> int:
    """Return the most that a version on the way may cost: a little more than the head promised.

    A delta that turns out wrong would otherwise make a whole copy of a version that nobody wants.
    """
    return hop.bytes + max(hop.bytes, wanted.ref.bytes // 20)

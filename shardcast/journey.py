"""Bringing a version here by its route: versions on the way first, each of them only a base.

A version on the way is staged and verified as any other, never activated, and removed once the next
one is whole: the disk holds two staged versions at most. Whatever goes wrong with it (it turns out
dearer than it is worth, vanishes from the sources, does not fit), the wanted version then comes
directly. What was verified of it stays until then, also over a cancellation: the next try goes on
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
    DiskFullError,
    IntegrityError,
    MalformedError,
    NetworkError,
    TrustError,
)


class NewObtainer(Protocol):
    """Makes what obtains one version."""

    def __call__(self, tally: Tally, allowance: int | None) -> Obtainer:
        """Return a new one; with an allowance it is for a version on the way."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version that is complete, and over which others it came."""

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

    def go(self, wanted: Wanted, tally: Tally) -> Arrived:
        """Make a version complete on disk.

        Raises:
            ShardcastError: As ``Obtainer.obtain`` says of the wanted version.
        """
        hops = self._ways.find(wanted).hops[:-1]
        via = [hop.ref.version for hop in hops]
        with ExitStack() as lease:
            try:
                for number, hop in enumerate(hops):
                    self._go_over(hop, wanted, tally, lease)
                    self._remove(via[:number])
            except _DETOUR_ERRORS as error:
                lease.close()
                if isinstance(error, DiskFullError):
                    self._remove(via)
                via = []
            try:
                if via:
                    wanted = self._documents(wanted.ref)
                stored = self._obtain(wanted, tally, None)
            except DiskFullError:
                if not via:
                    raise
                lease.close()
                self._remove(via)
                via = []
                stored = self._obtain(wanted, tally, None)
        self._remove(via)
        return Arrived(stored, tuple(via))

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
        obtainer = self._new_obtainer(tally, allowance)
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

"""What makes a complete version the current one: commit, switch, evict, recycle, run the hook.

Blocking; the session runs it in threads.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardcast.cancel import Cancel
from shardcast.errors import DiskError, MalformedError
from shardcast.heads import HeadKeeper
from shardcast.hooks import UpdateHook
from shardcast.protocol.head import VersionRef
from shardcast.scans import Scans
from shardcast.store.files import atomic_write, is_there
from shardcast.store.recycling import worthwhile
from shardcast.store.retention import Held, Keep, choose_evictions, collect
from shardcast.store.run import RunStore

if TYPE_CHECKING:
    from shardcast.session import WorkerOptions


class Activator:
    """Acts on one OUT for its leader."""

    def __init__(
        self,
        options: WorkerOptions,
        store: RunStore,
        keeper: HeadKeeper,
        scans: Scans,
        documents: threading.Lock,
    ) -> None:
        """Do nothing yet.

        Args:
            options: What the worker was told.
            store: The run's directory.
            keeper: Knows what was withdrawn.
            scans: Remembers which versions are whole.
            documents: Held while documents are fetched: none is collected then.
        """
        self._options = options
        self._store = store
        self._keeper = keeper
        self._scans = scans
        self._documents = documents
        self._recycling = False

    # --- commit -----------------------------------------------------------------------------

    def commit(self, number: int, busy: frozenset[int]) -> Path:
        """Commit a version, switch ``current``, evict what is over; return its directory.

        Args:
            number: The version.
            busy: Versions that are being worked on and must stay.

        Raises:
            DiskError: If the commit fails; the old version stays current then.
        """
        store = self._store
        with self._leased(number):
            store.commit(number, self._options.durability)
            self._scans.remember(number)
            if store.current() != number:
                store.switch_current(number)
        self._evict(number, busy)
        return Path(os.path.abspath(store.version_directory(number)))

    def _leased(self, number: int) -> AbstractContextManager[None]:
        """Keep a version from being given up for room while it is committed."""
        stored = self._store.stored(number)
        return nullcontext() if stored is None else stored.lease()

    # --- evict and recycle ------------------------------------------------------------------

    def recycle(self) -> None:
        """From now on keep the files of evicted versions for the next one, where that pays.

        Not where this directory is served, or ever was: bytes that ``sendfile`` took may wait in a
        socket as the file's own pages, and overwriting them changes what the neighbour receives.
        """
        self._recycling = self._options.recycle and worthwhile(self._store.root)

    def tidy(self, current: int) -> None:
        """Evict what is over beside a version that is current already; the next commit may, too."""
        with suppress(DiskError):
            self._evict(current, frozenset())

    def close(self) -> None:
        """Give up what was kept for the next version."""
        if self._recycling:
            self._store.spares.drop()

    def _evict(self, current: int, busy: frozenset[int]) -> None:
        """Keep the newest versions; drop what this one superseded. Readers go first."""
        store = self._store
        held = [Held(number=n, bytes=0, age_ms=0) for n in store.committed()]
        over = choose_evictions(held, Keep(count=self._options.keep), {current, *busy})
        accepted = self._keeper.accepted
        withdrawn = accepted.head.withdrawn if accepted is not None else []
        stale = [n for n in store.staged() if n not in busy and (n < current or n in withdrawn)]
        gone = [*stale, *over]
        served = is_there(store.root / "state" / "serve", lambda mode: True)
        spare = self._options.keep if self._recycling and not served else None
        if not self._documents.acquire(blocking=False):
            for n in gone:  # documents of another version are just coming: none is removed now
                store.evict(n, spare_within=spare)
            return
        try:
            # A head that cannot be read is replaced by the next one; then this works again.
            with suppress(MalformedError):
                collect(store, gone, spare_within=spare)
        finally:
            self._documents.release()

    # --- the hook ---------------------------------------------------------------------------

    def run_hook(self, hook: UpdateHook, ref: VersionRef, path: Path, cancel: Cancel) -> None:
        """Run the hook for a version that is current.

        Raises:
            EngineError: As ``UpdateHook.run``.
        """
        variables = {
            "SHARDCAST_RUN": self._options.run,
            "SHARDCAST_VERSION": str(ref.version),
            "SHARDCAST_STEP": "" if ref.step is None else str(ref.step),
            "SHARDCAST_MANIFEST": ref.manifest,
            "SHARDCAST_PATH": str(path),
        }
        hook.run(variables, cancel)

    def note_hook(self, number: int) -> None:
        """Remember which version the leader's hook ran for last, if the disk lets us."""
        with suppress(DiskError):
            atomic_write(self._hooked, b"%d\n" % number, sync=False)

    def missed(self, number: int) -> bool:
        """Say whether the hook ran for another version last: it was killed before this one's."""
        if self._options.on_update is None:
            return False
        try:
            return int(self._hooked.read_bytes()) != number
        except (OSError, ValueError):
            return False

    @property
    def _hooked(self) -> Path:
        return self._store.root / "state" / "hooked"

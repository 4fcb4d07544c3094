"""Bringing a version's shards onto the disk: from what is here already, and over the network.

The plan is pure (protocol.plan); this makes room, plans, and has it performed (plan_work), local
work on all cores while the network works.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from shardcast.cancel import Cancel
from shardcast.documents import OpenPool
from shardcast.errors import BusyError, DiskFullError, IntegrityError
from shardcast.hashing import default_threads
from shardcast.plan_work import Damage, PlanWork, Shards, Tally, local_tasks
from shardcast.protocol.limits import MIB
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Delta, Holding, Plan, network_share, plan_version
from shardcast.rebuilding import DeltaFailure, Rebuilding
from shardcast.store.files import disk_errors, is_there
from shardcast.store.renewing import has_other_size
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from shardcast.store.version_files import make_files

_ROUNDS: Final = 3
"""Plans made for one version: a later one is needed where a disk changes under our hands."""

AHEAD_BYTES: Final = 128 * MIB
"""What is fetched ahead in one go: enough to keep the connections busy, and soon over when the version
is announced whole, which is planned anew."""


class Obtainer:
    """Makes one version complete on disk.

    Attributes:
        failures: What deltas did not bring.
    """

    def __init__(
        self,
        store: RunStore,
        open_pool: OpenPool,
        cancel: Cancel,
        *,
        tally: Tally,
        damaged: Callable[[Damage], None],
        threads: int | None,
        allowance: int | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            store: The run's directory.
            open_pool: Makes the pool that fetches.
            cancel: Ends it; what was verified stays.
            tally: Counts.
            damaged: Called when local bytes turn out bad.
            threads: For local work; None means all cores.
            allowance: Fetch no more bytes than this; None: any number.
        """
        self._store = store
        self._open_pool = open_pool
        self._cancel = cancel
        self._damaged = damaged
        self._threads = threads or default_threads()
        self._shards = Shards(tally, damaged, cancel, allowance)
        self.failures: list[DeltaFailure] = []

    def obtain(self, version: Version, deltas: Sequence[Delta] = ()) -> StoredVersion:
        """Return the version with every shard verified, staged or (if it was before) committed.

        Args:
            version: The version.
            deltas: What leads to it, best first. What they do not bring is fetched plainly, and
                ``failures`` says why.

        Raises:
            AllowanceError: If it would cost more than it may.
            DiskFullError: If there is no room, naming what is needed and what is free.
            DiskError: If the system refuses otherwise.
            NetworkError, IntegrityError: If no source delivers what is missing.
            TransferCancelledError: If it was cancelled.
        """
        self._shards.tally.total_bytes = version.layout.total_bytes
        with disk_errors(self._store.root, f"bringing version {version.number} here"):
            sources = self._lease_sources(version.number)
            try:
                stored, found = self._prepare(version, sources)
                with stored.lease():
                    self._complete(version, stored, sources, deltas, found=found)
            finally:
                for source in sources:
                    source.release_lease()
        return stored

    def fetch_ahead(self, version: Version, deltas: Sequence[Delta] | None) -> bool:
        """Fetch some shards of an open version; what is on this disk is left for ``obtain``.

        Args:
            version: What is known of it.
            deltas: What is announced of a delta that leads to it: what that does not bring is not
                fetched ahead. None: no delta comes, and shards are fetched as they are.

        Returns:
            Whether there was anything to fetch: then there may be more.

        Raises:
            ShardcastError: As ``obtain``.
        """
        with disk_errors(self._store.root, f"fetching ahead of version {version.number}"):
            sources = self._lease_sources(version.number)
            try:
                stored, found = self._prepare(version, sources)
                with stored.lease():
                    if found:
                        self._confirm(stored)
                    holdings = [_holding(source) for source in sources]
                    plan = network_share(
                        plan_version(version, stored.present(), holdings, deltas or ()),
                        AHEAD_BYTES,
                        plain=deltas is None,
                    )
                    if not plan.deltas and not plan.fetches:
                        return False
                    self._perform(plan, stored, {s.version.number: s for s in sources})
            finally:
                for source in sources:
                    source.release_lease()
        return True

    def _complete(
        self,
        version: Version,
        stored: StoredVersion,
        sources: Sequence[StoredVersion],
        deltas: Sequence[Delta],
        *,
        found: bool,
    ) -> None:
        if found:
            self._confirm(stored)
        renewed: set[int] = set()
        for _ in range(_ROUNDS):
            done = stored.present()
            if stored.committed:
                lacking = {version.layout.extent(shard).file for shard in stored.missing()}
                self._renew(stored, lacking - renewed)
                renewed |= lacking
            self._shards.count_done(stored, done)
            holdings = [_holding(source) for source in sources]
            plan = plan_version(version, done, holdings, () if self.failures else deltas)
            if not (plan.files or plan.copies or plan.deltas or plan.fetches or plan.repeats):
                break
            self._shards.spend(plan.fetch_bytes)
            self._perform(plan, stored, {source.version.number: source for source in sources})
        if not stored.complete:
            raise IntegrityError(
                f"version {version.number} still lacks {len(stored.missing())} shards: "
                "its files change on disk",
                source=str(stored.directory),
            )

    # --- before -----------------------------------------------------------------------------

    def _lease_sources(self, target: int) -> list[StoredVersion]:
        """Return the other versions on disk, leased, the best sources first."""
        found: list[StoredVersion] = []
        for number in [*self._store.committed(), *self._store.staged()]:
            stored = self._store.stored(number) if number != target else None
            if stored is not None:
                with suppress(BusyError):
                    stored.acquire_lease()
                    found.append(stored)
        return found

    def _prepare(
        self, version: Version, sources: list[StoredVersion]
    ) -> tuple[StoredVersion, bool]:
        """Stage the version, or find it where it is; every file gets its full size.

        Returns:
            The version, and whether it was here before.
        """
        store, number = self._store, version.number
        here = store.stored(number)
        lost = (store.version_directory(number), store.staging_directory(number))
        if here is None and any(is_there(directory, stat.S_ISDIR) for directory in lost):
            store.save_state(version)  # its state was lost: look at it again
            here = store.stored(number)
        if here is None or (
            not here.committed and here.version.layout_digest != version.layout_digest
        ):
            return self._stage_anew(version, sources), False
        stored = store.stage(version, files=False)
        if not stored.committed:
            if version.complete:
                self._link_unchanged(version, stored.directory, sources, stored.present())
            self._recycle(version, stored.directory)
        elif stored.damaged is not None:
            error = IntegrityError(stored.damaged, source=str(stored.directory))
            self._damaged(Damage(number, str(stored.directory), error))
        if stored.committed:
            entries = enumerate(version.layout.files)
            self._renew(stored, {n for n, e in entries if has_other_size(stored.directory, e)})
        self._with_room(version, stored.directory, sources)
        if stored.committed:
            stored.restore_files()
        return stored, True

    def _stage_anew(self, version: Version, sources: list[StoredVersion]) -> StoredVersion:
        """Stage the version; files that a committed version has become hard links to them."""
        directory = self._store.staging_directory(version.number)
        if is_there(directory, stat.S_ISDIR):
            self._store.evict(version.number)
        self._link_unchanged(version, directory, sources, ())
        self._recycle(version, directory)
        self._with_room(version, directory, sources)
        return self._store.stage(version, files=False)

    def _link_unchanged(
        self,
        version: Version,
        directory: Path,
        sources: Sequence[StoredVersion],
        done: Collection[int],
    ) -> None:
        """Make links of files of which a committed version has all the bytes, and we have none.

        The place that was reserved for one while the version was open is given back.
        """
        committed = {s.version.number: s for s in sources if s.committed}
        holdings = [_holding(source) for source in committed.values()]
        for reuse in plan_version(version, done, holdings).files:
            original = committed[reuse.source_version].directory / reuse.source_path
            target = directory / version.layout.files[reuse.file].path
            aside = self._store.temporary(f"link-{reuse.file}")
            with disk_errors(target, "linking"):
                target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # no hard links here: it is copied like everything else
                os.link(original, aside, follow_symlinks=False)
                os.replace(aside, target)
                aside.unlink(missing_ok=True)  # rename does nothing where both are one file

    def _recycle(self, version: Version, directory: Path) -> None:
        """Overwrite files of an evicted version instead of making new ones, where that is safe."""
        self._store.spares.claim(directory, {e.path: e.bytes for e in version.layout.files})

    def _with_room(self, version: Version, directory: Path, sources: list[StoredVersion]) -> None:
        """Make the files; where there is no room, give up other unfinished versions for it."""
        try:
            make_files(version, directory)
        except DiskFullError:
            others = [source for source in sources if not source.committed]
            if not others:
                raise
            for source in others:
                sources.remove(source)
                source.release_lease()
                self._store.evict(source.version.number)
            make_files(version, directory)

    def _renew(self, stored: StoredVersion, files: Collection[int]) -> None:
        """Put copies in the place of files that are to be written to: engines may have them mapped."""
        for file in sorted(files):
            self._cancel.check()
            stored.renew(file, self._store.temporary(f"file-{file}"))

    def _confirm(self, stored: StoredVersion) -> None:
        """Look at what an earlier process's journal says is there, and at files that changed.

        Where it says nothing of a shard, but files have bytes there, they are hashed against the
        signed digests: that is faster than any network.
        """
        layout, digests = stored.version.layout, stored.version.digests
        shards, present = stored.unconfirmed(), stored.present()

        def confirm(shard: int) -> None:
            self._cancel.check()
            if not stored.judge(shard):
                self._shards.tell(stored, shard, "changed since it was verified")

        def salvage(shard: int) -> None:
            digest, xxh3 = self._shards.hash(stored, layout.extent(shard))
            if digest == digests[shard]:
                stored.record(shard, xxh3)

        self._all(confirm, shards)
        # What this process has looked at before and found bad need not be hashed again.
        if stored.committed or shards or not present:
            missing = [s for s in stored.missing() if digests[s] is not None]
            self._all(salvage, [s for s in missing if stored.written(s)])

    # --- the plan ---------------------------------------------------------------------------

    def _perform(
        self, plan: Plan, stored: StoredVersion, sources: dict[int, StoredVersion]
    ) -> None:
        with ExitStack() as open_now:
            asides = open_now.enter_context(ExitStack())
            pool = open_now.enter_context(self._open_pool())
            work = PlanWork(self._shards, self._store, stored, sources, pool, plan, asides)
            rebuilding = open_now.enter_context(
                Rebuilding(stored, sources, pool, self._cancel, work, threads=self._threads)
            )
            try:
                rebuilding.start(plan.deltas, fed=work.fetch_planned)
                self._all(work.local, local_tasks(plan, stored))
                rebuilding.finish()
                pool.finish()
            finally:
                self.failures += rebuilding.failures
                self._shards.count_fetched(pool, rebuilding.arrived_bytes)

    def _all(self, action: Callable[..., None], items: Iterable[object]) -> None:
        """Do ``action`` for all items, on all cores; the first error ends it and is raised."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="local") as executor:
            futures: list[Future[None]] = [executor.submit(action, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                wait(futures)
                raise


def _holding(stored: StoredVersion) -> Holding:
    return Holding(stored.version, stored.present())

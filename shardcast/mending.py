"""A committed version is looked at and what is damaged of it brought again, while it is in use.

What a follower that is started again does with its current version, for any version that is committed here: hash
everything, fetch what is wrong or gone (or copy it from another version), put it in place without a
byte of a file that somebody may have mapped being written to (``store.renewing``).
"""

from __future__ import annotations

import asyncio
import stat
from dataclasses import dataclass

from msgspec.structs import replace

from shardcast.cancel import Cancel
from shardcast.errors import BusyError, IntegrityError, NotFoundError
from shardcast.events import EventKind
from shardcast.joining import ref_of
from shardcast.obtain import Obtainer
from shardcast.plan_work import Tally
from shardcast.protocol.head import VersionRef
from shardcast.session import WorkerSession
from shardcast.store.files import is_there


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of a version that somebody called damaged.

    Attributes:
        version: Its number.
        manifest: Its manifest's digest.
        damage: What was wrong with it and is right now; empty where every byte was right.
        bytes_fetched: What the network carried for that.
    """

    version: int
    manifest: str
    damage: str
    bytes_fetched: int = 0


class Mender:
    """Mends what one session has committed. For one event loop."""

    def __init__(self, session: WorkerSession) -> None:
        """Do nothing yet.

        Args:
            session: One that leads in its directory.
        """
        self._session = session
        self._store = session.store
        self._tasks: set[asyncio.Task[Repaired]] = set()

    async def mend(self, number: int, manifest: str | None = None) -> Repaired:
        """Look at every byte of a version; fetch what is damaged or gone, and tell of it.

        Cancellation keeps what was verified.

        Args:
            number: The version.
            manifest: Which one is meant, where the caller knows.

        Raises:
            NotFoundError: If no such version was here.
            GoneError: If it left the head, and no source has what is missing.
            BusyError: If it is being evicted, or the worker ends.
            NetworkError, IntegrityError: If no source delivers, or what was brought is damaged at once.
            DiskError: If the system refuses.
        """
        ref = await self._ref(number, manifest)
        work = self._session.in_thread(lambda cancel: self._mend(ref, cancel))
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.wait([task])
            self._tasks.discard(task)
        if task.cancelled():
            raise BusyError(f"version {number} is not repaired: the worker ends")
        return task.result()

    async def close(self) -> None:
        """End what is under way; who waits for it gets a ``BusyError``."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ref(self, number: int, manifest: str | None) -> VersionRef:
        """Return what the head says of a version, or did."""
        keeper = self._session.keeper
        listed = None if keeper.accepted is None else keeper.accepted.head.ref(number)
        if listed is not None and manifest in (None, listed.manifest):
            return listed
        stored = self._store.stored(number)
        found = None if stored is None or not stored.committed else stored.version.manifest
        if stored is not None and found is not None and manifest in (None, found):
            return ref_of(stored, found)
        if manifest is None or keeper.state.manifests.get(number) != manifest:
            raise NotFoundError(f"version {number} is not here", source=str(self._store.root))
        return await self._session.ref_of(manifest)

    # --- in a thread ------------------------------------------------------------------------

    def _mend(self, ref: VersionRef, cancel: Cancel) -> Repaired:
        session, tally = self._session, Tally(total_bytes=ref.bytes)
        with session.turns.mine(ref.version, cancel, committed=True):
            damage = self._mend_documents(ref, cancel, tally)
            lacking = self._lacking(ref.version, cancel)
            if lacking:
                damage = lacking
                self._bring(ref, cancel, tally)
        if damage:
            path = self._store.version_directory(ref.version)
            session.emit_version(EventKind.REPAIRED, ref, path, tally.fetched_bytes)
        return Repaired(ref.version, ref.manifest, damage, tally.fetched_bytes)

    def _mend_documents(self, ref: VersionRef, cancel: Cancel, tally: Tally) -> str:
        """See to it that what describes a version is here; say what was wrong with it."""
        if self._store.load_state(ref.version) is not None:  # all of it, by its digests
            return ""
        wanted = self._session.documents_of(replace(ref, deltas=[]), cancel, tally)
        if is_there(self._store.version_directory(ref.version), stat.S_ISDIR):
            self._store.save_state(wanted.version)
        return f"version {ref.version}: what describes it was damaged or gone"

    def _lacking(self, number: int, cancel: Cancel) -> str:
        """Hash a version; say what is wrong with its files."""
        stored = self._store.stored(number)
        if stored is None or not stored.committed:
            return f"version {number}: its directory is gone"
        with stored.lease():
            if self._session.scans.look_again(stored, cancel):
                return ""
        return stored.damaged or f"version {number} lacks {len(stored.missing())} shards"

    def _bring(self, ref: VersionRef, cancel: Cancel, tally: Tally) -> None:
        session = self._session
        wanted = session.documents_of(ref, cancel, tally)
        listed = session.still_listed(ref)
        obtainer = Obtainer(
            self._store,
            lambda: session.sources.pool(cancel, None, listed),
            cancel,
            tally=tally,
            damaged=session.damaged,
            threads=session.options.threads,
        )
        self._store.clean_version_state()  # where the directory is gone its journal means nothing
        stored = obtainer.obtain(wanted.version, wanted.deltas)
        if not stored.committed:  # its directory was gone: it was staged anew
            with stored.lease():
                self._store.commit(ref.version, session.options.durability)
        if again := self._lacking(ref.version, cancel):
            raise IntegrityError(
                f"{again}; that is just after it was repaired: check this machine's disk and memory",
                source=str(stored.directory),
            )
        session.scans.remember(ref.version)

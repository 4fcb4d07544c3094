"""What a worker has open while it works on one OUT: trust, sources, and the two acts.

*Obtain* makes a version complete on disk; *activate* commits it and points ``current`` at it.
Blocking work runs in threads; cancelling a coroutine here ends its threads and sockets before it
returns, and leaves verified shards and a consistent directory behind.
"""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from shardcast import deadline
from shardcast.activating import Activator
from shardcast.ahead import Ahead
from shardcast.cancel import Cancel
from shardcast.config import NetConfig
from shardcast.delta_documents import DeltaDocuments
from shardcast.delta_reports import DeltaReports
from shardcast.documents import DocumentFetcher
from shardcast.effort import Effort
from shardcast.errors import (
    EngineError,
    IntegrityError,
    NetworkError,
    ShardcastError,
)
from shardcast.events import EventKind, WorkerEvent
from shardcast.heads import HeadKeeper
from shardcast.journey import Arrived, Journey
from shardcast.obtain import Obtainer
from shardcast.plan_work import Damage, Tally
from shardcast.protocol.head import OpenRef, VersionRef
from shardcast.pulling import FetchPool
from shardcast.scans import Scans
from shardcast.source_set import SourceSet
from shardcast.steps import gone
from shardcast.store.files import is_there
from shardcast.store.renewing import Turns
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from shardcast.upstream import HeadSource
from shardcast.ways import Wanted, Ways
from shardcast.worker_options import WorkerOptions

_T = TypeVar("_T")

PROGRESS_S: Final = 0.2
"""Progress events: five a second move a bar smoothly and cost nothing."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """A version with every shard verified, and what it cost on the network."""

    ref: VersionRef
    stored: StoredVersion
    bytes_fetched: int


class WorkerSession:
    """An open OUT. Made by ``shardcast.joining.open_worker``.

    Attributes:
        options: What the worker was told.
        store: The run's directory.
        keeper: Judges heads.
        sources: Where heads and blobs come from.
        activator: Commits and evicts.
        scans: Remembers which versions are whole.
        turns: Whose it is to write a version's files.
        emit: Takes events.
        fruitless: Whether the last try to obtain a version failed without one more verified shard.
    """

    def __init__(
        self,
        options: WorkerOptions,
        store: RunStore,
        keeper: HeadKeeper,
        upstreams: Sequence[HeadSource],
        emit: Callable[[WorkerEvent], None],
    ) -> None:
        self.options = options
        self.store = store
        self.keeper = keeper
        self.emit = emit
        self.sources = SourceSet(options, upstreams, keeper, emit)
        self.fruitless = False
        self.scans = Scans(store, options.threads)
        self.turns = Turns()
        self._documents = threading.Lock()
        self._delta_documents = DeltaDocuments()
        self._delta_reports = DeltaReports(options.run, emit)
        self._ways = Ways(store, self._listed)
        self._effort = Effort(self._ways.ahead)
        self.activator = Activator(options, store, keeper, self.scans, self._documents)
        self._ahead = Ahead(
            options,
            store,
            keeper,
            self.sources,
            self._ways,
            (self._documents, self._delta_documents),
            self.damaged,
            self._delta_reports,
        )

    # --- obtain -----------------------------------------------------------------------------

    async def obtain(self, ref: VersionRef, *, exact: bool = False) -> Obtained:
        """Make a version complete on disk. Cancellation keeps what was verified.

        Args:
            ref: The version.
            exact: No other one will do: it is asked for with all patience though it left the head. Else
                a version on the way may be what is returned.

        Raises:
            GoneError: If it left the head, and no source has it any more.
            ShardcastError: As ``DocumentFetcher.version`` and ``Obtainer.obtain`` say.
        """
        return await self.in_thread(lambda cancel: self._try(ref, cancel, exact=exact))

    async def fetch_ahead(self, ref: OpenRef) -> bool:
        """Fetch some of what a head says of an open version; say whether there was anything.

        Raises:
            ShardcastError: As ``Ahead.fetch``.
        """
        return await self.in_thread(lambda cancel: self._ahead.fetch(ref, cancel))

    async def ref_of(self, manifest: str) -> VersionRef:
        """Return the entry of a version that no head lists (any more), by its manifest.

        Raises:
            NetworkError: If no source has it.
        """
        patience = self._impatient()

        def get(cancel: Cancel) -> VersionRef:
            with self._documents:
                return DocumentFetcher(
                    self.store, lambda: self.sources.document_pool(cancel, patience)
                ).ref_of(manifest)

        return await self.in_thread(get)

    def here(self, number: int, manifest: str) -> StoredVersion | None:
        """Return a version if it is committed and whole, and has that manifest."""
        stored = self.store.stored(number)
        if stored is None or not stored.committed or not stored.complete or stored.damaged:
            return None
        return stored if stored.version.manifest == manifest else None

    def _try(self, ref: VersionRef, cancel: Cancel, *, exact: bool) -> Obtained:
        before = self._shards_here(ref.version)
        self.fruitless = False
        try:
            return self._obtain(ref, cancel, exact=exact)
        except ShardcastError:
            self.fruitless = self._shards_here(ref.version) <= before
            raise

    def _shards_here(self, number: int) -> int:
        with suppress(ShardcastError):
            stored = self.store.stored(number)
            return 0 if stored is None else len(stored.present())
        return 0

    def _obtain(self, ref: VersionRef, cancel: Cancel, *, exact: bool) -> Obtained:
        tally = Tally(total_bytes=ref.bytes)
        self.sources.doubt_the_unheard()
        wanted = self.documents_of(ref, cancel, tally, exact=exact)
        pools: list[FetchPool] = []

        def new_obtainer(hop: VersionRef, tally: Tally, allowance: int | None) -> Obtainer:
            config = None if allowance is None else self._impatient()
            listed = self.still_listed(hop, exact=exact and hop == ref)

            def pool() -> FetchPool:
                pools.append(self.sources.pool(cancel, config, listed))
                return pools[-1]

            return Obtainer(
                self.store,
                pool,
                cancel,
                tally=tally,
                damaged=self.damaged,
                threads=self.options.threads,
                allowance=allowance,
            )

        journey = Journey(
            self.store,
            self._ways,
            new_obtainer,
            lambda hop: self.documents_of(
                hop, cancel, tally, self._impatient(), exact=exact and hop == ref
            ),
        )
        try:
            with (
                self._turn(ref.version, cancel),
                self._effort.on(wanted, tally, pools),
                self._progress(ref, tally, pools),
            ):
                arrived = journey.go(wanted, tally, exact=exact)
        finally:
            self._delta_reports.tell(journey.failures)
        ahead = self._ahead.spent_on(arrived.ref.version)
        self._ahead.reached()
        self._emit_ready(arrived, tally, ahead)
        return Obtained(arrived.ref, arrived.stored, tally.fetched_bytes + ahead.fetched_bytes)

    def _turn(self, number: int, cancel: Cancel) -> AbstractContextManager[None]:
        """Wait until nobody else writes this version's files, or those of committed versions, too."""
        committed = is_there(self.store.version_directory(number), stat.S_ISDIR)
        return self.turns.mine(number, cancel, committed=committed)

    def still_listed(self, ref: VersionRef, *, exact: bool = False) -> Callable[[], bool]:
        """Return what says whether sources may come to have a version that they have not got."""

        def listed() -> bool:
            accepted = self.keeper.accepted
            return exact or accepted is None or not gone(accepted.head, ref.version)

        return listed

    def _emit_ready(self, arrived: Arrived, tally: Tally, ahead: Tally) -> None:
        ref = arrived.ref
        self.emit(
            WorkerEvent(
                kind=EventKind.READY,
                run=self.options.run,
                version=ref.version,
                step=ref.step,
                manifest=ref.manifest,
                path=arrived.stored.directory,
                bytes_total=ref.bytes,
                bytes_fetched=tally.fetched_bytes + ahead.fetched_bytes,
                bytes_hedged=tally.hedged_bytes + ahead.hedged_bytes,
                bytes_delta=tally.delta_bytes + ahead.delta_bytes,
                bytes_ahead=ahead.fetched_bytes,
                via=arrived.via,
            )
        )

    def documents_of(
        self,
        ref: VersionRef,
        cancel: Cancel,
        tally: Tally,
        config: NetConfig | None = None,
        *,
        exact: bool = False,
    ) -> Wanted:
        """Return a version's documents and the deltas that lead to it; what is not here is fetched.

        Raises:
            ShardcastError: As ``DocumentFetcher.version``.
        """
        listed = self.still_listed(ref, exact=exact)

        def pool() -> FetchPool:
            return self.sources.document_pool(cancel, config, listed)

        with self._documents:
            version = DocumentFetcher(self.store, pool, lambda n: _add_fetched(tally, n)).version(
                ref, self.keeper.state
            )
            deltas = self._delta_documents.fetch(
                ref,
                version,
                self._ways.bases(ref.version),
                pool,
                count=lambda n: _add_fetched(tally, n),
                refused=lambda error: self._delta_reports.refused(ref, error),
            )
        return Wanted(ref, version, deltas)

    def _listed(self) -> Sequence[VersionRef]:
        accepted = self.keeper.accepted
        return () if accepted is None else accepted.head.versions

    async def supersedes(self, newer: VersionRef) -> bool:
        """Say whether what is being obtained should be dropped for a newer version.

        If so, what that throws away is counted: say it only once for each that is dropped.

        Raises:
            ShardcastError: If the newer one's documents cannot be had.
        """
        return await self.in_thread(lambda cancel: self._supersedes(newer, cancel))

    def _supersedes(self, newer: VersionRef, cancel: Cancel) -> bool:
        if not self._effort.under_way:
            return True  # not a byte of it has been asked for
        return self._effort.switch_to(self.documents_of(newer, cancel, Tally()))

    def _impatient(self) -> NetConfig:
        """Return the bounds for what the sources may well not have, and need not."""
        config = self.options.config
        return replace(config, give_up_after_s=min(config.give_up_after_s, 10.0))

    def damaged(self, damage: Damage) -> None:
        """Tell of bytes on this disk that are not what they should be."""
        self.emit(
            WorkerEvent(
                kind=EventKind.DAMAGED,
                run=self.options.run,
                version=damage.version,
                error=damage.error,
            )
        )

    def _progress(self, ref: VersionRef, tally: Tally, pools: list[FetchPool]) -> _Ticker:
        before = tally.fetched_bytes

        def tell(kind: EventKind) -> None:
            coming = pools[-1].unverified_bytes if pools else 0
            fetched = before + sum(pool.received_bytes for pool in pools)
            self.emit(
                WorkerEvent(
                    kind=kind,
                    run=self.options.run,
                    version=ref.version,
                    step=ref.step,
                    manifest=ref.manifest,
                    bytes_done=min(tally.done_bytes + coming, tally.total_bytes),
                    bytes_total=tally.total_bytes,
                    bytes_fetched=fetched + coming,
                )
            )

        return _Ticker(tell)

    # --- activate ---------------------------------------------------------------------------

    async def activate(self, ready: Obtained, *, busy: tuple[int, ...] = ()) -> Path:
        """Commit a version, switch ``current``, run the hook, evict what is over.

        Cancellation ends the hook; a commit that has begun is finished first.

        Args:
            ready: The version.
            busy: Versions that are being worked on and must stay.

        Raises:
            DiskError: If the commit fails; the old version stays current then.
        """
        number = ready.ref.version
        path = await self.in_thread(lambda _: self.activator.commit(number, frozenset(busy)))
        await self.announce(ready, path)
        return path

    async def announce(self, ready: Obtained, path: Path) -> None:
        """Tell that ``current`` names a version and run the hook; cancellation ends the hook.

        Who leads remembers that its hook has run: one that was killed before it runs it later.
        """
        ref, hook = ready.ref, self.options.on_update
        self.emit_version(EventKind.COMMITTED, ref, path, ready.bytes_fetched)
        if hook is None:
            return
        try:
            await self.in_thread(lambda cancel: self.activator.run_hook(hook, ref, path, cancel))
        except EngineError as error:
            self.emit(
                WorkerEvent(
                    kind=EventKind.ERROR,
                    run=self.options.run,
                    version=ref.version,
                    step=ref.step,
                    manifest=ref.manifest,
                    path=path,
                    error=error,
                )
            )
        if self.keeper.remembers:
            await self.in_thread(lambda _: self.activator.note_hook(ref.version))

    async def tidy(self, current: int) -> None:
        """Evict what is over beside a version that is current already."""
        await self.in_thread(lambda _: self.activator.tidy(current))

    async def whole(self, number: int) -> bool:
        """Say whether a committed version is whole; hash it if something may have changed it."""
        return await self.in_thread(lambda cancel: self._whole(number, cancel))

    def _whole(self, number: int, cancel: Cancel) -> bool:
        whole = self.scans.scan(number, cancel)
        stored = self.store.stored(number)
        if stored is not None and stored.damaged:
            error = IntegrityError(stored.damaged, source=str(stored.directory))
            self.damaged(Damage(number, str(stored.directory), error))
        return whole

    # --- plumbing ---------------------------------------------------------------------------

    def too_late(self, seconds: float, ref: VersionRef | None) -> NetworkError:
        """Return the error of a pull that was not done in time: what is missing, and who failed."""
        progress = None
        if ref is not None:
            stored = self.store.stored(ref.version)
            layout = None if stored is None else stored.version.layout
            here = () if stored is None else stored.present()
            progress = deadline.Progress(
                version=ref.version,
                missing=None if layout is None else layout.shard_count - len(here),
                shards=0 if layout is None else layout.shard_count,
                bytes_here=0 if layout is None else sum(layout.extent(s).length for s in here),
                bytes_total=ref.bytes,
            )
        failures = {**self.keeper.errors, **self.sources.failures}
        return deadline.too_late(self.options.run, seconds, progress, failures, self.sources.urls)

    def emit_version(
        self,
        kind: EventKind,
        ref: VersionRef,
        path: Path | None = None,
        fetched: int | None = None,
    ) -> None:
        """Tell something about a version."""
        self.emit(
            WorkerEvent(
                kind=kind,
                run=self.options.run,
                version=ref.version,
                step=ref.step,
                manifest=ref.manifest,
                path=path,
                bytes_total=ref.bytes,
                bytes_fetched=fetched,
            )
        )

    async def in_thread(self, work: Callable[[Cancel], _T]) -> _T:
        """Run blocking work in a thread. Cancellation cancels it and waits until it has ended."""
        cancel = Cancel()
        task = asyncio.ensure_future(asyncio.to_thread(work, cancel))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancel.cancel()
            while not task.done():
                with suppress(asyncio.CancelledError, ShardcastError):
                    await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # it was looked at
            raise

    def close(self) -> None:
        """Close sockets and files. Nothing may be running any more."""
        self.activator.close()
        self.sources.close()
        self.store.close()


class _Ticker:
    """Calls ``tell`` now and then while its block runs."""

    def __init__(self, tell: Callable[[EventKind], None]) -> None:
        self._tell = tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(PROGRESS_S):
            self._tell(EventKind.PROGRESS)

    def __enter__(self) -> None:
        self._tell(EventKind.STARTED)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._tell(EventKind.PROGRESS)


def _add_fetched(tally: Tally, count: int) -> None:
    tally.fetched_bytes += count

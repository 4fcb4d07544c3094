"""Several workers on one OUT: one leads, the others wait and share what it commits.

Who holds ``state/run.lock`` leads: only it fetches, commits, evicts and remembers trust. A *guest*
writes nothing that counts. It verifies heads, the one on disk too, against its own keys, and takes
a version only if such a head names the manifest that lies there and its files are whole, as for any
local version. It never moves ``current``. When the leader ends or dies, the kernel gives its lock
to the first guest that asks; what the leader had verified is on disk. A leader that failed without
one more verified shard gives its lock away for its pause, if a guest waits (``state/guests.lock``).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from shardcast.errors import BusyError, DiskError, MalformedError, UsageError
from shardcast.events import EventKind, Observer, WorkerEvent
from shardcast.heads import HeadKeeper
from shardcast.protocol import trust
from shardcast.protocol.head import Head, VersionRef
from shardcast.protocol.limits import SKEW_MS
from shardcast.protocol.trust import TrustState
from shardcast.session import Obtained, WorkerSession
from shardcast.store.locks import FileLock, try_lock
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from shardcast.upstream import HeadAnswer, Upstream, open_session
from shardcast.worker_options import WorkerOptions

LEAST_REST_S: Final = 1.0
"""Whoever gave the lead away lets every guest ask some times before it asks again."""

POLL_S: Final = 0.1
"""A try for the lock and two looks at names: cheap, and a commit is shared within this."""

Stamp = tuple[object, ...]
Updated = Callable[[Obtained, Path, Head | None], None]
"""Told of a version that is current and whose hook has run, and of the head that named it."""


def lock_of(options: WorkerOptions) -> FileLock:
    """Return the lock of an OUT, not yet taken: who holds it leads."""
    return RunStore(options.out, options.run).lock(what=f"{options.out}")


@asynccontextmanager
async def open_worker(
    options: WorkerOptions, observer: Observer | None, *, leading: bool
) -> AsyncIterator[WorkerSession]:
    """Open an OUT for one worker: decide what to trust, connect to nothing yet.

    Args:
        options: What the worker was told.
        observer: Told everything that happens.
        leading: Whether the caller holds the lock (``lock_of``). A guest remembers nothing.

    Raises:
        UsageError: If it belongs to another run, or no key is known or given.
        StateError: If what is remembered is damaged, or ``current`` is no link.
    """
    emit = _serialised(observer)
    store = RunStore(options.out, options.run)
    state = trust.begin(
        options.run,
        pinned=options.keys,
        first_use=options.first_use,
        remembered=remembered(store),
    )
    keeper = HeadKeeper(store, state, emit, remember=leading)
    if leading:
        store.require_link()  # not after everything was fetched
        store.clean_leftovers()
    async with open_session(options.config, tls=options.tls) as http:
        upstreams = [Upstream(url, http, options.config) for url in options.sources]
        session = WorkerSession(options, store, keeper, upstreams, emit)
        try:
            yield session
        finally:
            session.close()


def remembered(store: RunStore) -> TrustState | None:
    """Return what an OUT remembers of its run, None where it is new.

    Raises:
        UsageError: If it belongs to another run.
        StateError: If it is damaged.
    """
    path = store.root / "state" / "trust.json"
    with suppress(OSError, MalformedError):
        other = trust.decode_state(path.read_bytes()).run
        if other != store.run:
            raise UsageError(
                f"{store.root} belongs to run {other!r}; pull {store.run!r} into a directory of "
                "its own",
                source=str(store.root),
            )
    return store.read_trust()


def manifest_to_share(
    head: Head | None, state: TrustState, number: int, *, now_ms: int, accept_expired: bool
) -> str | None:
    """Return the manifest that a version on disk must have to be taken from a leader, or None.

    The same rules as for fetching it: an accepted head names it or did, it is not withdrawn, and
    the head has not expired unless that is accepted.
    """
    if head is None or number in head.withdrawn:
        return None
    if not accept_expired and now_ms > head.expires_at + SKEW_MS:
        return None
    ref = head.ref(number)
    return state.manifests.get(number) if ref is None else ref.manifest


def ref_of(stored: StoredVersion, manifest: str) -> VersionRef:
    """Return what a head would say of a version on disk."""
    layout = stored.version.layout
    return VersionRef(
        version=stored.version.number,
        step=layout.step,
        manifest=manifest,
        bytes=layout.total_bytes,
        deltas=[],
    )


class WaitingMark:
    """Tells a leader that somebody would lead in its place: a lock that guests share."""

    def __init__(self, store: RunStore) -> None:
        """Show nothing yet."""
        self._path = store.root / "state" / "guests.lock"
        self._fd: int | None = None

    def show(self) -> None:
        """Hold it, until ``hide`` or the end of the process; where it cannot be held, nobody knows."""
        if self._fd is not None:
            return
        with suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if try_lock(fd, exclusive=False):
                self._fd = fd
            else:  # the leader looks at it just now
                os.close(fd)

    def hide(self) -> None:
        """Let go of it; harmless if it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def shown(self) -> bool:
        """Say whether a guest holds it. For the leader, which does not."""
        with suppress(OSError):
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return not try_lock(fd, exclusive=True)
            finally:
                os.close(fd)
        return False


class Guest:
    """A worker beside the one that leads.

    Attributes:
        seen: The version that it knows of last as being current.
    """

    def __init__(
        self,
        session: WorkerSession,
        lock: FileLock,
        *,
        rest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Do nothing yet.

        Args:
            session: Opened without leading.
            lock: Held by another process; taken over as soon as it can be.
            rest_s: For so long others may lead: this one has just failed.
            clock: Monotonic seconds.
            sleep: Waits.
        """
        self._session = session
        self._store = session.store
        self._lock = lock
        self._clock = clock
        self._sleep = sleep
        self._leader = ""
        self._rests_until = clock() + rest_s
        self._mark = WaitingMark(session.store)
        self.seen: int | None = None
        self._seen_head: Stamp | None = None
        self._changed_at = clock()
        self._signs: Stamp = ()

    # --- one version ------------------------------------------------------------------------

    async def wait_for(self, wanted: Callable[[], VersionRef]) -> tuple[Obtained, Path] | None:
        """Wait until the leader has committed a version.

        Args:
            wanted: Which one; asked again and again, since the newest one changes.

        Returns:
            None as soon as this process leads: the lock is held then.

        Raises:
            BusyError: If the leader shows no progress towards it for ``give_up_after_s``; names
                the leader.
            UsageError: If OUT turns out to belong to another run.
            ShardcastError: What ``wanted`` raises.
        """
        try:
            return await self._wait_for(wanted)
        finally:
            self._mark.hide()

    async def _wait_for(self, wanted: Callable[[], VersionRef]) -> tuple[Obtained, Path] | None:
        patience = self._session.options.config.give_up_after_s
        while not self._leads():
            self._check_run()
            ref = wanted()
            current = self._store.current()
            stored = self._here(ref.version, ref.manifest)
            # Renamed and not switched to yet: the leader is in the middle of its commit.
            if stored is not None and current is not None and current >= ref.version:
                path = await self._take(stored)
                if path is not None:
                    return Obtained(ref, stored, 0), path
            passed = current is not None and current > ref.version
            if self._quiet_s(passed=passed) >= patience:
                raise BusyError(
                    f"{self._lock.what} is in use by {self._lock.holder}, which has not committed "
                    f"version {ref.version} and made no progress with it for {patience:g} s",
                    source=str(self._store.root),
                )
            await self._sleep(POLL_S)
        return None

    # --- every version ----------------------------------------------------------------------

    async def follow(self, updated: Updated) -> None:
        """Share every version that the leader makes current, until this process leads.

        The version that is current at the start is no news, as for any follower.

        Args:
            updated: Called after the hook of each version.

        Raises:
            UsageError: If OUT turns out to belong to another run.
        """
        try:
            await self._follow(updated)
        finally:
            self._mark.hide()

    async def _follow(self, updated: Updated) -> None:
        self.seen = self._store.current()
        while True:
            leads = self._leads()
            self._check_run()
            await self._read_head()
            current = self._store.current()
            news = current is not None and current != self.seen
            if current is not None and news and await self._share(current, updated):
                self.seen = current
            if leads:  # after a last look: what the leader did before it ended is not missed
                return
            await self._sleep(POLL_S)

    async def _share(self, number: int, updated: Updated) -> bool:
        """Take a version that is current; say whether it was taken."""
        session, keeper = self._session, self._session.keeper
        accepted = keeper.accepted
        manifest = manifest_to_share(
            None if accepted is None else accepted.head,
            keeper.state,
            number,
            now_ms=keeper.clock_ms(),
            accept_expired=session.options.accept_expired,
        )
        self._store.forget_gone()
        if accepted is None or manifest is None:
            return False
        stored = self._here(number, manifest)
        if stored is None:
            return False
        ref = accepted.head.ref(number) or ref_of(stored, manifest)
        with suppress(BusyError), stored.lease():  # not evicted while the hook reads it
            path = await self._take(stored)
            if path is None:
                return False
            ready = Obtained(ref, stored, 0)
            await session.announce(ready, path)
            updated(ready, path, accepted.head)
            return True
        return False

    def _here(self, number: int, manifest: str) -> StoredVersion | None:
        """Return a version that is committed and whole. What is staged is the leader's: not touched.

        The leader may commit or evict it at this very moment.
        """
        directory = self._store.version_directory(number)
        if not directory.is_dir():
            return None
        try:
            return self._session.here(number, manifest)
        except DiskError:
            if directory.is_dir():
                raise
            return None

    async def _take(self, stored: StoredVersion) -> Path | None:
        directory = self._store.version_directory(stored.version.number).absolute()
        try:
            return directory if await self._session.whole(stored.version.number) else None
        except DiskError:
            if directory.is_dir():
                raise
            return None  # evicted while it was looked at

    # --- looking ----------------------------------------------------------------------------

    async def _read_head(self) -> None:
        """Judge the head that the leader wrote by our own keys; a refusal is told once."""
        stamp = self._store.head_stamp()
        if stamp is None or stamp == self._seen_head:
            return
        self._seen_head = stamp
        envelope = self._store.read_head()
        if envelope is not None:
            url = str(self._store.root / "head.json")
            await self._session.keeper.on_head(
                HeadAnswer(envelope=envelope, depth=0, node=None, url=url)
            )

    def _check_run(self) -> None:
        remembered(self._store)

    def _leads(self) -> bool:
        """Lead if that is possible; else wait, and let the leader know."""
        if self._clock() < self._rests_until:
            if self._lock.holder != f"process {os.getpid()}":
                self.tell_leader()  # somebody has taken what this one gave away
            return False
        if self._lock.try_acquire():
            return True
        self._mark.show()
        self.tell_leader()
        return False

    def tell_leader(self) -> None:
        """Say whom this waits for, once for each leader."""
        leader = self._lock.holder
        if leader == self._leader:
            return
        self._leader = leader
        root = str(self._store.root)
        error = BusyError(f"{self._lock.what} is led by {leader}; waiting for it", source=root)
        self._session.emit(WorkerEvent(kind=EventKind.WAITING, run=self._store.run, error=error))

    def _quiet_s(self, *, passed: bool) -> float:
        """Return for how long nothing has changed that a leader changes while it works.

        Args:
            passed: The leader is beyond what is waited for: what it does is no progress.
        """
        signs = _signs(self._store.root)
        if not passed and signs != self._signs:
            self._signs = signs
            self._changed_at = self._clock()
        return self._clock() - self._changed_at


def _signs(root: Path) -> Stamp:
    """Return what changes while a leader works: journals grow, versions come and go."""
    found: list[tuple[str, int]] = []
    for directory in (root / "state", root / "versions", root / "state" / "staging"):
        with suppress(OSError):
            for entry in os.scandir(directory):
                size = 0
                if entry.name.endswith(".shards"):
                    with suppress(OSError):
                        size = entry.stat(follow_symlinks=False).st_size
                elif directory.name == "state":
                    continue
                found.append((entry.path, size))
    return tuple(sorted(found))


def _serialised(observer: Observer | None) -> Callable[[WorkerEvent], None]:
    if observer is None:
        return lambda event: None
    lock = threading.RLock()

    def emit(event: WorkerEvent) -> None:
        with lock:
            observer.on_event(event)

    return emit

"""The worker: pull a version of a run into a directory, or follow the run.

::

    worker = Worker("out", "policy", ["http://relay:8470"], keys=[public_key])
    update = worker.pull()                      # newest, verified, committed
    async for update in worker.follow(): ...    # every newer one

``out`` is one run's directory (docs/PROTOCOL.md, "Store"): ``out/current`` names the version to
use. Of several workers on one directory one leads, the others share what it commits
(``shardcast.joining``).
"""

from __future__ import annotations

import asyncio
import queue
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shardcast.choosing import choose, first_head, watching
from shardcast.config import NetConfig
from shardcast.deadline import Deadline
from shardcast.errors import BusyError, DiskError, UsageError
from shardcast.events import EventKind, Observer, WorkerEvent
from shardcast.follow import Follower
from shardcast.hooks import UpdateHook
from shardcast.iterating import FollowThread
from shardcast.joining import (
    LEAST_REST_S,
    Guest,
    Updated,
    WaitingMark,
    lock_of,
    open_worker,
    ref_of,
)
from shardcast.mending import Mender, Repaired
from shardcast.protocol import trust
from shardcast.protocol.digest import is_digest
from shardcast.protocol.head import Head, VersionRef
from shardcast.protocol.limits import MAX_DEPTH
from shardcast.session import Obtained, WorkerSession
from shardcast.store.locks import FileLock
from shardcast.store.stored import Durability
from shardcast.worker_options import WorkerOptions

__all__ = [
    "Durability",
    "EventKind",
    "Observer",
    "Repaired",
    "Update",
    "UpdateHook",
    "Worker",
    "WorkerEvent",
    "WorkerOptions",
]


@dataclass(frozen=True, slots=True)
class Update:
    """A version that is committed and current.

    Attributes:
        version: Its number.
        step: Its training step, or None.
        manifest: Its manifest digest: the identity that rollouts are stamped with.
        path: Its directory, absolute.
        bytes_fetched: What the network carried for it; 0 if it was here before.
        head: The head that named it; None for a pull by manifest that found no head, and for what was
            current before.
    """

    version: int
    step: int | None
    manifest: str
    path: Path
    bytes_fetched: int
    head: Head | None


class Worker:
    """Keeps one directory up to date with one run."""

    def __init__(  # noqa: PLR0913 - options, by keyword; checked as WorkerOptions
        self,
        out: Path | str,
        run: str,
        sources: Sequence[str],
        *,
        keys: Sequence[bytes] = (),
        first_use: bool = False,
        accept_expired: bool = False,
        durability: Durability = Durability.SYNC,
        keep: int = 2,
        on_update: UpdateHook | str | None = None,
        recycle: bool = True,
        observer: Observer | None = None,
        config: NetConfig | None = None,
        tls: ssl.SSLContext | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Take the options; open nothing yet.

        Args:
            out: The run's directory on this machine.
            run: The run.
            sources: Base URLs of relays, origins or static servers; several share the work.
            keys: Raw public keys to pin.
            first_use: Trust the first head's keys where none is known.
            accept_expired: Take versions of an expired head.
            durability: What a commit waits for.
            keep: Committed versions that are kept.
            on_update: Shell command to run after each commit.
            recycle: ``follow`` overwrites files of evicted versions that nothing has open or
                mapped; False where another program sends them with ``sendfile``.
            observer: Told everything that happens.
            config: Network bounds.
            tls: For https; None means the system's certificates.
            deadline_s: A pull fails after so long, whatever it waits for. What was verified is
                kept for the next one.

        Raises:
            UsageError: If an option is wrong.
        """
        self.options = WorkerOptions(
            out=Path(out),
            run=run,
            sources=tuple(dict.fromkeys(source.rstrip("/") for source in sources)),
            keys=tuple(keys),
            first_use=first_use,
            accept_expired=accept_expired,
            durability=durability,
            keep=keep,
            on_update=UpdateHook(on_update) if isinstance(on_update, str) else on_update,
            recycle=recycle,
            config=config or NetConfig(),
            tls=tls,
            deadline_s=deadline_s,
        )
        self._observer = observer
        self._following: WorkerSession | None = None
        self._head: Head | None = None
        self._mender: Mender | None = None

    @property
    def depth(self) -> int:
        """How far from the origin what this worker follows is; 16 while no source answers."""
        return MAX_DEPTH if self._following is None else self._following.sources.depth

    @property
    def head(self) -> Head | None:
        """While following: the newest accepted head, None before the first.

        It stays when this worker begins to lead, until a newer one was accepted.
        """
        following, known = self._following, self._head
        accepted = None if following is None else following.keeper.accepted
        if accepted is not None and (known is None or accepted.head.sequence >= known.sequence):
            return accepted.head
        return known

    def _follow_with(self, session: WorkerSession) -> None:
        """Follow by another session; what the one before had accepted stays known."""
        self._head, self._following = self.head, session

    async def repair(self, version: int, manifest: str | None = None) -> Repaired:
        """While following: hash a committed version again, and fetch what is damaged of it.

        Its files get new ones in their place: whoever has an old one open or mapped keeps that as it
        is. Also for a version that has left the head, as long as a source, or another version here,
        has what is missing.

        Args:
            version: Its number.
            manifest: Its manifest digest, where the caller knows: no other one will do then.

        Raises:
            BusyError: If another process works on the directory: that one has to.
            NotFoundError: If there is no such version here.
            NetworkError, IntegrityError: If no source delivers what is missing (GoneError: none has it
                any more), or the disk damages it again at once.
            DiskError: If the system refuses.
        """
        if self._mender is None:
            raise BusyError(
                f"version {version} is not repaired: this worker does not lead in {self.options.out}, "
                "so the process that does has to; start that one again",
                source=str(self.options.out),
            )
        return await self._mender.mend(version, manifest)

    # --- pull -------------------------------------------------------------------------------

    def pull(self, version: int | None = None, manifest: str | None = None) -> Update:
        """Bring a version here, verify it, commit it; the blocking form of ``apull``.

        Raises:
            UsageError: Also if an event loop runs in this thread: use ``apull`` there.
        """
        _refuse_running_loop("apull")
        return asyncio.run(self.apull(version, manifest))

    async def apull(self, version: int | None = None, manifest: str | None = None) -> Update:
        """Bring a version here, verify it, commit it.

        Cancellation leaves what was verified for the next try, and the old version current.

        Args:
            version: Its number; None means the newest.
            manifest: Its manifest digest instead; expiry of the head does not matter then.

        Where another worker leads in the directory, this waits for it and shares what it commits;
        ``current`` stays with the leader then.

        Returns:
            The version; at once if it is here already.

        Raises:
            UsageError: If the options are wrong, or the directory belongs to another run.
            BusyError: If another worker leads and makes no progress with the version; names it.
            NotFoundError: If there is no such run or version.
            TrustError: If no acceptable head says so (ExpiredError, WithdrawnError, ...).
            NetworkError, IntegrityError: If no source delivers; names each. Also after
                ``deadline_s``; names what is missing.
            DiskError: If there is no room, or the system refuses.
        """
        if version is not None and manifest is not None:
            raise UsageError("give a version or a manifest, not both")
        if manifest is not None and not is_digest(manifest):
            raise UsageError(f"manifest is not 64 lowercase hex digits: {manifest[:80]!r}")
        lock = lock_of(self.options)
        deadline = Deadline(self.options.deadline_s)
        try:
            if not lock.try_acquire():
                shared = await self._share(lock, version, manifest, deadline)
                if shared is not None:
                    return shared
            return await self._bring(version, manifest, deadline)
        finally:
            lock.release()

    async def _bring(self, version: int | None, manifest: str | None, deadline: Deadline) -> Update:
        """Lead: bring a version here and make it current."""
        async with (
            open_worker(self.options, self._observer, leading=True) as session,
            watching(session) as task,  # it tells which sources are alive, all the time
        ):
            async with deadline.within(lambda seconds: session.too_late(seconds, None)):
                accepted = await first_head(session, task, needed=manifest is None)
                ref = await choose(session, accepted, version, manifest)
            head = None if accepted is None else accepted.head
            stored = session.here(ref.version, ref.manifest)
            if stored is not None and await session.whole(ref.version):
                ready = Obtained(ref, stored, 0)
                if session.store.current() == ref.version:
                    await session.tidy(ref.version)
                    path = Path(self.options.out.absolute(), "versions", stored.directory.name)
                    return _update(ready, path, head)
            else:
                async with deadline.within(lambda seconds: session.too_late(seconds, ref)):
                    ready = await session.obtain(ref, exact=True)
            path = await session.activate(ready)
            return _update(ready, path, head)

    async def _share(
        self, lock: FileLock, version: int | None, manifest: str | None, deadline: Deadline
    ) -> Update | None:
        """Wait for what another worker commits; None as soon as this one holds the lock."""
        async with (
            open_worker(self.options, self._observer, leading=False) as session,
            watching(session) as task,
        ):
            guest = Guest(session, lock)
            guest.tell_leader()
            async with deadline.within(lambda seconds: session.too_late(seconds, None)):
                accepted = await first_head(session, task, needed=manifest is None)
                chosen = await choose(session, accepted, version, manifest)

            def wanted() -> VersionRef:
                newest = session.keeper.accepted
                if version is not None or manifest is not None or newest is None:
                    return chosen
                return trust.require_version(newest.head, None)

            async with deadline.within(lambda seconds: session.too_late(seconds, chosen)):
                shared = await guest.wait_for(wanted)
            if shared is None:
                return None
            head = None if session.keeper.accepted is None else session.keeper.accepted.head
            return _update(*shared, head)

    # --- follow -----------------------------------------------------------------------------

    async def follow(self, *, current: bool = False) -> AsyncGenerator[Update, None]:
        """Yield each newer version once it is committed, until the caller stops.

        Failures are events, and are tried again. Of updates that the caller is too slow to take,
        only the newest is kept. Closing the iterator (``aclose``), or cancellation, ends every
        thread, closes every socket and gives the directory's lock back before it returns.

        Where another worker leads in the directory, its commits are shared, each with this one's
        hook, until it ends; then this one leads.

        Args:
            current: Yield the version that was current before, too, once it is known to be whole.

        Raises:
            UsageError: If the options are wrong, or the directory belongs to another run.
            StateError: If what is remembered is damaged.
        """
        newest: asyncio.Queue[Update] = asyncio.Queue(1)
        last: str | None = None

        def updated(ready: Obtained, path: Path, head: Head | None) -> None:
            nonlocal last
            last = ready.ref.manifest
            if newest.full():
                newest.get_nowait()
            newest.put_nowait(_update(ready, path, head))

        def found(ready: Obtained, path: Path, head: Head | None) -> None:
            if ready.ref.manifest != last:
                updated(ready, path, head)

        running = asyncio.ensure_future(self._follow(updated, found if current else None))
        try:
            while True:
                taking = asyncio.ensure_future(newest.get())
                try:
                    await asyncio.wait([taking, running], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    taking.cancel()
                if running.done():
                    running.result()  # it only ends by an error
                if taking.done() and not taking.cancelled():
                    yield taking.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _follow(self, updated: Updated, found: Updated | None) -> None:
        """Follow beside another worker while there is one, then lead. Ends by an error only.

        ``found`` is told what was current before.
        """
        lock, seen, failures, rest_s = lock_of(self.options), None, 0, 0.0
        try:
            while True:
                if rest_s > 0 or not lock.try_acquire():
                    async with open_worker(self.options, self._observer, leading=False) as session:
                        self._follow_with(session)
                        guest = Guest(session, lock, rest_s=rest_s)
                        async with watching(session), self._finding(session, found):
                            await guest.follow(updated)
                        seen = guest.seen
                async with open_worker(self.options, self._observer, leading=True) as session:
                    self._follow_with(session)
                    follower = await self._lead(session, updated, found, seen, failures)
                failures, rest_s = follower.failures, max(follower.rest_s, LEAST_REST_S)
                lock.release()
        finally:
            lock.release()

    async def _lead(
        self,
        session: WorkerSession,
        updated: Updated,
        found: Updated | None,
        seen: int | None,
        failures: int,
    ) -> Follower:
        """Follow the sources, until it should give way to a guest that waits; return how it went."""
        mark = WaitingMark(session.store)
        session.activator.recycle()
        current = await self._current(session)
        if current is not None:
            await self._finish(session, current, updated, found, seen)
        async with watching(session) as task, self._mending(session):
            follower = Follower(
                session,
                session.keeper,
                session.emit,
                updated,
                accept_expired=self.options.accept_expired,
                current=current,
            )
            follower.failures = failures
            follower.gives_way = lambda: session.fruitless and mark.shown()
            running = asyncio.ensure_future(follower.run())
            try:
                await asyncio.wait([running, task], return_when=asyncio.FIRST_COMPLETED)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            for ended in (task, running):
                if ended.done() and not ended.cancelled():
                    ended.result()  # the watcher only ends by an error
        return follower

    @asynccontextmanager
    async def _mending(self, session: WorkerSession) -> AsyncIterator[None]:
        """Let versions be repaired while the block runs."""
        self._mender = mender = Mender(session)
        try:
            yield
        finally:
            self._mender = None
            await mender.close()

    @asynccontextmanager
    async def _finding(self, session: WorkerSession, found: Updated | None) -> AsyncIterator[None]:
        """Tell which version is current, if it is whole, while the block runs. For a guest."""
        if found is None:
            yield
            return
        looking = asyncio.ensure_future(self._find(session, found))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _find(self, session: WorkerSession, found: Updated) -> None:
        number = session.store.current()
        try:
            current = await self._current(session)
            ready = None if current is None else _ready(session, current)
        except DiskError as error:
            if number is not None and session.store.version_directory(number).is_dir():
                run = self.options.run
                session.emit(
                    WorkerEvent(kind=EventKind.ERROR, run=run, version=number, error=error)
                )
            return  # else it was evicted while it was looked at
        if ready is not None and session.store.current() == ready[0].ref.version:
            found(*ready, None)

    async def _finish(
        self,
        session: WorkerSession,
        current: tuple[int, str],
        updated: Updated,
        found: Updated | None,
        seen: int | None,
    ) -> None:
        """Do what a leader that was killed after it had moved ``current`` did not do any more."""
        number = current[0]
        await session.tidy(number)
        here = _ready(session, current)
        if here is None:
            return
        ready, path = here
        if number != seen and session.activator.missed(number):
            await session.announce(ready, path)
            updated(ready, path, None)
        elif found is not None:
            found(ready, path, None)

    async def _current(self, session: WorkerSession) -> tuple[int, str] | None:
        number = session.store.current()
        if number is None or not await session.whole(number):
            return None
        stored = session.store.stored(number)
        if stored is None or stored.version.manifest is None:
            return None
        return number, stored.version.manifest

    def iterate(self) -> Generator[Update, None, None]:
        """Yield each newer version once it is committed: ``follow`` for code without asyncio.

        Following goes on in a thread of its own while the caller works. Closing the iterator
        ends it.

        Raises:
            ShardcastError: As ``follow``.
        """
        box: queue.Queue[Update | BaseException] = queue.Queue()
        following = FollowThread(self.follow, box)
        following.start()
        try:
            while True:
                item = box.get()
                while not box.empty():
                    item = box.get_nowait()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            following.stop()


def _ready(session: WorkerSession, current: tuple[int, str]) -> tuple[Obtained, Path] | None:
    """Return what a commit of the version that is current would have told, None if it is gone."""
    number, manifest = current
    stored = session.store.stored(number)
    if stored is None or not stored.committed:
        return None
    return Obtained(ref_of(stored, manifest), stored, 0), stored.directory.absolute()


def _update(ready: Obtained, path: Path, head: Head | None) -> Update:
    ref = ready.ref
    return Update(
        version=ref.version,
        step=ref.step,
        manifest=ref.manifest,
        path=path,
        bytes_fetched=ready.bytes_fetched,
        head=head,
    )


def _refuse_running_loop(instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(f"an event loop runs in this thread: use {instead}()")

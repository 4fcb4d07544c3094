"""The life of one relay: start, take over from another one, serve, make room for the next, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from relay import notify
from relay.handover import Door, Offer, Predecessor, find_predecessor
from relay.keeping import OriginMark
from relay.listening import Listening, adopt, listen, passed_sockets
from relay.node import Feed, Node
from relay.parents import Place
from relay.prefetch import Prefetcher
from relay.publishing import Publishing
from relay.retaining import Retention
from relay.room import Room
from relay.runs import RelayRun
from relay.scrub import Scrubber
from relay.server import Server
from relay.threads import in_thread, in_thread_or
from relay.turns import Turns
from shardcast.errors import BusyError, ShardcastError, UsageError
from shardcast.store.roles import Role, claim_if_writable, require_role

if TYPE_CHECKING:
    from relay.materialize import Materializer

log = logging.getLogger("relay.life")

LOCK_WAIT_S = 10.0
"""How long a start waits for a relay that is ending to let go of the store."""
_RESTART_S = 1.0
_LOOK_S = 0.02


class Life:
    """One relay, from start to end. Used on the event loop; ``run`` is called once.

    Attributes:
        stopping: Set it to drain and end.
        hurry: Set it to end a drain at once.
    """

    def __init__(
        self,
        node: Node,
        server: Server,
        feed: Feed,
        publishing: Publishing,
        *,
        replaceable: bool,
    ) -> None:
        """Do nothing yet.

        Args:
            node: What all share.
            server: Its connections.
            feed: Its heads.
            publishing: Its uploads.
            replaceable: Whether this process is the relay, so that another one may take its place.
        """
        self.node = node
        self.server = server
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self._feed = feed
        self._publishing = publishing
        self._replaceable = replaceable
        self._door = Door(node.config.store, self)
        self._mark = OriginMark(node.config.store)
        self._listening: Listening | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = Turns(node.config.limits.prefetch_fills)
        self._scrubber = Scrubber(node)
        room = Room(node)
        node.room, node.scrub = room, self._scrubber
        node.on_run.append(room.watch)
        self._materializer = _materializer(node) if node.config.materialize else None
        self._in_charge = asyncio.Event()
        self._successor: int | None = None
        self._kept: tuple[str, ...] = ()

    async def run(self, ready: Callable[[str], None]) -> None:
        """Live.

        Args:
            ready: Called with the URL once it listens.

        Raises:
            UsageError: If it cannot listen, or another process has the store.
        """
        if not self.node.config.origin:
            self.node.on_run.append(self._prefetch)
        try:
            if await _unless(self.stopping, self._start()):
                assert self._listening is not None
                log.info("listening on %s", self._listening.url)
                ready(self._listening.url)
                await self.stopping.wait()
                await _unless(self.hurry, self._leave())
        finally:
            await self._end()
        log.info("stopped")

    # --- start ------------------------------------------------------------------------------------

    async def _start(self) -> None:
        node, config = self.node, self.node.config
        predecessor = await find_predecessor(config.store) if config.take_over else None
        try:
            if config.origin:
                await in_thread(self._mark.show)
            elif predecessor is None:
                await asyncio.to_thread(self._mark.require_absent)
            if predecessor is None:
                if self._role is not None:
                    await in_thread(
                        partial(require_role, config.store, self._role, take_over=config.take_over)
                    )
                await self._have_store()
                await self._claim_role()
            else:
                node.store.set_writer(node.keeper.held)
                node.parents.assume(Place(predecessor.depth, tuple(predecessor.path)))
            await self._feed.prepare()
            sockets = partial(self._sockets, predecessor)
            self._listening = await in_thread_or(sockets, Listening.close)
            if predecessor is not None:
                await predecessor.ready(self._listening.sockets)
                await self._feed.prepare()  # heads that the other one accepted meanwhile
            await self.server.start(self._listening)
            if predecessor is not None:
                predecessor.accepting()
                log.info("took over from process %d", predecessor.pid)
        finally:
            if predecessor is not None:
                predecessor.close()
        if self._replaceable:
            self._door.open()
            notify.notify(notify.READY)
        self._background("feed", self._feed.run)
        self._background("charge", self._take_charge)

    async def _have_store(self) -> None:
        try:
            await self.node.keeper.acquire(LOCK_WAIT_S)
        except BusyError as error:
            raise BusyError(
                f"{error.message}, which serves it: stop that one first, or take its place with "
                "--take-over",
                source=error.source,
            ) from error

    @property
    def _role(self) -> Role | None:
        """What it makes of the store; None for a relay that only reads."""
        if not self.node.config.writes:
            return None
        return Role.ORIGIN if self.node.config.origin else Role.RELAY

    async def _claim_role(self) -> None:
        """Mark the store, once this process may change it."""
        config = self.node.config
        if self._role is not None:
            await in_thread(
                partial(claim_if_writable, config.store, self._role, take_over=config.take_over)
            )

    def _sockets(self, predecessor: Predecessor | None) -> Listening:
        """Return what to listen on. Blocking.

        Raises:
            UsageError: If it cannot be had.
        """
        passed = passed_sockets(os.environ, os.getpid()) if self._replaceable else []
        offered = predecessor.sockets if predecessor is not None else []
        if not passed and predecessor is not None and predecessor.passed:
            return adopt(offered)
        if passed:
            for sock in offered:
                sock.close()
            return adopt(passed)
        return listen(self.node.config.listen, offered)

    async def _take_charge(self) -> None:
        """Begin to change the store, as soon as the relay before has stopped doing so."""
        await self.node.keeper.acquire(float("inf"), self._look_again)
        for run in list(self.node.runs.values()):
            run.spawn(run.commit_complete())
        self._in_charge.set()
        self._background("retention", Retention(self.node).run)
        if self.node.config.scrub_rate_bytes_per_s:
            self._background("scrub", self._scrubber.run)
        self._background("uploads", self._publishing.run)
        await asyncio.Event().wait()

    async def _look_again(self) -> None:
        """See what the relay before has written until now."""
        await self._claim_role()
        self.node.store.set_writer(True)
        for run in list(self.node.runs.values()):
            await run.attach()

    def _prefetch(self, run: RelayRun) -> None:
        async def prefetch() -> None:
            await self._in_charge.wait()
            await Prefetcher(self.node, run, self._slots, self._materializer).run()

        self._background(f"prefetch {run.name}", prefetch)

    # --- what goes on behind ----------------------------------------------------------------------

    def _background(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(_forever(name, work), name=name)

    async def _quit(self, *names: str) -> None:
        tasks = [task for name in names if (task := self._tasks.pop(name, None)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- making room (relay.handover.Host) --------------------------------------------------------

    def may_be_replaced(self) -> str | None:
        """Return why no successor can take over now, or None."""
        if self.stopping.is_set() or self._listening is None:
            return "it is not serving at the moment"
        return None if self._door.is_open else "it has no door in its store (its log says why)"

    def offer(self) -> Offer | str:
        """Return what a successor is given, or why nothing."""
        if self.stopping.is_set() or self._listening is None:
            return "it is stopping"
        place = self.node.place
        listening = self._listening
        return Offer(listening.sockets, listening.passed, place.depth, place.path)

    async def pause(self) -> None:
        """Accept no connection and follow no parent, until ``resume`` or the end."""
        await self.server.pause()
        await self._quit("feed")

    async def resume(self) -> None:
        """Go on as before."""
        await self.server.resume()
        self._background("feed", self._feed.run)

    def leave(self, pid: int, kept: Sequence[str]) -> None:
        """Drain and end: process ``pid`` accepts now."""
        log.info("process %d has taken over", pid)
        self._successor = pid
        self._kept = tuple(kept)
        notify.notify(notify.main_pid(pid))
        self.stopping.set()

    # --- end --------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        """Drain: nobody is let in any more, and whoever is here gets what he came for."""
        node = self.node
        log.info("draining")
        if self._replaceable and self._successor is None:
            notify.notify(notify.STOPPING)
        node.draining = True
        node.wake_runs()
        await self.server.stop_accepting(self._kept)
        await self._door.close(unlink=self._successor is None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(node.config.limits.drain_s + 1.0):
                await asyncio.gather(self.server.drain(node.config.limits.drain_s), self._retire())

    async def _retire(self) -> None:
        """Stop changing the store, and let the next process do so.

        What readers or publishers wait for is finished; what nobody waits for is left to it.
        """
        node = self.node
        await self._quit(*self._tasks)
        if not node.config.origin:
            node.feed = None  # nothing new is heard of
        await self._written()
        for run in list(node.runs.values()):
            await run.close()
        node.store.set_writer(not node.config.writes)
        node.keeper.give_up()
        self._mark.hide()

    async def _written(self) -> None:
        """Wait until no extent is being written; what is filled for nobody is cancelled."""
        while True:
            for fill in self.node.fills.open():
                if not fill.readers:
                    fill.cancel.cancel()
            claimed = any(run.claims for run in self.node.runs.values())
            if not claimed and not self._publishing.busy:
                return
            await asyncio.sleep(_LOOK_S)

    async def _end(self) -> None:
        """Cut off what is left."""
        node = self.node
        node.draining = True
        await self._door.close(unlink=self._successor is None)
        await self._quit(*self._tasks)
        await node.fills.stop()
        await self.server.close()
        await node.close()
        for run in list(node.runs.values()):
            await run.close()
        node.keeper.give_up()
        self._mark.hide()


def _materializer(node: Node) -> Materializer:
    """Return who rebuilds shards. Only who wants one loads the codec.

    Raises:
        UsageError: If the codec is not built.
    """
    try:
        from relay.materialize import Materializer
    except ImportError as error:
        raise UsageError(f"--materialize: {error}") from error
    made = Materializer(node)
    node.rebuilding = made
    node.on_run.append(made.watch)
    return made


async def _unless(event: asyncio.Event, work: Awaitable[None]) -> bool:
    """Do some work; if the event is set before it is done, cancel it and return False."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        for pending in (task, waiting):
            pending.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


async def _forever(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Keep background work going: trouble with one run never ends the relay."""
    while True:
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except ShardcastError as error:
            log.error("%s: %s", name, error)
        except Exception:
            log.exception("%s broke; it is started again", name)
        await asyncio.sleep(_RESTART_S)

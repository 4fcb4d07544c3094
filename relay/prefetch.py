"""Prefetching: the newest version first, documents before deltas before full shards.

Older versions are fetched when somebody asks for them. A newer head ends every wait here at once:
blobs that only a superseded version needs and nobody reads are dropped where they are, so that the
uplink carries what is wanted now; shards that were verified stay.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from relay.catalog import Known, ShardBlob
from relay.config import Prefetch
from relay.copies import copy_local, plan_for
from relay.following import fetch_documents
from relay.node import Node
from relay.runs import RelayRun
from relay.salvaging import salvage_missing
from relay.threads import in_thread
from relay.turns import Turns
from shardcast.errors import DiskError, DiskFullError, ShardcastError
from shardcast.protocol.manifest import Version
from shardcast.store.stored import StoredVersion

if TYPE_CHECKING:
    from relay.materialize import Materializer, Step

log = logging.getLogger("relay.prefetch")

AGAIN_FIRST_S = 0.5
AGAIN_CAP_S = 10.0
LOOK_S = 5.0
"""How often a whole version is looked at: serving or scrubbing may have found it damaged."""


def wanted_versions(run: RelayRun) -> list[int]:
    """Return what to prefetch, most urgent first: the newest complete version, then the open one."""
    if run.head is None:
        return []
    head = run.head.head
    wanted = [] if head.version is None else [head.version]
    if head.open is not None:
        wanted.append(head.open.version)
    return wanted


class Prefetcher:
    """Keeps one run of a relay up to date."""

    def __init__(
        self, node: Node, run: RelayRun, slots: Turns, materializer: Materializer | None = None
    ) -> None:
        self._node = node
        self._materializer = materializer
        self._run = run
        self._slots = slots
        self._flying: dict[str, asyncio.Task[bool]] = {}
        self._news = asyncio.Event()
        self._looked: set[int] = set()
        run.on_change.append(self._news.set)
        if run.head is not None:
            self._news.set()

    async def run(self) -> None:
        """Prefetch until cancelled. Trouble is logged and tried again."""
        try:
            await self._run_forever()
        finally:
            flying = list(self._flying.values())
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def _run_forever(self) -> None:
        if self._node.siblings is not None:
            await self._node.siblings.settled()
        failures = 0
        while True:
            if failures:
                cap = min(AGAIN_FIRST_S * 2.0**failures, AGAIN_CAP_S)
                pause: float | None = random.uniform(0.0, cap)  # noqa: S311 - jitter
            else:
                pause = LOOK_S
            try:
                async with asyncio.timeout(pause):
                    await self._news.wait()
            except TimeoutError:
                pass
            if self._news.is_set():
                failures = 0
            elif not failures and not self._damaged():
                continue
            self._news.clear()
            try:
                done = await self._catch_up()
                self._run.no_room = None
            except DiskError as error:
                log.warning("run %s: prefetching: %s", self._run.name, error)
                self._run.no_room = str(error)
                done = False
            except ShardcastError as error:
                log.warning("run %s: prefetching: %s", self._run.name, error)
                self._run.problem = str(error)
                done = False
            failures = 0 if done or self._news.is_set() else failures + 1

    def _damaged(self) -> bool:
        """Say whether a version that is wanted turned out damaged since it was whole."""
        found = (self._run.stored.get(number) for number in wanted_versions(self._run))
        return any(stored is not None and stored.damaged is not None for stored in found)

    async def _catch_up(self) -> bool:
        """Fetch what is wanted; False if something did not come. Ends early for a newer head."""
        wanted = wanted_versions(self._run)
        if self._materializer is not None:  # each is the base of the next
            whole = True
            for number in wanted:
                whole &= await self._catch_up_on(number)
                if self._news.is_set():
                    return False
            return whole
        # Documents and deltas of one never wait for what does not come of the other.
        tasks: list[asyncio.Task[bool]] = []
        for number in wanted:
            before = tasks[-1] if tasks else None
            tasks.append(asyncio.create_task(self._catch_up_on(number, before)))
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return all(results) and not self._news.is_set()

    async def _catch_up_on(self, number: int, before: asyncio.Task[bool] | None = None) -> bool:
        """Fetch what is wanted of a version; its shards after those of a more urgent one."""
        run, policy = self._run, self._node.config.prefetch
        whole = here = await self._documents(number)
        await run.attach()
        if here:
            self._drop_superseded()
        if self._news.is_set():
            return False
        if here and self._materializer is not None:
            whole &= await self._materialize(self._materializer, number)
        if policy is not Prefetch.DEMAND:
            blobs = [
                known
                for b in run.catalog.delta_blobs(number)
                if (known := run.find(b.digest)) is not None
            ]
            whole &= await self._fetch_all(blobs)
        if before is not None:
            await asyncio.wait([before])
        version = run.catalog.version(number)
        if policy is Prefetch.ALL and version is not None and not self._news.is_set():
            whole &= await self._version(version)
        return whole and not self._news.is_set()

    async def _version(self, version: Version) -> bool:
        stored = await self._begin(version)
        await self._copy(stored)
        return await self._rest(stored) and (not version.complete or not stored.missing())

    async def _copy(self, stored: StoredVersion) -> None:
        """Copy what any version on disk has: also one that was open, and that no head names now."""
        await copy_local(self._run, stored, await in_thread(self._run.on_disk))

    async def _begin(self, version: Version) -> StoredVersion:
        """Return a version on disk, with what is good of it found."""
        stored = self._run.stored.get(version.number)
        if stored is None or not stored.alive:
            stored = await self._stage(version)
            self._looked.add(version.number)  # there is nothing yet
        stored.update(version)
        await self._look_at(stored)
        return stored

    async def _rest(self, stored: StoredVersion) -> bool:
        """Fetch what is missing of a version, unless it is about to be rebuilt, and commit it."""
        run, materializer = self._run, self._materializer
        whole = True
        if not stored.complete:
            plan = await in_thread(lambda: plan_for(stored, run.on_disk()))
            blobs: list[Known] = []
            for fetch in plan.fetches:
                known = run.find(fetch.digest)
                if not isinstance(known, ShardBlob):
                    continue
                if materializer is not None and materializer.awaited(run, known):
                    whole = False  # looked at again soon
                else:
                    blobs.append(known)
            whole &= await self._fetch_all(blobs)
            await self._copy(stored)
        await run.commit_complete()
        return whole

    async def _materialize(self, materializer: Materializer, number: int) -> bool:
        """Rebuild a version from what is here and deltas; False if something did not come.

        What the deltas do not give of a version on the way is fetched, so that the next one can
        start from it. Never interrupted between: what is begun is the base of what comes next.
        """
        run = self._run
        for step in materializer.way_to(run, number):
            try:
                if step.version != number and not await self._documents(step.version):
                    return False
                version = run.catalog.version(step.version)
                if version is None:
                    return False
                stored = await self._begin(version)
                await self._copy(stored)
                if not await self._rebuild(materializer, stored, step):
                    return False
            except ShardcastError:
                materializer.gone_through(run, number)
                raise
            if self._news.is_set():
                return False
        return True

    async def _rebuild(self, materializer: Materializer, stored: StoredVersion, step: Step) -> bool:
        run = self._run
        with materializer.begin(run, stored, step) as work:
            came = await self._fetch_all(work.blobs(), work.use)
        if work.trouble is not None:
            raise work.trouble
        if not came and (self._news.is_set() or not self._node.parents.live()):
            return False  # tried again soon
        materializer.gone_through(run, step.version)
        if not work.failed:
            return await self._rest(stored)
        return self._node.config.prefetch is Prefetch.ALL

    async def _stage(self, version: Version) -> StoredVersion:
        """Begin a version; on a full disk, others make room for it.

        Raises:
            DiskFullError: If they cannot.
        """
        run, room = self._run, self._node.room
        run.admit(version)
        try:
            return await in_thread(partial(run.stage, version))
        except DiskFullError:
            if room is None or not await room.make(run, version.number, version.layout.total_bytes):
                raise
        return await in_thread(partial(run.stage, version))

    async def _look_at(self, stored: StoredVersion) -> None:
        """Before anything is fetched: give damaged files their size, and find what is good.

        The first time in a process, also where no record says that a shard is here: a journal that
        a power cut took costs reading, not fetching.
        """
        number = stored.version.number
        if stored.damaged is not None:
            await in_thread(stored.restore_files)
        self._looked.intersection_update(self._run.catalog.numbers())  # of others nobody asks
        if number in self._looked:
            return
        self._looked.add(number)
        await salvage_missing(self._run, stored)

    async def _fetch_all(
        self, blobs: Iterable[Known], use: Callable[[Known], Awaitable[None]] | None = None
    ) -> bool:
        """Bring blobs here, a few at once, and use each as soon as it is; False if some are not."""
        queue = iter(blobs)
        workers = min(self._node.config.limits.prefetch_fills, 64)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._fetch_some(queue, use)) for _ in range(workers)]
        return all(task.result() for task in tasks)

    async def _fetch_some(
        self, queue: Iterator[Known], use: Callable[[Known], Awaitable[None]] | None
    ) -> bool:
        whole = True
        for known in queue:
            task = self._on_its_way(known)
            if task is None:
                slot = asyncio.ensure_future(self._slots.take(self._run.name))
                if not await self._before_news(slot):
                    slot.cancel()
                    return False
                task = asyncio.create_task(self._one(known))
            if not await self._before_news(task):
                return False  # it flies on, with its slot
            if not task.result():
                whole = False
                if not self._node.parents.live():
                    return False
            elif use is not None:
                await use(known)
        return whole

    def _on_its_way(self, known: Known) -> asyncio.Task[bool] | None:
        """Return what has flown on since before the news: it has a slot, and needs no second one."""
        task = self._flying.get(known.digest)
        fill = self._node.fills.get(self._run.name, known.digest)
        return None if fill is None or fill.cancel.cancelled else task

    async def _one(self, known: Known) -> bool:
        """Bring one blob here, with a slot that is given back."""
        task = asyncio.current_task()
        assert task is not None
        self._flying[known.digest] = task
        try:
            await self._node.ensure(self._run, known)
        except ShardcastError as error:
            log.info("run %s: blob %s: %s", self._run.name, known.digest, error)
            return False
        finally:
            if self._flying.get(known.digest) is task:
                del self._flying[known.digest]
            self._slots.give(self._run.name)
        return True

    async def _documents(self, number: int) -> bool:
        """Bring the documents of a version here; False if they are not, or if news came first."""
        task = asyncio.ensure_future(fetch_documents(self._node, self._run, number))
        if not await self._before_news(task):
            task.cancel()
            return False
        return task.result()

    async def _before_news(self, task: asyncio.Future[Any]) -> bool:
        """Wait for a task or for news; say whether the task is done. A cancellation ends it too."""
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({task, news}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            news.cancel()
        return task.done()

    def _drop_superseded(self) -> None:
        """Cancel what is on its way for no wanted version and for no reader."""
        wanted = wanted_versions(self._run)
        deltas = {blob.digest for n in wanted for blob in self._run.catalog.delta_blobs(n)}
        for digest in list(self._flying):
            known = self._run.find(digest)
            if isinstance(known, ShardBlob):
                needed = any(place.version in wanted for place in known.places)
            else:
                needed = digest in deltas
            fill = self._node.fills.get(self._run.name, digest)
            if fill is not None and not needed and not fill.readers:
                log.info("run %s: blob %s is superseded: dropped", self._run.name, digest)
                fill.cancel.cancel()

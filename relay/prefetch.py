"""Prefetching: the newest version first, documents before deltas before full shards.

Older versions are fetched when somebody asks for them. A newer head ends every wait here at once:
blobs that only a superseded version needs and nobody reads are dropped where they are, so that the
uplink carries what is wanted now; shards that were verified stay.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from relay.catalog import Known, ShardBlob
from relay.config import Prefetch
from relay.copies import copy_local, plan_for
from relay.following import fetch_documents
from relay.node import Node
from relay.runs import RelayRun
from relay.threads import in_thread
from relay.turns import Turns
from shardcast.errors import DiskError, DiskFullError, ShardcastError
from shardcast.protocol.manifest import Version
from shardcast.salvage import salvage
from shardcast.store.stored import StoredVersion

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

    def __init__(self, node: Node, run: RelayRun, slots: Turns) -> None:
        self._node = node
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
        run, policy = self._run, self._node.config.prefetch
        whole = True
        for number in wanted_versions(run):
            here = await self._documents(number)
            whole &= here
            await run.attach()
            if here:
                self._drop_superseded()
            if self._news.is_set():
                return False
            if policy is not Prefetch.DEMAND:
                blobs = [
                    known
                    for b in run.catalog.delta_blobs(number)
                    if (known := run.find(b.digest)) is not None
                ]
                whole &= await self._fetch_all(blobs)
            version = run.catalog.version(number)
            if policy is Prefetch.ALL and version is not None:
                whole &= await self._version(version)
            if self._news.is_set():
                return False
        return whole

    async def _version(self, version: Version) -> bool:
        run = self._run
        stored = run.stored.get(version.number)
        if stored is None or not stored.alive:
            stored = await self._stage(version)
            self._looked.add(version.number)  # there is nothing yet
        stored.update(version)
        await self._look_at(stored)
        if stored.complete:
            await run.commit_complete()
            return True
        others = list(run.stored.values())
        await copy_local(run, stored, others)
        plan = await in_thread(partial(plan_for, stored, others))
        known = (run.find(fetch.digest) for fetch in plan.fetches)
        whole = await self._fetch_all(k for k in known if k is not None)
        await copy_local(run, stored, list(run.stored.values()))
        await run.commit_complete()
        return whole and (not version.complete or not stored.missing())

    async def _stage(self, version: Version) -> StoredVersion:
        """Begin a version; on a full disk, others make room for it.

        Raises:
            DiskFullError: If they cannot.
        """
        run, room = self._run, self._node.room
        run.admit(version)
        try:
            return await asyncio.to_thread(run.stage, version)
        except DiskFullError:
            if room is None or not await room.make(run, version.number, version.layout.total_bytes):
                raise
        return await asyncio.to_thread(run.stage, version)

    async def _look_at(self, stored: StoredVersion) -> None:
        """Before anything is fetched: give damaged files their size, and find what is good.

        The first time in a process, also where no record says that a shard is here: a journal that
        a power cut took costs reading, not fetching.
        """
        number = stored.version.number
        if stored.damaged is not None:
            await in_thread(stored.restore_files)
        if number in self._looked:
            return
        self._looked.add(number)
        claims = {(number, shard) for shard in stored.missing()} - self._run.claims
        self._run.claims |= claims
        try:
            await in_thread(partial(salvage, stored, [shard for _, shard in claims]))
        finally:
            self._run.claims -= claims

    async def _fetch_all(self, blobs: Iterable[Known]) -> bool:
        queue = iter(blobs)
        workers = min(self._node.config.limits.prefetch_fills, 64)
        results = await asyncio.gather(*(self._fetch_some(queue) for _ in range(workers)))
        return all(results)

    async def _fetch_some(self, queue: Iterator[Known]) -> bool:
        whole = True
        for known in queue:
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
        return whole

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

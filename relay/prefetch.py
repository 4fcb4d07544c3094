"""Prefetching: the newest version first, documents before deltas before full shards.

Older versions are fetched when somebody asks for them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Iterator
from functools import partial

from relay.catalog import Known
from relay.config import Prefetch
from relay.copies import copy_local, plan_for
from relay.following import fetch_documents
from relay.node import Node
from relay.runs import RelayRun
from relay.threads import in_thread
from shardcast.errors import ShardcastError
from shardcast.protocol.manifest import Version

log = logging.getLogger("relay.prefetch")

AGAIN_FIRST_S = 0.5
AGAIN_CAP_S = 10.0


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

    def __init__(self, node: Node, run: RelayRun, slots: asyncio.Semaphore) -> None:
        self._node = node
        self._run = run
        self._slots = slots
        self._news = asyncio.Event()
        run.on_change.append(self._news.set)
        if run.head is not None:
            self._news.set()

    async def run(self) -> None:
        """Prefetch until cancelled. Trouble is logged and tried again."""
        if self._node.siblings is not None:
            await self._node.siblings.settled()
        failures = 0
        while True:
            if failures:
                cap = min(AGAIN_FIRST_S * 2.0**failures, AGAIN_CAP_S)
                pause: float | None = random.uniform(cap / 2, cap)  # noqa: S311 - jitter
            else:
                pause = None
            try:
                async with asyncio.timeout(pause):
                    await self._news.wait()
            except TimeoutError:
                pass
            if self._news.is_set():
                failures = 0
            self._news.clear()
            try:
                done = await self._catch_up()
            except ShardcastError as error:
                log.warning("run %s: prefetching: %s", self._run.name, error)
                self._run.problem = str(error)
                done = False
            failures = 0 if done or self._news.is_set() else failures + 1

    async def _catch_up(self) -> bool:
        """Fetch what is wanted; False if something did not come. Ends early for a newer head."""
        run, policy = self._run, self._node.config.prefetch
        whole = True
        for number in wanted_versions(run):
            whole &= await fetch_documents(self._node, run, number)
            await run.attach()
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
            stored = await asyncio.to_thread(run.stage, version)
        stored.update(version)
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

    async def _fetch_all(self, blobs: Iterable[Known]) -> bool:
        queue = iter(blobs)
        workers = min(self._node.config.limits.prefetch_fills, 64)
        results = await asyncio.gather(*(self._fetch_some(queue) for _ in range(workers)))
        return all(results)

    async def _fetch_some(self, queue: Iterator[Known]) -> bool:
        whole = True
        for known in queue:
            if self._news.is_set():
                return False
            async with self._slots:
                try:
                    await self._node.ensure(self._run, known)
                except ShardcastError as error:
                    log.info("run %s: blob %s: %s", self._run.name, known.digest, error)
                    whole = False
                    if self._node.parents.live():
                        continue
                    return False
        return whole

"""The feed of an origin: what the publisher writes into the store.

The origin trusts the pinned keys, else those its store remembers, which the local publisher
writes. Its own disk is the authority on sequence: what was remembered there only names keys.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from relay.isolation import for_each
from relay.node import Node
from relay.runs import RelayRun
from shardcast.errors import ShardcastError, UsageError
from shardcast.protocol import trust
from shardcast.protocol.trust import Accepted, TrustState
from shardcast.salvage import salvage
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion

log = logging.getLogger("relay.origin")

POLL_S = 0.05
"""One stat per run: a new head is seen within this time."""
LOOK_S = 0.5
"""One listing of the store: a new run is seen within this time."""

_Stamp = tuple[int, int, int]


def now_ms() -> int:
    """Return the wall clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


class OriginFeed:
    """Watches the head of every run in the store."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stamps: dict[str, _Stamp] = {}
        self._told: dict[str, object] = {}
        self._salvaged: set[tuple[str, int]] = set()
        self._lock = asyncio.Lock()

    async def prepare(self) -> None:
        """Look at every run once."""
        await self._look_for_runs()
        await for_each(self._node.runs.values(), "looking at its head", self._look)

    async def run(self) -> None:
        """Watch until cancelled."""
        looked = float("-inf")
        while True:
            if self._node.clock() - looked >= LOOK_S:
                looked = self._node.clock()
                await self._look_for_runs()
            await for_each(self._node.runs.values(), "looking at its head", self._look)
            await asyncio.sleep(POLL_S)

    async def refresh(self, run: RelayRun) -> None:
        """Look at one head, and at documents that came meanwhile."""
        await self._look(run)
        await self._documents(run)

    async def discover(self, name: str) -> None:
        """Look for new runs."""
        await self._look_for_runs()
        run = self._node.runs.get(name)
        if run is not None:
            await self._look(run)

    async def _look_for_runs(self) -> None:
        try:
            names = await asyncio.to_thread(self._node.store.runs)
        except ShardcastError as error:
            self._tell("", f"store: {error}")
            return
        wanted = self._node.config.runs
        for name in names:
            if name not in self._node.runs and (not wanted or name in wanted):
                self._node.add_run(self._node.store.run(name))

    async def _look(self, run: RelayRun) -> None:
        stamp = run.store.head_stamp()
        if stamp is None or self._stamps.get(run.name) == stamp:
            return
        async with self._lock:
            if self._stamps.get(run.name) == stamp:
                return
            try:
                accepted = await asyncio.to_thread(self._read, run.store, run.trust)
            except ShardcastError as error:
                # Asked again at the next poll: the key may be written a moment after the head.
                text = f"run {run.name}: head is not served: {error}"
                self._tell(run.name, text, (type(error).__name__, stamp))
                run.problem = str(error)
                return
            if accepted is None:
                return
            self._told.pop(run.name, None)
            run.problem = None
            await self.take(run, accepted)
            # Only now: a look that a request began ends with the request, and is repeated.
            self._stamps[run.name] = stamp

    async def take(self, run: RelayRun, accepted: Accepted) -> None:
        """Serve an accepted head; its documents are taken in before anyone hears of it."""
        run.trust = accepted.state
        run.took(run.catalog.set_head(accepted.head, run.readers.versions()))
        await self._documents(run)
        run.serve(accepted)

    async def _documents(self, run: RelayRun) -> None:
        for number in run.catalog.numbers():
            absent = await run.load_documents(number)
            if absent:
                log.error(
                    "run %s: %d documents of version %d are not in the store, the first %s",
                    run.name,
                    len(absent),
                    number,
                    absent[0].digest,
                )
        await run.attach()
        for number, stored in list(run.stored.items()):
            lacking = (run.name, number)
            if stored.damaged is not None and lacking not in self._salvaged:
                self._salvaged.add(lacking)
                run.spawn(self._salvage(stored))

    async def _salvage(self, stored: StoredVersion) -> None:
        """Nobody can be asked for an origin's shards, so their bytes are: once a process."""
        try:
            await asyncio.to_thread(salvage, stored)
        except ShardcastError as error:
            log.error("%s", error)
        if stored.damaged is not None:
            log.error("%s; nobody can repair it here: publish it again", stored.damaged)

    def _read(self, store: RunStore, state: TrustState | None) -> Accepted | None:
        data = store.read_head()
        if data is None:
            return None
        return trust.accept(state or local_trust(self._node, store), data, now_ms())

    def _tell(self, name: str, text: str, what: object = None) -> None:
        """Log what is wrong with a run once, however often it is looked at.

        Args:
            name: The run.
            text: What to say.
            what: What makes it another trouble; None: the text, where it holds no time.
        """
        what = text if what is None else what
        if self._told.get(name) != what:
            self._told[name] = what
            log.warning("%s", text)


def local_trust(node: Node, store: RunStore) -> TrustState:
    """Return the keys to judge the store's own head by.

    Raises:
        UsageError: If none is known.
        StateError: If what is remembered is damaged.
    """
    state = trust.begin(
        store.run,
        pinned=node.config.pubkeys,
        first_use=node.config.first_use and store.read_trust() is None,
        remembered=store.read_trust(),
    )
    if not state.keys and not node.config.first_use:
        raise UsageError(f"no key is known for run {store.run!r}")
    return msgspec.structs.replace(state, sequence=None, payload=None, manifests={}, layouts={})

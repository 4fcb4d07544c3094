"""The feed of a relay with parents: long polls, its own trust, persisted before it is served."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from functools import partial

import msgspec

from relay.catalog import DocumentBlob
from relay.node import Node
from relay.origin import now_ms
from relay.runs import RelayRun
from relay.threads import in_thread
from relay.watching import Watch, feel
from shardcast.asyncget import HttpSession
from shardcast.errors import (
    MalformedError,
    NotFoundError,
    ShardcastError,
    TrustError,
    UsageError,
    said_of,
)
from shardcast.protocol import trust
from shardcast.protocol.documents import check_run
from shardcast.protocol.trust import Accepted, TrustState
from shardcast.protocol.wire import NODE_HEADER
from shardcast.store.run import RunStore
from shardcast.upstream import HeadAnswer, Upstream, open_session
from shardcast.watcher import HeadWatcher, UpstreamState, WaitSlots

log = logging.getLogger("relay.following")

TICK_S = 0.5
MAX_RUNS = 256
"""Runs taken over from parents that were not named: a parent cannot fill the disk with names."""
MAX_STRANGE_RUNS = 32
"""Runs that one parent alone has named and nobody has given a head for that is trusted: each costs
every parent a question every few seconds."""
RESTART_S = 1.0


def check_keys(node: Node) -> None:
    """Check that some run can be trusted at all.

    Raises:
        UsageError: If no key is given and none remembered.
    """
    config = node.config
    if config.origin or config.pubkeys or config.first_use:
        return
    names = config.runs or node.store.runs()
    lacking = [name for name in names if _remembered(node, name) is None]
    if not names or (config.runs and lacking):
        raise UsageError(
            f"no key is known{f' for run {lacking[0]!r}' if lacking else ''}: "
            "give --pubkey FILE or --trust-on-first-use"
        )


def _remembered(node: Node, name: str) -> TrustState | None:
    try:
        return node.store.run(name).read_trust()
    except NotFoundError:
        return None


class ParentFeed:
    """Follows the heads of all runs that this relay carries."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._upstreams: list[Upstream] = []
        self._group: asyncio.TaskGroup | None = None
        self._slots: WaitSlots | None = None
        self._told: set[str] = set()
        self._states: dict[str, TrustState] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._adopting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._named_by: dict[str, str] = {}
        self._discovering: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Serve the heads that were served before the restart."""
        for name in self._node.config.runs or tuple(await asyncio.to_thread(self._node.store.runs)):
            known = self._node.runs.get(name)
            if known is None:
                await self._adopt(name)
            else:  # looked at before; another process may have written to it since
                await asyncio.to_thread(self._begin, name)
                await self._resume(known)

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            await self._follow_all()
        finally:  # who asks while nobody is followed looks for nothing
            self._group, self._upstreams = None, []

    async def _follow_all(self) -> None:
        config, node = self._node.config, self._node
        me = {NODE_HEADER: node.identity.node}
        polls = node.budget.polls // max(1, len(config.parents) + len(config.siblings))
        self._slots = WaitSlots(max(1, polls // 2))
        async with (
            open_session(config.net, me, most=max(2, polls)) as session,
            asyncio.TaskGroup() as group,
        ):
            self._group = group
            self._discovering = None
            self._upstreams = [Upstream(url, session, config.net) for url in node.parents.urls]
            if node.siblings is not None:
                group.create_task(node.siblings.watch(session))
            group.create_task(self._fill_watch(session).run())
            for run in list(node.runs.values()):
                self._watch(run)
            for name in config.runs:
                await self._follow(name)
            group.create_task(self._tick())
            if not config.runs:
                for upstream in self._upstreams:
                    group.create_task(self._discover_forever(upstream))

    def _fill_watch(self, session: HttpSession) -> Watch:
        node = self._node
        assert node.sources is not None
        return Watch(
            node.fills.open,
            node.sources.leads_up,
            partial(feel, session),
            self._silent,
            node.clock,
        )

    def _silent(self, url: str) -> None:
        for watcher in self._node.parents.watchers.values():
            watcher.doubt(url)
        if self._node.siblings is not None:
            self._node.siblings.saw(url, None, live=False)

    async def refresh(self, run: RelayRun) -> None:
        """Ask all parents for the head once, then for documents that are known by name only."""
        watcher = self._node.parents.watchers.get(run.name)
        # Both at once: a parent that does not answer must not hold up what another one has.
        await asyncio.gather(
            watcher.refresh() if watcher is not None else asyncio.sleep(0), self._documents(run)
        )
        await self._documents(run)

    async def _documents(self, run: RelayRun) -> None:
        # All at once: an open version whose parts do not come must not hold up the others.
        numbers = run.catalog.numbers()
        await asyncio.gather(*(fetch_documents(self._node, run, number) for number in numbers))
        await run.attach()

    async def discover(self, name: str) -> None:
        """Look for a run, and for its head if it is known; the look outlives who waits for it."""
        if not self._upstreams or self._group is None:
            return
        watcher = self._node.parents.watchers.get(name)
        if watcher is not None:
            await watcher.refresh()
        elif not self._node.config.runs:
            if self._discovering is None or self._discovering.done():
                self._discovering = self._group.create_task(self._discover_all())
            await asyncio.wait([self._discovering])

    # --- runs -----------------------------------------------------------------------------------

    async def _discover_all(self) -> None:
        # A parent that does not answer must not hold up the next look.
        patience = self._node.config.limits.refresh_wait_s
        await asyncio.gather(*(self._discover(upstream, patience) for upstream in self._upstreams))

    async def _discover_forever(self, upstream: Upstream) -> None:
        while True:
            await self._discover(upstream)
            await asyncio.sleep(self._node.config.net.head_poll_s)

    async def _discover(self, upstream: Upstream, patience_s: float | None = None) -> None:
        """Follow the runs that a parent names, as far as it may name any."""
        try:
            async with asyncio.timeout(patience_s):
                names = await upstream.runs()
        except (ShardcastError, TimeoutError) as error:
            self._tell(f"{upstream.url} does not list its runs: {error}", level=logging.INFO)
            return
        for name in names[:MAX_RUNS]:
            if name in self._node.parents.watchers or not self._may_name(upstream.url):
                continue
            await self._follow(name)
            if name in self._node.runs:
                self._named_by.setdefault(name, upstream.url)

    def _may_name(self, url: str) -> bool:
        """Say whether a parent may name one more run: none can use up what is for all."""
        node = self._node
        if len(node.runs) >= MAX_RUNS:
            self._tell(f"{url} names more runs than the {MAX_RUNS} that are followed")
            return False
        named = [name for name, by in self._named_by.items() if by == url and name in node.runs]
        strange = sum(node.runs[name].head is None for name in named)
        if strange >= MAX_STRANGE_RUNS or len(named) >= max(1, MAX_RUNS // len(self._upstreams)):
            self._tell(
                f"{url} names too many runs: {len(named)} are followed, of {strange} of them "
                "nobody has a head that is trusted"
            )
            return False
        return True

    async def _follow(self, name: str) -> None:
        """Begin to follow a run, from what the disk remembers of it on."""
        if name in self._node.parents.watchers:
            return
        run = await self._adopt(name)
        if run is not None and name not in self._node.parents.watchers:
            self._watch(run)

    async def _adopt(self, name: str) -> RelayRun | None:
        """Begin to serve a run as far as it is here; None if it cannot be trusted."""
        try:
            check_run(name)
        except MalformedError as error:
            self._tell(f"run {name[:64]!r}: not followed: {error}")
            return None
        async with self._adopting[name]:
            return await self._adopt_alone(name)

    async def _adopt_alone(self, name: str) -> RelayRun | None:
        node = self._node
        known = node.runs.get(name)
        if known is not None:
            return known
        try:
            await asyncio.to_thread(self._begin, name)
            store = await asyncio.to_thread(lambda: node.store.run(name, create=True))
        except ShardcastError as error:
            self._tell(f"run {name[:64]}: not followed: {error}")
            return None
        run = node.add_run(store)
        await self._resume(run)
        return run

    def _watch(self, run: RelayRun) -> None:
        """Begin to poll the parents for a run."""
        node, group = self._node, self._group
        assert group is not None

        async def on_head(answer: HeadAnswer) -> int | None:
            return await self._on_head(run, answer)

        def on_change(url: str, state: UpstreamState) -> None:
            self._on_change(run, url, state)

        watcher = HeadWatcher(
            run.name,
            self._upstreams,
            node.config.net,
            on_head,
            on_change=on_change,
            slots=self._slots,
        )
        node.parents.watchers[run.name] = watcher
        group.create_task(self._watch_forever(run, watcher))

    async def _watch_forever(self, run: RelayRun, watcher: HeadWatcher) -> None:
        """Watch one run; what breaks there never stops the others."""
        while True:
            try:
                await watcher.watch()
            except Exception as error:
                log.exception("run %s: following broke; it is started again", run.name)
                run.problem = f"following broke: {error}"
            await asyncio.sleep(RESTART_S)

    def _begin(self, name: str) -> None:
        """Decide what to trust. Blocking."""
        config = self._node.config
        remembered = _remembered(self._node, name)
        self._states[name] = trust.begin(
            name,
            pinned=config.pubkeys,
            first_use=config.first_use and remembered is None,
            remembered=remembered,
        )

    async def _resume(self, run: RelayRun) -> None:
        """Serve the head that was served before the restart."""

        def read() -> Accepted | None:
            data = run.store.read_head()
            if data is None:
                return None
            state = self._states[run.name]
            # A crash between the two writes left a head older than what is remembered.
            lenient = msgspec.structs.replace(
                state, sequence=None, payload=None, manifests={}, layouts={}
            )
            return trust.accept(lenient, data, now_ms())

        try:
            accepted = await asyncio.to_thread(read)
        except ShardcastError as error:
            log.warning("run %s: the stored head is not served: %s", run.name, error)
            return
        if accepted is not None:
            run.trust = self._states[run.name]
            run.took(run.catalog.set_head(accepted.head, run.readers.versions()))
            for number in run.catalog.numbers():
                await run.load_documents(number)
            await run.attach()
            run.serve(accepted)
            run.trust = self._states[run.name]

    # --- heads ----------------------------------------------------------------------------------

    async def _on_head(self, run: RelayRun, answer: HeadAnswer) -> int | None:
        self._find_place()
        async with self._locks[run.name]:
            state = self._states[run.name]
            try:
                accepted = await asyncio.to_thread(trust.accept, state, answer.envelope, now_ms())
                if accepted.changed or run.head is None:
                    await in_thread(partial(self._persist, run.store, accepted))
            except (TrustError, MalformedError) as error:
                if run.head is not None and error.code == "rollback":
                    log.info("run %s: %s is behind: %s", run.name, answer.url, error)
                    return run.head.sequence
                log.error("run %s: head of %s is refused: %s", run.name, answer.url, error)
                run.problem = said_of(answer.url, error)
                return None
            except ShardcastError as error:
                log.error("run %s: head of %s cannot be kept: %s", run.name, answer.url, error)
                run.problem = str(error)
                return None
            self._states[run.name] = accepted.state
            run.problem = None
            run.serve(accepted)
            return accepted.head.sequence

    @staticmethod
    def _persist(store: RunStore, accepted: Accepted) -> None:
        """Remember before anyone hears of it. Blocking."""
        store.write_trust(accepted.state)
        store.write_head(accepted.envelope)

    def _on_change(self, run: RelayRun, url: str, state: UpstreamState) -> None:
        if not state.live:
            told = f"{url}: gone" if state.error is None else said_of(url, state.error)
            self._tell(f"run {run.name}: parent {told}")
        else:
            self._told = {text for text in self._told if url not in text}
            if self._node.sources is not None:
                self._node.sources.alive(url)
        self._find_place()

    def _find_place(self) -> None:
        """Look how far the origin is now; children that wait for a head hear of a change."""
        if self._node.parents.update():
            self._node.wake_runs()

    async def _tick(self) -> None:
        while True:
            self._find_place()
            await asyncio.sleep(TICK_S)

    def _tell(self, text: str, *, level: int = logging.WARNING) -> None:
        if text not in self._told:
            if len(self._told) > 1000:
                self._told.clear()
            self._told.add(text)
            log.log(level, "%s", text)


async def fetch_documents(node: Node, run: RelayRun, number: int) -> bool:
    """Bring the documents of a version here; return whether all are.

    Documents that did not come are asked for again at the next call.
    """
    failed: set[str] = set()
    came = False
    while True:
        absent = [d for d in await run.load_documents(number) if d.digest not in failed]
        if not absent:
            if came and not failed:
                node.fills.hasten(run.name)  # whoever had them knows now what they name
            return not failed
        results = await asyncio.gather(
            *(_fetch(node, run, document) for document in absent), return_exceptions=True
        )
        for document, result in zip(absent, results, strict=True):
            if isinstance(result, ShardcastError):
                log.info(
                    "run %s: %s %s: %s", run.name, document.kind.value, document.digest, result
                )
                failed.add(document.digest)
            elif isinstance(result, BaseException):
                raise result
            else:
                came = True


async def _fetch(node: Node, run: RelayRun, document: DocumentBlob) -> None:
    await node.ensure(run, document)

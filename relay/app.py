"""A relay from start to end: ``serve`` runs until it is cancelled or told to stop by SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from relay.clients import Clients
from relay.config import Prefetch, RelayConfig
from relay.descriptors import raise_descriptor_limit
from relay.following import ParentFeed, check_keys
from relay.handlers import Handlers
from relay.node import Feed, Node
from relay.origin import OriginFeed
from relay.prefetch import Prefetcher
from relay.publishing import Publishing
from relay.retaining import Retention
from relay.runs import RelayRun
from relay.server import Server
from shardcast.errors import ShardcastError, UsageError
from shardcast.store.store import Store

__all__ = ["Prefetch", "RelayConfig", "serve"]

log = logging.getLogger("relay.app")

_IO_THREADS = 16
"""For what may wait for a disk: hashing before the first serving, documents, uploads."""
_RESTART_S = 1.0


async def serve(
    config: RelayConfig,
    *,
    ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run a relay until SIGTERM or SIGINT (then it drains), ``stop`` is set, or it is cancelled.

    Must run on the stock asyncio loop: uvloop has no sendfile. A cancellation closes every
    connection at once; what is on disk is consistent at any moment.

    Args:
        config: What to do.
        ready: Called with the relay's URL once it listens.
        stop: Set it to drain and return, instead of a signal.

    Raises:
        UsageError: If options, keys, token file or address are not usable.
        DiskError: If the store cannot be used.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.SelectorEventLoop):
        raise UsageError(f"the relay needs asyncio's own event loop, not {type(loop).__name__}")
    loop.set_default_executor(ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="relay-io"))
    raise_descriptor_limit()
    store = Store(config.store)
    stopping = stop or asyncio.Event()
    node = Node(config, store, await asyncio.to_thread(store.node_id), loop)
    try:
        check_keys(node)
        publishing = Publishing(node)
        clients = Clients(node.clock)
        server = Server(node, Handlers(node, publishing, clients))
        feed: OriginFeed | ParentFeed = OriginFeed(node) if config.origin else ParentFeed(node)
        node.feed = feed
        with contextlib.nullcontext() if stop is not None else _signals(loop, stopping):
            await _run(node, feed, server, publishing, ready, stopping)
    finally:
        await asyncio.to_thread(_close, node)
        store.close()


async def _run(
    node: Node,
    feed: Feed,
    server: Server,
    publishing: Publishing,
    ready: Callable[[str], None],
    stopping: asyncio.Event,
) -> None:
    tasks: list[asyncio.Task[None]] = []
    slots = asyncio.Semaphore(node.config.limits.prefetch_fills)

    def background(name: str, work: Callable[[], object]) -> None:
        tasks.append(asyncio.create_task(_forever(name, work), name=name))

    def prefetch(run: RelayRun) -> None:
        background(f"prefetch {run.name}", Prefetcher(node, run, slots).run)

    if not node.config.origin:
        node.on_run.append(prefetch)
    try:
        await feed.prepare()
        url = await server.listen()
        log.info("listening on %s, node %s", url, node.identity.node)
        background("feed", feed.run)
        background("retention", Retention(node).run)
        background("uploads", publishing.run)
        ready(url)
        await stopping.wait()
        log.info("draining")
        node.draining = True
        node.wake_runs()
        await server.drain(node.config.limits.drain_s)
    finally:
        node.draining = True
        for task in tasks:
            task.cancel()
        for fill in node.fills.open():
            fill.cancel.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.drain(0.0)
        for run in node.runs.values():
            await run.close()
    log.info("stopped")


async def _forever(name: str, work: Callable[[], object]) -> None:
    """Keep background work going: trouble with one run never ends the relay."""
    while True:
        try:
            result = work()
            assert asyncio.iscoroutine(result)
            await result
        except asyncio.CancelledError:
            raise
        except ShardcastError as error:
            log.error("%s: %s", name, error)
        except Exception:
            log.exception("%s broke; it is started again", name)
        await asyncio.sleep(_RESTART_S)


def _close(node: Node) -> None:
    """End fills and connections. Blocks for a moment."""
    if node.sources is not None:
        node.sources.close()
    node.fills.close()


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set the event, where this is the main thread."""
    installed = []
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stopping.set)
            installed.append(number)
        except (ValueError, RuntimeError, NotImplementedError):
            break  # not the main thread: whoever started us stops us
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)

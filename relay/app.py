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
from relay.descriptors import telling_shortage
from relay.following import ParentFeed, check_keys
from relay.handlers import Handlers
from relay.life import Life
from relay.node import Node
from relay.origin import OriginFeed
from relay.publishing import Publishing
from relay.server import Server
from relay.successor import Successors
from shardcast.errors import UsageError
from shardcast.store.descriptors import raise_limit
from shardcast.store.store import Store

__all__ = ["Prefetch", "RelayConfig", "serve"]

log = logging.getLogger("relay.app")

_IO_THREADS = 16
"""For what may wait for a disk: heads, documents, uploads, copies. Readers have threads of their own
(``relay.node``)."""


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
    raise_limit()
    store = Store(config.store)
    node = Node(config, store, await asyncio.to_thread(store.node_id), loop)
    try:
        check_keys(node)
        publishing = Publishing(node)
        clients = Clients(node.clock)
        server = Server(node, Handlers(node, publishing, clients))
        feed: OriginFeed | ParentFeed = OriginFeed(node) if config.origin else ParentFeed(node)
        node.feed = feed
        life = Life(node, server, feed, publishing, replaceable=stop is None)
        if stop is not None:
            life.stopping = stop
        signals = contextlib.nullcontext() if stop is not None else _signals(loop, life)
        with telling_shortage(loop), signals:
            await life.run(ready)
    finally:
        await asyncio.to_thread(_close, node)
        store.close()


def _close(node: Node) -> None:
    """End threads and connections. Blocks for a moment."""
    if node.sources is not None:
        node.sources.close()
    node.fills.close()
    node.reading.shutdown(wait=True, cancel_futures=True)
    if node.rebuilding is not None:
        node.rebuilding.close()


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, life: Life) -> Iterator[None]:
    """Obey signals, where this is the main thread: else whoever started us stops us.

    SIGTERM and SIGINT drain; a second one ends at once. SIGUSR2 starts a successor.
    """
    successors = Successors(loop, life.may_be_replaced)

    told = False

    def stop() -> None:
        nonlocal told
        (life.hurry if told else life.stopping).set()
        told = True

    actions = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR2: successors.start}
    installed = []
    for number, action in actions.items():
        try:
            loop.add_signal_handler(number, action)
            installed.append(number)
        except (ValueError, RuntimeError, NotImplementedError):
            break
    try:
        yield
    finally:
        successors.forget()
        for number in installed:
            loop.remove_signal_handler(number)

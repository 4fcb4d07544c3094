"""``follow --serve``: a worker's committed versions, served to its neighbours as they are.

The relay runs as an origin does, over a view of OUT: a directory ``OUT/state/serve/{run}`` whose
``versions``, ``blobs`` and ``state`` are links to OUT's own, and whose ``head.json`` follows OUT's
once the version that it calls newest is committed. So it never announces what it cannot serve.
The view's publish lock is held, which keeps the relay from removing anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from shardcast.errors import MalformedError, ShardcastError
from shardcast.store.files import atomic_write, disk_errors
from shardcast.store.run import RunStore

log = logging.getLogger("shardcast.serving")

SCRUB_RATE: Final = 16_000_000
"""Bytes a second: 62 GB in about an hour, a hundredth of what a disk can do."""
POLL_S: Final = 0.1
"""One stat: a committed version is served within this time."""


async def serve_out(
    out: Path,
    run: str,
    listen: str,
    ready: Callable[[str], None],
    *,
    depth: Callable[[], int],
    repair: Callable[[int], Awaitable[object]],
    scrub_rate_bytes_per_s: int = SCRUB_RATE,
) -> None:
    """Serve OUT until cancelled; then neighbours that are downloading get the rest.

    A second cancellation ends that, too.

    Args:
        out: The directory.
        run: Its run.
        listen: ``HOST:PORT``.
        ready: Called with the URL once it listens.
        depth: Returns how far the worker is from the origin at the moment.
        repair: Brings what is damaged of a committed version again (``Worker.repair``).
        scrub_rate_bytes_per_s: How fast to look for what is damaged; 0: not at all.

    Raises:
        UsageError: If it cannot listen there.
        DiskError: If the view cannot be made.
    """
    from relay.app import serve
    from relay.config import RelayConfig

    store = RunStore(out, run)
    view = make_view(out, run)
    # It holds the newest versions only, and the head names older ones.
    spoken = logging.getLogger("relay.origin")
    level = spoken.level
    spoken.setLevel(logging.CRITICAL)
    lock = store.lock("publish", what=f"serving {out}")
    try:
        lock.acquire(wait_s=5.0)
        repairs: set[asyncio.Task[None]] = set()

        def damaged(_run: str, number: int) -> None:
            task = asyncio.create_task(_repair(repair, number))
            repairs.add(task)
            task.add_done_callback(repairs.discard)

        config = RelayConfig(
            store=view.parent,
            listen=listen,
            runs=(run,),
            depth=depth,
            scrub_rate_bytes_per_s=scrub_rate_bytes_per_s,
            on_damage=damaged,
        )
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(serve(config, ready=ready, stop=stop)),
            asyncio.create_task(_forward_heads(store, view)),
        ]
        await _until_cancelled(tasks, stop)
    finally:
        spoken.setLevel(level)
        lock.release()
        store.close()


async def _repair(repair: Callable[[int], Awaitable[object]], number: int) -> None:
    try:
        await repair(number)
    except ShardcastError as error:
        log.error("version %d: repairing: %s", number, error)


async def _until_cancelled(tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Run the server and what feeds it; the first is told to stop, the others are cancelled."""
    serving, *others = tasks
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        stop.set()
        for task in others:
            task.cancel()
        try:
            await asyncio.wait([serving])
        finally:
            serving.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def make_view(out: Path, run: str) -> Path:
    """Make the directory that the relay serves; return it."""
    view = out / "state" / "serve" / run
    with disk_errors(view, "making"):
        view.mkdir(parents=True, exist_ok=True)
        for name in ("versions", "blobs", "state"):
            target = os.path.abspath(out / name)
            link = view / name
            if not link.is_symlink() or os.readlink(link) != target:
                with contextlib.suppress(FileNotFoundError):
                    link.unlink()
                link.symlink_to(target)
    return view


async def _forward_heads(store: RunStore, view: Path) -> None:
    seen: tuple[int, int, int] | None = None
    while True:
        stamp = store.head_stamp()
        if stamp is not None and stamp != seen:
            data = await asyncio.to_thread(servable_head, store)
            if data is not None:
                await asyncio.to_thread(atomic_write, view / "head.json", data, sync=False)
                seen = stamp
        await asyncio.sleep(POLL_S)


def servable_head(store: RunStore) -> bytes | None:
    """Return OUT's head if the version it calls newest is committed here, else None."""
    from shardcast.protocol.envelope import open_unverified
    from shardcast.protocol.head import decode_head

    data = store.read_head()
    if data is None:
        return None
    try:
        newest = decode_head(open_unverified(data)[1]).version
    except MalformedError:
        return None
    return data if newest is not None and newest in store.committed() else None

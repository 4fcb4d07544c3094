"""Which version a pull brings: the head it goes by, how long it waits for one, and what that says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from shardcast.errors import (
    MalformedError,
    NetworkError,
    NotFoundError,
    SourceStatusError,
    StallError,
    WithdrawnError,
)
from shardcast.protocol import trust
from shardcast.protocol.head import VersionRef
from shardcast.protocol.trust import Accepted
from shardcast.session import WorkerSession

_UNKNOWN_RUN_S: Final = 3.0
"""A relay that was just started learns its runs within this; then 404 everywhere is an answer."""
_UNREACHABLE_S: Final = 15.0
"""A relay that is restarted listens again within this; then nobody is there."""

_NO_HEAD: Final = (NetworkError, MalformedError)
"""What may be gone in a moment: a source that failed, or a page that somebody sent in its place."""


@asynccontextmanager
async def watching(session: WorkerSession) -> AsyncIterator[asyncio.Task[None]]:
    """Watch all sources while the block runs; yield the task, which ends only by an error."""
    task = asyncio.ensure_future(session.sources.watcher().watch())
    task.add_done_callback(lambda _: session.keeper.changed.set())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def first_head(
    session: WorkerSession, task: asyncio.Task[None], *, needed: bool
) -> Accepted | None:
    """Return the newest head that any source gives within a moment of the first.

    Args:
        session: Of the worker.
        task: What ``watching`` yields.
        needed: Whether nothing can be done without one.

    Returns:
        The head; None if there is none in time and it is not needed.

    Raises:
        ShardcastError: If no source gives an acceptable one in time, and it is needed.
    """
    keeper, config = session.keeper, session.options.config
    began = time.monotonic()
    first: float | None = None
    everyone = set(session.sources.urls)
    while True:
        if task.done():
            task.result()
        keeper.changed.clear()
        now = time.monotonic()
        if keeper.accepted is not None:
            first = now if first is None else first
            if everyone <= keeper.heard or now >= first + config.head_grace_s:
                return keeper.accepted
            left = first + config.head_grace_s - now
        else:
            if now >= began + _patience(session, needed=needed):
                verdict = keeper.verdict()
                if needed or not isinstance(verdict, (*_NO_HEAD, NotFoundError)):
                    raise verdict
                return None
            left = 0.25
        # Not wait_for: before Python 3.12 it may swallow a cancellation.
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                await keeper.changed.wait()


def _patience(session: WorkerSession, *, needed: bool) -> float:
    """Return how long to wait for a first head, by what the sources said so far."""
    errors = session.keeper.errors
    if set(session.sources.urls) <= set(errors):
        if not any(isinstance(error, _NO_HEAD) for error in errors.values()):
            return 0.0  # every source gave a head, and none is acceptable
        if all(isinstance(e, SourceStatusError) and e.status == 404 for e in errors.values()):
            return min(_UNKNOWN_RUN_S, session.options.config.give_up_after_s)
        if not needed:
            return 0.0
        if not any(isinstance(e, (SourceStatusError, StallError)) for e in errors.values()):
            return min(_UNREACHABLE_S, session.options.config.give_up_after_s)
    return session.options.config.give_up_after_s


async def choose(
    session: WorkerSession,
    accepted: Accepted | None,
    version: int | None,
    manifest: str | None,
) -> VersionRef:
    """Return which version a pull brings.

    Args:
        session: Of the worker.
        accepted: The head to go by; None only where a manifest is given.
        version: The version's number; None means the newest.
        manifest: Its manifest digest instead.

    Raises:
        NotFoundError: If there is no such version.
        TrustError: If it may not be run (ExpiredError, WithdrawnError, ...).
        NetworkError: If no source has that manifest.
    """
    if manifest is None:
        assert accepted is not None
        ref = trust.require_version(accepted.head, version)
        if not session.options.accept_expired:
            keeper = session.keeper
            trust.require_fresh(accepted, keeper.clock_ms(), keeper.clock_error_ms)
        return ref
    head = None if accepted is None else accepted.head
    listed = [] if head is None else head.versions
    ref = next((r for r in listed if r.manifest == manifest), None) or await session.ref_of(
        manifest
    )
    if head is not None and ref.version in head.withdrawn:
        raise WithdrawnError(f"version {ref.version} of run {head.run!r} was withdrawn")
    known = session.keeper.state.manifests.get(ref.version)
    if known is not None and known != manifest:
        raise NotFoundError(
            f"manifest {manifest} claims to be version {ref.version}, which is {known}"
        )
    return ref

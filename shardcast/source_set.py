"""The sources of one worker: who is asked for heads and for blobs, and how each of them stands."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from shardcast.cancel import Cancel
from shardcast.config import NetConfig
from shardcast.errors import NetworkError, ShardcastError, SourceStatusError
from shardcast.events import EventKind, WorkerEvent
from shardcast.fetch import BlobSource
from shardcast.heads import HeadKeeper
from shardcast.protocol.limits import MAX_DEPTH
from shardcast.pulling import FetchPool
from shardcast.schedule import Notice
from shardcast.selector import Selector
from shardcast.upstream import HeadSource
from shardcast.watcher import HeadWatcher, UpstreamState
from shardcast.worker_options import WorkerOptions


class SourceSet:
    """Everything that a worker knows of its sources.

    Attributes:
        failures: The last failure to fetch of each source that had one.
    """

    def __init__(
        self,
        options: WorkerOptions,
        upstreams: Sequence[HeadSource],
        keeper: HeadKeeper,
        emit: Callable[[WorkerEvent], None],
    ) -> None:
        """Connect to nothing yet.

        Args:
            options: What the worker was told.
            upstreams: Where heads come from.
            keeper: Judges heads.
            emit: Takes events.
        """
        self._options = options
        self._upstreams = upstreams
        self._keeper = keeper
        self._emit = emit
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._sources = {
            source.url: source
            for url in options.sources
            for source in [BlobSource(url, options.config, tls=options.tls)]
        }
        self._selector = self._new_selector()
        # Documents are small and decide what is fetched next: they never queue behind shards.
        self._document_selector = self._new_selector()
        self._watcher: HeadWatcher | None = None
        self.failures: dict[str, ShardcastError] = {}

    def _new_selector(self) -> Selector[str]:
        config = self._options.config
        return Selector(
            self._sources,
            clock=time.monotonic,
            rng=self._rng,
            limit=config.connections_per_source,
            rest_first_s=config.backoff_first_s * 2,
            rest_cap_s=config.backoff_cap_s,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The sources."""
        return tuple(self._sources)

    # --- heads ------------------------------------------------------------------------------

    def watcher(self) -> HeadWatcher:
        """Return a watcher of all sources that feeds the keeper."""
        self._watcher = HeadWatcher(
            self._options.run,
            self._upstreams,
            self._options.config,
            self._keeper.on_head,
            on_change=self._on_change,
            rng=self._rng,
        )
        return self._watcher

    @property
    def depth(self) -> int:
        """One more than the nearest live source's distance from the origin, at most 16."""
        states = self._watcher.states.values() if self._watcher is not None else ()
        depths = [s.depth for s in states if s.live and s.depth is not None]
        return min([MAX_DEPTH, *(depth + 1 for depth in depths)])

    def _on_change(self, url: str, state: UpstreamState) -> None:
        self._keeper.on_change(url, state)
        if url not in self._sources:
            return
        silent = isinstance(state.error, NetworkError)
        if silent and not isinstance(state.error, SourceStatusError):
            self._doubt(url)
        elif state.live:
            self._selector.alive(url)
            self._document_selector.alive(url)

    def _doubt(self, url: str) -> None:
        self._selector.doubt(url)
        self._document_selector.doubt(url)

    def doubt_the_unheard(self) -> None:
        """Leave sources alone that gave no sign of life while others gave a head."""
        for url, state in (self._watcher.states if self._watcher is not None else {}).items():
            if not state.live and state.error is None and url in self._sources:
                self._doubt(url)

    # --- blobs ------------------------------------------------------------------------------

    def pool(
        self,
        cancel: Cancel,
        config: NetConfig | None = None,
        listed: Callable[[], bool] = lambda: True,
    ) -> FetchPool:
        """Return a pool that fetches shards.

        Args:
            cancel: Ends it.
            config: Other network bounds than the worker's.
            listed: Whether sources that have not got a blob may come to have it.
        """
        return self._pool_with(self._selector, cancel, config, listed)

    def document_pool(
        self,
        cancel: Cancel,
        config: NetConfig | None = None,
        listed: Callable[[], bool] = lambda: True,
    ) -> FetchPool:
        """Return a pool that fetches documents.

        Args:
            cancel: Ends it.
            config: Other network bounds than the worker's.
            listed: Whether sources that have not got a blob may come to have it.
        """
        return self._pool_with(self._document_selector, cancel, config, listed)

    def _pool_with(
        self,
        selector: Selector[str],
        cancel: Cancel,
        config: NetConfig | None,
        listed: Callable[[], bool],
    ) -> FetchPool:
        return FetchPool(
            self._options.run,
            self._sources,
            selector,
            config or self._options.config,
            cancel,
            notify=self._notice,
            listed=listed,
        )

    def _notice(self, notice: Notice) -> None:
        error = notice.error
        self.failures[notice.source] = error
        if isinstance(error, SourceStatusError) and error.status in (404, 429, 503):
            return  # not yet, not now: no news before a pull fails for it
        if notice.banned:  # for documents as for shards
            for selector in (self._selector, self._document_selector):
                selector.banned(notice.source, self._options.config.ban_s)
        kind = EventKind.BANNED if notice.banned else EventKind.SOURCE
        self._emit(WorkerEvent(kind=kind, run=self._options.run, source=notice.source, error=error))

    def close(self) -> None:
        """Close every connection. Nothing may be running any more."""
        for source in self._sources.values():
            source.close()

"""Fetching ahead: shards of a version that is still being published, for who has nothing else to do.

They are verified against the digests that the signed head's parts name, and staged where the version will
be obtained; once it is announced whole, everything is planned and verified against its manifest. What a
version brought that never closed is a source for the next one, and bounded: what was lost since a version was
last reached is never more than a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from shardcast.cancel import Cancel
from shardcast.delta_documents import DeltaDocuments
from shardcast.delta_reports import DeltaReports
from shardcast.documents import DocumentFetcher
from shardcast.errors import DiskFullError
from shardcast.heads import HeadKeeper
from shardcast.obtain import Obtainer
from shardcast.plan_work import Damage, Tally
from shardcast.protocol.head import OpenRef
from shardcast.protocol.manifest import Version
from shardcast.pulling import FetchPool
from shardcast.source_set import SourceSet
from shardcast.store.run import RunStore
from shardcast.ways import Ways
from shardcast.worker_options import WorkerOptions

DOCUMENT_PATIENCE_S: Final = 2.0
"""A part that no source has may be gone, since the version has closed: nobody waits long for one."""

SHARD_PATIENCE_S: Final = 10.0


class Ahead:
    """What one worker fetches of open versions. One thread at a time calls ``fetch``."""

    def __init__(
        self,
        options: WorkerOptions,
        store: RunStore,
        keeper: HeadKeeper,
        sources: SourceSet,
        ways: Ways,
        documents: tuple[threading.Lock, DeltaDocuments],
        damaged: Callable[[Damage], None],
        reports: DeltaReports,
    ) -> None:
        """Fetch nothing yet.

        Args:
            options: What the worker was told.
            store: The run's directory.
            keeper: Knows what is trusted.
            sources: Where shards come from.
            ways: Knows which bases are here.
            documents: Held while documents are fetched; and what brings delta parts.
            damaged: Called when local bytes turn out bad.
            reports: Told what deltas did not bring.
        """
        self._options = options
        self._store = store
        self._keeper = keeper
        self._sources = sources
        self._ways = ways
        self._lock, self._delta_documents = documents
        self._damaged = damaged
        self._reports = reports
        self._tallies: dict[int, Tally] = {}
        self._no_room: int | None = None

    def fetch(self, ref: OpenRef, cancel: Cancel) -> bool:
        """Fetch some of what a head says of an open version; say whether there was anything.

        Raises:
            ShardcastError: As ``Obtainer.fetch_ahead`` and ``DocumentFetcher.open``.
        """
        if self._no_room == ref.version:
            return False
        tally = self._tallies.setdefault(ref.version, Tally())

        def count(fetched: int) -> None:
            tally.fetched_bytes += fetched

        def pool() -> FetchPool:
            return self._pool(cancel, DOCUMENT_PATIENCE_S, documents=True)

        with self._lock:
            version = DocumentFetcher(self._store, pool, count).open(ref, self._keeper.state)
            bases = self._ways.bases(ref.version)
            deltas = self._delta_documents.fetch_open(ref, version, bases, pool, count=count)
        if not self._worth_it(version):
            return False
        obtainer = Obtainer(
            self._store,
            lambda: self._pool(cancel, SHARD_PATIENCE_S, documents=False),
            cancel,
            tally=tally,
            damaged=self._damaged,
            threads=self._options.threads,
        )
        try:
            return obtainer.fetch_ahead(version, deltas)
        except DiskFullError:
            self._no_room = ref.version  # the version itself makes room once it is whole
            raise
        finally:
            self._reports.tell(obtainer.failures)

    def spent_on(self, version: int) -> Tally:
        """Return what was fetched of a version while it was open."""
        return self._tallies.get(version, Tally())

    def reached(self) -> None:
        """A version is whole: what was lost before counts no more."""
        self._tallies.clear()

    def _worth_it(self, version: Version) -> bool:
        lost = sum(
            tally.fetched_bytes
            for number, tally in self._tallies.items()
            if number != version.number
        )
        return lost <= version.layout.total_bytes

    def _pool(self, cancel: Cancel, patience_s: float, *, documents: bool) -> FetchPool:
        config = self._options.config
        config = replace(config, give_up_after_s=min(config.give_up_after_s, patience_s))
        if documents:
            return self._sources.document_pool(cancel, config)
        return self._sources.pool(cancel, config)

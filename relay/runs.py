"""One run as the relay sees it: its head, what its digests are, and where their bytes lie."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from relay.catalog import Catalog, DocumentBlob, Known, Parsed, ShardBlob, parse_document
from relay.claims import Claims
from relay.opened import Opened, open_extent
from relay.parents import Place
from relay.readers import Readers
from relay.shelf import Shelf
from shardcast.errors import DiskError, MalformedError, ShardcastError
from shardcast.protocol import trust, wire
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import Head
from shardcast.protocol.manifest import Version, contradicts
from shardcast.protocol.trust import Accepted, TrustState
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, ShardState, StoredVersion

log = logging.getLogger("relay.runs")


@dataclass(frozen=True, slots=True)
class ServedHead:
    """The head that is served: its bytes verbatim, and what clients compare."""

    envelope: bytes
    etag: str
    head: Head

    @property
    def sequence(self) -> int:
        """Its sequence."""
        return self.head.sequence


class ToldPlaces:
    """Which place in the tree each relay below heard of last, for one run. Bounded."""

    MOST: Final = 1024

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def place(self, child: str | None, now: Place) -> Place | None:
        """Return what a child knows; ``now`` if it was never told; None where that is no relay."""
        return None if child is None else self._places.get(child, now)

    def tell(self, child: str | None, place: Place) -> None:
        """Note what a child is being told."""
        if child is not None:
            self._places.pop(child, None)
            self._places[child] = place
            if len(self._places) > self.MOST:
                del self._places[next(iter(self._places))]


class RelayRun:
    """State of one run. Used on the event loop, except where a method says that it blocks.

    Attributes:
        name: The run.
        store: Its directory.
        shelf: Its documents and delta blobs.
        catalog: What each digest is.
        head: What is served, None before the first accepted head.
        trust: What is trusted and was seen last.
        stored: Versions on disk, by number.
        used: When a version was last asked for (monotonic).
        readers: Which versions somebody is fetching.
        problem: Why the run is not followed at the moment, for people.
        no_room: Why a version cannot come here at the moment, for people.
        admit: Asked before a version is begun; raises ``DiskFullError`` where it must not.
        short: Told which version lacks how many bytes of room.
        claims: Extents (version, shard) that somebody writes at the moment. Whoever wants to
            write one claims it first, on the event loop: unverified bytes never land on verified
            ones.
        told: The places in the tree that the relays below were told.
        replaces: Whether a version on disk that contradicts the head makes room for the head's: below
            parents, never at an origin, whose disk is what there is.
    """

    def __init__(
        self,
        store: RunStore,
        clock: Callable[[], float] = time.monotonic,
        readers: Readers | None = None,
    ) -> None:
        self.name = store.run
        self.store = store
        self.shelf = Shelf(store)
        self.catalog = Catalog(store.run)
        self.head: ServedHead | None = None
        self.trust: TrustState | None = None
        self.stored: dict[int, StoredVersion] = {}
        self.used: dict[int, float] = {}
        self.readers = readers or Readers(clock)
        self.problem: str | None = None
        self.no_room: str | None = None
        self.claims = Claims()
        self.told = ToldPlaces()
        self.replaces = False
        self.refreshed = float("-inf")
        self.on_change: list[Callable[[], None]] = []
        self.admit: Callable[[Version], None] = lambda version: None
        self.short: Callable[[int, int], None] = lambda number, needed: None
        self._clock = clock
        self._waiters: list[asyncio.Future[None]] = []  # for a head
        self._curious: list[asyncio.Future[None]] = []  # for a digest
        self._documents = asyncio.Lock()
        self._commits = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the background; ``close`` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what runs in the background."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.readers.close()

    # --- the head -----------------------------------------------------------------------------

    def serve(self, accepted: Accepted) -> None:
        """Serve an accepted head from now on, and wake whoever waits for it."""
        self.trust = accepted.state
        if self.head is not None and self.head.envelope == accepted.envelope:
            return
        etag = wire.head_etag(digest_of(accepted.envelope))
        self.head = ServedHead(accepted.envelope, etag, accepted.head)
        self.took(self.catalog.set_head(accepted.head, self.readers.versions()))
        log.info(
            "run %s: head %d, version %s%s",
            self.name,
            accepted.head.sequence,
            accepted.head.version,
            ", expired" if accepted.expired else "",
        )
        self.wake()
        for hook in self.on_change:
            hook()

    def wake(self) -> None:
        """Let everyone who waits for a head look again."""
        _wake(self._waiters)

    async def wait_head(self, after: int, seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait until the head's sequence is above ``after``, time is up, or all shall stop."""
        deadline = self._clock() + seconds
        while not stopped() and (self.head is None or self.head.sequence <= after):
            if not await self._wait(self._waiters, deadline):
                return

    async def wait_known(self, digest: str, seconds: float) -> Known | None:
        """Return what a digest is, as soon as that is known; None once the time is up."""
        deadline = self._clock() + seconds
        while (known := self.find(digest)) is None:
            if not await self._wait(self._curious, deadline):
                return None
        return known

    async def _wait(self, waiters: list[asyncio.Future[None]], deadline: float) -> bool:
        """Wait to be woken; False if the time is up before."""
        left = deadline - self._clock()
        if left <= 0:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            async with asyncio.timeout(left):
                await waiter
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ValueError):
                waiters.remove(waiter)
        return True

    # --- documents --------------------------------------------------------------------------------

    def took(self, versions: list[Version]) -> None:
        """Check versions that the catalog has just put together; wake who waits for a digest."""
        _wake(self._curious)
        for version in versions:
            try:
                if self.trust is not None:
                    trust.check_version(self.trust, version)
            except ShardcastError as error:
                log.error("run %s: version %d is not usable: %s", self.name, version.number, error)
                self.catalog.reject(version.number, str(error))

    def learn(self, digest: str, document: Parsed | None) -> None:
        """Take in a document that has just become known."""
        self.took(self.catalog.learn(digest, document))

    async def load_documents(self, number: int) -> list[DocumentBlob]:
        """Take in the documents of a version that are on disk; return those that are not."""
        async with self._documents:
            absent: set[str] = set()
            while True:
                wanted = [
                    document
                    for document in self.catalog.missing_documents(number)
                    if document.digest not in absent
                ]
                if not wanted:
                    return [
                        document
                        for document in self.catalog.missing_documents(number)
                        if document.digest in absent
                    ]
                for document in wanted:
                    found = await asyncio.to_thread(self.read_document, document)
                    if found is None:
                        absent.add(document.digest)
                    else:
                        self.learn(document.digest, found[0])

    def read_document(self, document: DocumentBlob) -> tuple[Parsed | None] | None:
        """Read and parse a document from disk; None if it is not there. Blocking.

        A document that is there and malformed gives ``(None,)``.
        """
        try:
            data = self.store.read_blob(document.digest)
        except DiskError as error:
            log.warning("run %s: %s", self.name, error)
            return None
        return None if data is None else (self.parse(document, data),)

    def parse(self, document: DocumentBlob, data: bytes) -> Parsed | None:
        """Parse a document; None if it is malformed, which only its publisher can be to blame for."""
        try:
            return parse_document(document.kind, data)
        except MalformedError as error:
            log.error(
                "run %s: %s %s is malformed: %s",
                self.name,
                document.kind.value,
                document.digest,
                error,
            )
            return None

    # --- versions on disk ---------------------------------------------------------------------

    async def attach(self) -> None:
        """Look which known versions are on disk now (others may have written or removed them)."""
        known = {version.number: version for version in self.catalog.versions()}
        found = await asyncio.to_thread(self._look, known)
        for number in list(self.stored):
            if number not in found and (number not in known or not self.stored[number].alive):
                del self.stored[number]
        self.stored.update(found)

    def _look(self, known: dict[int, Version]) -> dict[int, StoredVersion]:
        found: dict[int, StoredVersion] = {}
        self.store.forget_gone()
        for number, version in known.items():
            try:
                stored = self._stored_of(version)
                if self.replaces and stored is not None and contradicts(stored.version, version):
                    continue  # until it is replaced, it is nothing that anybody may read
                if stored is not None and stored.version.layout_digest == version.layout_digest:
                    before = stored.version
                    stored.update(version)
                    if stored.version.documents != before.documents and not stored.read_only:
                        self.store.save_state(stored.version)
                    found[number] = stored
            except ShardcastError as error:
                log.warning("run %s: version %d on disk: %s", self.name, number, error)
        return found

    def on_disk(self) -> list[StoredVersion]:
        """Return every version on disk, newest first, also those that no head names. Blocking."""
        store = self.store
        numbers = sorted({*store.committed(), *store.staged()}, reverse=True)
        return [stored for number in numbers if (stored := store.stored(number)) is not None]

    def _stored_of(self, version: Version) -> StoredVersion | None:
        """Return a version on disk; at an origin also one that a publisher beside it still writes."""
        if not self.replaces and not version.complete:
            followed = self.store.followed(version)
            if followed is not None:
                return followed
        return self.store.stored(version.number)

    def stage(self, version: Version) -> StoredVersion:
        """Make room for a version on disk. Blocking.

        Raises:
            DiskFullError: If there is none.
            StateError: If its number is taken by something else.
        """
        before = self.store.stored(version.number) if self.replaces else None
        stored = self.store.stage(version, replace=self.replaces)
        if before is not None and stored is not before and contradicts(before.version, version):
            log.warning(
                "run %s: version %d on disk is not the publisher's: removed, and fetched again",
                self.name,
                version.number,
            )
        self.stored[version.number] = stored
        return stored

    async def commit_complete(self, durability: Durability = Durability.NONE) -> None:
        """Give every complete staged version its final name."""
        async with self._commits:
            for number, stored in list(self.stored.items()):
                if stored.complete and not stored.committed:
                    try:
                        await asyncio.to_thread(self.store.commit, number, durability)
                    except ShardcastError as error:
                        log.error("run %s: version %d: %s", self.name, number, error)
                        continue
                    log.info("run %s: version %d is complete", self.name, number)

    def complete_version(self) -> int | None:
        """Return the newest version that anyone may run and that is whole on disk, or None."""
        if self.head is None:
            return None
        head = self.head.head
        for ref in head.versions:
            if ref.version in head.withdrawn:
                continue
            stored = self.stored.get(ref.version)
            if stored is not None and stored.complete and stored.damaged is None:
                return ref.version
        return None

    # --- bytes --------------------------------------------------------------------------------

    def find(self, digest: str) -> Known | None:
        """Return what a digest is, or None."""
        return self.catalog.find(digest)

    @staticmethod
    def number_of(known: Known) -> int | None:
        """Return the newest version that a shard or delta blob belongs to; None for a document."""
        if isinstance(known, DocumentBlob):
            return None
        return known.places[0].version if isinstance(known, ShardBlob) else known.version

    def touch(self, known: Known) -> None:
        """Note that a blob was asked for, or that an answer has just ended."""
        number = self.number_of(known)
        if number is None:
            return  # whoever follows asks for those of every version, to weigh it
        self.used[number] = self._clock()
        self.readers.saw(number, self.stored.get(number))

    def rank(self, known: Known) -> int:
        """Return how urgent a blob is: by how many versions its newest one is behind, 0 first.

        So nobody can keep the newest version from coming by asking for old ones.
        """
        if not isinstance(known, ShardBlob):
            return 0
        newest = known.places[0].version
        return sum(number > newest for number in self.catalog.numbers())

    def let_go(self) -> None:
        """Forget versions that the head dropped and that nobody fetches any more."""
        fetched = self.readers.versions()
        self.catalog.forget([n for n in self.catalog.lingering() if n not in fetched])
        for number in self.used.keys() - fetched - self.stored.keys():
            del self.used[number]

    def surely_absent(self, known: Known) -> bool:
        """Say whether a blob is not on disk, as far as that is known without reading."""
        if not isinstance(known, ShardBlob):
            with contextlib.suppress(DiskError):
                return not self.store.has_blob(known.digest)
            return False
        return all(
            stored is None or stored.state(place.shard) is ShardState.MISSING
            for place in known.places
            for stored in (self.stored.get(place.version),)
        )

    def open_now(self, known: Known) -> Opened | None:
        """Open a blob if that takes no reading of its bytes; else None."""
        if isinstance(known, ShardBlob):
            return self._open_shard(known, only_verified=True)
        return _opened(self.shelf.open_now(known.digest))

    def open(self, known: Known) -> Opened | None:
        """Open a blob that is good on disk, or return None. Blocking: it may have to be hashed."""
        if isinstance(known, ShardBlob):
            return self._open_shard(known, only_verified=False)
        return _opened(self.shelf.open(known.digest))

    def _open_shard(self, known: ShardBlob, *, only_verified: bool) -> Opened | None:
        for place in known.places:
            stored = self.stored.get(place.version)
            if stored is None:
                continue
            state = stored.state(place.shard)
            if state is ShardState.MISSING or (only_verified and state is not ShardState.VERIFIED):
                continue
            opened = open_extent(stored, place.shard, read=not only_verified)
            if opened is not None:
                return opened
        return None


def _opened(found: tuple[int, int] | None) -> Opened | None:
    return None if found is None else Opened(found[0], 0, found[1])


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)

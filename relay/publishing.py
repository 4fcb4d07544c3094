"""Publishing over HTTP: which digests are missing, their bytes, and then the head.

Only over TLS or loopback, only with the bearer token, and nothing is visible before the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from relay import respond
from relay.authorization import refusal
from relay.config import read_token
from relay.node import Node
from relay.origin import OriginFeed, local_trust, now_ms
from relay.receiving import BodyError, FileReceiver, read_body, skip_body
from relay.runs import RelayRun
from relay.threads import in_thread, in_thread_or
from relay.upload import decode_any
from relay.uploads import TooManyUploadsError, Uploads, shard_present
from relay.whole import to_its_end
from shardcast.errors import (
    BusyError,
    DiskError,
    DiskFullError,
    MalformedError,
    RollbackError,
    StateError,
    TrustError,
    UsageError,
)
from shardcast.protocol import trust, wire
from shardcast.protocol.digest import digest_of, is_digest
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_HEAD_BYTES, MIB
from shardcast.protocol.trust import Accepted
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, StoredVersion

log = logging.getLogger("relay.publishing")

_LISTED: Final = 100
"""How many missing digests an error names."""
_MAX_QUESTION_BYTES: Final = 4 * MIB
"""About 60,000 digests; publishers ask for 4096 at a time."""
_LOCK_WAIT_S: Final = 30.0
_EXPIRE_EVERY_S: Final = 60.0


class _Asked(msgspec.Struct):
    digests: list[str]


class Publishing:
    """The writing half of the HTTP surface; without a token file all of it answers 403."""

    def __init__(self, node: Node) -> None:
        self._node = node
        path = node.config.publish_token_file
        self._token = None if path is None else read_token(path)
        self._uploads: dict[str, Uploads] = {}
        self._open = 0
        self._documents = asyncio.Semaphore(node.config.limits.max_documents)
        self._heads = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered that may change the store."""
        return self._open > 0

    async def run(self) -> None:
        """Forget abandoned uploads, until cancelled."""
        try:
            while True:
                await asyncio.sleep(_EXPIRE_EVERY_S)
                for uploads in list(self._uploads.values()):
                    await uploads.expire(self._node.config.limits.pending_timeout_s)
        finally:
            for uploads in self._uploads.values():
                await uploads.close()

    async def answer(
        self, request: web.BaseRequest, name: str, endpoint: str, digest: str
    ) -> web.StreamResponse:
        """Answer POST missing, PUT blobs and PUT head."""
        refused = (
            refusal(request, self._token, origin=not self._node.config.parents)
            or await self._no_room()
        )
        if refused is not None:
            return refused
        self._open += 1
        try:
            run = await self._run(name)
            uploads = self._uploads.get(name)
            if uploads is None:
                most = self._node.config.limits.max_pending
                uploads = Uploads(run, most, self._node.clock, self._admit)
                self._uploads[name] = uploads
            await uploads.recover()
            match endpoint:
                case "missing":
                    return await self._missing(request, run, uploads)
                case "blobs":
                    return await self._blob(request, run, uploads, digest)
                case _:
                    return await self._head(request, run, uploads)
        except BodyError as error:
            return respond.error_answer(error.status, "body", error.message)
        except (BusyError, TooManyUploadsError) as error:
            return respond.busy_answer(error.message, 5)
        except UsageError as error:
            return respond.error_answer(403, error.code, error.message)
        except (StateError, TrustError) as error:
            return respond.error_answer(409, error.code, error.message)
        except DiskError as error:
            log.error("run %s: %s", name, error)
            status = 507 if isinstance(error, DiskFullError) else 503
            return respond.error_answer(status, error.code, error.message, Retry_After="5")
        finally:
            self._open -= 1

    async def _no_room(self) -> web.Response | None:
        """Return why nothing can be taken at the moment, or None."""
        if not await self._node.keeper.hoped(self._node.config.limits.take_over_wait_s):
            return respond.busy_answer("another process has this store at the moment")
        if self._open >= self._node.config.limits.max_uploads:
            return respond.busy_answer("too many uploads at once")
        return None

    def _admit(self) -> None:
        """Refuse to make room for more than the quota, of what no head has announced.

        What a head announces is retained as options say; this is for who has a token and no key.

        Raises:
            DiskFullError: If the versions on their way, of all runs, are beyond it.
        """
        quota = self._node.config.quota_bytes
        pending = sum(uploads.pending_bytes for uploads in self._uploads.values())
        if quota is not None and pending > quota:
            raise DiskFullError(
                f"versions that are being uploaded have {pending} bytes, over the quota of {quota}",
                source=str(self._node.store.root),
            )

    # --- the run --------------------------------------------------------------------------------

    async def _run(self, name: str) -> RelayRun:
        """Return the run, made if it is new and some key may sign its first head.

        Raises:
            UsageError: If no key is known.
        """
        config = self._node.config
        if config.runs and name not in config.runs:
            raise UsageError(f"run {name!r} is not served here")
        known = self._node.runs.get(name)
        if known is not None:
            return known

        def make() -> RunStore:
            here = RunStore(self._node.store.root / name, name)
            local_trust(self._node, here)  # before a directory is made for it
            return self._node.store.run(name, create=True)

        return self._node.add_run(await in_thread(make))

    # --- what is missing ------------------------------------------------------------------------

    async def _missing(
        self, request: web.BaseRequest, run: RelayRun, uploads: Uploads
    ) -> web.Response:
        body = await read_body(request, _MAX_QUESTION_BYTES, self._node.config.limits)
        try:
            asked = msgspec.json.decode(body, type=_Asked).digests
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise MalformedError(f'send {{"digests": [...]}}: {error}') from error
        if not all(is_digest(digest) for digest in asked):
            raise MalformedError("a digest is 64 lowercase hex digits")
        await uploads.rebuild(asked)
        async with uploads.sparing.during():
            stored, shelved = await in_thread(lambda: _present(run, uploads, asked))
            for digest in shelved:
                await self._count_again(run, uploads, digest)
        missing = [d for d in dict.fromkeys(asked) if d not in stored and d not in shelved]
        return respond.json_answer(200, {"missing": missing})

    async def _count_again(self, run: RelayRun, uploads: Uploads, digest: str) -> None:
        """Register a document that is here already: a restart or a full disk came in between.

        Raises:
            ShardcastError: As ``Uploads.register``.
        """
        if uploads.knows(digest) or (run.find(digest) is not None and not _is_open(run, digest)):
            return
        data = await in_thread(partial(run.store.read_document, digest))
        if data is not None:
            with contextlib.suppress(MalformedError):
                await uploads.register(digest, decode_any(data))

    # --- blobs ----------------------------------------------------------------------------------

    async def _blob(
        self, request: web.BaseRequest, run: RelayRun, uploads: Uploads, digest: str
    ) -> web.Response:
        limits = self._node.config.limits
        if request.content_length is None:
            raise BodyError(411, "send a Content-Length")
        place = uploads.shard(digest)
        if place is not None:
            return await self._shard(request, run, digest, place[0], place[1])
        async with uploads.sparing.during():
            here = await in_thread(lambda: run.shelf.holds(digest))
            if here:
                await self._count_again(run, uploads, digest)
        if here:
            await skip_body(request, MAX_DOCUMENT_BYTES, limits)
            return _kept(200, digest)
        length = uploads.blob(digest)
        if length is not None:
            return await self._delta_blob(request, run, digest, length)
        return await self._document(request, run, uploads, digest)

    async def _document(
        self, request: web.BaseRequest, run: RelayRun, uploads: Uploads, digest: str
    ) -> web.Response:
        async with self._documents:
            body = await read_body(
                request, MAX_DOCUMENT_BYTES, self._node.config.limits, first=b"{ \t\r\n"
            )
            if body is None:
                return _unknown(digest)
            found = await in_thread(lambda: digest_of(body))
            if found != digest:
                return _wrong(digest, found)
            try:
                document = decode_any(body)
            except MalformedError as error:
                return respond.error_answer(409, "unknown_blob", f"{digest}: {error.message}")
        async with uploads.sparing.during():
            await in_thread(lambda: run.store.write_blob(digest, body))
            try:
                await uploads.register(digest, document)
            except (TrustError, MalformedError, StateError):
                await in_thread(lambda: run.store.remove_blob(digest))
                raise
        return _kept(201, digest)

    async def _shard(
        self,
        request: web.BaseRequest,
        run: RelayRun,
        digest: str,
        stored: StoredVersion,
        shard: int,
    ) -> web.Response:
        limits = self._node.config.limits
        extent = stored.version.layout.extent(shard)
        if await in_thread(lambda: shard_present(stored, shard)):
            await skip_body(request, MAX_DOCUMENT_BYTES, limits)
            return _kept(200, digest)
        if request.content_length != extent.length:
            await skip_body(request, MAX_DOCUMENT_BYTES, limits)
            return respond.error_answer(
                422, "wrong_length", f"shard {digest} has {extent.length} bytes"
            )
        claim = (stored.version.number, shard)
        if claim in run.claims:
            await skip_body(request, MAX_DOCUMENT_BYTES, limits)
            return respond.busy_answer(f"shard {digest} is being written already")
        run.claims.add(claim)
        try:
            with stored.lease():
                receiver = FileReceiver(stored.open_file(extent.file, writable=True), extent.offset)
                try:
                    await receiver.receive(request, extent.length, limits)
                    if receiver.digest != digest:
                        return _wrong(digest, receiver.digest)
                    await in_thread(lambda: stored.record(shard, receiver.xxh3))
                finally:
                    receiver.close()
        finally:
            run.claims.discard(claim)
        self._node.metrics.received.labels(origin="upload").inc(extent.length)
        return _kept(201, digest)

    async def _delta_blob(
        self, request: web.BaseRequest, run: RelayRun, digest: str, length: int
    ) -> web.Response:
        limits = self._node.config.limits
        if request.content_length != length:
            await skip_body(request, MAX_DOCUMENT_BYTES, limits)
            return respond.error_answer(422, "wrong_length", f"blob {digest} has {length} bytes")
        make = partial(FileReceiver.temporary, run.store, digest)
        receiver = await in_thread_or(make, FileReceiver.close)
        try:
            await receiver.receive(request, length, limits)
            if receiver.digest != digest:
                return _wrong(digest, receiver.digest)
            await in_thread(lambda: receiver.keep(run.store))
        finally:
            receiver.close()
        self._node.metrics.received.labels(origin="upload").inc(length)
        return _kept(201, digest)

    # --- the head -------------------------------------------------------------------------------

    async def _head(
        self, request: web.BaseRequest, run: RelayRun, uploads: Uploads
    ) -> web.Response:
        if_match = request.headers.get("If-Match")
        if_none = request.headers.get("If-None-Match")
        if if_match is None and if_none is None:
            await skip_body(request, MAX_HEAD_BYTES, self._node.config.limits)
            return respond.error_answer(
                428, "precondition", "send If-Match with the head's ETag, or If-None-Match: *"
            )
        body = await read_body(request, MAX_HEAD_BYTES, self._node.config.limits)
        async with self._heads:
            current = await in_thread(run.store.read_head)
            if current == body:
                return self._head_answer(200, body)
            if not _condition_holds(if_match, if_none, current):
                return respond.error_answer(
                    412, "precondition", "another head was published meanwhile"
                )
            async with uploads.sparing.during():
                return await self._take_head(run, uploads, body, current)

    async def _take_head(
        self, run: RelayRun, uploads: Uploads, body: bytes, current: bytes | None
    ) -> web.Response:
        try:
            state = run.trust
            if state is None:
                state = await in_thread(partial(local_trust, self._node, run.store))
            accepted = await in_thread(partial(trust.accept, state, body, now_ms()))
        except RollbackError as error:
            return respond.error_answer(409, error.code, error.message)
        except TrustError as error:
            return respond.error_answer(403, error.code, error.message)
        async with uploads.taking(accepted.head):
            return await self._take_accepted(run, uploads, accepted, current)

    async def _take_accepted(
        self, run: RelayRun, uploads: Uploads, accepted: Accepted, current: bytes | None
    ) -> web.Response:
        previous = run.head.head if run.head is not None else None
        lacking = await uploads.lacking(accepted.head, previous)
        if lacking:
            return respond.error_answer(
                409,
                "incomplete",
                f"{len(lacking)} blobs that the head reaches are not here: "
                + ", ".join(lacking[:_LISTED]),
            )
        try:
            changed = await to_its_end(self._announce(run, uploads, accepted, current))
        except BusyError as error:
            return respond.busy_answer(error.message, 2)
        if not changed:
            return respond.error_answer(412, "precondition", "another publisher was faster")
        log.info("run %s: head %d was published", run.name, accepted.head.sequence)
        return self._head_answer(201 if current is None else 200, accepted.envelope)

    async def _announce(
        self, run: RelayRun, uploads: Uploads, accepted: Accepted, current: bytes | None
    ) -> bool:
        """Commit a head, and serve it; False if the head changed meanwhile.

        Raises:
            BusyError, StateError, DiskError: As ``_commit``.
        """
        if not await in_thread(lambda: _commit(run, accepted, current)):
            return False
        uploads.announced(accepted.head)
        feed = self._node.feed
        if isinstance(feed, OriginFeed):
            await feed.take(run, accepted)
        return True

    def _head_answer(self, status: int, envelope: bytes) -> web.Response:
        etag = wire.head_etag(digest_of(envelope))
        return respond.json_answer(status, {"etag": etag}, ETag=etag)


def _condition_holds(if_match: str | None, if_none: str | None, current: bytes | None) -> bool:
    etag = None if current is None else wire.head_etag(digest_of(current))
    if if_match is not None and (etag is None or not wire.etag_in(if_match, etag, strong=True)):
        return False
    return if_none is None or etag is None or not wire.etag_in(if_none, etag)


def _is_open(run: RelayRun, digest: str) -> bool:
    """Say whether a document is one of the version that the head names as open."""
    opened = None if run.head is None else run.head.head.open
    if opened is None:
        return False
    parts = [part for delta in opened.deltas for part in delta.parts]
    return digest in (opened.layout, *opened.parts, *parts)


def _present(run: RelayRun, uploads: Uploads, asked: list[str]) -> tuple[set[str], set[str]]:
    """Return which digests are shards on disk, and which documents or delta blobs. Blocking."""
    wanted = set(asked)
    stored: set[str] = set()
    for version in run.on_disk():
        digests = version.version.digests
        for shard in version.present():
            digest = digests[shard]
            if digest is not None and digest in wanted:
                stored.add(digest)
    return stored, {d for d in wanted - stored if run.shelf.holds(d)}


def _commit(run: RelayRun, accepted: Accepted, current: bytes | None) -> bool:
    """Commit versions, then the head, then the trust; False if the head changed meanwhile.

    Blocking. A crash before the head leaves versions that nothing names; a crash after it leaves
    a head newer than what is remembered, which is accepted. Its numbers are noted first, for a local
    publisher: a power cut may take a head that was read (what remote ones do: ``unfinished.py``).

    Raises:
        BusyError: If a local publisher holds the run for too long.
        StateError: If what is remembered is damaged.
        DiskError: If the system refuses.
    """
    lock = run.store.lock("publish", what=f"publishing to run {run.name!r}")
    lock.acquire(wait_s=_LOCK_WAIT_S)
    try:
        if run.store.read_head() != current:
            return False
        for ref in accepted.head.versions:
            stored = run.store.stored(ref.version)
            if stored is not None and not stored.committed and stored.complete:
                run.store.commit(ref.version, Durability.SYNC)
        before = run.store.read_trust() or trust.fresh(run.name, accepted.head.raw_keys())
        run.store.note_numbers(before, accepted.head)
        run.store.write_head(accepted.envelope)
        run.store.write_trust(accepted.state)
    finally:
        lock.release()
    return True


def _kept(status: int, digest: str) -> web.Response:
    return respond.json_answer(status, {"digest": digest}, ETag=wire.blob_etag(digest))


def _wrong(digest: str, found: str) -> web.Response:
    return respond.error_answer(
        422, "wrong_digest", f"the body has digest {found}, not {digest}; nothing was kept"
    )


def _unknown(digest: str) -> web.Response:
    return respond.error_answer(
        409, "unknown_blob", f"no uploaded document names {digest}: upload layout and parts first"
    )

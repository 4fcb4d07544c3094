"""Versions that are being uploaded: what their documents say so far, and where shards go.

Nothing here is served: a version becomes visible by the head that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from functools import partial
from typing import Final

from relay.copies import copy_local
from relay.runs import RelayRun
from relay.sparing import Sparing
from relay.threads import in_thread
from relay.upload import Document, Upload, decode_any, layout_of
from relay.whole import to_its_end
from shardcast.errors import BusyError, DiskFullError, ShardcastError, StateError
from shardcast.protocol.head import Head, OpenRef, VersionRef
from shardcast.protocol.manifest import Version
from shardcast.store.retention import on_their_way
from shardcast.store.stored import ShardState, StoredVersion

log = logging.getLogger("relay.uploads")


UNNAMED_S: Final = 3600.0
"""Documents without their layout, and deltas of a version that was announced before, keep collections
out while somebody goes on with them; what was collected after it is asked for again (409)."""


class TooManyUploadsError(ShardcastError):
    """As many versions as the relay can hold are being uploaded already."""


class Uploads:
    """All uploads to one run. Used on the event loop.

    Attributes:
        run: The run.
        sparing: Keeps collections out where documents are on disk that nothing there names yet.

    Args:
        run: The run.
        most: How many versions may be on their way at once.
        clock: Monotonic seconds.
        admit: Asked before room is made for a version that counts as pending already; raises
            ``DiskFullError`` where it must not be.
    """

    def __init__(
        self,
        run: RelayRun,
        most: int,
        clock: Callable[[], float],
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = run
        self._admit = admit
        self._most = most
        self._clock = clock
        self._by_layout: dict[str, Upload] = {}
        self._taking: frozenset[int] = frozenset()
        self.sparing = Sparing(run.store, self._has_unnamed)
        self._lock = asyncio.Lock()
        self._recovering = asyncio.Lock()
        self._recovered = False

    def _has_unnamed(self) -> bool:
        since = self._clock() - UNNAMED_S
        return any(u.stored is None and u.touched > since for u in self._by_layout.values())

    @property
    def pending_bytes(self) -> int:
        """What the versions on their way have, as far as their layouts are here."""
        layouts = [u.layout for u in self._by_layout.values() if u.layout is not None]
        return sum(layout.total_bytes for layout in layouts)

    async def recover(self) -> None:
        """Know again, once, what the process before this one was being sent.

        Its publishers go on with shards, and do not send the documents again.
        """
        async with self._recovering:
            if self._recovered:
                return
            for digest, data in await in_thread(self._staged_documents):
                with contextlib.suppress(ShardcastError):
                    await self.register(digest, decode_any(data))
            self._recovered = True

    def _staged_documents(self) -> list[tuple[str, bytes]]:
        """Return the documents of versions that no head has announced. Blocking."""
        store, head = self.run.store, self.run.head
        newest = 0 if head is None else max((ref.version for ref in head.head.versions), default=0)
        found = []
        for number in store.staged():
            stored = store.stored(number) if number > newest else None
            for digest in () if stored is None else stored.version.documents:
                data = store.read_blob(digest)
                if data is not None:
                    found.append((digest, data))
        known = {digest for digest, _data in found}
        for digest in on_their_way(store, [d for d in store.blobs() if d not in known]):
            data = store.read_document(digest)
            if data is not None:
                found.append((digest, data))
        return found

    async def register(self, digest: str, document: Document) -> None:
        """Take in a document whose bytes are in ``blobs/``; make room for its version.

        A cancellation is delivered once it is registered or refused: a document that is on disk and
        half known would be present, and yet its shards would be refused.

        Raises:
            TooManyUploadsError: If too many versions are on their way.
            TrustError: If it does not belong to the documents that came before.
            StateError: If the version number is taken by other content.
            BusyError: If a head of that version is being taken.
            DiskFullError: If there is no room.
        """
        async with self._lock:
            await to_its_end(self._register(digest, document))

    async def _register(self, digest: str, document: Document) -> None:
        key = layout_of(digest, document)
        upload = self._by_layout.get(key)
        if upload is None:
            if len(self._by_layout) >= self._most:
                raise TooManyUploadsError(
                    f"{self._most} versions of run {self.run.name!r} are being uploaded already"
                )
            upload = self._by_layout[key] = Upload(key, self._clock())
        upload.touched = self._clock()
        known, manifest = self.knows(digest), upload.manifest
        upload.take(digest, document)
        try:
            self._require_free(upload, known=known)
            await self._grow(upload)
        except Exception:
            if not known:  # else whatever comes after it would be refused for it
                upload.forget(digest, document)
                upload.manifest = manifest
            if upload.stored is None:
                self._drop(key)
            raise

    async def _grow(self, upload: Upload) -> None:
        version = upload.version(self.run.name)
        if version is None:
            return
        self._require_as_announced(upload, version)
        for key, rival in list(self._by_layout.items()):
            same = rival.layout is not None and rival.layout.version == version.number
            if same and rival is not upload:  # its files make way for ours
                self._drop(key)
        self._admit()
        try:
            upload.stored = await in_thread(lambda: self.run.store.stage(version))
        except DiskFullError:
            self.run.short(version.number, version.layout.total_bytes)
            raise
        named = self.run.catalog.version(version.number)
        if named is not None and named.layout_digest == version.layout_digest:
            # It is open, and was lost meanwhile: what comes is served at once.
            self.run.stored[version.number] = upload.stored
        upload.index = {}
        for shard, digest in enumerate(version.digests):
            if digest is not None:
                upload.index.setdefault(digest, shard)
        if version.complete and upload.copying is None:
            upload.copying = asyncio.create_task(self._copy(upload))

    def _require_free(self, upload: Upload, *, known: bool) -> None:
        """Check that a document may change what is here of a version.

        Raises:
            StateError: If its number was announced with another layout.
            BusyError: If a head of that version is being taken, and this is news.
        """
        if upload.layout is None:
            return
        number = upload.layout.version
        seen = {} if self.run.trust is None else self.run.trust.layouts
        if seen.get(number, upload.layout_digest) != upload.layout_digest:
            raise StateError(
                f"version {number} of run {self.run.name!r} was announced with layout "
                f"{seen[number]}, not {upload.layout_digest}: publish under a higher number"
            )
        if number in self._taking and not known:
            raise BusyError(f"a head with version {number} is being taken")

    def _require_as_announced(self, upload: Upload, version: Version) -> None:
        """Check that shards which the head lists of an open version stay what they are.

        Raises:
            StateError: If other documents say otherwise.
        """
        opened = None if self.run.head is None else self.run.head.head.open
        if opened is None or opened.layout != upload.layout_digest:
            return
        for digest in opened.parts:
            part = upload.parts.get(digest)
            if part is None:
                continue
            for shard, announced in zip(part.shards, part.shard_digests, strict=True):
                if version.digests[shard] != announced:
                    raise StateError(
                        f"shard {shard} of version {version.number} of run {self.run.name!r} was "
                        f"announced as {announced}, not {version.digests[shard]}"
                    )

    @contextlib.asynccontextmanager
    async def taking(self, head: Head) -> AsyncIterator[None]:
        """Let nothing change what is here of a head's versions while it is looked at and taken."""
        numbers = {ref.version for ref in head.versions}
        self._taking = frozenset(numbers | ({head.open.version} if head.open else set()))
        try:
            async with self._lock:
                pass  # what is being registered was begun before
            yield
        finally:
            self._taking = frozenset()

    async def _copy(self, upload: Upload) -> None:
        stored = upload.stored
        if stored is not None and not stored.committed:
            others = await in_thread(self.run.on_disk)
            await copy_local(self.run, stored, others)

    async def rebuild(self, digests: Collection[str]) -> None:
        """Rebuild what deltas that were uploaded give of these shards; return when that is done.

        Each delta is tried once. A cancellation ends the waiting only.
        """
        for upload in list(self._by_layout.values()):
            if upload.stored is None or upload.index.keys().isdisjoint(digests):
                continue
            if upload.rebuilding is None or upload.rebuilding.done():
                upload.rebuilding = asyncio.create_task(self._rebuild(upload, upload.stored))
            upload.touched = self._clock()
            await asyncio.wait([upload.rebuilding])
            upload.touched = self._clock()

    async def _rebuild(self, upload: Upload, stored: StoredVersion) -> None:
        digests = stored.version.digests
        fresh = {
            digest: part
            for digest, part in upload.delta_parts.items()
            if digest not in upload.tried and all(digests[part.first_shard : part.shards.stop])
        }
        if not fresh or stored.committed:
            return
        upload.tried |= fresh.keys()
        await self._settle(stored)
        try:
            from relay.uploaded_deltas import rebuild_all, rebuildable  # loads the codec

            found = rebuildable(fresh.values(), stored, await in_thread(self.run.on_disk))
            done = await rebuild_all(self.run, stored, found)
        except (ShardcastError, ImportError) as error:  # ImportError: the codec is not built
            log.warning("run %s: nothing comes from uploaded deltas: %s", self.run.name, error)
            return
        if done:
            log.info(
                "run %s: %d bytes of version %d came from its delta",
                self.run.name,
                done,
                stored.version.number,
            )

    def shard(self, digest: str) -> tuple[StoredVersion, int] | None:
        """Return where an uploaded shard goes."""
        for upload in self._by_layout.values():
            shard = upload.index.get(digest)
            if shard is not None and upload.stored is not None and upload.stored.alive:
                upload.touched = self._clock()
                return upload.stored, shard
        return None

    def blob(self, digest: str) -> int | None:
        """Return the length of a delta blob that an uploaded document names."""
        for upload in self._by_layout.values():
            if digest in upload.blobs:
                upload.touched = self._clock()
                return upload.blobs[digest]
        return None

    def knows(self, digest: str) -> bool:
        """Say whether a document is registered, and its version was not removed since."""
        return any(
            u.has(digest) and (u.stored is None or u.stored.alive) for u in self._by_layout.values()
        )

    async def lacking(self, head: Head, previous: Head | None) -> list[str]:
        """Return the digests that a new head reaches and that are not here whole.

        First puts together what can be copied on this disk.
        """
        before = {} if previous is None else {ref.version: ref for ref in previous.versions}
        lacking: list[str] = []
        for ref in head.versions:
            old = before.get(ref.version)
            if old is None or old.manifest != ref.manifest:
                lacking += await self._lacking_version(ref)
            known = [] if old is None else [part for d in old.deltas for part in d.parts]
            for delta in ref.deltas:
                lacking += await self._lacking_deltas(p for p in delta.parts if p not in known)
        if head.open is not None:
            lacking += await self._lacking_open(head.open)
        return list(dict.fromkeys(lacking))

    async def _lacking_version(self, ref: VersionRef) -> list[str]:
        stored = await in_thread(lambda: self.run.store.stored(ref.version))
        if stored is None or stored.version.manifest != ref.manifest:
            return [ref.manifest]
        await self._settle(stored)
        documents = await in_thread(partial(self._not_shelved, stored.version.documents))
        return documents + _missing(stored)

    async def _lacking_open(self, ref: OpenRef) -> list[str]:
        upload = self._by_layout.get(ref.layout)
        if upload is None or upload.stored is None or not upload.stored.alive:
            return [ref.layout]
        absent = [digest for digest in ref.parts if digest not in upload.parts]
        absent += await in_thread(partial(self._not_shelved, (ref.layout, *ref.parts)))
        await self._settle(upload.stored)
        here = upload.stored.present()
        for part in (upload.parts[digest] for digest in ref.parts if digest in upload.parts):
            shards = zip(part.shards, part.shard_digests, strict=True)
            absent += [digest for shard, digest in shards if shard not in here]
        for delta in ref.deltas:
            absent += await self._lacking_deltas(delta.parts)
        return absent

    async def _lacking_deltas(self, parts: Iterable[str]) -> list[str]:
        absent: list[str] = []
        named = {d: part for u in self._by_layout.values() for d, part in u.delta_parts.items()}
        for digest in parts:
            part = named.get(digest)
            if part is None:
                absent.append(digest)
                continue
            names = (digest, *(blob.digest for blob in part.blobs))
            absent += await in_thread(partial(self._not_shelved, names))
        return absent

    def _not_shelved(self, digests: Iterable[str]) -> list[str]:
        """Return the documents and delta blobs that are not on disk, whatever was sent. Blocking."""
        return [digest for digest in digests if not self.run.shelf.holds(digest)]

    async def _settle(self, stored: StoredVersion) -> None:
        """Wait for copies that are under way, then copy what can still be copied."""
        for upload in self._by_layout.values():
            if upload.stored is stored and upload.copying is not None:
                await asyncio.wait([upload.copying])
        if stored.missing() and not stored.committed:
            await copy_local(self.run, stored, await in_thread(self.run.on_disk))

    def announced(self, head: Head) -> None:
        """Forget uploads that a head has announced, or passed by."""
        named = {ref.version for ref in head.versions}
        newest = max(named, default=0)
        deltas = {part for ref in head.versions for d in ref.deltas for part in d.parts}
        for key, upload in list(self._by_layout.items()):
            number = upload.layout.version if upload.layout is not None else None
            if number is None:  # deltas of a version that was announced before
                late = bool(upload.delta_parts) and not upload.parts and upload.manifest is None
                over = late and deltas.issuperset(upload.delta_parts)
            else:
                over = number in named or number <= newest
            if over:
                self._drop(key)

    async def expire(self, timeout_s: float) -> None:
        """Forget uploads that nobody continued, and remove what they left in staging.

        Also those that a head has announced without anyone noting it: another publisher's, or one
        whose sender went away. What is announced as open stays as long as it is.
        """
        head = None if self.run.head is None else self.run.head.head
        if head is not None:
            self.announced(head)
        opened = None if head is None or head.open is None else head.open.layout
        now = self._clock()
        for key, upload in list(self._by_layout.items()):
            if now - upload.touched <= timeout_s or key == opened:
                continue
            self._drop(key)
            stored = upload.stored
            if stored is not None and not stored.committed:
                number = stored.version.number
                log.info("run %s: upload of version %d was given up", self.run.name, number)
                with contextlib.suppress(ShardcastError):
                    await in_thread(partial(self.run.store.evict, number))
        self.sparing.look_again()

    def _drop(self, key: str) -> None:
        upload = self._by_layout.pop(key, None)
        for task in () if upload is None else upload.tasks():
            task.cancel()
        self.sparing.look_again()

    async def close(self) -> None:
        """Stop copying."""
        self.sparing.close()
        tasks = [task for upload in self._by_layout.values() for task in upload.tasks()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _missing(stored: StoredVersion) -> list[str]:
    digests = stored.version.digests
    return [digest for shard in stored.missing() if (digest := digests[shard]) is not None]


def shard_present(stored: StoredVersion, shard: int) -> bool:
    """Say whether a shard is good on disk. Blocking."""
    return stored.state(shard) is not ShardState.MISSING and stored.confirm(shard)

"""Sending what a remote origin lacks: documents, deltas, shards, heads; also of a version that streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardcast.announcing import issue_for, remembered
from shardcast.deltas import Delta
from shardcast.errors import (
    DiskError,
    IntegrityError,
    ModifiedError,
    NetworkError,
    RefusedError,
    ShardcastError,
)
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol import succession, trust
from shardcast.protocol.delta import DeltaPart
from shardcast.protocol.envelope import Signer, seal
from shardcast.protocol.head import Head, OpenRef, encode_head
from shardcast.protocol.layout import Extent, Layout
from shardcast.protocol.trust import Accepted
from shardcast.sharing import Stopping, share_out
from shardcast.store.run import RunStore
from shardcast.streaming import Opened, Piece

UPLOAD_THREADS: Final = 4
"""Connections to the origin: enough to fill a long path, few enough for a small server."""

STEP_S: Final = 2.0
"""What is sent between two heads of an open version takes about so long: a head and its questions cost
some round trips, in which nothing else is sent."""

ClientFactory = Callable[[], OriginClient]

Place = Callable[[Extent], Path]
"""Says where the bytes of a shard lie on this machine."""


class Upload:
    """Sends what an origin lacks.

    Attributes:
        bytes: Bytes of shards and delta blobs that were sent.
        sent: Called with the bytes of each shard that was sent; several threads at once.
    """

    def __init__(self, client: OriginClient, client_factory: ClientFactory, place: Place) -> None:
        """Send nothing yet.

        Args:
            client: For questions and documents.
            client_factory: Makes one client a thread, for what is long.
            place: Where shards lie.
        """
        self.bytes = 0
        self.sent: Callable[[int], None] = lambda count: None
        self._client = client
        self._factory = client_factory
        self._place = place

    def send_documents(self, documents: Mapping[str, bytes]) -> None:
        """Send documents that are not there."""
        self.put_documents({d: documents[d] for d in self._client.missing(list(documents))})

    def put_documents(self, documents: Mapping[str, bytes]) -> None:
        """Send documents that cannot be there: a question less."""
        for digest, data in documents.items():
            self._client.put_blob(digest, Body(len(data), data))

    def send_deltas(self, deltas: Sequence[Delta], cache: RunStore) -> None:
        """Send the parts and blobs of deltas that lie in the cache."""
        for delta in deltas:
            self.send_documents(delta.parts)
        blobs = {digest: size for delta in deltas for digest, size in delta.blobs.items()}
        self.put_blobs({d: blobs[d] for d in self._client.missing(list(blobs))}, cache)

    def put_blobs(self, blobs: Mapping[str, int], cache: RunStore) -> None:
        """Send delta blobs, given with their lengths."""
        bodies = {d: Body(size, path=cache.blob_path(d)) for d, size in blobs.items()}
        self._send_all(bodies, lambda count: None)

    def lacking(self, shards: Mapping[str, Extent]) -> dict[str, Body]:
        """Return those of the shards, by digest, that the origin has not and cannot rebuild."""
        return {
            digest: Body(
                shards[digest].length,
                path=self._place(shards[digest]),
                offset=shards[digest].offset,
            )
            for digest in self._client.missing(list(shards))
        }

    def send_shards(self, bodies: Mapping[str, Body]) -> None:
        """Send shards.

        Raises:
            ModifiedError: If one is not what it was when it was hashed.
        """
        self._send_all(bodies, self.sent)

    def _send_all(self, bodies: Mapping[str, Body], sent: Callable[[int], None]) -> None:
        def send(own: OriginClient, item: tuple[str, Body], stopping: Stopping) -> None:
            del stopping  # a shard is short
            _send(own, *item)
            sent(item[1].length)

        share_out(
            bodies.items(),
            send,
            threads=min(UPLOAD_THREADS, len(bodies)),
            tool=lambda: contextlib.closing(self._factory()),
            name="upload",
        )
        self.bytes += sum(body.length for body in bodies.values())


def _send(client: OriginClient, digest: str, body: Body) -> None:
    try:
        client.put_blob(digest, body)
    except IntegrityError as error:
        raise ModifiedError(
            f"checkpoint file {body.path} changed while it was uploaded "
            f"(offset {body.offset}, {body.length} bytes); no version was announced",
            source=str(body.path),
        ) from error


@dataclass(slots=True)
class OriginHead:
    """What is known of the head at an origin.

    Attributes:
        head: The last one that it is known to have had; None: it had none.
        envelope: Its bytes.
        in_doubt: Heads that were sent from that one and not answered: it may have any of them.
    """

    head: Head | None
    envelope: bytes | None
    in_doubt: list[Accepted] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Announcer:
    """Puts heads to an origin, each in the place of the last one.

    Attributes:
        client: The origin.
        memory: Where trust is remembered.
        signers: Who signs.
        now_ms: The clock, Unix milliseconds.
        expiry_ms: How long a head is fresh.
        last: What the next head follows.
    """

    client: OriginClient
    memory: RunStore
    signers: Sequence[Signer]
    now_ms: Callable[[], int]
    expiry_ms: int
    last: OriginHead

    def announce(self, make: Callable[[Head | None, succession.Issue], Head]) -> Head:
        """Sign a head, check it as a reader will, and put it in the place of the last one.

        Where the answer was lost, now or to an earlier head, the origin is asked which it has: what it
        took counts, and the new head is made once more if it has to follow another than was thought.

        Args:
            make: Makes the head from the one that it follows.

        Raises:
            TrustError: If readers would refuse it.
            RefusedError: If the origin does; another publisher may have been faster.
            NetworkError: If the origin cannot be reached; it may have taken the head all the same.
        """
        signed = self._sign(make)
        try:
            self._put(signed)
        except (NetworkError, RefusedError) as error:
            taken = self._find_taken()
            if taken is None:
                if isinstance(error, NetworkError):
                    error.message += "; it may have taken the head all the same"
                raise
            if taken is not signed:
                signed = self._sign(make)
                self._put(signed)
        return signed.head

    def resolve(self) -> None:
        """Find out which of the heads in doubt the origin took, as far as it can be asked."""
        self._find_taken()

    def _sign(self, make: Callable[[Head | None, succession.Issue], Head]) -> Accepted:
        issue = issue_for(self.memory.run, self.signers, self.now_ms(), self.expiry_ms)
        envelope = seal(encode_head(make(self.last.head, issue)), self.signers)
        return trust.accept(remembered(self.memory, self.signers), envelope, issue.now_ms)

    def _put(self, signed: Accepted) -> None:
        try:
            self.client.put_head(signed.envelope, self.last.envelope)
        except NetworkError:
            self.last.in_doubt.append(signed)
            raise
        self._follow(signed)

    def _find_taken(self) -> Accepted | None:
        """Return that of the heads in doubt which the origin has; what is announced next follows it."""
        if not self.last.in_doubt:
            return None
        try:
            envelope = self.client.head()
        except ShardcastError:
            return None
        for signed in self.last.in_doubt:
            if signed.envelope == envelope:
                self._follow(signed)
                return signed
        return None

    def _follow(self, taken: Accepted) -> None:
        self.last.head, self.last.envelope = taken.head, taken.envelope
        self.last.in_doubt.clear()
        with contextlib.suppress(DiskError):  # it is announced, and above what is remembered
            self.memory.write_trust(taken.state)


class RemoteOutlet:
    """Announces an open version at a remote origin: sends what the next head lists, then the head.

    Delta blobs go before the shards that they rebuild: the origin rebuilds those, and they are not sent.

    A head whose answer is lost may have opened the version all the same.
    """

    after_delta: Final = True

    def __init__(
        self,
        announcer: Announcer,
        upload: Upload,
        layout: Layout,
        cache: RunStore | None,
        *,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send nothing yet.

        Args:
            announcer: Announces through a client that nobody else uses meanwhile.
            upload: Sends through that client.
            layout: The version's layout.
            cache: Where delta blobs lie; None: there are none.
            steps: Heads at most.
            clock: Monotonic seconds.
        """
        self._announcer = announcer
        self._upload = upload
        self._layout = layout
        self._cache = cache
        self._least = max(layout.total_bytes // steps, 1)
        self._clock = clock
        self._rate = 0.0

    def most_bytes(self) -> int | None:
        """Return what is sent in about ``STEP_S``."""
        return max(self._least, int(self._rate * STEP_S))

    def tell(self, opened: Opened, pieces: Sequence[Piece], delta: Sequence[DeltaPart]) -> None:
        """Send parts, delta blobs, and shards that are lacking then; then the head.

        Raises:
            NetworkError, RefusedError: If the origin does not take it.
            ModifiedError: If a file changed meanwhile.
        """
        began, upload = self._clock(), self._upload
        if not self._is_open:
            upload.put_documents(dict([opened.layout_document()]))
        upload.put_documents(opened.list_delta_parts(delta))
        if self._cache is not None:
            blobs = {blob.digest: blob.bytes for part in delta for blob in part.blobs}
            upload.put_blobs(blobs, self._cache)
        upload.put_documents(opened.list_pieces(pieces))
        shards = {
            found.digest: self._layout.extent(piece.first + n)
            for piece in pieces
            for n, found in enumerate(piece.hashes)
        }
        upload.send_shards(upload.lacking(shards))
        self._announce(opened.ref())
        seconds = max(self._clock() - began, 1e-6)
        self._rate = sum(extent.length for extent in shards.values()) / seconds

    def give_up(self) -> None:
        """Say that the version is not open any more.

        Raises:
            NetworkError, RefusedError: If the origin does not take it.
        """
        if not self._is_open:
            self._announcer.resolve()
        if self._is_open:
            self._announce(None)

    @property
    def _is_open(self) -> bool:
        """Whether the last head says so."""
        head = self._announcer.last.head
        return (
            head is not None and head.open is not None and head.open.version == self._layout.version
        )

    def _announce(self, ref: OpenRef | None) -> None:
        self._announcer.announce(lambda last, issue: succession.with_open(last, issue, ref))

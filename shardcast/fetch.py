"""The data plane: one blob from one HTTP server, hashed and checked as its bytes arrive.

Blocking sockets in the caller's threads, one cache-sized buffer a connection, BLAKE3 and xxh3 in
place, then straight into the sink. Figures and the alternatives tried: docs/adr/0005.
The rules for what may be resumed are those of docs/PROTOCOL.md ("Blobs"): a blob is truncated
until length *and* digest say otherwise, a 206 must be exactly the range that was asked for under
the blob's own strong ETag, and a 200 means from the start.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

import shardcast
from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.config import NetConfig
from shardcast.connection import (
    ClosedEarlyError,
    Connection,
    ResponseHead,
    open_connection,
    parse_endpoint,
)
from shardcast.errors import (
    LimitError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
    StallError,
    WrongAnswerError,
)
from shardcast.protocol.wire import (
    SOURCE_FILL,
    SOURCE_HEADER,
    blob_etag,
    blob_path,
    parse_content_range,
    parse_retry_after,
)
from shardcast.transfer import BlobSink, Branch, MemorySink, Transfer

__all__ = [
    "BlobSink",
    "BlobSource",
    "Branch",
    "Cancel",
    "Fetched",
    "MemorySink",
    "Transfer",
    "TransferCancelledError",
]

_ETAG_PREFIX: Final = '"blake3-'
_DRAIN_BYTES: Final = 64 * 1024
_DRAIN_S: Final = 1.0
"""An error page up to this size is read, for so long, so that the connection can be used again."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A blob, or its last piece, that arrived and has the right digest.

    Attributes:
        bytes: How many bytes came in this request.
        seconds: From the request to the last byte, without the time that the sink took.
        from_fill: The source was still fetching it itself: the rate says nothing about it.
    """

    bytes: int
    seconds: float
    from_fill: bool


class BlobSource:
    """One HTTP server that has blobs. Thread-safe; keeps idle connections.

    Attributes:
        url: Its base URL, without a slash at the end.
    """

    def __init__(
        self,
        url: str,
        config: NetConfig,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Take the URL apart; connect later.

        Args:
            url: ``http://`` or ``https://``, perhaps with a path before ``/v1``.
            config: Bounds.
            headers: Sent with every request.
            tls: For https; None means the system's certificates.

        Raises:
            UsageError: If the URL is none.
        """
        self._endpoint = parse_endpoint(url)
        self.url = self._endpoint.url
        self._config = config
        self._tls = tls
        self._headers = {
            "User-Agent": f"shardcast/{shardcast.__version__}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            **(headers or {}),
        }
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = Cancel()
        self._resumable = True
        self._sent_whole = False

    @property
    def resumes(self) -> bool:
        """Whether it sends the rest of a blob where it is asked for it, as far as is known."""
        return self._resumable and not self._sent_whole

    def fetch(self, transfer: Transfer, cancel: Cancel) -> Fetched:
        """Get the blob, from ``transfer.offset`` on where the source can, and check its digest.

        After an error other than IntegrityError the transfer keeps what it has and can be
        continued here or elsewhere.

        Raises:
            IntegrityError: If the bytes are wrong. ``transfer.stitched`` says whether other
                sources or answers had a part in it.
            SourceStatusError: If the answer is not 200 or 206.
            StallError: If the source is slower than the minimum rate or silent.
            NetworkError: If it cannot be reached, or answers anything but what was asked for.
            LimitError: If it announces more bytes than the transfer's limit.
            DiskError: If the sink cannot take the bytes.
            TransferCancelledError: If ``cancel`` was cancelled or the source closed.
        """
        with self._closed.child() as mine, cancel.hook(mine.cancel):
            try:
                return self._fetch(transfer, mine)
            except ShardcastError as error:
                if mine.cancelled and isinstance(error, NetworkError):
                    raise TransferCancelledError("cancelled", source=self.url) from error
                if error.source is None and isinstance(error, (NetworkError, LimitError)):
                    error.source = self.url
                raise

    def _fetch(self, transfer: Transfer, cancel: Cancel) -> Fetched:
        while True:
            cancel.check()
            connection = self._take() or open_connection(
                self._endpoint, self._config, cancel, self._tls
            )
            used_before = connection.requests > 0
            keep = False
            try:
                with cancel.hook(connection.abort):
                    cancel.check()
                    fetched, keep = self._exchange(connection, transfer)
                return fetched
            except ClosedEarlyError:
                if not used_before or cancel.cancelled:
                    raise
            except _SpentError as spent:
                keep = spent.keep
                raise spent.error from None
            finally:
                self._put(connection, keep=keep)

    def _exchange(self, connection: Connection, transfer: Transfer) -> tuple[Fetched, bool]:
        headers = dict(self._headers)
        if transfer.offset and not self._resumable:
            transfer.restart()
        if transfer.offset:
            headers["Range"] = f"bytes={transfer.offset}-"
            headers["If-Range"] = blob_etag(transfer.digest)
        started = time.monotonic()
        target = self._endpoint.prefix + blob_path(transfer.run, transfer.digest)
        head, first = connection.request(target, headers)
        if head.status not in (200, 206):
            self._refuse(connection, transfer, head, first)
        left = self._expect(transfer, head)
        before = transfer.offset
        sunk = self._receive(connection, transfer, left, first)
        transfer.finish(self.url)
        fetched = Fetched(
            bytes=transfer.offset - before,
            seconds=max(time.monotonic() - started - sunk, 1e-6),
            from_fill=head.headers.get(SOURCE_HEADER.lower(), "") == SOURCE_FILL,
        )
        return fetched, head.keep_alive and len(first) <= left

    def _expect(self, transfer: Transfer, head: ResponseHead) -> int:
        """Check the head of a 200 or 206; return how many bytes are to come.

        Raises:
            WrongAnswerError: If the answer is not exactly what was asked for.
        """
        headers = head.headers
        coding = headers.get("content-encoding", "identity").lower()
        etag = headers.get("etag")
        if coding != "identity":
            raise WrongAnswerError(f"sends the blob with Content-Encoding {coding[:40]!r}")
        if "transfer-encoding" in headers or head.length is None:
            raise WrongAnswerError("sends the blob without a Content-Length")
        if (
            etag is not None
            and etag.startswith(_ETAG_PREFIX)
            and etag != blob_etag(transfer.digest)
        ):
            self._resumable = False
            raise WrongAnswerError(f"answers for blob {transfer.digest} with ETag {etag[:80]}")
        if head.status == 206:
            length = self._expect_rest(transfer, head, head.length)
            self._sent_whole = False
            return length
        if transfer.offset:
            self._sent_whole = True
            transfer.restart()
        if transfer.total is None and head.length > transfer.limit:
            raise LimitError(
                f"blob {transfer.digest} is announced with {head.length} bytes, "
                f"over the limit of {transfer.limit}"
            )
        if transfer.total is not None and head.length != transfer.total:
            raise WrongAnswerError(
                f"answers for blob {transfer.digest} with {head.length} bytes "
                f"instead of {transfer.total}"
            )
        transfer.total = head.length
        return head.length

    def _expect_rest(self, transfer: Transfer, head: ResponseHead, length: int) -> int:
        got = parse_content_range(head.headers.get("content-range"))
        problem: str | None = None
        if not transfer.offset:
            problem = "a part although the whole was asked for"
        elif got is None:
            problem = f"a part with Content-Range {head.headers.get('content-range')!r:.80}"
        elif head.headers.get("etag") != blob_etag(transfer.digest):
            problem = f"a part with ETag {head.headers.get('etag')!r:.80}"
        elif got.total != transfer.total or got.start != transfer.offset or got.stop != got.total:
            problem = (
                f"{got.content_range!r} instead of bytes {transfer.offset}- of {transfer.total}"
            )
        elif length != got.length:
            problem = f"{length} bytes as {got.content_range!r}"
        if problem is None:
            transfer.resumed = True
            return length
        # Whatever it is that answers so: ask it for whole blobs only from now on.
        self._resumable = False
        raise WrongAnswerError(f"answers for blob {transfer.digest} with {problem}")

    def _receive(
        self, connection: Connection, transfer: Transfer, left: int, first: memoryview
    ) -> float:
        """Read ``left`` bytes; return the seconds that hashing and writing took."""
        config, url, clock = self._config, self.url, time.monotonic
        waited = sunk = 0.0
        window = 0
        data = first[:left]
        while True:
            now = clock()
            if data:
                transfer.receive(url, data)
                left -= len(data)
                window += len(data)
            if not left:
                return sunk + clock() - now
            then = clock()
            sunk += then - now
            data = connection.read(left)
            waited += clock() - then
            if not data:
                raise NetworkError(
                    f"closed the connection after {transfer.offset} of {transfer.total} bytes "
                    f"of blob {transfer.digest}"
                )
            if waited >= config.rate_window_s:
                if window < config.minimum_rate_bytes_per_s * waited:
                    raise StallError(
                        f"sent {window} bytes of blob {transfer.digest} in {waited:.1f} s, "
                        f"less than {config.minimum_rate_bytes_per_s:g} bytes/s"
                    )
                waited, window = 0.0, 0

    def _refuse(
        self, connection: Connection, transfer: Transfer, head: ResponseHead, first: memoryview
    ) -> None:
        """Raise for any other status; small bodies are read, so that the connection stays good."""
        status = head.status
        keep = head.keep_alive and head.length is not None and head.length <= _DRAIN_BYTES
        left = (head.length or 0) - len(first)
        deadline = time.monotonic() + _DRAIN_S
        with suppress(NetworkError):
            while keep and left > 0:
                got = len(connection.read(left, before=deadline))
                keep = got > 0
                left -= got
        keep = keep and left == 0
        where = head.headers.get("location")
        if 300 <= status < 400 and where is not None:
            error = NetworkError(
                f"redirects blob {transfer.digest} to {where!r:.200}: not followed"
            )
        else:
            if status == 416:
                transfer.restart()
                self._resumable = False
            error = SourceStatusError(
                f"answers {status} for blob {transfer.digest}",
                source=self.url,
                status=status,
                retry_after=parse_retry_after(head.headers.get("retry-after"), time.time()),
            )
        raise _SpentError(error, keep=keep)

    def _take(self) -> Connection | None:
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.stale(now):
                return connection
            connection.close()

    def _put(self, connection: Connection, *, keep: bool) -> None:
        if keep:
            connection.idle_since = time.monotonic()
            with self._lock:
                if not self._closed.cancelled:
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        """End what is in flight and close every connection."""
        self._closed.cancel()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SpentError(Exception):
    """Carries an error out of an exchange whose connection may still be good."""

    def __init__(self, error: NetworkError, *, keep: bool) -> None:
        super().__init__(error)
        self.error = error
        self.keep = keep

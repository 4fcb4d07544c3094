"""The publishing side of the HTTP surface: one remote origin, blocking, bounded retries."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from shardcast.connection import without_password
from shardcast.errors import (
    IntegrityError,
    MalformedError,
    NetworkError,
    RefusedError,
    UsageError,
)
from shardcast.protocol import wire
from shardcast.protocol.digest import digest_of
from shardcast.protocol.layout import Layout, decode_layout
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_HEAD_BYTES
from shardcast.protocol.manifest import decode_manifest
from shardcast.store.files import disk_errors

CONNECT_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 60.0
"""An origin that takes no byte for so long, or has not answered in full, is given up."""
MINIMUM_RATE_BYTES_PER_S: Final = 8 * 1024
"""An upload that is slower on the whole is given up: nobody is served by waiting for it."""
COMMIT_TIMEOUT_S: Final = 1800.0
"""Before it answers, an origin rebuilds shards from deltas, copies unchanged ones, syncs its disk."""
ATTEMPTS: Final = 6
SILENT_ATTEMPTS: Final = 2
"""Of them, those that may end by a timeout: a minute each, in which nothing came."""
PAUSE_FIRST_S: Final = 0.25
PAUSE_CAP_S: Final = 5.0
RETRY_AFTER_CAP_S: Final = 30.0
"""An origin that asks for more patience is asked again all the same."""
MISSING_BATCH: Final = 4096
_MAX_ANSWER_BYTES: Final = MAX_DOCUMENT_BYTES


class Missing(msgspec.Struct):
    """The answer to ``POST missing``."""

    missing: list[str]


@dataclass(frozen=True, slots=True)
class Body:
    """What a request carries: bytes, or ``length`` bytes at ``offset`` of a file."""

    length: int
    data: bytes = b""
    path: Path | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by which an origin must have taken everything, shared by several clients.

    Attributes:
        seconds: How long that was when it began, for messages.
        at: The moment, monotonic seconds.
    """

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Begin now."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """What is left of it."""
        return self.at - time.monotonic()


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def reason(self) -> str:
        """What the origin says about it, one line."""
        try:
            text = msgspec.json.decode(self.body)["message"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            text = self.body[:200].decode("utf-8", "replace")
        return " ".join(str(text).split()) or "no reason given"


class OriginClient:
    """Talks to one origin over one connection at a time; use one object a thread.

    Args:
        url: Base URL of the origin.
        run: The run to publish to.
        token: The bearer token; never logged.
        deadline: Until when everything must be done; None: however long it takes.

    Attributes:
        date_ms: What the origin's clock said with its last answer, Unix milliseconds.

    Raises:
        UsageError: If the URL is not one, or the token would travel in clear text.
    """

    def __init__(self, url: str, run: str, token: str, deadline: Deadline | None = None) -> None:
        self.url = url.rstrip("/")
        self.date_ms: int | None = None
        self._deadline = deadline
        self.run = run
        self._token = token
        self._parts = _check_url(self.url)
        self._connection: http.client.HTTPConnection | None = None

    def head(self) -> bytes | None:
        """Return the run's head envelope, or None where the origin knows no such run.

        Raises:
            NetworkError: If the origin does not answer properly.
        """
        answer = self._ask("GET", wire.head_path(self.run))
        if answer.status == http.client.NOT_FOUND:
            return None
        self._require(answer, (http.client.OK,), "the head")
        if len(answer.body) > MAX_HEAD_BYTES:
            raise MalformedError(f"head is over {MAX_HEAD_BYTES} bytes", source=self.url)
        return answer.body

    def layout_of(self, manifest: str) -> Layout | None:
        """Return the layout of a version at the origin; None if it is not to be had there.

        Raises:
            NetworkError: If the origin does not answer.
        """
        try:
            listed = decode_manifest(self._document(manifest))
            return decode_layout(self._document(listed.layout))
        except (MalformedError, IntegrityError, RefusedError):
            return None

    def _document(self, digest: str) -> bytes:
        answer = self._ask("GET", wire.blob_path(self.run, digest))
        self._require(answer, (http.client.OK,), f"document {digest}")
        if digest_of(answer.body) != digest:
            raise IntegrityError(f"document does not have digest {digest}", source=self.url)
        return answer.body

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Return those of ``digests`` that the origin lacks.

        Before it answers, an origin may rebuild shards from deltas that it was sent, so that takes
        as long as that does; asked again after a time-out, it goes on.

        Raises:
            RefusedError: If the token is refused.
            NetworkError: If the origin does not answer properly.
        """
        lacking: list[str] = []
        for first in range(0, len(digests), MISSING_BATCH):
            batch = list(digests[first : first + MISSING_BATCH])
            data = msgspec.json.encode({"digests": batch})
            answer = self._ask(
                "POST",
                wire.missing_path(self.run),
                Body(len(data), data),
                timeout_s=COMMIT_TIMEOUT_S,
            )
            self._require(answer, (http.client.OK,), "the list of digests")
            try:
                listed = msgspec.json.decode(answer.body, type=Missing).missing
            except msgspec.MsgspecError as error:
                raise MalformedError(f"answer is malformed: {error}", source=self.url) from error
            asked = set(batch)
            lacking.extend(digest for digest in listed if digest in asked)
        return lacking

    def put_blob(self, digest: str, body: Body) -> None:
        """Upload a document or shard; being there already is fine.

        Raises:
            IntegrityError: If the bytes that arrived have another digest.
            RefusedError: If the origin does not take it.
            NetworkError: If it cannot be brought there within the attempts.
        """
        answer = self._ask("PUT", wire.blob_path(self.run, digest), body)
        if answer.status == http.client.UNPROCESSABLE_ENTITY:
            raise IntegrityError(f"origin refused blob {digest}: {answer.reason}", source=self.url)
        self._require(answer, (http.client.OK, http.client.CREATED), f"blob {digest}")

    def put_head(self, envelope: bytes, previous: bytes | None) -> None:
        """Replace the head, provided that it is still ``previous``.

        Raises:
            RefusedError: If it is not, or the origin does not take it.
            NetworkError: If the origin does not answer; the head may have been taken then.
        """
        condition = (
            {"If-None-Match": "*"}
            if previous is None
            else {"If-Match": wire.head_etag(digest_of(previous))}
        )
        answer = self._ask(
            "PUT",
            wire.head_path(self.run),
            Body(len(envelope), envelope),
            headers=condition,
            timeout_s=COMMIT_TIMEOUT_S,
        )
        if answer.status == http.client.PRECONDITION_FAILED:
            if self.head() == envelope:  # our first try got through, its answer did not
                return
            raise RefusedError(
                f"another publisher changed run {self.run!r} meanwhile; run publish again",
                source=self.url,
            )
        done = (http.client.OK, http.client.CREATED, http.client.NO_CONTENT)
        self._require(answer, done, "the head")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- inner workings ---------------------------------------------------------------------

    def _require(self, answer: Answer, wanted: tuple[int, ...], what: str) -> None:
        if answer.status in wanted:
            return
        if answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise RefusedError(
                f"origin refused {what} for run {self.run!r} with {answer.status}: {answer.reason}",
                source=self.url,
            )
        raise RefusedError(
            f"origin answered {answer.status} to {what} of run {self.run!r}: {answer.reason}",
            source=self.url,
        )

    def _ask(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Send one request, again after lost connections, 429 and 5xx, with growing pauses.

        An origin that is silent is asked less often: each time takes a minute.
        """
        last: Exception | None = None
        silences = tries = 0
        for attempt in range(ATTEMPTS):
            self._require_time(last)
            tries += 1
            cap = min(PAUSE_FIRST_S * 2**attempt, PAUSE_CAP_S)
            pause = random.uniform(0.0, cap)  # noqa: S311 - jitter
            try:
                answer = self._once(method, path, body, headers or {}, timeout_s or IDLE_TIMEOUT_S)
            except ssl.SSLCertVerificationError as error:
                raise NetworkError(
                    f"TLS certificate of {self.url} is not valid: {error.verify_message}",
                    source=self.url,
                ) from error
            except (OSError, http.client.HTTPException) as error:
                last = error
                self.close()
                silences += isinstance(error, TimeoutError)
                if silences >= SILENT_ATTEMPTS:
                    break
            else:
                busy = answer.status == http.client.TOO_MANY_REQUESTS
                if answer.status < http.client.INTERNAL_SERVER_ERROR and not busy:
                    return answer
                last = RefusedError(f"{answer.status}: {answer.reason}")
                asked = wire.parse_retry_after(answer.headers.get("retry-after"), time.time())
                pause += min(asked or 0.0, RETRY_AFTER_CAP_S)
            if attempt + 1 < ATTEMPTS:
                time.sleep(self._within_deadline(pause))
        self._require_time(last)
        raise NetworkError(
            f"origin {self.url}: {method} {path} failed {tries} times, last: {last}",
            source=self.url,
        ) from last

    def _within_deadline(self, seconds: float) -> float:
        """Return so many seconds, or what is left if that is less."""
        if self._deadline is None:
            return seconds
        return max(min(seconds, self._deadline.left_s), 0.001)

    def _require_time(self, last: Exception | None) -> None:
        if self._deadline is None or self._deadline.left_s > 0:
            return
        why = "" if last is None else f", last: {last}"
        raise NetworkError(
            f"origin {self.url} did not take it within {self._deadline.seconds:g} s{why}; nothing was "
            "announced, and what arrived counts for the next try",
            source=self.url,
        ) from last

    def _once(
        self,
        method: str,
        path: str,
        body: Body | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Answer:
        connection = self._connect()
        connection.putrequest(method, self._parts.path + path, skip_accept_encoding=True)
        connection.putheader("Accept-Encoding", "identity")
        if self._token and method != "GET":
            connection.putheader("Authorization", f"Bearer {self._token}")
        if body is not None:
            connection.putheader("Content-Length", str(body.length))
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        sock = connection.sock
        if body is not None:
            most = IDLE_TIMEOUT_S + body.length / MINIMUM_RATE_BYTES_PER_S
            with _within(sock, self._within_deadline(most), "taking the body"):
                _send(sock, body)
        timeout_s = self._within_deadline(timeout_s)
        sock.settimeout(timeout_s)
        with _within(sock, timeout_s, "the answer"):
            response = connection.getresponse()
            data = response.read(_MAX_ANSWER_BYTES)
        answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, data)
        date = wire.parse_date(answer.headers.get("date"))
        self.date_ms = None if date is None else int(date * 1000)
        if response.will_close or not response.isclosed():
            self.close()
        else:
            sock.settimeout(IDLE_TIMEOUT_S)
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = self._parts.hostname or "", self._parts.port
            timeout_s = self._within_deadline(CONNECT_TIMEOUT_S)
            if self._parts.scheme == "https":
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=timeout_s, context=ssl.create_default_context()
                )
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            self._connection.connect()
            self._connection.sock.settimeout(IDLE_TIMEOUT_S)
            _configure(self._connection.sock)
        return self._connection


def _configure(sock: socket.socket) -> None:
    """Send at once, and have the system ask a silent peer whether it is still there.

    An origin may commit for minutes without a byte. A live one's system answers meanwhile; one whose
    host is gone, or whose connection a gateway has dropped, is given up after 35 s.
    """
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for option in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(*option)


@contextlib.contextmanager
def _within(sock: socket.socket, seconds: float, what: str) -> Iterator[None]:
    """End the block after so long, also where a byte comes now and then.

    Timeouts of a socket begin anew with each byte.

    Raises:
        TimeoutError: If the time was over; nothing that was read then counts.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if over.is_set():
            raise TimeoutError(f"{what} took over {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
    if over.is_set():
        raise TimeoutError(f"{what} took over {seconds:g} s")


def _send(sock: socket.socket, body: Body) -> None:
    if body.path is None:
        sock.sendall(body.data)
        return
    with disk_errors(body.path, "reading"):
        file = open(body.path, "rb", buffering=0)  # noqa: SIM115 - closed below
    try:
        if os.fstat(file.fileno()).st_size < body.offset + body.length:
            raise ShrunkError(f"{body.path} shrank while it was uploaded", source=str(body.path))
        sock.sendfile(file, body.offset, body.length)
    finally:
        file.close()


class ShrunkError(IntegrityError):
    """A file became shorter than the piece of it that is uploaded."""

    code = "modified"


def _check_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"not a URL: {without_password(url)!r}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"not an http or https URL: {without_password(url)!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("give the URL without user, query or fragment", source=parts.hostname)
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise UsageError(
            f"the publish token would travel in clear text to {parts.hostname}: use https, "
            "or a tunnel to loopback",
            source=url,
        )
    return parts


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

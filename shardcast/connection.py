"""One HTTP/1.1 connection for reading blobs: blocking, strict, every wait bounded.

Responses are read as RFC 9112 says, and what a blob never needs is refused: bodies without a
length, chunked bodies, folded headers, repeated lengths. A thin reader instead of ``http.client``
because that one waits for a head without a deadline (a byte a second keeps it waiting for ever)
and because here the body's first bytes land in the buffer together with the head.
"""

from __future__ import annotations

import queue
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

from shardcast.cancel import Cancel
from shardcast.config import NetConfig
from shardcast.errors import NetworkError, StallError, UsageError

Address = tuple[Any, ...]
"""What ``socket.connect`` takes: host, port and for IPv6 two more."""

_STATUS_LINE = re.compile(rb"^HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n\0]*)?\Z")
_HEADER = re.compile(rb"^([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*\Z")
_LENGTH = re.compile(r"^\d{1,16}\Z", re.ASCII)
_MAX_INTERIM: Final = 4
"""100, 102, 103: more of them before the answer is a server that never answers."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL, taken apart.

    Attributes:
        url: As given, without a slash at the end.
        tls: Whether it is https.
        host: Name or address to connect to, without brackets.
        port: Port to connect to.
        authority: Value of the Host header.
        prefix: Path before ``/v1``, often empty.
    """

    url: str
    tls: bool
    host: str
    port: int
    authority: str
    prefix: str


def without_password(url: str) -> str:
    """Return a URL, or what was given as one, fit to be shown."""
    _, at, rest = url.rpartition("@")
    return f"...@{rest}" if at else url


def parse_endpoint(url: str) -> Endpoint:
    """Take a base URL apart.

    Raises:
        UsageError: If it is not http or https, or carries a user, query or fragment.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as error:
        raise UsageError(f"not a URL: {without_password(url)!r}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"not an http or https URL: {without_password(url)!r}")
    if parts.query or parts.fragment or parts.username is not None:
        raise UsageError(
            f"a source's URL has no user, query or fragment: {without_password(url)!r}"
        )
    if not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise UsageError(f"a source's URL is plain ASCII: {without_password(url)!r}")
    tls = parts.scheme == "https"
    return Endpoint(
        url=url.rstrip("/"),
        tls=tls,
        host=host,
        port=port if port is not None else (443 if tls else 80),
        authority=parts.netloc,
        prefix=parts.path.rstrip("/"),
    )


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers (names in lower case) of a response.

    Attributes:
        status: Three digits.
        headers: The last value of each name.
        length: Content-Length, or None.
        keep_alive: Whether the connection may carry another request after the body.
    """

    status: int
    headers: Mapping[str, str]
    length: int | None
    keep_alive: bool


def parse_head(data: bytes) -> ResponseHead:
    """Parse the head of a response, without the empty line that ends it.

    Raises:
        NetworkError: If it is not one, or ambiguous about where its body ends.
    """
    status_line, *lines = data.split(b"\r\n")
    match = _STATUS_LINE.match(status_line)
    if match is None:
        raise NetworkError(f"answer is not HTTP/1.1: {status_line[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.match(line)
        if header is None:
            raise NetworkError(f"header is malformed: {line[:60]!r}")
        name, value = header[1].decode("ascii").lower(), header[2].decode("latin-1")
        if name == "content-length" and headers.get(name, value) != value:
            raise NetworkError("two different Content-Length headers")
        headers[name] = value
    length = headers.get("content-length")
    if length is not None and not _LENGTH.match(length):
        raise NetworkError(f"Content-Length is not a number: {length[:40]!r}")
    connection = headers.get("connection", "").lower()
    keep = connection == "keep-alive" if match[1] == b"0" else "close" not in connection
    return ResponseHead(
        status=int(match[2]),
        headers=headers,
        length=None if length is None else int(length),
        keep_alive=keep and "transfer-encoding" not in headers,
    )


@cache
def default_tls() -> ssl.SSLContext:
    """Return the process's TLS context: system certificates, host names checked."""
    return ssl.create_default_context()


class ClosedEarlyError(NetworkError):
    """The server closed before it answered: on a connection used before, try a new one."""


class Connection:
    """A connected socket with its buffer. One request at a time, from one thread.

    Attributes:
        endpoint: Where it leads.
        buffer: ``config.chunk_bytes`` that every read goes through.
        requests: How many requests it has carried.
        idle_since: Monotonic time of its last use.
    """

    def __init__(self, endpoint: Endpoint, config: NetConfig, sock: socket.socket) -> None:
        self.endpoint = endpoint
        self.buffer = memoryview(bytearray(config.chunk_bytes))
        self.requests = 0
        self.idle_since = 0.0
        self._config = config
        self._sock = sock

    def request(self, target: str, headers: Mapping[str, str]) -> tuple[ResponseHead, memoryview]:
        """Send a GET and read the response's head.

        Returns:
            The head, and what of the body came with it: a view into ``buffer``.

        Raises:
            NetworkError: If the connection breaks or the answer is not acceptable HTTP.
            StallError: If the head does not end within the header timeout.
        """
        lines = [f"GET {target} HTTP/1.1", f"Host: {self.endpoint.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        with self._translated("sending the request", unanswered=True):
            self._sock.settimeout(self._config.read_timeout_s)
            self._sock.sendall(data)
        self.requests += 1
        head, body = self._read_head()
        with self._translated("waiting for the answer"):
            self._sock.settimeout(self._config.read_timeout_s)
        return head, body

    def _read_head(self) -> tuple[ResponseHead, memoryview]:
        config, view = self._config, self.buffer
        deadline = time.monotonic() + config.header_timeout_s
        have = interim = 0
        while True:
            end = bytes(view[: min(have, config.max_header_bytes)]).find(b"\r\n\r\n")
            if end < 0:
                if have >= config.max_header_bytes:
                    raise NetworkError(
                        f"head of the answer is over {config.max_header_bytes} bytes"
                    )
                have += self._read_some(view[have : 2 * config.max_header_bytes], deadline, have)
                continue
            head = parse_head(bytes(view[:end]))
            if head.status >= 200:
                return head, view[end + 4 : have]
            interim += 1
            if head.status == 101 or interim > _MAX_INTERIM:
                raise NetworkError(f"answers {head.status} instead of the blob")
            rest = bytes(view[end + 4 : have])
            have = len(rest)
            view[:have] = rest

    def _read_some(self, into: memoryview, deadline: float, have: int) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StallError(f"no answer within {self._config.header_timeout_s:g} s")
        with self._translated("waiting for the answer", unanswered=have == 0):
            self._sock.settimeout(left)
            count = self._sock.recv_into(into)
        if count == 0 and have == 0:
            raise ClosedEarlyError("closed the connection before an answer")
        if count == 0:
            raise NetworkError("closed the connection within the head of its answer")
        return count

    def read(self, most: int, *, before: float | None = None) -> memoryview:
        """Return the next bytes of a body, at most ``most``; empty at the end of the stream.

        Args:
            most: How many.
            before: Monotonic time at which patience ends; None: ``read_timeout_s`` of silence.

        Raises:
            StallError: If nothing came in time.
            NetworkError: If the connection breaks.
        """
        with self._translated("reading"):
            if before is not None:
                left = before - time.monotonic()
                if left <= 0:
                    raise StallError("nothing more is read")
                self._sock.settimeout(min(left, self._config.read_timeout_s))
            count = self._sock.recv_into(self.buffer, min(most, len(self.buffer)))
        return self.buffer[:count]

    @contextmanager
    def _translated(self, doing: str, *, unanswered: bool = False) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            patience = self._sock.gettimeout() or 0.0
            raise StallError(f"nothing came for {patience:.3g} s while {doing}") from error
        except (ConnectionResetError, BrokenPipeError) as error:
            kind = ClosedEarlyError if unanswered else NetworkError
            raise kind(f"connection was reset while {doing}") from error
        except (OSError, ValueError) as error:
            raise NetworkError(f"connection failed while {doing}: {error}") from error

    def stale(self, now: float) -> bool:
        """Say whether an idle connection should not be used again (closed, or too old)."""
        if now - self.idle_since > self._config.idle_connection_s:
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def abort(self) -> None:
        """End what is going on, from any thread: a blocked read returns at once."""
        _shutdown(self._sock)

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._sock.close()


def open_connection(
    endpoint: Endpoint, config: NetConfig, cancel: Cancel, tls: ssl.SSLContext | None = None
) -> Connection:
    """Connect: resolve, try each address, shake hands; all within the connect timeout.

    Args:
        endpoint: Where to.
        config: Timeouts and buffer size.
        cancel: Ends the attempt at once.
        tls: Context for https; None is the default one.

    Raises:
        NetworkError: If no address answers, or the certificate is not trusted.
        TransferCancelledError: If it was cancelled.
    """
    deadline = time.monotonic() + config.connect_timeout_s
    addresses = _resolve(endpoint, config.connect_timeout_s)
    problem: NetworkError | None = None
    for index, (family, address) in enumerate(addresses):
        cancel.check()
        left = deadline - time.monotonic()
        if left <= 0:
            break
        # A black hole behind the first address must not use up the time of the others.
        patience = left / (len(addresses) - index) if index + 1 < len(addresses) else left
        try:
            sock = _connect(family, address, patience, cancel)
        except NetworkError as error:
            problem = error
            continue
        return _wrapped(endpoint, config, cancel, sock, tls, deadline)
    cancel.check()
    raise problem or StallError(f"no connection within {config.connect_timeout_s:g} s")


def _connect(
    family: socket.AddressFamily, address: Address, patience: float, cancel: Cancel
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(patience)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with cancel.hook(lambda: _shutdown(sock)):
            cancel.check()
            sock.connect(address)
    except TimeoutError as error:
        sock.close()
        raise StallError(f"connection to {address[0]} not accepted in {patience:.1f} s") from error
    except OSError as error:
        sock.close()
        raise NetworkError(f"cannot connect to {address[0]}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _wrapped(
    endpoint: Endpoint,
    config: NetConfig,
    cancel: Cancel,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    deadline: float,
) -> Connection:
    if not endpoint.tls:
        return Connection(endpoint, config, sock)
    wrapped = sock
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        secured = (tls or default_tls()).wrap_socket(
            sock, server_hostname=endpoint.host, do_handshake_on_connect=False
        )
        wrapped = secured  # it took the descriptor over
        with cancel.hook(lambda: _shutdown(secured)):
            cancel.check()
            secured.do_handshake()
    except BaseException as error:
        wrapped.close()
        cancel.check()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise NetworkError(
                f"certificate of {endpoint.host} is not trusted: {error.verify_message}"
            ) from error
        if isinstance(error, TimeoutError):
            raise StallError(f"no TLS handshake within {config.connect_timeout_s:g} s") from error
        if isinstance(error, (OSError, ValueError)):
            raise NetworkError(f"TLS handshake failed: {error}") from error
        raise
    return Connection(endpoint, config, wrapped)


def _shutdown(sock: socket.socket) -> None:
    # Not SSLSocket.shutdown: that one drops the TLS object, after which a read in another thread
    # would return raw bytes.
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _resolve(endpoint: Endpoint, seconds: float) -> list[tuple[socket.AddressFamily, Address]]:
    """Resolve a name. The C library's resolver has no deadline, so it runs in a thread of its own.

    Raises:
        NetworkError: If the name is unknown, or not resolved in time.
    """
    host, port = endpoint.host, endpoint.port
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass
    result: queue.SimpleQueue[list[tuple[socket.AddressFamily, Address]] | OSError] = (
        queue.SimpleQueue()
    )

    def look() -> None:
        try:
            result.put(_lookup(host, port, 0))
        except OSError as error:
            result.put(error)

    threading.Thread(target=look, name=f"resolve-{host}", daemon=True).start()
    try:
        found = result.get(timeout=seconds)
    except queue.Empty:
        raise StallError(f"name {host!r} not resolved within {seconds:g} s") from None
    if isinstance(found, OSError):
        raise NetworkError(f"cannot resolve {host!r}: {found.strerror or found}") from found
    return found


def _lookup(host: str, port: int, flags: int) -> list[tuple[socket.AddressFamily, Address]]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in infos]

"""Small answers over asyncio: GET of heads and JSON, POST of JSON, bounded in size and time.

Responses are judged by the same parser as blobs (``connection.parse_head``). A client of its own,
because ``import aiohttp`` costs a pull a tenth of a second of CPU: as much as moving 200 MB.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from shardcast.config import NetConfig
from shardcast.connection import (
    ClosedEarlyError,
    Endpoint,
    ResponseHead,
    default_tls,
    parse_head,
)
from shardcast.errors import LimitError, NetworkError, ShardcastError, StallError

_PIECE: Final = 64 * 1024
_MAX_INTERIM: Final = 4
_MAX_TRAILERS: Final = 64
"""Header fields after a chunked body: nobody of us sends any."""
_HAPPY_EYEBALLS_S: Final = 0.25
"""RFC 8305: how long the first address may take before the next is tried beside it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response: status, headers with names in lower case, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class UnansweredError(NetworkError):
    """A POST was sent, and nobody knows whether it had an effect: no proper answer came."""


@dataclass(slots=True)
class _Line:
    """An open connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False
    idle_since: float = 0.0


class HttpSession:
    """Keeps connections to any number of servers. For one event loop."""

    def __init__(
        self,
        config: NetConfig,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        most: int | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            config: Timeouts.
            headers: Sent with every request.
            tls: For https; None means the system's certificates.
            most: Connections to one server, in use or idle; further requests wait. None: any
                number.
        """
        self._config = config
        self._most = most
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._headers = dict(headers or {})
        self._tls = tls
        self._idle: dict[str, list[_Line]] = {}
        self._closed = False

    def set_header(self, name: str, value: str) -> None:
        """Send a header with every request that begins from now on."""
        self._headers[name] = value

    async def get(self, endpoint: Endpoint, path: str, *, limit: int, timeout_s: float) -> Answer:
        """Get ``path`` (below the endpoint's prefix). Cancellation closes the connection.

        Where connections are bounded, it may have to wait for one that becomes free.

        Args:
            endpoint: The server.
            path: Path and query.
            limit: Most bytes of the body.
            timeout_s: From the request to the last byte; connecting has its own timeout.

        Raises:
            StallError: If the time is over.
            NetworkError: If the server cannot be reached or does not answer properly.
            LimitError: If the body is over its limit.
        """
        if self._most is None:
            return await self._get(endpoint, path, limit, timeout_s)
        # By server: one that does not answer must not hold up the others.
        async with self._turns.setdefault(endpoint.url, asyncio.Semaphore(self._most)):
            return await self._get(endpoint, path, limit, timeout_s)

    async def post(
        self, endpoint: Endpoint, path: str, body: bytes, *, limit: int, timeout_s: float
    ) -> Answer:
        """Post JSON to ``path``, once, over a connection of its own. Cancellation closes it.

        Args:
            endpoint: The server.
            path: Path and query.
            body: The JSON.
            limit: Most bytes of the answer.
            timeout_s: From the request to the last byte; connecting has its own timeout.

        Raises:
            UnansweredError: If it was sent and not answered properly, or not in time.
            NetworkError: If the server cannot be reached: nothing was sent.
        """
        line = await self._connect(endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                return (await self._exchange(line, endpoint, path, limit, body))[0]
        except TimeoutError as error:
            raise UnansweredError(f"no answer to {path} in {timeout_s:g} s") from error
        except ShardcastError as error:
            raise UnansweredError(f"{path}: {error.message}") from error
        finally:
            self._put(endpoint, line, keep=False)

    async def _get(self, endpoint: Endpoint, path: str, limit: int, timeout_s: float) -> Answer:
        while True:
            line = self._take(endpoint) or await self._connect(endpoint)
            done = False
            try:
                async with asyncio.timeout(timeout_s):
                    answer, done = await self._exchange(line, endpoint, path, limit)
                return answer
            except ClosedEarlyError:
                if not line.used:
                    raise
            except TimeoutError as error:
                raise StallError(f"no answer to {path} in {timeout_s:g} s") from error
            finally:
                self._put(endpoint, line, keep=done)

    async def _connect(self, endpoint: Endpoint) -> _Line:
        tls = (self._tls or default_tls()) if endpoint.tls else None
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                reader, writer = await asyncio.open_connection(
                    endpoint.host,
                    endpoint.port,
                    ssl=tls,
                    limit=_PIECE,
                    happy_eyeballs_delay=None if _is_address(endpoint.host) else _HAPPY_EYEBALLS_S,
                )
        except TimeoutError as error:
            raise StallError(f"no connection in {self._config.connect_timeout_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise NetworkError(
                f"certificate of {endpoint.host} is not trusted: {error.verify_message}"
            ) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise NetworkError(f"cannot connect to {endpoint.host}: {why}") from error
        return _Line(reader, writer)

    async def _exchange(
        self, line: _Line, endpoint: Endpoint, path: str, limit: int, content: bytes | None = None
    ) -> tuple[Answer, bool]:
        method = "GET" if content is None else "POST"
        lines = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint.authority}"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if content is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
            lines.append("Connection: close")
        with _translated():
            request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
            line.writer.write(request + (content or b""))
            await line.writer.drain()
            head = await self._head(line)
        if head.length is not None and head.length > limit:
            raise LimitError(f"{path} has {head.length} bytes, over its limit of {limit}")
        with _translated():
            body, framed = await _body(line.reader, head, limit, path)
        return Answer(head.status, head.headers, body), framed and head.keep_alive

    async def _head(self, line: _Line) -> ResponseHead:
        for _ in range(_MAX_INTERIM + 1):
            try:
                data = await line.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise NetworkError("closed the connection within its answer") from error
                raise ClosedEarlyError("closed the connection before an answer") from error
            except ConnectionResetError as error:
                raise ClosedEarlyError("reset the connection before an answer") from error
            except asyncio.LimitOverrunError as error:
                raise NetworkError("head of its answer is too long") from error
            if len(data) > self._config.max_header_bytes:
                raise NetworkError("head of its answer is too long")
            head = parse_head(data[:-4])
            if head.status >= 200:
                return head
        raise NetworkError("answers with nothing but interim responses")

    def _take(self, endpoint: Endpoint) -> _Line | None:
        idle = self._idle.get(endpoint.url, [])
        while idle:
            line = idle.pop()
            fresh = time.monotonic() - line.idle_since < self._config.idle_connection_s
            if fresh and not line.reader.at_eof() and not line.writer.is_closing():
                line.used = True
                return line
            line.writer.transport.abort()
        return None

    def _put(self, endpoint: Endpoint, line: _Line, *, keep: bool) -> None:
        if keep and not self._closed:
            line.idle_since = time.monotonic()
            self._idle.setdefault(endpoint.url, []).append(line)
        else:
            line.writer.transport.abort()

    async def close(self) -> None:
        """Close every connection: idle ones now, one in use when its request ends."""
        self._closed = True
        lines = [line for idle in self._idle.values() for line in idle]
        self._idle.clear()
        for line in lines:
            line.writer.transport.abort()
        for line in lines:
            with suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(line.writer.wait_closed(), 1)


async def _body(
    reader: asyncio.StreamReader, head: ResponseHead, limit: int, path: str
) -> tuple[bytes, bool]:
    """Read a body; return it and whether its end was told, so that the connection is still good."""
    coding = head.headers.get("transfer-encoding")
    if head.status in (204, 304):
        return b"", True
    if coding is not None:
        if coding.strip().lower() != "chunked" or head.length is not None:
            raise NetworkError(f"sends {path} with an unclear Transfer-Encoding")
        return await _chunked(reader, limit, path), True
    if head.length is not None:
        return await reader.readexactly(head.length), True
    body = bytearray()
    while piece := await reader.read(_PIECE):
        body += piece
        _bound(len(body), limit, path)
    return bytes(body), False


async def _chunked(reader: asyncio.StreamReader, limit: int, path: str) -> bytes:
    """Read a chunked body (RFC 9112, section 7.1); trailers are dropped."""
    body = bytearray()
    while True:
        size_line = (await reader.readuntil(b"\r\n"))[:-2].split(b";")[0].strip()
        if not size_line or len(size_line) > 8 or not _is_hex(size_line):
            raise NetworkError(f"sends {path} with a malformed chunk")
        size = int(size_line, 16)
        _bound(len(body) + size, limit, path)
        if size == 0:
            break
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise NetworkError(f"sends {path} with a malformed chunk")
    for _ in range(_MAX_TRAILERS):
        if await reader.readuntil(b"\r\n") == b"\r\n":
            return bytes(body)
    raise NetworkError(f"sends {path} with trailers that do not end")


def _is_hex(text: bytes) -> bool:
    return all(char in b"0123456789abcdefABCDEF" for char in text)


def _bound(size: int, limit: int, path: str) -> None:
    if size > limit:
        raise LimitError(f"{path} is over its limit of {limit} bytes")


def _is_address(host: str) -> bool:
    """Say whether a host is an address: then there is nothing to race.

    And a race that is cancelled leaves its winner's socket to the garbage collector (Python 3.11).
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (ShardcastError, TimeoutError):
        raise
    except asyncio.IncompleteReadError as error:
        raise NetworkError(
            f"closed the connection within its answer, after {len(error.partial)} bytes"
        ) from error
    except asyncio.LimitOverrunError as error:
        raise NetworkError("sends an endless line") from error
    except (OSError, ValueError) as error:
        raise NetworkError(f"connection failed: {error}") from error

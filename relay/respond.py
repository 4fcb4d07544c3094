"""Answers: headers, conditions, ranges, and file bytes by sendfile.

The bytes of blobs never pass through this process: ``loop.sendfile`` moves them from the page
cache to the socket (which needs the stock asyncio loop; docs/adr/0005).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

import shardcast
from relay.pacing import Stream
from shardcast.protocol import wire
from shardcast.protocol.limits import MIB
from shardcast.protocol.wire import ByteRange, UnsatisfiableRangeError
from shardcast.store.files import MEMORY_FILE_SYSTEMS, file_system_of_device

SERVER: Final = f"shardcast/{shardcast.__version__}"
JSON_TYPE: Final = "application/json"

_PIECE_BYTES: Final = 16 * MIB
"""What one readiness check of the page cache covers, and how much is read ahead at once: a shard."""
_PROBES: Final = 4
_READ_AHEAD_STEP: Final = 512 * 1024


def client_asking(request: web.BaseRequest) -> str:
    """Return the client that a request is counted for (``relay.admission``)."""
    return str(getattr(request.protocol, "asking", ""))


class AbortedResponseError(Exception):
    """The rest of a response will not come: its connection was aborted."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What every answer says about this relay.

    Attributes:
        node: The store's node id.
        via: This hop's entry in Via.
    """

    node: str
    via: str

    def headers(self, request: web.BaseRequest, depth: int) -> dict[str, str]:
        """Return the headers that every answer carries."""
        before = request.headers.get("Via", "")
        if len(before) > 1024 or not (before.isascii() and before.isprintable()):
            before = ""
        return {
            "Server": SERVER,
            "Via": f"{before}, {self.via}" if before else self.via,
            wire.DEPTH_HEADER: str(depth),
            wire.NODE_HEADER: self.node,
        }


def json_answer(status: int, body: Mapping[str, Any], **headers: str) -> web.Response:
    """Return a JSON document that nobody caches."""
    text = json.dumps(body, separators=(",", ":")) + "\n"
    return web.Response(
        status=status,
        body=text.encode(),
        headers={
            "Content-Type": JSON_TYPE,
            "Cache-Control": wire.ERROR_CACHE_CONTROL,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        },
    )


def error_answer(status: int, code: str, message: str, **headers: str) -> web.Response:
    """Return an error: ``{"error": code, "message": ...}``."""
    return json_answer(status, {"error": code, "message": message[:2000]}, **headers)


def busy_answer(message: str, retry_after_s: int = 1) -> web.Response:
    """Return 503 with Retry-After."""
    return error_answer(503, "busy", message, Retry_After=str(retry_after_s))


def blob_headers(digest: str, source: str) -> dict[str, str]:
    """Return the headers of a blob, apart from its length."""
    return {
        "ETag": wire.blob_etag(digest),
        "Cache-Control": wire.BLOB_CACHE_CONTROL,
        "Content-Type": wire.BLOB_CONTENT_TYPE,
        "Accept-Ranges": "bytes",
        wire.SOURCE_HEADER: source,
    }


def unchanged_answer(request: web.BaseRequest, digest: str) -> web.Response | None:
    """Return the answer that If-Match and If-None-Match lead to before any byte is looked at.

    A blob never changes, so both can be answered by its name alone (RFC 9110 section 13.2.2).
    """
    etag = wire.blob_etag(digest)
    if_match = request.headers.get("If-Match")
    if if_match is not None and not wire.etag_in(if_match, etag, strong=True):
        return error_answer(412, "precondition", f"blob {digest} has the ETag {etag}")
    if wire.etag_in(request.headers.get("If-None-Match"), etag):
        headers = {"ETag": etag, "Cache-Control": wire.BLOB_CACHE_CONTROL}
        return web.Response(status=304, headers=headers)
    return None


def requested_range(request: web.BaseRequest, digest: str, total: int) -> ByteRange | None:
    """Return the part that the request wants, None for the whole.

    Raises:
        UnsatisfiableRangeError: If it lies outside; answer 416.
    """
    header = request.headers.get("Range")
    if header is None or request.method != "GET":
        return None
    if not wire.if_range_matches(request.headers.get("If-Range"), wire.blob_etag(digest)):
        return None
    return wire.parse_range(header, total)


def unsatisfiable_answer(error: UnsatisfiableRangeError, total: int) -> web.Response:
    """Return 416 as RFC 9110 section 15.5.17 says."""
    return error_answer(416, "range", error.message, Content_Range=f"bytes */{total}")


def blob_response(
    digest: str, source: str, total: int, part: ByteRange | None
) -> web.StreamResponse:
    """Return the head of a 200 or 206 for a blob."""
    headers = blob_headers(digest, source)
    if part is not None:
        headers["Content-Range"] = part.content_range
    response = web.StreamResponse(status=200 if part is None else 206, headers=headers)
    response.content_length = total if part is None else part.length
    return response


# --- bytes --------------------------------------------------------------------------------------


class _Descriptor:
    """What ``loop.sendfile`` wants of a file."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd


async def send_file(
    request: web.BaseRequest,
    fd: int,
    offset: int,
    count: int,
    pace: Stream | None,
    counted: Callable[[int], None],
    reading: Executor | None = None,
) -> None:
    """Send ``count`` bytes of a file to the client.

    A cancellation leaves the response unfinished; the connection is unusable then.

    Args:
        request: Whose answer it is.
        fd: The file.
        offset: Where to begin.
        count: How many.
        pace: Holds it back; None: nothing does.
        counted: Told how many bytes have just been given to the client's connection.
        reading: Whose threads wait for the disk; None: the loop's own.

    Raises:
        ConnectionError: If the client is gone.
        AbortedResponseError: If the file is too short or cannot be read.
    """
    loop = asyncio.get_running_loop()
    while count:
        size = min(count, _PIECE_BYTES if pace is None else pace.piece_bytes)
        if pace is not None:
            await pace.take(size)
        begun = loop.time()
        if not in_page_cache(fd, offset, size):
            await loop.run_in_executor(reading, read_ahead, fd, offset, size)
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("client is gone")
        try:
            file: Any = _Descriptor(fd)
            with _corked(transport):
                sent = await loop.sendfile(transport, file, offset, size, fallback=False)
        except (RuntimeError, asyncio.SendfileNotAvailableError) as error:
            # asyncio hides the error of a first sendfile; nearly always the client has gone.
            raise ConnectionResetError("client is gone") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise AbortedResponseError(f"reading failed: {error}") from error
        counted(sent)
        if sent != size:
            raise AbortedResponseError(f"file ended {size - sent} bytes early")
        if pace is not None:
            pace.sent(size, loop.time() - begun)
        offset += size
        count -= size


@contextlib.contextmanager
def _corked(transport: asyncio.BaseTransport) -> Iterator[None]:
    """Send full segments only while the block runs, then what is left (tcp(7), TCP_CORK).

    sendfile moves 64 KiB at a time, and TCP_NODELAY, which aiohttp sets, would end each of them
    with a small segment of its own: twice the packets over loopback.
    """
    sock = transport.get_extra_info("socket")
    _cork(sock, 1)
    try:
        yield
    finally:
        _cork(sock, 0)


def _cork(sock: Any, value: int) -> None:
    if sock is not None and hasattr(socket, "TCP_CORK"):
        with contextlib.suppress(OSError):  # the client is gone: sendfile says so
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, value)


def in_page_cache(fd: int, offset: int, count: int) -> bool:
    """Guess from a few pages whether a piece of a file can be sent without waiting for a disk."""
    buffer = bytearray(1)
    step = max(1, (count - 1) // (_PROBES - 1))
    try:
        for probe in range(_PROBES):
            position = offset + min(probe * step, count - 1)
            os.preadv(fd, [buffer], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return True  # sendfile meets the same error and reports it
        return _in_memory(os.fstat(fd).st_dev)  # tmpfs does not know the flag, and needs none
    return True


@functools.lru_cache(maxsize=64)
def _in_memory(device: int) -> bool:
    return file_system_of_device(device) in MEMORY_FILE_SYSTEMS


def read_ahead(fd: int, offset: int, count: int) -> None:
    """Bring a piece of a file into the page cache; returns when it is there. Blocking."""
    try:
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_WILLNEED)
        for position in range(offset, offset + count, _READ_AHEAD_STEP):
            os.pread(fd, 1, position)
        os.pread(fd, 1, offset + count - 1)
    except OSError:
        return  # sendfile meets the same error and reports it


def abort(request: web.BaseRequest) -> None:
    """Cut the connection: after the first byte this is the only honest way to say "wrong"."""
    transport = request.transport
    if transport is not None:
        transport.abort()

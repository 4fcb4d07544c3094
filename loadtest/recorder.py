"""A TCP proxy that forwards bytes untouched and notes which request arrived when.

It stands between two programs that know nothing of it, so what it counts is what crossed the
hop. One thread a direction: enough for tests, useless for throughput.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from loadtest.http_wire import WireError, parse_head

_MAX_CONNECTIONS = 1024  # at once; more wait for a place
_CHUNK_BYTES = 256 * 1024
_CONNECT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Request:
    """One request as it came in.

    Attributes:
        method: GET, HEAD, ...
        target: Path and query.
        unix_ms: When its head was complete, on the clock that events carry.
    """

    method: str
    target: str
    unix_ms: float

    @property
    def is_blob(self) -> bool:
        """Whether it asks for a blob."""
        return "/blobs/" in self.target


class Recorder:
    """Listens on a free loopback port in front of `upstream`; a context manager.

    Attributes:
        url: What clients use instead of the upstream's URL.
    """

    def __init__(self, upstream: str) -> None:
        """Prepare to forward to the base URL `upstream`."""
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._requests: list[Request] = []
        self._news = threading.Condition()
        self._open: set[socket.socket] = set()
        self._closing = False
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        """Start to accept."""
        threading.Thread(target=self._accept, name="recorder", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the listener and break every connection; the threads end with them."""
        with self._news:
            self._closing = True
            for sock in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._news.wait_for(lambda: not self._open, _CLOSE_TIMEOUT_S)
        self._listener.close()

    def requests(self, where: Callable[[Request], bool] = lambda _request: True) -> list[Request]:
        """Return the requests so far that satisfy `where`, oldest first."""
        with self._news:
            return [request for request in self._requests if where(request)]

    def wait_request(
        self, where: Callable[[Request], bool], *, timeout: float, count: int = 1
    ) -> Request:
        """Return the `count`-th request that satisfies `where`, now or when it comes.

        Raises:
            TimeoutError: Fewer came within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while len(found := [r for r in self._requests if where(r)]) < count:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{len(found)} of {count} requests within {timeout:g} s")
                self._news.wait(left)
        return found[count - 1]

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _address = self._listener.accept()
            except OSError:  # closed: the recorder is done
                return
            threading.Thread(target=self._link, args=(client,), daemon=True).start()

    def _link(self, client: socket.socket) -> None:
        """Carry one connection, in both directions, until both have ended."""
        with client, self._places:
            try:
                server = socket.create_connection(self._upstream, timeout=_CONNECT_TIMEOUT_S)
            except OSError:
                return
            with server:
                pair = (client, server)
                for sock in pair:
                    sock.settimeout(None)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._news:
                    if self._closing:
                        return
                    self._open.update(pair)
                down = threading.Thread(target=_pump, args=(server, client), daemon=True)
                down.start()
                self._upward(client, server)
                down.join()
                with self._news:
                    self._open.difference_update(pair)
                    self._news.notify_all()

    def _upward(self, client: socket.socket, server: socket.socket) -> None:
        heads = _RequestHeads()

        def note(data: bytes) -> None:
            now = time.time() * 1000
            found = [Request(method, target, now) for method, target in heads.feed(data)]
            if found:
                with self._news:
                    self._requests += found
                    self._news.notify_all()

        _pump(client, server, note)


class _RequestHeads:
    """Finds request heads in a client's byte stream, stepping over bodies."""

    def __init__(self) -> None:
        self._buffer = b""
        self._skip = 0

    def feed(self, data: bytes) -> list[tuple[str, str]]:
        self._buffer += data
        found = []
        while self._buffer:
            step = min(self._skip, len(self._buffer))
            self._buffer = self._buffer[step:]
            self._skip -= step
            parsed = parse_head(self._buffer)
            if parsed is None:
                break
            message, used = parsed
            method, target, _version = message.first_line.split(" ", 2)
            found.append((method, target))
            self._buffer = self._buffer[used:]
            self._skip = message.length
        return found


def _pump(
    source: socket.socket,
    sink: socket.socket,
    note: Callable[[bytes], None] = lambda _data: None,
) -> None:
    with contextlib.suppress(OSError, WireError):
        while data := source.recv(_CHUNK_BYTES):
            note(data)
            sink.sendall(data)
    for sock, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            sock.shutdown(how)

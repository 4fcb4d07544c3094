"""Listening, connections and draining: aiohttp's low-level server with our own bounds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from relay import respond
from relay.config import split_listen
from relay.handlers import Handlers
from relay.node import Node
from shardcast.errors import UsageError

log = logging.getLogger("relay.server")

_LINGER_S: Final = 5.0
"""How long the body of a refused request is read and thrown away."""
_BACKLOG: Final = 1024
_ACCEPT_AT_ONCE: Final = 16
"""Connections that asyncio accepts before it looks at any: it must not run out of descriptors in
a burst of connections that are then refused."""
_READ_BYTES: Final = 256 * 1024


class Connection(RequestHandler):
    """One client connection: counted, and bounded in time until its first request."""

    __slots__ = ("busy", "client", "header_timer", "let_in", "node")

    def __init__(self, node: Node, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.node = node
        self.client = ""
        self.let_in: bool | None = None
        self.busy = 0
        self.header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let it in, or prepare to refuse it."""
        peer = transport.get_extra_info("peername")
        self.client = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        admission = self.node.admission
        if admission.enter(self.client):
            self.let_in = True
        else:
            self.node.metrics.refused.inc()
            if not admission.refuse():
                assert isinstance(transport, asyncio.Transport)
                super().connection_made(transport)
                transport.abort()
                return
            self.let_in = False
        _tune(transport, self.node.config.limits.stuck_timeout_s)
        super().connection_made(transport)
        self.header_timer = asyncio.get_running_loop().call_later(
            self.node.config.limits.header_timeout_s, self._no_request
        )

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self.first_request()
        if self.let_in:
            self.node.admission.leave(self.client)
        elif self.let_in is False:
            self.node.admission.refused_left()
        self.let_in = None
        super().connection_lost(exc)

    def first_request(self) -> None:
        """A whole request head has come."""
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def _no_request(self) -> None:
        self.header_timer = None
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP request at all: short, and without echoing it."""
        del message
        if request.writer.output_size > 0:
            raise ConnectionResetError("a response is under way already")
        log.debug("%s: %s", self.client, exc)
        text = "the request is malformed" if status == 400 else "the request failed"
        response = respond.error_answer(status, "malformed", text)
        response.headers["Server"] = respond.SERVER
        response.force_close()
        return response


class Server:
    """The listening sockets and every connection."""

    def __init__(self, node: Node, handlers: Handlers) -> None:
        self._node = node
        self._handlers = handlers
        limits = node.config.limits
        self._web = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=log,
            keepalive_timeout=limits.idle_timeout_s,
            lingering_time=_LINGER_S,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,  # bodies are what their digest says; nobody inflates here
        )
        self._kwargs = dict(self._web._kwargs)
        self._servers: list[asyncio.Server] = []
        self._idle = asyncio.Event()
        self._busy = 0

    async def listen(self) -> str:
        """Bind and listen; return the URL.

        Raises:
            UsageError: If the address cannot be had.
        """
        host, port = split_listen(self._node.config.listen)
        loop = asyncio.get_running_loop()
        sockets = await asyncio.to_thread(bind, host, port)
        for sock in sockets:
            server = await loop.create_server(self._connection, sock=sock, backlog=_ACCEPT_AT_ONCE)
            self._servers.append(server)
            sock.listen(_BACKLOG)  # asyncio uses one number for both
        return url_of(host, sockets[0].getsockname())

    def _connection(self) -> Connection:
        return Connection(self._node, self._web, loop=asyncio.get_running_loop(), **self._kwargs)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.first_request()
        if connection.let_in is False:
            response = respond.busy_answer("too many connections", 2)
            response.force_close()
            return response
        connection.busy += 1
        self._busy += 1
        try:
            return await self._handlers(request)
        finally:
            connection.busy -= 1
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Stop accepting, let running responses finish for a while, then close everything."""
        for server in self._servers:
            server.close()
        for connection in self._web.connections:
            if isinstance(connection, Connection) and not connection.busy:
                connection.force_close()
        deadline = asyncio.get_running_loop().time() + seconds
        while self._busy:
            self._idle.clear()
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                log.warning("%d requests did not end within %.0f s", self._busy, seconds)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._idle.wait()
        await self._web.shutdown(1.0)


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind every address of a host to one port; ``::`` takes IPv4 as well.

    Raises:
        UsageError: If no address can be had, or one is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--listen: host {host!r} is not known: {error}") from error
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _name, address in dict.fromkeys(found):
        if sockets and port == 0:
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        try:
            sockets.append(_bind_one(family, kind, protocol, address))
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
    if not sockets or (problem is not None and problem.errno == errno.EADDRINUSE):
        for sock in sockets:
            sock.close()
        raise UsageError(f"--listen {host}:{port}: {problem}")
    return sockets


def _bind_one(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            dual = address[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def url_of(host: str, address: Any) -> str:
    """Return the URL that reaches a listening socket from this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a name, no bind
    return f"http://[{name}]:{address[1]}" if ":" in name else f"http://{name}:{address[1]}"


def _tune(transport: asyncio.BaseTransport, stuck_s: float) -> None:
    """Let the kernel give up on a reader that takes nothing at all."""
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stuck_s * 1000))

"""Connections, from the first to the last: aiohttp's low-level server with our own bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import OrderedDict
from collections.abc import Collection
from math import ceil
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from relay import respond
from relay.admission import client_of
from relay.handlers import Handlers
from relay.listening import BACKLOG, Listening
from relay.node import Node
from relay.sending import QUEUED_BYTES, queue_at_most

log = logging.getLogger("relay.server")

_LINGER_S: Final = 5.0
"""How long the body of a refused request is read and thrown away."""
_ACCEPT_AT_ONCE: Final = 16
"""Connections that asyncio accepts before it looks at any: it must not run out of descriptors in
a burst of connections that are then refused."""
_READ_BYTES: Final = 256 * 1024
_LOOK_S: Final = 0.01
"""Between two looks at the connections while draining."""
_IDLE_S: Final = 1.0
"""A connection that has been idle for so long makes room where there are too many."""
_REFUSAL_S: Final = 0.5
"""How long the answer to a request over the rate is held back at most, so that a client that asks
again at once cannot keep the relay busy with refusing."""
_ALWAYS: Final = ("/healthz", "/readyz")
"""Never refused: whoever watches the relay must hear the truth. But not at any rate at once."""


class Connection(RequestHandler):
    """One client connection: counted, and bounded in time until its first request."""

    __slots__ = (
        "active",
        "asking",
        "busy",
        "client",
        "fast",
        "header_timer",
        "idlers",
        "let_in",
        "node",
        "proxy",
    )

    def __init__(
        self, node: Node, idlers: OrderedDict[Connection, float], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.node = node
        self.idlers = idlers
        self.proxy = False
        self.fast = False
        self.client = self.asking = ""
        self.let_in: bool | None = None
        self.busy = 0
        self.active = 0.0
        self.header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let it in, or prepare to refuse it."""
        self.touch()
        self.client = client_of(transport.get_extra_info("peername"))
        admission = self.node.admission
        self.proxy = admission.is_proxy(self.client)
        if self._enter() or (self._make_room() and self._enter()):
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

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        self.touch()
        super().data_received(data)

    def touch(self) -> None:
        """Something came or went."""
        self.active = asyncio.get_running_loop().time()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self.first_request()
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Count it no longer."""
        self.idlers.pop(self, None)
        if self.let_in:
            self.node.admission.connections.leave(self.client)
        elif self.let_in is False:
            self.node.admission.refused_left()
        self.let_in = None

    def _enter(self) -> bool:
        return self.node.admission.connections.enter(self.client, limited=not self.proxy)

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest, for a client that has none yet."""
        connections = self.node.admission.connections
        if connections.taken < connections.most or connections.held(self.client):
            return False
        if not self.idlers:
            return False
        oldest, since = next(iter(self.idlers.items()))
        if asyncio.get_running_loop().time() - since < _IDLE_S:
            return False
        oldest.leave()
        oldest.force_close()
        return True

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
        self._idlers: OrderedDict[Connection, float] = OrderedDict()
        self._servers: list[tuple[asyncio.Server, socket.socket]] = []
        self._listening: Listening | None = None

    async def start(self, listening: Listening) -> None:
        """Accept connections; the sockets are this server's from now on."""
        self._listening = listening
        await self.resume()

    async def resume(self) -> None:
        """Accept connections (again)."""
        loop = asyncio.get_running_loop()
        assert self._listening is not None
        for sock in self._listening.sockets:
            own = sock.dup()
            server = await loop.create_server(self._connection, sock=own, backlog=_ACCEPT_AT_ONCE)
            self._servers.append((server, own))
            own.listen(BACKLOG)  # asyncio uses one number for both

    async def pause(self) -> None:
        """Accept nothing; whoever connects waits in the kernel's queue."""
        servers, self._servers = self._servers, []
        for _server, own in servers:
            asyncio.get_running_loop().remove_reader(own)
        # A server that is closed drops what it has accepted and not looked at yet.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for server, _own in servers:
            server.close()

    async def stop_accepting(self, kept: Collection[str] = ()) -> None:
        """Accept no more, for good.

        What waits in the queue of a socket that nobody else listens on is let in first: the
        kernel would reset it.

        Args:
            kept: Addresses (``str(getsockname())``) that another process goes on listening on.
        """
        await self.pause()
        listening, self._listening = self._listening, None
        if listening is None:
            return
        loop = asyncio.get_running_loop()
        waiting = []
        for sock in listening.sockets:
            if not listening.passed and str(sock.getsockname()) not in kept:
                waiting += waiting_on(sock)
            sock.close()
        try:
            while waiting:
                with contextlib.suppress(OSError):
                    await loop.connect_accepted_socket(self._connection, waiting.pop(0))
        finally:  # cancelled: the drain shall end at once
            for connection in waiting:
                connection.close()

    def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        return Connection(self._node, self._idlers, self._web, loop=loop, **self._kwargs)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.first_request()
        if connection.let_in is False:
            return _refusal(respond.busy_answer("too many connections", 2), close=True)
        connection.busy += 1
        self._idlers.pop(connection, None)
        try:
            response = await self._admit(request, connection)
            if request.method == "CONNECT" or "Upgrade" in request.headers:
                # No tunnel begins here, and the parser is in doubt what the next bytes would be.
                response.force_close()
            return response
        finally:
            connection.busy -= 1
            connection.touch()
            if connection.let_in:
                self._idlers[connection] = asyncio.get_running_loop().time()

    async def _admit(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        """Answer a request, if its client may ask at all at the moment."""
        codings = request.headers.getall("Transfer-Encoding", ())
        if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
            text = "send bodies plain or chunked"
            return _refusal(respond.error_answer(501, "coding", text), close=True)
        admission, metrics = self._node.admission, self._node.metrics
        client = connection.client
        if connection.proxy:
            client = admission.behind(client, request.headers.getall("X-Forwarded-For", ()))
        connection.asking = client
        wait = admission.rate.ask(client)
        if request.rel_url.raw_path in _ALWAYS:
            await asyncio.sleep(min(wait, _REFUSAL_S))
            return await self._handlers(request)
        if wait > 0:
            metrics.refused_requests.labels(reason="rate").inc()
            await asyncio.sleep(min(wait, _REFUSAL_S))
            text = "too many requests by this client"
            return _refusal(respond.error_answer(429, "rate", text, Retry_After=str(ceil(wait))))
        if not admission.requests.enter(client):
            metrics.refused_requests.labels(reason="busy").inc()
            return _refusal(respond.busy_answer("too many requests at once", 1))
        try:
            return await self._handlers(request)
        finally:
            admission.requests.leave(client)

    async def drain(self, seconds: float) -> None:
        """Let every connection end in its own time, for a while.

        A response that began is finished. A connection without a request is closed once it has
        been silent for ``quiet_s``: a client that is about to use it again would find it closed
        under its request. Who does use it again is answered, with ``Connection: close``.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        quiet = self._node.config.limits.quiet_s
        # Once more than needed: a connection accepted last is made known a moment later.
        await asyncio.sleep(_LOOK_S)
        while True:
            now = clock()
            left = 0
            for connection in self._web.connections:
                if isinstance(connection, Connection) and connection.transport is not None:
                    if not connection.busy and now - connection.active >= quiet:
                        connection.force_close()
                    else:
                        left += 1
            if not left:
                return
            if now >= deadline:
                log.warning("%d connections did not end within %.0f s", left, seconds)
                return
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Cut off whatever is left."""
        await self.stop_accepting()
        for connection in self._web.connections:
            if isinstance(connection, Connection) and connection.transport is not None:
                connection.transport.abort()
        await self._web.shutdown(1.0)


def waiting_on(sock: socket.socket) -> list[socket.socket]:
    """Take every connection that waits to be accepted."""
    found = []
    with contextlib.suppress(OSError):  # none is left, or no descriptor
        while True:
            connection, _address = sock.accept()
            connection.setblocking(False)
            found.append(connection)
    return found


def _tune(transport: asyncio.BaseTransport, stuck_s: float) -> None:
    """Let the kernel give up on a reader that takes nothing at all, and queue little for any."""
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stuck_s * 1000))
    queue_at_most(sock, QUEUED_BYTES)


def _refusal(response: web.Response, *, close: bool = False) -> web.Response:
    """Return an answer that no handler has seen, complete."""
    response.headers["Server"] = respond.SERVER
    if close:
        response.force_close()
    return response

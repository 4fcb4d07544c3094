"""A TCP server over asyncio that leaves nothing behind: every connection ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

_LOOKS: Final = 3
"""Turns of the event loop from a connection that is accepted to one that is known here."""


class StreamServer:
    """Serves each connection in a task; for one event loop.

    Args:
        serve: Serves one connection, which is closed afterwards. A client that leaves ends it.
    """

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self, sock: socket.socket | None = None, *, port: int = 0) -> str:
        """Accept on a listening socket, or on a port of this machine; return the base URL."""
        if sock is not None:
            self._server = await asyncio.start_server(self._accepted, sock=sock)
        else:
            self._server = await asyncio.start_server(self._accepted, "127.0.0.1", port)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._tasks.values():
            writer.transport.abort()

    async def close(self) -> None:
        """Accept no more, break every connection, and wait until all are gone."""
        server, self._server = self._server, None
        if server is not None:
            for sock in server.sockets:
                asyncio.get_running_loop().remove_reader(sock.fileno())
            # A server that is closed drops what it has accepted and not looked at yet, and leaves
            # it to the garbage collector (Python 3.11).
            for _ in range(_LOOKS):
                await asyncio.sleep(0)
            server.close()
        self.cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the last transports tell their end

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No coroutine: asyncio's own callback complains of a task that was cancelled.
        task = asyncio.get_running_loop().create_task(self._one(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()
            await writer.wait_closed()

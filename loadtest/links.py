"""TCP links that can be slow, frozen or cut: proxies on loopback, all on one thread's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from loadtest.streams import StreamServer

_CHUNK_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 10.0


class Link:
    """One proxied address; made by `Links.add`.

    Attributes:
        url: What clients use instead of the upstream's URL.
    """

    def __init__(self, upstream: str, rate: int | None, loop: asyncio.AbstractEventLoop) -> None:
        """Bind a free port; bytes towards the client pass at `rate` a second a connection."""
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._rate = rate
        self._loop = loop
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._whole = True
        self._open: set[asyncio.WriteTransport] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._server = StreamServer(self._connected)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def freeze(self) -> None:
        """Pass nothing on, in either direction; connections stay."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def cut(self) -> None:
        """Break every connection, and each new one."""
        self._loop.call_soon_threadsafe(self._break)

    def mend(self) -> None:
        """Work again."""

        def whole() -> None:
            self._whole = True
            self._flowing.set()

        self._loop.call_soon_threadsafe(whole)

    async def listen(self) -> None:
        """Begin to accept."""
        await self._server.start(self._socket)

    async def close(self) -> None:
        """Stop, and break what is open."""
        self._break()
        await self._server.close()

    def _break(self) -> None:
        self._whole = False
        for transport in self._open:
            transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = [writer]
        self._open.add(writer.transport)
        try:
            if not self._whole:
                return
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._flowing.wait()
                upper, upper_writer = await asyncio.open_connection(self._host, self._port)
            mine.append(upper_writer)
            self._open.add(upper_writer.transport)
            if self._whole:
                await asyncio.gather(
                    self._pump(reader, upper_writer, None), self._pump(upper, writer, self._rate)
                )
        except (OSError, TimeoutError):
            pass
        finally:
            for one in mine:
                self._open.discard(one.transport)
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: int | None
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
            if rate is not None:
                await asyncio.sleep(len(data) / rate)
        with contextlib.suppress(OSError):
            writer.write_eof()


class Links:
    """Runs links on a thread of their own; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._links: list[Link] = []

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Break every link and end the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._loop.close()

    def add(self, upstream: str, *, rate: int | None = None) -> Link:
        """Return a new link in front of the base URL `upstream`."""
        link = Link(upstream, rate, self._loop)
        self._links.append(link)
        self._call(link.listen())
        return link

    async def _close(self) -> None:
        for link in self._links:
            await link.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CLOSE_TIMEOUT_S)

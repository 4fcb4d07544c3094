"""A parent that sends exactly the bytes it is told to, and counts what it was asked for."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from loadtest.streams import StreamServer
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from tests.contract.made import RUN, MadeVersion

Script = Callable[["Ask", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Ask:
    """One request for a blob."""

    digest: str
    headers: dict[str, str]
    data: bytes

    @property
    def start(self) -> int:
        """Where its Range begins, 0 without one."""
        text = self.headers.get("range", "bytes=0-")
        return int(text.removeprefix("bytes=").split("-")[0])


@dataclass
class ScriptedParent:
    """Serves heads and blobs; `scripts` answer for single digests, once or always."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    heads: dict[str, bytes] = field(default_factory=dict)
    scripts: dict[str, list[Script]] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    sent: int = 0
    url: str = ""
    alive: bool = True

    def __post_init__(self) -> None:
        self._news = asyncio.Event()
        self._server = StreamServer(self._client)

    def serve(self, envelope: bytes, *versions: MadeVersion, run: str = RUN) -> None:
        """Serve a head and everything it reaches."""
        for version in versions:
            self.blobs.update(version.blobs)
        self.heads[run] = envelope
        news, self._news = self._news, asyncio.Event()
        news.set()

    def script(self, digest: str, *scripts: Script) -> None:
        """Answer the next requests for a blob in these ways, later ones as usual."""
        self.scripts.setdefault(digest, []).extend(scripts)

    def count(self, digests: str | Iterable[str]) -> int:
        """How often some blobs were asked for."""
        wanted = {digests} if isinstance(digests, str) else set(digests)
        return sum(ask.digest in wanted for ask in self.asks)

    def cut(self) -> None:
        """Drop every connection."""
        self._server.cut()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator["ScriptedParent"]:
        self.alive = True
        self._news = asyncio.Event()
        self.url = await self._server.start(port=port)
        try:
            yield self
        finally:
            self.alive = False
            await self._server.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self.alive:
            await self._one(reader, writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        target = urlsplit(request.split(" ")[1])
        match target.path.split("/")[1:]:
            case ["healthz"]:
                await self._send(writer, 200, b"{}")
            case ["v1", "runs"]:
                await self._send(writer, 200, json.dumps({"runs": sorted(self.heads)}).encode())
            case ["v1", run, "head"]:
                await self._head(writer, run, parse_qs(target.query))
            case ["v1", _, "blobs", name]:
                digest = name.removesuffix(".bin")
                ask = Ask(digest, headers, self.blobs.get(digest, b""))
                self.asks.append(ask)
                scripts = self.scripts.get(digest)
                if scripts:
                    await scripts.pop(0)(ask, writer)
                elif digest in self.blobs:
                    await self._blob(writer, ask)
                else:
                    await self._send(writer, 404, b"{}")
            case _:
                await self._send(writer, 404, b"{}")

    async def _head(
        self, writer: asyncio.StreamWriter, run: str, query: dict[str, list[str]]
    ) -> None:
        after, wait = int(query.get("after", ["0"])[0]), int(query.get("wait", ["0"])[0])
        deadline = asyncio.get_running_loop().time() + wait
        while self.alive and run in self.heads and wait and _sequence(self.heads[run]) <= after:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                break
        if run in self.heads:
            await self._send(writer, 200, self.heads[run])
        else:
            await self._send(writer, 404, b"{}")

    async def _blob(self, writer: asyncio.StreamWriter, ask: Ask) -> None:
        data, start = ask.data[ask.start :], ask.start
        self.sent += len(data)
        if start:
            total = len(ask.data)
            content_range = f"bytes {start}-{total - 1}/{total}"
            await self._send(
                writer, 206, data, {"Content-Range": content_range, "ETag": etag(ask.digest)}
            )
        else:
            await self._send(writer, 200, data, {"ETag": etag(ask.digest)})

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        head = start_of(status, len(body), {**self.extra, **(headers or {})})
        writer.write(head + body)
        await writer.drain()


def _sequence(envelope: bytes) -> int:
    return decode_head(open_unverified(envelope)[1]).sequence


def etag(digest: str) -> str:
    return f'"blake3-{digest}"'


def start_of(status: int, length: int, headers: dict[str, str] | None = None) -> bytes:
    """The head of an answer."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Pause:
    """Sends a blob's first bytes, waits to be told, then sends the rest (or other bytes)."""

    after: int
    rest: bytes | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    abort: bool = False

    async def __call__(self, ask: Ask, writer: asyncio.StreamWriter) -> None:
        writer.write(start_of(200, len(ask.data), {"ETag": etag(ask.digest)}))
        writer.write(ask.data[: self.after])
        await writer.drain()
        self.reached.set()
        async with asyncio.timeout(30):
            await self.go.wait()
        if self.abort:
            writer.transport.abort()
            raise ConnectionResetError
        writer.write(self.rest if self.rest is not None else ask.data[self.after :])
        await writer.drain()


def sends(body: bytes) -> Script:
    """A script that answers 200 with other bytes than the right ones."""

    async def script(ask: Ask, writer: asyncio.StreamWriter) -> None:
        writer.write(start_of(200, len(body), {"ETag": etag(ask.digest)}) + body)
        await writer.drain()

    return script


def refuses(status: int, retry_after: str | None = None) -> Script:
    """A script that answers with an error."""

    async def script(ask: Ask, writer: asyncio.StreamWriter) -> None:
        extra = {} if retry_after is None else {"Retry-After": retry_after}
        writer.write(start_of(status, 2, extra) + b"{}")
        await writer.drain()

    return script

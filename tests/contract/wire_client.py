"""An HTTP client that hides nothing: raw bytes out, status, headers and body in."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Answer:
    """An answer. `whole`: the connection gave as many bytes as Content-Length said."""

    status: int
    headers: dict[str, list[str]]
    body: bytes
    whole: bool

    def __getitem__(self, name: str) -> str:
        (value,) = self.headers[name.lower()]
        return value

    def __contains__(self, name: str) -> bool:
        return name.lower() in self.headers


class Wire:
    """One connection to a server; a context manager."""

    def __init__(self, url: str, *, source: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._source = source
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        local = None if self._source is None else (self._source, 0)
        self.reader, self.writer = await asyncio.wait_for(
            asyncio.open_connection(self._host, self._port, local_addr=local), PATIENCE_S
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        transport = self.writer.transport
        transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), PATIENCE_S)

    async def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: test"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        await self.send("\r\n".join([*lines, "", ""]).encode() + (body or b""))

    async def head(self) -> tuple[int, dict[str, list[str]]]:
        data = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        status_line, *lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers: dict[str, list[str]] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers.setdefault(name.lower(), []).append(value.strip())
        return int(status_line.split(" ")[1]), headers

    async def exactly(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), PATIENCE_S)

    async def rest(self) -> bytes:
        """Everything until the server closes or aborts the connection."""
        data = bytearray()
        try:
            while piece := await asyncio.wait_for(self.reader.read(1 << 20), PATIENCE_S):
                data += piece
        except ConnectionError:
            pass
        return bytes(data)

    async def answer(self, *, method: str = "GET") -> Answer:
        status, headers = await self.head()
        body, whole = b"", True
        if method != "HEAD" and status not in (204, 304):
            assert "transfer-encoding" not in headers, "never chunked"
            length = int(headers["content-length"][0])
            try:
                body = await self.exactly(length)
            except asyncio.IncompleteReadError as error:
                body, whole = error.partial, False
            except ConnectionError:
                whole = False
        return Answer(status, headers, body, whole)


async def http(
    url: str,
    path: str,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Answer:
    """One request over a connection of its own."""
    async with Wire(url) as wire:
        await wire.ask(path, method, headers, body)
        return await wire.answer(method=method)


async def eventually(check: object, *, what: str = "condition") -> None:
    """Wait until `check()` (plain or a coroutine) is true; bounded."""
    assert callable(check)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert loop.time() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.01)

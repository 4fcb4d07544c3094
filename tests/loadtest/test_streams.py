"""A server that ends takes its connections with it, also those that nobody has looked at yet."""

import asyncio
import gc
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from loadtest.streams import StreamServer


@pytest.fixture
def leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the garbage collector had to close, until the test looks."""
    found: list[str] = []
    gc.collect()
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: found.append(str(unraisable.exc_value))
    )
    yield found
    gc.collect()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line)


async def test_a_connection_is_served_and_its_last_bytes_arrive() -> None:
    server = StreamServer(echo)
    port = int((await server.start()).rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"one\ntwo\n")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 10) == b"one\ntwo\n"
    writer.close()
    await server.close()


@pytest.mark.parametrize("turns", range(8))
async def test_it_ends_at_any_moment_after_a_connection_and_leaves_nothing(
    leaks: list[str], turns: int
) -> None:
    server = StreamServer(echo)
    port = int((await server.start()).rpartition(":")[2])
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        for client in clients:
            client.settimeout(10)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
    gc.collect()
    assert leaks == []


async def test_it_can_begin_again_at_the_same_port() -> None:
    server = StreamServer(echo)
    url = await server.start()
    await server.close()
    assert await server.start(port=int(url.rpartition(":")[2])) == url
    await server.close()

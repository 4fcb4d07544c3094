"""Request bodies: bounded in size, time and memory, hashed and written in threads."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Final, Literal, overload

from aiohttp import web
from blake3 import blake3
from xxhash import xxh3_128

from relay.config import Limits
from relay.shelf import remove_quietly
from relay.threads import in_thread
from shardcast.protocol.limits import MIB
from shardcast.store.abandoned import create_temporary
from shardcast.store.files import disk_errors, write_all
from shardcast.store.run import RunStore

_BATCH_BYTES: Final = MIB
"""So much is gathered before a thread hashes and writes it."""


class BodyError(Exception):
    """A body that is not taken.

    Attributes:
        status: The HTTP status to answer.
        message: Why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


async def expect_body(request: web.BaseRequest) -> None:
    """Tell a client that waits for permission to send its body (RFC 9110 section 10.1.1)."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        transport = request.transport
        if transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


class Body:
    """A request's body, in the pieces in which it comes; it must keep coming."""

    def __init__(self, request: web.BaseRequest, limits: Limits) -> None:
        self._content = request.content
        self._limits = limits
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()
        self._came = 0

    async def next(self) -> bytes:
        """Return the next piece; empty at its end.

        Raises:
            BodyError: 408 after ``body_timeout_s`` of silence, or of less than
                ``body_rate_bytes_per_s``; 400 if it is malformed.
        """
        limits, now = self._limits, self._clock()
        late = self._begun + limits.body_timeout_s + self._came / limits.body_rate_bytes_per_s
        try:
            async with asyncio.timeout(min(limits.body_timeout_s, max(0.0, late - now))):
                piece = await self._content.readany()
        except TimeoutError:
            raise BodyError(
                408, f"{self._came} bytes of the body came in {self._clock() - self._begun:.0f} s"
            ) from None
        except web.RequestPayloadError as error:
            raise BodyError(400, "the body is malformed") from error
        self._came += len(piece)
        return piece


@overload
async def read_body(
    request: web.BaseRequest, most: int, limits: Limits, *, first: Literal[b""] = ...
) -> bytes: ...


@overload
async def read_body(
    request: web.BaseRequest, most: int, limits: Limits, *, first: bytes
) -> bytes | None: ...


async def read_body(
    request: web.BaseRequest, most: int, limits: Limits, *, first: bytes = b""
) -> bytes | None:
    """Return a whole body; None (and the rest skipped) if it does not begin as ``first`` says.

    Raises:
        BodyError: 413 if it is longer than ``most``, 408 if it stops coming.
    """
    if (request.content_length or 0) > most:
        raise BodyError(413, f"the body has more than {most} bytes")
    await expect_body(request)
    body, source = bytearray(), Body(request, limits)
    while piece := await source.next():
        if first and not body and piece[0] not in first:
            await _skip_rest(source, most)
            return None
        body += piece
        if len(body) > most:
            raise BodyError(413, f"the body has more than {most} bytes")
    return bytes(body)


async def skip_body(request: web.BaseRequest, most: int, limits: Limits) -> None:
    """Read a body that is not needed, so that the client hears the answer.

    A client that asks before it sends is answered without.
    """
    if (request.content_length or 0) <= most and "Expect" not in request.headers:
        await _skip_rest(Body(request, limits), most)


async def _skip_rest(body: Body, most: int) -> None:
    left = most
    while left >= 0 and (piece := await body.next()):
        left -= len(piece)


class FileReceiver:
    """Writes a body into a file while hashing it."""

    def __init__(self, fd: int, offset: int, path: Path | None = None) -> None:
        self._fd = fd
        self._offset = offset
        self._path = path
        self._blake3 = blake3()
        self._xxh3 = xxh3_128()

    @classmethod
    def temporary(cls, store: RunStore, digest: str) -> FileReceiver:
        """Make one that writes a temporary file. Blocking."""
        path = store.temporary(digest)
        with disk_errors(path, "creating"):
            return cls(create_temporary(path), 0, path)

    @property
    def digest(self) -> str:
        """BLAKE3 of what came."""
        return self._blake3.hexdigest()

    @property
    def xxh3(self) -> bytes:
        """xxh3-128 of what came."""
        return self._xxh3.digest()

    async def receive(self, request: web.BaseRequest, length: int, limits: Limits) -> None:
        """Take exactly ``length`` bytes.

        Raises:
            BodyError: If more or fewer come, or none for too long.
            DiskError: If they cannot be written.
        """
        await expect_body(request)
        body, done = Body(request, limits), 0
        batch: list[bytes] = []
        size = 0
        while True:
            piece = await body.next()
            batch.append(piece)
            size += len(piece)
            if done + size > length:
                raise BodyError(400, f"the body has more than {length} bytes")
            if size >= _BATCH_BYTES or not piece:
                await in_thread(partial(self._take, batch, self._offset + done))
                done, batch, size = done + size, [], 0
            if not piece:
                break
        if done != length:
            raise BodyError(400, f"the body ended after {done} of {length} bytes")

    def _take(self, pieces: list[bytes], at: int) -> None:
        with disk_errors(self._path or "an extent", "writing"):
            for piece in pieces:
                self._blake3.update(piece)
                self._xxh3.update(piece)
                write_all(self._fd, memoryview(piece), at)
                at += len(piece)

    def keep(self, store: RunStore) -> None:
        """Move the temporary file to its place in ``blobs/``. Blocking."""
        assert self._path is not None
        store.keep_blob(self.digest, self._path)
        self._path = None

    def close(self) -> None:
        """Close the file; remove it if it was temporary and not kept."""
        os.close(self._fd)
        if self._path is not None:
            remove_quietly(self._path)

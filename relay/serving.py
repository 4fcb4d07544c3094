"""Sending one blob: from disk, or from a fill while it arrives."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from relay import respond
from relay.catalog import DataBlob, Known, ShardBlob
from relay.fill import Fill, State, status_of
from relay.node import Node
from relay.opened import Opened
from relay.pacing import Stream
from relay.respond import AbortedResponseError
from relay.runs import RelayRun
from relay.sending import FastLane
from shardcast.errors import DiskFullError, NetworkError, NotFoundError, ShardcastError
from shardcast.protocol import wire
from shardcast.protocol.wire import UnsatisfiableRangeError

_SIBLING_WAIT_S: Final = 1.0
"""A sibling may have heard of a version a moment before this relay."""


class BlobServer:
    """Answers GET and HEAD of blobs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lane = FastLane()

    async def answer(
        self, request: web.BaseRequest, run: RelayRun, digest: str, common: dict[str, str]
    ) -> web.StreamResponse:
        """Answer one request; the response may have been sent already when this returns."""
        node = self._node
        for_sibling = wire.parse_node(request.headers.get(wire.SIBLING_HEADER)) is not None
        known = run.find(digest)
        if known is None:
            await node.refresh(run, digest)
            known = await run.wait_known(digest, _SIBLING_WAIT_S if for_sibling else 0.0)
            if known is None:
                return respond.error_answer(
                    404, "not_found", f"no head of run {run.name!r} reaches blob {digest}"
                )
        run.touch(known)
        unchanged = respond.unchanged_answer(request, digest)
        if unchanged is not None:
            return unchanged
        opened = await node.open_here(run, known)
        if opened is not None:
            stored = opened.stored
            number = run.number_of(known) if stored is None else stored.version.number
            try:
                with node.responses.sending(run.name, number, opened.length):
                    return await self._from_disk(request, digest, opened, wire.SOURCE_DISK, common)
            finally:
                opened.close()
                run.touch(known)
        if request.method == "HEAD" and isinstance(known, (ShardBlob, DataBlob)) and node.sources:
            response = respond.blob_response(digest, wire.SOURCE_FILL, known.length, None)
            return await self._start(request, response, common)
        try:
            return await self._by_fill(request, run, known, for_sibling, common)
        finally:
            run.touch(known)

    async def _from_disk(
        self,
        request: web.BaseRequest,
        digest: str,
        opened: Opened,
        source: str,
        common: dict[str, str],
    ) -> web.StreamResponse:
        try:
            part = respond.requested_range(request, digest, opened.length)
        except UnsatisfiableRangeError as error:
            return respond.unsatisfiable_answer(error, opened.length)
        response = respond.blob_response(digest, source, opened.length, part)
        await self._start(request, response, common)
        if request.method == "HEAD":
            return response
        offset, count = (0, opened.length) if part is None else (part.start, part.length)
        pace = self._pace(request)
        await self._send(request, response, opened.fd, opened.offset + offset, count, source, pace)
        return response

    async def _start(
        self, request: web.BaseRequest, response: web.StreamResponse, common: dict[str, str]
    ) -> web.StreamResponse:
        response.headers.update(common)
        if self._node.draining:
            response.force_close()
        await response.prepare(request)
        return response

    async def _send(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        fd: int,
        offset: int,
        count: int,
        source: str,
        pace: Stream | None,
    ) -> None:
        """Send bytes, or cut the connection."""
        self._node.sending += 1
        try:
            with self._lane.sending(request, count):
                counted = self._node.metrics.sent.labels(source=source).inc
                reading = self._node.reading
                await respond.send_file(request, fd, offset, count, pace, counted, reading)
        except AbortedResponseError:
            self._abort(request, response)
            raise
        except (ConnectionError, asyncio.CancelledError):
            response.force_close()
            respond.abort(request)
            raise
        finally:
            self._node.sending -= 1

    def _pace(self, request: web.BaseRequest) -> Stream | None:
        pacer = self._node.pacer
        return None if pacer is None else pacer.stream(respond.client_asking(request))

    def _abort(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        self._node.metrics.aborted.inc()
        response.force_close()
        respond.abort(request)

    # --- fills ----------------------------------------------------------------------------------

    async def _by_fill(
        self,
        request: web.BaseRequest,
        run: RelayRun,
        known: Known,
        for_sibling: bool,
        common: dict[str, str],
    ) -> web.StreamResponse:
        digest, rebuilding = known.digest, self._node.rebuilding
        if rebuilding is not None and isinstance(known, ShardBlob):
            flying = self._node.fills.get(run.name, digest)
            if flying is None and rebuilding.awaited(run, known):
                return respond.busy_answer(f"blob {digest} is being rebuilt from a delta")
        try:
            fill = self._node.fill(run, known, for_sibling=for_sibling)
        except NotFoundError as error:
            return respond.error_answer(404, "not_found", error.message)
        except DiskFullError as error:
            return respond.busy_answer(f"no room for blob {digest}: {error.message}", 5)
        except ShardcastError as error:
            return respond.busy_answer(error.message)
        with fill.reading():
            whole_at_once = request.method == "HEAD" or "Range" in request.headers
            while True:
                mark = fill.mark
                if fill.done or (fill.released and not whole_at_once):
                    break
                if for_sibling and fill.lateral:
                    return respond.busy_answer(f"blob {digest} comes from a sibling")
                await fill.changed(mark)
            if fill.state is State.FAILED:
                return _failed(run, known, fill)
            assert fill.total is not None
            number = run.number_of(known)
            with self._node.responses.sending(run.name, number, fill.total):
                if fill.state is not State.VERIFIED:
                    return await self._follow(request, fill, for_sibling, common)
                arrived = Opened(fill.fd, fill.base, fill.total)
                return await self._from_disk(request, digest, arrived, wire.SOURCE_FILL, common)

    async def _follow(
        self, request: web.BaseRequest, fill: Fill, for_sibling: bool, common: dict[str, str]
    ) -> web.StreamResponse:
        """Send a blob while it arrives, its last piece once it is verified."""
        assert fill.total is not None
        total, generation = fill.total, fill.generation
        response = respond.blob_response(fill.target.digest, wire.SOURCE_FILL, total, None)
        await self._start(request, response, common)
        position, pace = 0, self._pace(request)
        while position < total:
            mark = fill.mark
            if (
                fill.state is State.FAILED
                or fill.generation != generation
                or (for_sibling and fill.lateral and not fill.done)
            ):
                self._abort(request, response)
                raise AbortedResponseError(f"blob {fill.target.digest} did not come as it began")
            released = fill.released
            if released > position:
                await self._send(
                    request,
                    response,
                    fill.fd,
                    fill.base + position,
                    released - position,
                    wire.SOURCE_FILL,
                    pace,
                )
                position = released
            else:
                await fill.changed(mark)
        return response


def _failed(run: RelayRun, known: Known, fill: Fill) -> web.Response:
    digest, error = known.digest, fill.error
    if isinstance(error, DiskFullError):
        return respond.busy_answer(f"no room for blob {digest}: {error.message}", 5)
    if status_of(error) == 404:
        if run.catalog.lingers(known):
            text = f"no head lists the version of blob {digest}, and no parent has it any more"
            return respond.error_answer(404, "not_found", text)
        return respond.busy_answer(f"no parent has blob {digest} yet")
    text = error.message if isinstance(error, NetworkError) else str(error)
    return respond.busy_answer(f"blob {digest} did not come: {text}")

"""The HTTP surface: which request goes where, and what goes wrong in one place."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from relay import respond
from relay.clients import Clients
from relay.metrics import CONTENT_TYPE
from relay.node import Node
from relay.parents import Place
from relay.publishing import Publishing
from relay.respond import AbortedResponseError, client_asking
from relay.runs import RelayRun, ServedHead
from relay.serving import BlobServer
from relay.status import peers_document, ready_problem, runs_document, status_document
from shardcast.errors import MalformedError, NotFoundError, ShardcastError
from shardcast.protocol import wire
from shardcast.protocol.documents import RESERVED_RUNS, check_run

log = logging.getLogger("relay.http")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_READ: Final = ("GET", "HEAD")
CUT_OFF: Final = 499
"""What metrics count for a response that could not be finished."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a path names: an endpoint (also the label in metrics), a run, the rest of the path."""

    endpoint: str
    methods: tuple[str, ...]
    run: str | None = None
    rest: str = ""


def find_route(path: str) -> Route | None:
    """Return what a raw path names, or None for nothing. Pure.

    Raises:
        MalformedError: If the run or the blob's name in it is malformed.
    """
    match path.split("/")[1:]:
        case ["healthz" | "readyz" | "metrics" as name]:
            return Route(name, _READ)
        case ["v1", "runs" | "status" as name]:
            return Route(name, _READ)
        case ["v1", run, "head"] if run not in RESERVED_RUNS:
            return Route("head", (*_READ, "PUT"), check_run(run))
        case ["v1", run, "peers"] if run not in RESERVED_RUNS:
            return Route("peers", _READ, check_run(run))
        case ["v1", run, "missing"] if run not in RESERVED_RUNS:
            return Route("missing", ("POST",), check_run(run))
        case ["v1", run, "blobs", name] if run not in RESERVED_RUNS:
            digest = wire.parse_blob_name(name)
            if digest is None:
                raise MalformedError("a blob is named by 64 lowercase hex digits and .bin")
            return Route("blobs", (*_READ, "PUT"), check_run(run), digest)
        case _:
            return None


class Handlers:
    """Answers every request of a relay."""

    def __init__(self, node: Node, publishing: Publishing, clients: Clients) -> None:
        self._node = node
        self._publishing = publishing
        self._clients = clients
        self._blobs = BlobServer(node)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Whatever is wrong with it, the answer is short and says so."""
        endpoint = "none"
        common = self._node.identity.headers(request, self._node.depth)
        try:
            route = find_route(request.rel_url.raw_path)
            if route is None:
                response: web.StreamResponse = respond.error_answer(
                    404, "not_found", "there is nothing under this path"
                )
            elif request.method not in route.methods:
                response = respond.error_answer(
                    405, "method", f"use {', '.join(route.methods)}", Allow=", ".join(route.methods)
                )
            else:
                endpoint = route.endpoint
                self._clients.saw(request, route)
                response = await self._dispatch(request, route, common)
        except MalformedError as error:
            response = respond.error_answer(400, error.code, error.message)
        except NotFoundError as error:
            response = respond.error_answer(404, error.code, error.message)
        except ShardcastError as error:
            log.warning("%s %s: %s", request.method, request.rel_url.raw_path[:200], error)
            response = respond.busy_answer(error.message, 5)
        except (AbortedResponseError, ConnectionError) as error:
            if isinstance(error, AbortedResponseError):
                log.warning("%s: response cut off: %s", request.remote, error)
            respond.abort(request)
            response = web.Response(status=CUT_OFF)
            response.force_close()
        except Exception:
            log.exception("%s %s broke", request.method, request.rel_url.raw_path[:200])
            response = respond.error_answer(
                500, "internal", "this is a bug; the relay's log has it"
            )
        if not response.prepared:
            common[wire.DEPTH_HEADER] = str(self._node.depth)  # a long poll may outlive it
            response.headers.update(common)
        if self._node.draining and not response.prepared:
            response.force_close()  # said in its head: who was not told may use the connection again
        self._node.metrics.requests.labels(endpoint=endpoint, status=str(response.status)).inc()
        return response

    async def _dispatch(
        self, request: web.BaseRequest, route: Route, common: dict[str, str]
    ) -> web.StreamResponse:
        service = self._service(route.endpoint)
        if service is not None:
            return service
        assert route.run is not None
        if request.method in ("POST", "PUT"):
            return await self._publishing.answer(request, route.run, route.endpoint, route.rest)
        if route.endpoint == "head":
            wire.parse_wait(request.query.get("after"), request.query.get("wait"))
        run = await self._node.find_run(route.run)
        if run is None or run.head is None:
            return respond.error_answer(404, "not_found", f"run {route.run!r} is not here")
        if route.endpoint == "head":
            return await self._head(request, run)
        if route.endpoint == "peers":
            return respond.json_answer(200, peers_document(self._node, run))
        return await self._blobs.answer(request, run, route.rest, common)

    def _service(self, endpoint: str) -> web.Response | None:
        """Answer what concerns the relay as a whole, else None."""
        match endpoint:
            case "healthz":
                return respond.json_answer(200, {"status": "ok"})
            case "readyz":
                problem = ready_problem(self._node)
                if problem is None:
                    return respond.json_answer(200, {"status": "ready"})
                return respond.error_answer(503, "not_ready", problem, Retry_After="1")
            case "metrics":
                return self._metrics()
            case "runs":
                return respond.json_answer(200, runs_document(self._node))
            case "status":
                return respond.json_answer(200, status_document(self._node, self._clients))
            case _:
                return None

    async def _head(self, request: web.BaseRequest, run: RelayRun) -> web.Response:
        after, wait = wire.parse_wait(request.query.get("after"), request.query.get("wait"))
        node = self._node
        child = wire.parse_node(request.headers.get(wire.NODE_HEADER))
        if after is not None and wait and request.method == "GET":
            # Relays hear at once how far the origin is: what they may ask whom hangs on it.
            known = run.told.place(child, node.place)
            await self._wait(
                request, run, after, wait, lambda: node.draining or known not in (None, node.place)
            )
        place = node.place
        run.told.tell(child, place)
        head = run.head
        if head is None:
            raise NotFoundError(f"run {run.name!r} has no head")
        return head_answer(head, place)

    async def _wait(
        self,
        request: web.BaseRequest,
        run: RelayRun,
        after: int,
        seconds: float,
        stopped: Callable[[], bool],
    ) -> None:
        """Wait for a newer head, unless too many do: clients poll where nobody lets them wait."""
        waits, client = self._node.admission.waits, client_asking(request)
        if not waits.enter(client):
            self._node.metrics.unwaited.inc()
            return
        try:
            await run.wait_head(after, seconds, stopped)
        finally:
            waits.leave(client)

    def _metrics(self) -> web.Response:
        metrics = self._node.metrics
        metrics.connections.set(self._node.admission.connections.taken)
        metrics.waiting.set(self._node.admission.waits.taken)
        metrics.depth.set(self._node.depth)
        if self._node.scrub is not None:
            metrics.scrub_age.set(self._node.scrub.age_s)
        for run in self._node.runs.values():
            metrics.complete.labels(run=run.name).set(run.complete_version() or 0)
            damaged = sum(stored.damaged is not None for stored in run.stored.values())
            metrics.damaged.labels(run=run.name).set(damaged)
        return web.Response(
            body=metrics.render(),
            headers={"Content-Type": CONTENT_TYPE, "Cache-Control": wire.ERROR_CACHE_CONTROL},
        )


def head_answer(head: ServedHead, place: Place) -> web.Response:
    """Return the head, verbatim: always 200, never 304."""
    return web.Response(
        body=head.envelope,
        headers={
            "Content-Type": respond.JSON_TYPE,
            "ETag": head.etag,
            "Cache-Control": wire.HEAD_CACHE_CONTROL,
            wire.PATH_HEADER: ",".join(place.path),
        },
    )

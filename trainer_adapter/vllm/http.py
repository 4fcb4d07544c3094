"""vLLM's entry point ``vllm.endpoint_plugins``: the routes under ``/v1/shardcast`` on its server.

Named ``shardcast_http``. vLLM loads it only where ``VLLM_PLUGINS`` names it, which then is the list of
*all* plug-ins that are loaded: ``VLLM_PLUGINS=shardcast,shardcast_http``. Routes under ``/v1`` are
guarded by ``--api-key``; vLLM's dev mode is not needed, and better left off.
"""

from __future__ import annotations

import logging
import os
import secrets
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Final

import shardcast
from shardcast.engine.forms import MAX_REQUEST_BYTES
from shardcast.errors import ShardcastError
from trainer_adapter.vllm.adapters import Adapters
from trainer_adapter.vllm.api import ROUTES, Api, Call
from trainer_adapter.vllm.client import VllmAdapters, VllmControl, hold_adapter
from trainer_adapter.vllm.configured import refusal, settings_of
from trainer_adapter.vllm.control import SystemClock
from trainer_adapter.vllm.machine import Facts, Machine, SwapError
from trainer_adapter.vllm.metrics import StateCollector, SwapMetrics
from trainer_adapter.vllm.middleware import VersionMiddleware
from trainer_adapter.vllm.pinning import check_server
from trainer_adapter.vllm.serving import Settings, demands_key, keep_refusal
from trainer_adapter.vllm.swap import Swapper

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("vllm.shardcast")

SALT_VARIABLE: Final = "SHARDCAST_SALT"
"""Set to 1 in the server's environment, every request is salted by version (``middleware``)."""


class Endpoints:
    """The plug-in object that vLLM makes: one for each server."""

    name = "shardcast_http"
    required_tasks = None

    def __init__(self) -> None:
        self._api: Api | None = None
        self._swapper: Swapper | None = None
        self._salting = os.environ.get(SALT_VARIABLE, "") == "1"
        self._start = secrets.token_hex(8)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and what stamps and salts every other request."""
        for method, path in ROUTES:
            app.add_route(path, self._answer, methods=[method], include_in_schema=False)
        app.add_middleware(
            VersionMiddleware, machine=self._machine, start=self._start, salting=self._salting
        )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Find out what the engine serves. What is wrong with that is said by every route.

        Raises:
            ShardcastError: If this server has, or may have, read another version's files than those of
                the version that it has loaded; it must not start.
        """
        if engine_client is not None:
            check_server(engine_client.vllm_config)
        settings = _settings(engine_client, args)
        has_key = demands_key(getattr(args, "api_key", None), os.environ.get("VLLM_API_KEY"))
        if not has_key:
            log.warning("no --api-key: only clients on this host may change this server's weights")
        if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in {"", "0"}:
            log.warning("VLLM_SERVER_DEV_MODE opens routes that change weights without any key")
        facts = Facts(
            engine_version=settings.engine_version,
            plugin_version=shardcast.__version__,
            keep_refusal=keep_refusal(settings, salting=self._salting),
            may_sleep=settings.may_sleep,
            unsupported=refusal(settings),
            start=self._start,
        )
        control = VllmControl(engine_client, may_sleep=settings.may_sleep)
        swapper = Swapper(control, facts, SystemClock())
        host = VllmAdapters(engine_client, state, enabled=settings.lora)
        adapters = Adapters(host, hold_adapter, swapper)
        swapper.after_load = adapters
        if facts.unsupported:
            log.error("hot swaps are off: %s", facts.unsupported)
        else:
            swapper.observer = _metrics(swapper)
            await _boot(swapper)
        self._swapper, self._api = swapper, Api(swapper, adapters, has_key=has_key)

    def _machine(self) -> Machine:
        return Machine() if self._swapper is None else self._swapper.machine

    async def _answer(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        if self._api is None:
            return Response(status_code=503, headers={"retry-after": "1"})
        try:
            body = await _body(request) if request.method == "POST" else b""
        except ClientDisconnect:  # before the end of its request: nobody to answer, nothing to do
            return Response(status_code=400)
        reply = await self._api.answer(
            Call(
                path=request.url.path.removeprefix(request.scope.get("root_path", "")),
                query=dict(request.query_params),
                body=body,
                peer=None if request.client is None else request.client.host,
            )
        )
        return Response(
            reply.body,
            status_code=reply.status,
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )


async def _body(request: Request) -> bytes:
    """Return the body, or its first 64 KiB and one byte."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_REQUEST_BYTES:
            break
    return bytes(body[: MAX_REQUEST_BYTES + 1])


async def _boot(swapper: Swapper) -> None:
    try:
        await swapper.boot()
    except ShardcastError as error:
        log.error("what the engine has booted with is not known: %s", error)
        failed = SwapError("failed", str(error), phase="boot")
        swapper.machine = swapper.machine.failed(failed, None, SystemClock().now())
        return
    identity = swapper.machine.identity
    if identity is not None:
        log.info(
            "serving version %s of run %s (%s)", identity.version, identity.run, identity.digest
        )
    else:
        log.info("booted from elsewhere: unlabelled until a version is activated")


def _metrics(swapper: Swapper) -> SwapMetrics | None:
    from prometheus_client import REGISTRY

    try:
        metrics = SwapMetrics(REGISTRY)
        REGISTRY.register(StateCollector(swapper))
    except ValueError:
        log.warning("another server in this process has the metrics")  # in tests of vLLM's own
        return None
    return metrics


def _settings(engine_client: Any, args: Namespace) -> Settings:
    """Read what matters of vLLM's configuration."""
    import vllm

    version = str(vllm.__version__)
    plugins = os.environ.get("VLLM_PLUGINS")
    if engine_client is None:
        return Settings(engine_version=version, plugins=plugins, engine=False)
    return settings_of(
        engine_client.vllm_config,
        engine_version=version,
        plugins=plugins,
        servers=getattr(args, "api_server_count", None) or 1,
    )

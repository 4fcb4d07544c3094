"""Routes that only tests have: a rank fails (``tests.engine.injected``), somebody else pauses; and a
``current`` that moves when the weights are loaded (``tests.engine.moving``)."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

from trainer_adapter.vllm.http import Endpoints

ARM_PATH = "/v1/shardcast/test/arm"
PAUSE_PATH = "/v1/shardcast/test/pause"


def install() -> None:
    """Let our plug-in's object add the route when vLLM makes it."""
    attach, init = Endpoints.attach_router, Endpoints.init_state
    found: dict[str, Any] = {}

    async def arm(request: Any) -> Any:
        from starlette.responses import JSONResponse

        order = await request.json()
        args = (order["rank"], order["place"], order["after"], order["times"])
        return JSONResponse(await found["client"].collective_rpc("arm", args=args))

    async def pause(request: Any) -> Any:
        from starlette.responses import JSONResponse

        await found["client"].pause_generation(mode="keep", clear_cache=False)
        return JSONResponse({})

    def attach_router(self: Endpoints, app: Any) -> None:
        importlib.import_module("tests.engine.moving")  # vLLM's sampling defaults are read after it
        attach(self, app)
        app.add_route(ARM_PATH, arm, methods=["POST"])
        app.add_route(PAUSE_PATH, pause, methods=["POST"])

    async def init_state(self: Endpoints, engine_client: Any, state: Any, args: Namespace) -> None:
        found["client"] = engine_client
        await init(self, engine_client, state, args)

    Endpoints.attach_router = attach_router  # type: ignore[method-assign]
    Endpoints.init_state = init_state  # type: ignore[method-assign]

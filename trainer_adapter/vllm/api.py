"""The routes under ``/v1/shardcast``: bytes in, bytes out; no web framework (``http`` has that)."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from shardcast.engine.forms import (
    ACTIVATE_PATH,
    LORA_PATH,
    NEWEST_PATH,
    READY_PATH,
    STAGE_PATH,
    STATE_PATH,
    STATUS_OF,
    ActivateRequest,
    Fault,
    FaultAnswer,
    LoraRequest,
    NewestRequest,
    ReadyAnswer,
    StageAnswer,
    StageRequest,
    read_request,
    write,
)
from shardcast.errors import LimitError, MalformedError
from trainer_adapter.vllm.adapters import Adapters
from trainer_adapter.vllm.machine import SwapError
from trainer_adapter.vllm.swap import Swapper

ROUTES: Final = (
    ("POST", STAGE_PATH),
    ("POST", ACTIVATE_PATH),
    ("POST", NEWEST_PATH),
    ("POST", LORA_PATH),
    ("GET", STATE_PATH),
    ("GET", READY_PATH),
)

OPEN_SERVER: Final = (
    "this server has no API key, so only clients on its own host may change its weights: start it"
    " with --api-key, or ask from there"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read.

    Attributes:
        path: One of ``ROUTES``.
        query: Its query's members, the last of each name.
        body: At most one byte more than ``MAX_REQUEST_BYTES``.
        peer: The client's address; None where it came through a Unix socket.
    """

    path: str
    query: Mapping[str, str]
    body: bytes = b""
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: always JSON, never stored by a cache."""

    status: int
    body: bytes


class Api:
    """Answers calls. Whoever carries them has checked the API key."""

    def __init__(self, swapper: Swapper, adapters: Adapters, *, has_key: bool) -> None:
        """Answer for one engine.

        Args:
            swapper: Stages and activates.
            adapters: Loads LoRA adapters.
            has_key: Whether the server demands an API key. Without one only its own host may
                change anything.
        """
        self._swapper = swapper
        self._adapters = adapters
        self._has_key = has_key
        self._posts: dict[str, Callable[[bytes], Awaitable[msgspec.Struct]]] = {
            STAGE_PATH: self._stage,
            ACTIVATE_PATH: self._activate,
            NEWEST_PATH: self._newest,
            LORA_PATH: self._lora,
        }

    async def answer(self, call: Call) -> Reply:
        """Answer one call. A cancellation leaves what was begun to go on."""
        if call.path == STATE_PATH:
            return Reply(200, write(await self._swapper.look()))
        if call.path == READY_PATH:
            return await self._ready(call.query)
        try:
            if not self._has_key and not is_near(call.peer):
                raise SwapError("refused", OPEN_SERVER)
            return Reply(200, write(await self._posts[call.path](call.body)))
        except SwapError as error:
            return self._fault(error.slug, error.message, error)
        except LimitError as error:
            return self._fault("too_large", error.message)
        except MalformedError as error:
            return self._fault("malformed", error.message)

    async def _stage(self, body: bytes) -> msgspec.Struct:
        return StageAnswer(state=await self._swapper.stage(read_request(body, StageRequest)))

    async def _activate(self, body: bytes) -> msgspec.Struct:
        return await self._swapper.activate(read_request(body, ActivateRequest))

    async def _newest(self, body: bytes) -> msgspec.Struct:
        return StageAnswer(state=self._swapper.tell_newest(read_request(body, NewestRequest)))

    async def _lora(self, body: bytes) -> msgspec.Struct:
        request = read_request(body, LoraRequest)
        loading = request.action == "load"
        work = self._adapters.load(request) if loading else self._adapters.unload(request)
        await asyncio.shield(self._swapper.begin(work))
        return StageAnswer(state=self._swapper.state)

    async def _ready(self, query: Mapping[str, str]) -> Reply:
        state = await self._swapper.look()
        why = state.why
        if not why and query.get("require") == "served":
            why = self._swapper.machine.why_not_ready(must_serve=True)
        return Reply(503 if why else 200, write(ReadyAnswer(ready=not why, why=why)))

    def _fault(self, slug: str, message: str, error: SwapError | None = None) -> Reply:
        fault = Fault(code=slug, message=message, phase=None if error is None else error.phase)
        answer = FaultAnswer(error=fault, state=self._swapper.state)
        return Reply(STATUS_OF.get(slug, 500), write(answer))


def is_near(peer: str | None) -> bool:
    """Say whether a client is on this host: loopback, or a Unix socket."""
    if peer is None:
        return True
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)

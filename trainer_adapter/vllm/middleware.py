"""What every request of a server passes through (ASGI): the version header, and salts by version.

Salting makes a stale prefix impossible by construction: vLLM finds cached prefixes by tokens and
salt, and the salt changes with every swap. It is needed where running requests keep their KV cache
over a swap (``requests: keep``), because vLLM then cannot clear what they hold. In that mode a
request that cannot be salted is refused: one of them would be enough.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from blake3 import blake3

from shardcast.engine.forms import (
    ANSWERED_HEADER,
    API_PREFIX,
    START_HEADER,
    SWAPS_HEADER,
    UNKNOWN_VERSION,
    VERSION_HEADER,
    Fault,
    FaultAnswer,
    write,
)
from trainer_adapter.vllm.machine import Machine

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SALTED: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/inference/v1/generate",
        "/generative_scoring",
    }
)
"""Routes whose body has ``cache_salt`` in vLLM 0.32, and is one JSON object."""

HARMLESS: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/ping",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/messages/render",
        "/v1/responses/render",
    }
)
"""Routes that take a POST and run no model."""

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_SALT_DIGITS: Final = 32


def salt_of(machine: Machine) -> str:
    """Return the salt of this moment; another one after every swap, also back to an old version."""
    identity = machine.identity
    version = UNKNOWN_VERSION if identity is None else identity.digest[:_SALT_DIGITS]
    return f"{version}.{machine.swap_count}"


def salted(body: bytes, salt: str) -> bytes:
    """Return a request's body with the salt in it, and what salt it had by itself.

    Raises:
        ValueError: If it is no JSON object.
    """
    document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError("the body is no JSON object")
    own = document.get("cache_salt")
    if isinstance(own, str) and own:
        salt = f"{salt}.{blake3(own.encode('utf-8', 'surrogatepass')).hexdigest()[:_SALT_DIGITS]}"
    elif own is not None:
        return body  # vLLM refuses it, and says why
    document["cache_salt"] = salt
    return json.dumps(document).encode()


class VersionMiddleware:
    """Stamps answers with the version at admission; salts requests by it if it was told to."""

    def __init__(
        self, app: App, *, machine: Callable[[], Machine], start: str, salting: bool
    ) -> None:
        """Stand in front of ``app``.

        Args:
            app: The next one.
            machine: Returns the state of this moment.
            start: Names this start of the server (``Facts.start``).
            salting: Whether requests are salted.
        """
        self._app = app
        self._machine = machine
        self._start = start.encode()
        self._salting = salting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
        if scope["type"] == "websocket" and self._salting:
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "cannot be salted"})
            return
        if scope["type"] != "http" or path.startswith(f"{API_PREFIX}/"):
            await self._app(scope, receive, send)
            return
        if self._salting and scope["method"] not in _READS and path not in HARMLESS:
            if path not in SALTED:
                await _refuse(send, 501, "unsupported", _UNSALTABLE.format(path=path))
                return
            body = await _body(receive)
            if body is None:
                return
            try:
                # Salted in the same step that takes the state for the header.
                body = salted(body, salt_of(self._machine()))
            except (ValueError, RecursionError) as error:
                await _refuse(send, 400, "malformed", f"the body is no JSON object: {error}"[:200])
                return
            scope, receive = _with_body(scope, receive, body)
        await self._app(scope, receive, self._stamping(send))

    def _stamping(self, send: Send) -> Send:
        admitted = self._machine()
        label, swaps = admitted.label, admitted.swap_count

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (VERSION_HEADER.lower().encode(), label.encode()),
                    (SWAPS_HEADER.lower().encode(), str(swaps).encode()),
                    (ANSWERED_HEADER.lower().encode(), str(self._machine().swap_count).encode()),
                    (START_HEADER.lower().encode(), self._start),
                ]
            await send(message)

        return stamped


_UNSALTABLE: Final = (
    "{path} cannot be salted by version, and this server salts every request (SHARDCAST_SALT=1):"
    " use another route, or start it without salts"
)


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body; None where the client went away before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() not in {b"content-length", b"transfer-encoding"}
    ]
    headers.append((b"content-length", str(len(body)).encode()))
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return {**scope, "headers": headers}, again


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    body = write(FaultAnswer(error=Fault(code=code, message=message)))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""The version header on every answer, and salts that make a stale prefix impossible."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardcast.engine.forms import (
    ANSWERED_HEADER,
    START_HEADER,
    STATE_PATH,
    SWAPS_HEADER,
    VERSION_HEADER,
    label_of,
)
from tests.unit.swapping.engine import NEW, OLD
from trainer_adapter.vllm.machine import Facts, Machine
from trainer_adapter.vllm.middleware import (
    HARMLESS,
    SALTED,
    Message,
    Receive,
    Scope,
    Send,
    VersionMiddleware,
    salt_of,
    salted,
)


class Server:
    """An application behind the middleware that says what reached it."""

    def __init__(self, machine: Machine, *, salting: bool = False) -> None:
        self.machine = machine
        self.after: Machine | None = None
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.app = VersionMiddleware(
            self._inner, machine=lambda: self.machine, start="5eed", salting=salting
        )

    async def _inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        if self.after is not None:
            self.machine = self.after
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b"done"})

    async def ask(
        self, path: str, *parts: bytes, method: str = "POST", root: str = "", kind: str = "http"
    ) -> tuple[int, dict[str, str]]:
        sent: list[Message] = []
        left = [
            {"type": "http.request", "body": part, "more_body": n < len(parts) - 1}
            for n, part in enumerate(parts)
        ]

        async def receive() -> Message:
            return left.pop(0) if left else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": kind,
            "method": method,
            "path": root + path,
            "root_path": root,
            "headers": [(b"content-length", str(sum(map(len, parts))).encode()), (b"a", b"b")],
        }
        await self.app(scope, receive, send)
        if not sent or sent[0]["type"] != "http.response.start":
            return 0, {}
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers


def serving() -> Machine:
    return Machine().booted(OLD, 1)


async def test_answers_carry_the_version_at_admission_and_the_swaps() -> None:
    server = Server(serving())
    _, headers = await server.ask("/v1/completions", b"{}")
    assert headers[VERSION_HEADER.lower()] == label_of(OLD.identity)
    assert headers[SWAPS_HEADER.lower()] == "0"
    assert headers[ANSWERED_HEADER.lower()] == "0"
    facts = Facts(engine_version="0.32.0", plugin_version="0.1.0", start="5eed")
    assert headers[START_HEADER.lower()] == server.machine.view(facts).start == "5eed"
    assert headers["x"] == "y"
    server.after = server.machine.settled(NEW, 2)
    _, headers = await server.ask("/v1/completions", b"{}")
    assert headers[VERSION_HEADER.lower()] == label_of(OLD.identity)
    assert (headers[SWAPS_HEADER.lower()], headers[ANSWERED_HEADER.lower()]) == ("0", "1")
    _, headers = await server.ask("/v1/completions", b"{}")
    assert headers[VERSION_HEADER.lower()] == label_of(NEW.identity)


async def test_what_nobody_can_tell_is_called_unknown() -> None:
    for machine in (Machine(), serving().poison("half", 2), serving().died("killed")):
        _, headers = await Server(machine).ask("/v1/completions", b"{}")
        assert headers[VERSION_HEADER.lower()] == "unknown"


async def test_our_own_routes_are_left_alone() -> None:
    server = Server(serving(), salting=True)
    _, headers = await server.ask(STATE_PATH, b"x")
    assert VERSION_HEADER.lower() not in headers
    assert server.bodies == [b"x"]


@pytest.mark.parametrize("path", sorted(SALTED))
async def test_requests_are_salted_by_version(path: str) -> None:
    server = Server(serving(), salting=True)
    body = json.dumps({"prompt": [1, 2], "temperature": 0.5, "x": {"y": None}}).encode()
    status, headers = await server.ask(path, body[:5], body[5:], root="/proxied")
    assert status == 200
    assert VERSION_HEADER.lower() in headers
    (seen,) = server.bodies
    document = json.loads(seen)
    salt = document.pop("cache_salt")
    assert document == json.loads(body)
    assert salt == salt_of(server.machine)
    lengths = [value for name, value in server.scopes[0]["headers"] if name == b"content-length"]
    assert lengths == [str(len(seen)).encode()]
    assert (b"a", b"b") in server.scopes[0]["headers"]


async def test_without_salting_bodies_pass_as_they_are() -> None:
    server = Server(serving())
    await server.ask("/v1/completions", b"not json")
    assert server.bodies == [b"not json"]


def test_salts_never_come_back() -> None:
    """Going back to a version must not find what was cached under it before."""
    first = serving()
    second = first.settled(NEW, 2)
    third = second.settled(OLD, 3)
    assert len({salt_of(machine) for machine in (first, second, third)}) == 3
    for machine in (Machine(), first, second, third):
        salt = json.loads(salted(b'{"cache_salt": "mine"}', salt_of(machine)))["cache_salt"]
        assert len(salt) <= 128  # what vLLM takes
        assert not set(salt) & set("@/\\\0")


def test_a_salt_of_the_clients_own_still_separates() -> None:
    salts = {
        json.loads(salted(body, "v"))["cache_salt"]
        for body in (b'{"cache_salt": "a"}', b'{"cache_salt": "b"}', b"{}", b'{"cache_salt": null}')
    }
    assert len(salts) == 3
    assert all(salt.startswith("v") for salt in salts)
    assert json.loads(salted(b'{"cache_salt": 5}', "v"))["cache_salt"] == 5  # vLLM refuses it
    assert json.loads(salted(b'{"cache_salt": "a", "cache_salt": "b"}', "v")) != {}
    assert json.loads(salted(b'{"cache_salt": "\\ud800"}', "v"))["cache_salt"] != "v"


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'"x"', b"[" * 100_000])
async def test_what_cannot_be_salted_is_refused(body: bytes) -> None:
    server = Server(serving(), salting=True)
    status, _ = await server.ask("/v1/completions", body)
    assert status == 400
    assert server.bodies == []


async def test_routes_that_cannot_be_salted_are_refused() -> None:
    server = Server(serving(), salting=True)
    for path in ("/v1/audio/transcriptions", "/v1/chat/completions/batch", "/invocations"):
        assert (await server.ask(path, b"{}"))[0] == 501
    assert (await server.ask("/v1/realtime", kind="websocket"))[0] == 0
    assert server.bodies == []
    for path in sorted(HARMLESS):
        assert (await server.ask(path, b"raw"))[0] == 200
    assert (await server.ask("/v1/models", method="GET"))[0] == 200
    assert set(server.bodies) == {b"raw", b""}


async def test_a_client_that_goes_away_in_the_middle_of_its_body() -> None:
    server = Server(serving(), salting=True)
    assert (await server.ask("/v1/completions"))[0] == 0
    assert server.bodies == []

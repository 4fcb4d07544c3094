"""JSON over HTTP to one engine: its key, its time limits, and its errors told as ours.

The key is sent and never shown: no message, log line or event has it. Where it comes from a file, that is
read again as soon as an engine does not take it: keys are rotated while an agent runs.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from shardcast.asyncget import Answer, HttpSession, UnansweredError
from shardcast.config import NetConfig
from shardcast.connection import parse_endpoint
from shardcast.engine.driver import Waits
from shardcast.engine.forms import MAX_ANSWER_BYTES
from shardcast.errors import (
    EngineKeyError,
    EngineRefusedError,
    EngineUncertainError,
    EngineUnreachableError,
    EngineUnsupportedError,
    ShardcastError,
)

REFUSED: Final = (401, 403)
"""Statuses of a request whose key is not taken."""

Key = str | Callable[[], str | None] | None
"""An API key, or what reads it; it raises a ``ShardcastError`` if it cannot."""


class EngineClient:
    """Talks to one engine. For one event loop.

    Attributes:
        url: Its base URL.
        waits: How long answers are waited for.
    """

    def __init__(
        self,
        url: str,
        token: Key,
        *,
        missing: str,
        config: NetConfig | None = None,
        tls: ssl.SSLContext | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: Its base URL.
            token: Its API key, or what reads it (again, where the engine does not take it); None
                where it has none.
            missing: What to do where it has none of the routes.
            config: Network bounds.
            tls: For https; None means the system's certificates.
            waits: How long answers are waited for.

        Raises:
            UsageError: If it is no URL.
            ShardcastError: What reads the key raises.
        """
        self._endpoint = parse_endpoint(url)
        self.url = self._endpoint.url
        self._read_key = token if callable(token) else None
        self._key = token() if callable(token) else token
        self._unread = ""
        self._missing = missing
        self.waits = waits or Waits()
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._http = HttpSession(config or NetConfig(), headers, tls)

    async def get(self, path: str) -> bytes:
        """Return the body of a 200.

        Raises:
            EngineUnreachableError: If it does not answer, or with a 5xx.
            EngineKeyError, EngineUnsupportedError, EngineRefusedError: As the answer says.
        """
        try:
            answer = await self._keyed(
                lambda: self._http.get(
                    self._endpoint, path, limit=MAX_ANSWER_BYTES, timeout_s=self.waits.ask_s
                )
            )
        except ShardcastError as error:
            raise self._unreachable(error) from error
        self._judge(path, answer)
        if answer.status >= 500:
            raise EngineUnreachableError(
                f"engine {self.url} answers {answer.status} to {path}", source=self.url
            )
        if answer.status != 200:
            raise self._refused(path, answer)
        return answer.body

    async def post(
        self, path: str, content: bytes | Mapping[str, object], *, timeout_s: float | None = None
    ) -> Answer:
        """Post JSON, once; return the answer whatever its status, but for those that say no route.

        What was refused for its key, and so had no effect, is posted once more with the new one.

        Args:
            path: Path and query.
            content: The JSON.
            timeout_s: How long its answer is waited for; None: as long as for a small question.

        Raises:
            EngineUnreachableError: If it cannot be reached: nothing was sent.
            EngineUncertainError: If it was sent and nobody knows what became of it.
            EngineKeyError, EngineUnsupportedError: As the answer says.
        """
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        timeout_s = self.waits.ask_s if timeout_s is None else timeout_s
        try:
            answer = await self._keyed(
                lambda: self._http.post(
                    self._endpoint, path, body, limit=MAX_ANSWER_BYTES, timeout_s=timeout_s
                )
            )
        except UnansweredError as error:
            raise EngineUncertainError(
                f"engine {self.url} was asked and did not answer: {error.message}", source=self.url
            ) from error
        except ShardcastError as error:
            raise self._unreachable(error) from error
        self._judge(path, answer)
        return answer

    def uncertain(self, path: str, answer: Answer) -> EngineUncertainError:
        """Return the error of an answer that says nothing: of a proxy, of a server that broke."""
        return EngineUncertainError(
            f"engine {self.url} answers {answer.status} to {path}{_said(answer.body)}",
            source=self.url,
        )

    def members(self, path: str, body: bytes) -> dict[str, Any]:
        """Decode a JSON object.

        Raises:
            EngineUnsupportedError: If it is none.
        """
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise EngineUnsupportedError(
                f"{self.url} answers {path} with something else than a JSON object", source=self.url
            ) from error

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()

    async def _keyed(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask; where the key is not taken, once more with the one that there is now, if it is another."""
        shown = self._key
        answer = await ask()
        if answer.status in REFUSED and self._renew(shown):
            answer = await ask()
        return answer

    def _renew(self, shown: str | None) -> bool:
        """Read the key again; say whether it is another than the one that was shown."""
        self._unread = ""
        if self._read_key is None:
            return False
        try:
            key = self._read_key()
        except ShardcastError as error:
            self._unread = f"; it was read again, in vain: {error.message}"
            return False
        if key is not None and key != self._key:
            self._key = key
            self._http.set_header("Authorization", f"Bearer {key}")
        return self._key != shown

    def _judge(self, path: str, answer: Answer) -> None:
        if answer.status in REFUSED:
            if self._key is None:
                said = (
                    "wants a key: start again with the one that it was started with (--api-key), by "
                    "--engine-token-file FILE, or SHARDCAST_ENGINE_TOKEN in the environment"
                )
            else:
                said = (
                    "does not take the key: put the one that it was started with (--api-key) into the "
                    "file of --engine-token-file, which is read again by itself; or start again with "
                    f"that one in SHARDCAST_ENGINE_TOKEN{self._unread}"
                )
            raise EngineKeyError(f"engine {self.url} {said}", source=self.url)
        if answer.status in (404, 405):
            raise EngineUnsupportedError(
                f"{self.url} has no {path}: {self._missing}", source=self.url
            )

    def _unreachable(self, error: ShardcastError) -> EngineUnreachableError:
        return EngineUnreachableError(
            f"engine {self.url} cannot be reached: {error.message}", source=self.url
        )

    def _refused(self, path: str, answer: Answer) -> EngineRefusedError:
        return EngineRefusedError(
            f"engine {self.url} answers {answer.status} to {path}{_said(answer.body)}",
            source=self.url,
            reason="failed",
        )


def _said(body: bytes) -> str:
    text = body[:400].decode("utf-8", "replace").strip()
    return f": {' '.join(text.split())}" if text else ""

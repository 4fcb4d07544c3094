"""The control plane of one source: heads and JSON, by asyncio."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

import shardcast
from shardcast.asyncget import HttpSession
from shardcast.config import NetConfig
from shardcast.connection import parse_endpoint
from shardcast.errors import (
    MalformedError,
    NetworkError,
    ShardcastError,
    SourceStatusError,
)
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_HEAD_BYTES
from shardcast.protocol.wire import (
    API_PREFIX,
    DEPTH_HEADER,
    NODE_HEADER,
    PATH_HEADER,
    head_path,
    parse_date,
    parse_depth,
    parse_node,
    parse_path,
    parse_retry_after,
)

ANSWER_S: Final = 10.0
"""A head or a list is there or not: no server has to fetch it first, so none needs longer. One that
vanished without a word is given up this long after its long poll should have ended."""


@dataclass(frozen=True, slots=True)
class HeadAnswer:
    """A head as one source gave it: not verified.

    Attributes:
        envelope: The body.
        depth: How far the source is from the origin.
        node: Its node id, None for a static server.
        url: Its base URL.
        path: The nodes between the origin and it, its own last; empty where it tells none.
        date_s: Its clock when it answered, Unix seconds; None where it does not tell.
    """

    envelope: bytes
    depth: int
    node: str | None
    url: str
    path: tuple[str, ...] = ()
    date_s: float | None = None


class HeadSource(Protocol):
    """Where heads come from."""

    @property
    def url(self) -> str:
        """Names the source."""
        ...

    async def head(self, run: str, *, after: int | None = None, wait_s: int = 0) -> HeadAnswer:
        """Return the head, at once or when its sequence is above ``after`` or the wait is over."""
        ...


@asynccontextmanager
async def open_session(
    config: NetConfig,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    *,
    most: int | None = None,
) -> AsyncIterator[HttpSession]:
    """Yield an HTTP client as ``Upstream`` needs it, closed afterwards.

    Args:
        config: Timeouts.
        headers: Sent with every request.
        tls: For https; None means the system's certificates.
        most: Connections to one server at once; None: any number.
    """
    sent = {
        "User-Agent": f"shardcast/{shardcast.__version__}",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        **(headers or {}),
    }
    session = HttpSession(config, sent, tls, most=most)
    try:
        yield session
    finally:
        await session.close()


class Upstream:
    """One source's control plane.

    Attributes:
        url: Its base URL, without a slash at the end.
    """

    def __init__(self, url: str, session: HttpSession, config: NetConfig) -> None:
        """Check the URL; connect later.

        Raises:
            UsageError: If the URL is none.
        """
        self._endpoint = parse_endpoint(url)
        self.url = self._endpoint.url
        self._session = session
        self._config = config

    async def head(self, run: str, *, after: int | None = None, wait_s: int = 0) -> HeadAnswer:
        """Return the head, as it is; with ``after`` once its sequence is above, or after the wait.

        Raises:
            SourceStatusError: If the answer is not 200 (404: the source does not know the run).
            StallError: If no answer came in time.
            NetworkError: If the source cannot be reached.
            MalformedError: If the answer is over its limit or its depth is none.
        """
        path = head_path(run, after=after, wait=wait_s if after is not None else None)
        body, headers = await self._get(path, limit=MAX_HEAD_BYTES, wait_s=wait_s)
        try:
            depth = parse_depth(headers.get(DEPTH_HEADER.lower()))
        except MalformedError as error:
            error.source = self.url
            raise
        return HeadAnswer(
            envelope=body,
            depth=depth,
            node=parse_node(headers.get(NODE_HEADER.lower())),
            url=self.url,
            path=parse_path(headers.get(PATH_HEADER.lower())),
            date_s=parse_date(headers.get("date")),
        )

    async def runs(self) -> list[str]:
        """Return the names of the source's runs.

        Raises:
            NetworkError: If it has no such list or cannot be reached.
            MalformedError: If the answer is something else.
        """
        answer = await self._json(f"{API_PREFIX}/runs")
        names = answer.get("runs")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise MalformedError("its list of runs is malformed", source=self.url)
        return [name for name in names if isinstance(name, str)]

    async def status(self) -> dict[str, Any]:
        """Return the source's status, as it reports it.

        Raises:
            NetworkError: If it has none or cannot be reached.
            MalformedError: If the answer is no JSON object.
        """
        return await self._json(f"{API_PREFIX}/status")

    async def peers(self, run: str) -> dict[str, Any]:
        """Return the neighbours that serve a run, as the source reports them.

        Raises:
            NetworkError: If it tells none or cannot be reached.
            MalformedError: If the answer is no JSON object.
        """
        return await self._json(f"{API_PREFIX}/{run}/peers")

    async def _json(self, path: str) -> dict[str, Any]:
        body, _ = await self._get(path, limit=MAX_DOCUMENT_BYTES)
        try:
            answer = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise MalformedError(
                f"{path} is not a JSON object: {error}", source=self.url
            ) from error
        return answer

    async def _get(
        self, path: str, *, limit: int, wait_s: float = 0
    ) -> tuple[bytes, Mapping[str, str]]:
        try:
            answer = await self._session.get(
                self._endpoint,
                path,
                limit=limit,
                timeout_s=wait_s + min(ANSWER_S, self._config.header_timeout_s),
            )
            if answer.status != 200:
                raise self._status_error(path, answer.status, answer.headers)
            coding = answer.headers.get("content-encoding", "identity").lower()
            if coding != "identity":
                raise NetworkError(f"sends {path} with Content-Encoding {coding[:40]!r}")
        except ShardcastError as error:
            error.source = error.source or self.url
            raise
        return answer.body, answer.headers

    def _status_error(self, path: str, status: int, headers: Mapping[str, str]) -> NetworkError:
        where = headers.get("location")
        if 300 <= status < 400 and where is not None:
            return NetworkError(
                f"redirects {path} to {where!r:.200}: not followed", source=self.url
            )
        return SourceStatusError(
            f"answers {status} to {path}",
            source=self.url,
            status=status,
            retry_after=parse_retry_after(headers.get("retry-after"), time.time()),
        )

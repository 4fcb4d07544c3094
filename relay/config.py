"""What a relay is told: one immutable object, with a reason at every limit."""

from __future__ import annotations

import enum
import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shardcast.config import NetConfig
from shardcast.connection import parse_endpoint
from shardcast.errors import UsageError
from shardcast.protocol.documents import check_run
from shardcast.protocol.envelope import PUBLIC_KEY_BYTES
from shardcast.protocol.limits import KIB, MIB

log = logging.getLogger("relay.config")

_SHORT_TOKEN: Final = 16
LEAST_RATE: Final = 64 * KIB
"""A slower relay would have its readers take it for stalled."""


class Prefetch(enum.StrEnum):
    """What a relay with parents fetches before anyone asks."""

    ALL = "all"
    DELTAS = "deltas"
    DEMAND = "demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what clients and fills may take. Times in seconds, sizes in bytes.

    Attributes:
        max_connections: Open connections in all. Each costs about 60 KiB and a descriptor, one
            more while a blob is sent.
        max_connections_per_client: Open connections of one client (``relay.admission`` says what
            that is). Generous, because a whole site may sit behind one address translator.
        max_requests: Requests being answered at once. A connection has one at a time.
        max_requests_per_client: The same for one client: counts where a proxy's connection
            carries the requests of many.
        max_waits: Requests for a head that wait for a newer one; more are answered at once. Never
            more than half of the connections.
        max_waits_per_client: The same for one client.
        requests_per_s_per_client: What one client may ask for in the long run: a relay of one core
            answers some thousand a second.
        request_burst_per_client: And at once after a rest: a site of 1,000 workers that hear of a
            new version asks for head and documents within a second.
        refused_connections: How many connections over a limit are answered 503 rather than just
            closed: answering costs as much as a request.
        header_timeout_s: From the connection to the end of its first request's head.
        idle_timeout_s: Between two requests of a connection, until the second one's head ended.
        body_timeout_s: Longest silence within a request's body.
        body_rate_bytes_per_s: What a body must bring on average, after that time: a byte every
            now and then is no silence.
        stuck_timeout_s: A reader that takes nothing at all for so long is cut off (by
            TCP_USER_TIMEOUT); one that merely is slow is not.
        max_uploads: Request bodies being received at once, each with a buffer of 2 MiB.
        max_documents: Uploaded documents held in memory at once, each up to 16 MiB.
        max_pending: Versions being uploaded at once, in one run.
        pending_timeout_s: An upload that nobody continues for so long is forgotten.
        fill_threads: Blobs fetched from parents at once, each with a thread and an I/O buffer; as
            many again from siblings.
        prefetch_fills: Of these, how many prefetching may take: demand comes first.
        rebuild_threads: Delta blobs that are decoded at once, each with a few frames in memory
            (about 60 MiB at most); never more than there are cores.
        rebuild_patience_s: A shard that shall be rebuilt is fetched after all when nothing of its
            version has come on for so long: sooner than its readers lose patience (20 s and up).
        max_fills: Blobs being fetched or waiting for a thread; more requests are answered 503.
        fill_deadline_s: A fill that got nothing from any source for so long fails: sooner than its
            readers lose patience (30 s).
        refresh_wait_s: How long a request for an unknown digest waits for a newer head.
        refresh_pause_s: Between two such refreshes of one run: unknown digests cost nothing.
        drain_s: How long running responses may take to finish after SIGTERM.
        quiet_s: A connection without a request is closed while draining when nothing has come for
            so long: a round trip, so that no request is on its way to a connection that closes.
        take_over_wait_s: How long a request that needs the store waits for the relay before to let
            go of it; then its blob is fetched for it alone.
        recent_s: A version that was asked for within this time is not evicted.
    """

    max_connections: int = 4096
    max_connections_per_client: int = 2048
    max_requests: int = 4096
    max_requests_per_client: int = 2048
    max_waits: int = 4096
    max_waits_per_client: int = 2048
    requests_per_s_per_client: float = 500.0
    request_burst_per_client: int = 8000
    refused_connections: int = 256
    header_timeout_s: float = 20.0
    idle_timeout_s: float = 75.0
    body_timeout_s: float = 30.0
    body_rate_bytes_per_s: int = 4 * KIB
    stuck_timeout_s: float = 120.0
    max_uploads: int = 32
    max_documents: int = 4
    max_pending: int = 8
    pending_timeout_s: float = 24 * 3600.0
    fill_threads: int = 16
    prefetch_fills: int = 8
    rebuild_threads: int = 4
    rebuild_patience_s: float = 10.0
    max_fills: int = 1024
    fill_deadline_s: float = 20.0
    refresh_wait_s: float = 3.0
    refresh_pause_s: float = 1.0
    drain_s: float = 30.0
    quiet_s: float = 1.0
    take_over_wait_s: float = 10.0
    recent_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Everything a relay needs to know.

    Attributes:
        store: Directory of the store.
        listen: ``HOST:PORT``; a host name listens on all its addresses, ``[::]`` on IPv4 too.
        parents: Base URLs to fetch from; none: an origin.
        siblings: Base URLs of the relays that share the parents' load.
        runs: Runs to relay; none: all runs that the parents have.
        pubkeys: Raw public keys to pin.
        first_use: Trust the first key seen and remember it.
        publish_token_file: File with the bearer token for publishing; None: nobody may.
        keep: Versions to keep on disk; None: as many as the head retains.
        keep_for_s: Longest time to keep a version that is not the newest; None: any.
        quota_bytes: Most bytes of versions in the store; None: any.
        limit_rate_bytes_per_s: What all responses together may send, shared fairly by clients;
            None: no limit.
        limit_rate_client_bytes_per_s: What all responses to one client may send; None: no limit.
        trusted_proxies: Addresses or networks of proxies whose X-Forwarded-For says who the
            client is.
        take_over: Take the place of the relay that serves the store, if one does.
        scrub_rate_bytes_per_s: How fast to read what is on disk again, to find what rotted; 0:
            not at all.
        prefetch: What to fetch unasked.
        materialize: Rebuild full shards from a version that is here and a delta, instead of
            fetching them.
        depth: Returns how far the store is from the origin, where a worker fills it; None: what
            the parents say.
        on_damage: Told of a version of a run that was found damaged, where a worker can repair it.
        limits: Bounds.
        net: Bounds of fetching from parents and siblings.
    """

    store: Path
    listen: str = "127.0.0.1:8470"
    parents: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    pubkeys: tuple[bytes, ...] = ()
    first_use: bool = False
    publish_token_file: Path | None = None
    keep: int | None = None
    keep_for_s: float | None = None
    quota_bytes: int | None = None
    limit_rate_bytes_per_s: int | None = None
    limit_rate_client_bytes_per_s: int | None = None
    trusted_proxies: tuple[str, ...] = ()
    take_over: bool = False
    scrub_rate_bytes_per_s: int = 0
    prefetch: Prefetch = Prefetch.ALL
    materialize: bool = False
    depth: Callable[[], int] | None = None
    on_damage: Callable[[str, int], None] | None = None
    limits: Limits = field(default_factory=Limits)
    net: NetConfig = field(default_factory=NetConfig)

    def __post_init__(self) -> None:
        """Check what can be checked without touching disk or network.

        Raises:
            UsageError: Naming the option.
            MalformedError: If a run name is none.
        """
        split_listen(self.listen)
        for url in (*self.parents, *self.siblings):
            parse_endpoint(url)
        for run in self.runs:
            check_run(run)
        if self.pubkeys and self.first_use:
            raise UsageError("give either --pubkey or --trust-on-first-use, not both")
        if any(len(key) != PUBLIC_KEY_BYTES for key in self.pubkeys):
            raise UsageError(f"a public key is {PUBLIC_KEY_BYTES} bytes")
        if self.siblings and not self.parents:
            raise UsageError("--sibling is for relays with a --parent")
        if self.materialize and not self.parents:
            raise UsageError("--materialize is for relays with a --parent")
        if self.materialize and self.prefetch is Prefetch.DEMAND:
            raise UsageError("--materialize needs deltas: --prefetch all or deltas")
        if self.publish_token_file is not None and self.parents:
            raise UsageError("--publish-token-file is for origins: publish to the root of the tree")
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"--keep {self.keep}: at least one version is kept")
        self._check_admission()
        if self.quota_bytes is not None and self.quota_bytes < MIB:
            raise UsageError(f"--quota {self.quota_bytes} is below 1 MiB")

    def _check_admission(self) -> None:
        for option, rate in (
            ("--limit-rate", self.limit_rate_bytes_per_s),
            ("--limit-rate-client", self.limit_rate_client_bytes_per_s),
        ):
            if rate is not None and rate < LEAST_RATE:
                raise UsageError(f"{option} {rate} is below 64 KiB/s")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError as error:
                raise UsageError(f"--trust-proxy {proxy!r} is no address: {error}") from error
        limits = self.limits
        if min(limits.max_connections, limits.max_connections_per_client) < 1:
            raise UsageError("--max-connections and --max-connections-client are at least 1")
        if limits.requests_per_s_per_client <= 0 or limits.request_burst_per_client < 1:
            raise UsageError("--limit-requests-client must be more than 0")

    @property
    def origin(self) -> bool:
        """Whether the store itself is what it serves, and nothing is fetched."""
        return not self.parents

    @property
    def writes(self) -> bool:
        """Whether it changes the store in ways that two processes must not do at once."""
        return bool(self.parents) or self.publish_token_file is not None

    @property
    def role(self) -> str:
        """What it is in its tree."""
        if self.parents:
            return "relay"
        return "origin" if self.depth is None else "worker"


def split_listen(listen: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::]:8470``, ``127.0.0.1:0``, ``localhost:8470``).

    Raises:
        UsageError: If it is not that.
    """
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"--listen {listen!r}: write an IPv6 address as [ADDRESS]:PORT")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen {listen!r} is not HOST:PORT")
    return host, int(port)


def read_token(path: Path) -> bytes:
    """Read the publish token: the file's first line.

    Raises:
        UsageError: If it cannot be read, or is empty or not plain ASCII.
    """
    try:
        text = path.read_text("utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"publish token cannot be read: {error}", source=str(path)) from error
    if not text or not text.isascii():
        raise UsageError("publish token is empty or not plain ASCII", source=str(path))
    if len(text) < _SHORT_TOKEN:
        log.warning("publish token in %s has only %d characters: easy to guess", path, len(text))
    return text.encode("ascii")

"""How hard the client side tries: one immutable object, with a reason at every limit."""

from __future__ import annotations

from dataclasses import dataclass

from shardcast.errors import UsageError
from shardcast.protocol.limits import KIB, MAX_WAIT_SECONDS, MIB


@dataclass(frozen=True, slots=True)
class NetConfig:
    """Bounds of everything that waits for a network. Times in seconds, sizes in bytes.

    Attributes:
        connect_timeout_s: From name resolution to the end of the TLS handshake. Two lost SYNs
            (1 s + 2 s + 4 s) still get through.
        read_timeout_s: Longest silence while a body arrives.
        header_timeout_s: From the request to the last byte of the response's head: longer than
            ``read_timeout_s``, because a relay may first fetch the blob itself.
        minimum_rate_bytes_per_s: Slower than this over ``rate_window_s`` is a stall. At 8 KiB/s
            a shard of 16 MiB takes half an hour: nobody is served by waiting for it.
        rate_window_s: How long a source may be slower before it counts. Wi-Fi roams and TCP
            recovers from heavy loss within this.
        max_header_bytes: Head of a response; nginx itself stops at 32 KiB in all.
        chunk_bytes: I/O buffer of a connection. Hashing and writing find its bytes in the L2
            cache. Measured with two threads into one file on tmpfs, CPU seconds a GB: 128 KiB
            0.87, 256 KiB 0.66, 1 MiB 0.57, 4 MiB 0.61; writers of one file take turns, so
            fewer and larger writes also wait less.
        connections_per_source: Requests in flight to one source. Two hide the round trip between
            two shards; more take from other workers.
        max_connections: Threads that fetch, over all sources. Each keeps a core busy on a fast
            link; more of them only switch contexts.
        idle_connection_s: A pooled connection older than this is not used again: common servers
            close theirs after 60 s or more, some proxies after 15 s.
        backoff_first_s: Mean of the first pause after a failure, doubled with each further one.
        backoff_cap_s: No pause is longer, so that a recovered source is found within seconds.
        retry_after_cap_s: A source that asks for more patience is asked again all the same.
        give_up_after_s: A pull fails after this long without one verified byte from any source.
        ban_s: How long a source that sent a wrong blob is left alone for that run.
        head_wait_s: Long poll for a head; servers clamp it to 25 s themselves.
        head_poll_s: Pause between polls of a server that does not wait.
        head_grace_s: A single pull takes the newest head that came this long after the first.
        overtake_factor: In the end game a transfer that would last this many times longer than
            elsewhere is raced by a second request, or continued elsewhere.
        hedge_s: It is raced no sooner than it lags by this much: a round trip and a retransmission.
        lag_s: It is cancelled and continued no sooner than it lags by this much, more than a
            hiccup of TCP: what it had under way is lost then.
        silent_s: And one that is silent, no sooner than after this long: a relay may first have
            to fetch the blob itself.
        hedge_share: Bytes that come twice because of second requests are at most this share of
            the bytes that are pulled.
    """

    connect_timeout_s: float = 10.0
    read_timeout_s: float = 15.0
    header_timeout_s: float = 30.0
    minimum_rate_bytes_per_s: float = 8.0 * KIB
    rate_window_s: float = 10.0
    max_header_bytes: int = 32 * KIB
    chunk_bytes: int = MIB
    connections_per_source: int = 2
    max_connections: int = 8
    idle_connection_s: float = 12.0
    backoff_first_s: float = 0.25
    backoff_cap_s: float = 10.0
    retry_after_cap_s: float = 30.0
    give_up_after_s: float = 60.0
    ban_s: float = 600.0
    head_wait_s: int = MAX_WAIT_SECONDS
    head_poll_s: float = 2.0
    head_grace_s: float = 0.5
    overtake_factor: float = 3.0
    hedge_s: float = 0.25
    lag_s: float = 1.0
    silent_s: float = 2.0
    hedge_share: float = 0.02

    def __post_init__(self) -> None:
        """Check what would make the client misbehave.

        Raises:
            UsageError: Naming the value.
        """
        positive = (
            "connect_timeout_s",
            "read_timeout_s",
            "header_timeout_s",
            "rate_window_s",
            "connections_per_source",
            "max_connections",
            "backoff_first_s",
            "give_up_after_s",
            "head_poll_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is not above zero: {getattr(self, name)}")
        if not 0 <= self.hedge_share < 1:
            raise UsageError(f"hedge_share is not a share: {self.hedge_share}")
        if self.chunk_bytes < 2 * self.max_header_bytes:
            raise UsageError(
                f"chunk_bytes {self.chunk_bytes} is less than twice max_header_bytes "
                f"{self.max_header_bytes}"
            )

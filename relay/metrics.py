"""What a relay counts (Prometheus), in a registry of its own: many relays fit in one process."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_FILL_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The relay's counters. No label grows with clients, versions or digests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "shardcast_requests",
            "Requests answered",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.sent = Counter(
            "shardcast_sent_bytes",
            "Bytes of blobs sent to clients",
            ["source"],
            registry=self.registry,
        )
        self.received = Counter(
            "shardcast_received_bytes",
            "Bytes of blobs fetched or uploaded",
            ["origin"],
            registry=self.registry,
        )
        self.fills = Counter(
            "shardcast_fills", "Blobs fetched from upstream", ["result"], registry=self.registry
        )
        self.fill_seconds = Histogram(
            "shardcast_fill_seconds",
            "Time to fetch one blob from upstream",
            buckets=_FILL_SECONDS,
            registry=self.registry,
        )
        self.open_fills = Gauge(
            "shardcast_open_fills", "Blobs on their way", registry=self.registry
        )
        self.connections = Gauge(
            "shardcast_open_connections", "Open client connections", registry=self.registry
        )
        self.refused = Counter(
            "shardcast_refused_connections",
            "Connections over a limit",
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "shardcast_refused_requests",
            "Requests over a limit: rate (429), busy (503)",
            ["reason"],
            registry=self.registry,
        )
        self.waiting = Gauge(
            "shardcast_waiting_requests",
            "Requests that wait for a newer head",
            registry=self.registry,
        )
        self.unwaited = Counter(
            "shardcast_unwaited_requests",
            "Requests answered at once instead of waiting for a head: too many wait",
            registry=self.registry,
        )
        self.aborted = Counter(
            "shardcast_aborted_responses",
            "Responses cut off because the rest was wrong or did not come",
            registry=self.registry,
        )
        self.wrong = Counter(
            "shardcast_wrong_blobs",
            "Blobs from upstream with a wrong digest",
            registry=self.registry,
        )
        self.bans = Counter(
            "shardcast_bans",
            "Servers left alone for a run because they sent a wrong blob",
            registry=self.registry,
        )
        self.materialized = Counter(
            "shardcast_materialized_shards",
            "Shards rebuilt here from a base and a delta, instead of fetched",
            registry=self.registry,
        )
        self.materialized_bytes = Counter(
            "shardcast_materialized_bytes",
            "Bytes of the shards rebuilt here",
            registry=self.registry,
        )
        self.materialize_failures = Counter(
            "shardcast_materialize_failures",
            "Frames that did not rebuild their shards: by the delta, or by the base on this disk",
            ["cause"],
            registry=self.registry,
        )
        self.evicted = Counter(
            "shardcast_evicted_versions", "Versions removed by retention", registry=self.registry
        )
        self.sequence = Gauge(
            "shardcast_head_sequence",
            "Sequence of the head served",
            ["run"],
            registry=self.registry,
        )
        self.version = Gauge(
            "shardcast_newest_version",
            "Newest version the head names; 0 before the first",
            ["run"],
            registry=self.registry,
        )
        self.complete = Gauge(
            "shardcast_complete_version",
            "Newest version that is whole on disk; 0: none",
            ["run"],
            registry=self.registry,
        )
        self.depth = Gauge(
            "shardcast_depth_hops", "Distance from the origin", registry=self.registry
        )

        self.scrubbed = Counter(
            "shardcast_scrubbed_bytes",
            "Bytes on disk that were read again in the background",
            registry=self.registry,
        )
        self.scrub_damaged = Counter(
            "shardcast_scrub_damaged_shards",
            "Shards and blobs that reading again found damaged",
            registry=self.registry,
        )
        self.scrub_age = Gauge(
            "shardcast_scrub_pass_age_seconds",
            "Since everything on disk was last read again; before the first time: since the start",
            registry=self.registry,
        )
        self.damaged = Gauge(
            "shardcast_damaged_versions",
            "Versions on disk that are not whole any more",
            ["run"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)

"""What a worker tells about itself: values for progress bars, JSON lines and logs."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardcast.errors import ShardcastError


class EventKind(enum.StrEnum):
    """What happened.

    Attributes:
        WAITING: Another process leads in this directory (``error`` names it); what it commits is
            shared.
        HEAD: A newer head was accepted.
        SOURCE: A source failed, or its head was refused (``error`` says how, ``source`` which).
        BANNED: A source sent a wrong blob and is left alone for a while.
        STARTED: Work on a version began: ``bytes_total`` in all, ``bytes_done`` here already.
        PROGRESS: ``bytes_done`` of ``bytes_total`` are verified.
        DAMAGED: Bytes on this disk were not what they should be; they are fetched again.
        REPAIRED: A committed version was damaged on this disk, under those who use it, and is whole
            again: ``bytes_fetched`` came for that.
        INTACT: An engine (``engine``) called a version damaged, or could not read it, and every byte of
            it is right on this disk; ``error`` says what to look at.
        DELTA_FAILED: A delta did not bring some shards of a version, which come plainly; ``error``
            says which and why: the publisher's frame, this disk, or the sources.
        SUPERSEDED: Work on a version was dropped for a newer one.
        READY: Every shard of a version is verified; its files lie in ``path``.
        HELD: A version is ready, and the publisher holds activations.
        COMMITTED: ``current`` names the version; its files lie in ``path``.
        FROZEN: The head has expired: the publisher is gone or a relay withholds newer heads.
        THAWED: A fresh head came after that.
        ERROR: Something failed that will be tried again (``follow``), or the update hook did.
        STAGED: An engine (``engine``) has verified a version and holds it; it serves on.
        ACTIVATED: An engine serves a version now, after ``pause_ms`` of pause.
        ENGINE_FAILED: An engine failed to, or does not answer; ``error`` says who must do what. Tried
            again.
    """

    WAITING = "waiting"
    HEAD = "head"
    SOURCE = "source"
    BANNED = "banned"
    STARTED = "started"
    PROGRESS = "progress"
    DAMAGED = "damaged"
    REPAIRED = "repaired"
    INTACT = "intact"
    DELTA_FAILED = "delta_failed"
    SUPERSEDED = "superseded"
    READY = "ready"
    HELD = "held"
    COMMITTED = "committed"
    FROZEN = "frozen"
    THAWED = "thawed"
    ERROR = "error"
    STAGED = "staged"
    ACTIVATED = "activated"
    ENGINE_FAILED = "engine_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """One event. Members that do not apply are None.

    Attributes:
        kind: What happened.
        run: The run.
        t: When, Unix milliseconds.
        version: The version it is about.
        step: Its training step.
        manifest: Its manifest digest.
        path: Where its files are.
        bytes_done: Verified bytes of the version.
        bytes_total: Size of the version.
        bytes_fetched: What came over the network for it.
        bytes_hedged: Of those, what came twice because a slow request was raced by a second one
            (``READY``).
        bytes_delta: Of those, what came as deltas (``READY``).
        bytes_ahead: Of those, what came before the version was announced whole (``READY``).
        via: Versions that were obtained on the way to it (``READY``).
        source: URL of the source it is about.
        engine: URL of the engine it is about.
        pause_ms: How long that was paused (``ACTIVATED``); None where nobody measured it.
        model: By which name requests get the adapter (``ACTIVATED``, of an adapter).
        error: What went wrong.
    """

    kind: EventKind
    run: str
    t: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    version: int | None = None
    step: int | None = None
    manifest: str | None = None
    path: Path | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    bytes_fetched: int | None = None
    bytes_hedged: int | None = None
    bytes_delta: int | None = None
    bytes_ahead: int | None = None
    via: tuple[int, ...] = ()
    source: str | None = None
    engine: str | None = None
    pause_ms: float | None = None
    model: str | None = None
    error: ShardcastError | None = None


class Observer(Protocol):
    """Whoever wants to know."""

    def on_event(self, event: WorkerEvent) -> None:
        """Take an event. Called from any thread, one call at a time; it must not block."""
        ...

"""What the agent asks of an inference engine: a protocol with an implementation for each kind.

Every implementation passes one suite (tests/contract/test_engines.py). The states and answers are
the forms that our own routes speak (``shardcast.engine.forms``); other engines' drivers fill them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from shardcast.engine.forms import (
    DEFAULT_LEASE_SECONDS,
    EngineState,
    ErrorCode,
    Identity,
    Requests,
)
from shardcast.errors import IntegrityError, MalformedError, ShardcastError, TrustError


@dataclass(frozen=True, slots=True)
class Target:
    """A version that an engine can be told to load: committed, whole, on the engine's host.

    Attributes:
        run: Its run.
        version: Its number.
        digest: Its manifest digest.
        path: Its directory, absolute.
        step: Its training step, or None.
    """

    run: str
    version: int
    digest: str
    path: Path
    step: int | None = None

    @property
    def identity(self) -> Identity:
        """Which version it is."""
        return Identity(self.run, self.version, self.digest)


@dataclass(frozen=True, slots=True)
class Swapped:
    """What an activation that succeeded came to.

    Attributes:
        pause_ms: How long the engine was paused; 0 if it served the version already.
        phases_ms: Where the time went, by phase.
        state: Of the engine afterwards.
    """

    pause_ms: float
    phases_ms: dict[str, float]
    state: EngineState


MARGIN_S: Final = 15.0
"""Beyond a lease: an engine that keeps it has answered by then."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long an engine's answers are waited for, in seconds.

    Attributes:
        ask_s: For small questions: its API process answers them even while its ranks load.
        stage_s: Until a version is staged: hashing 1 TB from a slow disk. Only the agent waits for it,
            and finds by looks at the state whether the engine still answers.
        score_s: For log-probabilities: one prefill that queues behind running requests.
        margin_s: Beyond a lease, for what has one.
    """

    ask_s: float = 10.0
    stage_s: float = 3600.0
    score_s: float = 120.0
    margin_s: float = MARGIN_S


@dataclass(frozen=True, slots=True)
class Manner:
    """How engines are made to swap.

    Attributes:
        requests: What becomes of running requests.
        lease_s: How long an activation may take, pause included.
        waits: How long answers are waited for.
    """

    requests: Requests = "recompute"
    lease_s: float = DEFAULT_LEASE_SECONDS
    waits: Waits = field(default_factory=Waits)


def reason_of(error: ShardcastError) -> ErrorCode:
    """Return the code under which a version is refused that could not be read as it should be."""
    if isinstance(error, IntegrityError):
        return "integrity"
    if isinstance(error, TrustError):
        return "conflict"
    if isinstance(error, MalformedError):
        return "incompatible"
    return "unavailable"


class Engine(Protocol):
    """One inference engine.

    All calls raise ``EngineUnreachableError`` if nothing was sent, ``EngineUncertainError`` if
    nobody knows what became of a request, ``EngineRefusedError`` with the engine's reason,
    ``EngineKeyError`` and ``EngineUnsupportedError``. Cancelling a call leaves the engine serving
    one whole version, or not ready.

    Attributes:
        name: What people call it: its URL.
    """

    name: str

    async def state(self) -> EngineState:
        """Return what it says about itself."""
        ...

    async def stage(self, target: Target) -> EngineState:
        """Let it verify a version and hold it, while it serves."""
        ...

    async def activate(self, target: Target) -> Swapped:
        """Let it pause, load, check and resume; at once if it serves the version already."""
        ...

    async def tell(self, run: str, newest: int, max_lag: int | None) -> EngineState:
        """Let it know how far the run is."""
        ...

    async def load_adapter(self, name: str, target: Target) -> EngineState:
        """Load an adapter directory under a model name that is never used again."""
        ...

    async def unload_adapter(self, name: str, identity: Identity) -> EngineState:
        """Give up what was loaded for a version of an adapter; harmless if it is not there."""
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, given those before it."""
        ...

    async def close(self) -> None:
        """Close connections. What was begun at the engine goes on there."""
        ...

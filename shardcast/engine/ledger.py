"""What a driver remembers for an engine that does not speak our forms itself, and says for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardcast.engine import forms
from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState, Identity, Phase, Requests


class Watch:
    """Times the phases of a swap.

    Attributes:
        began_ms: When it began, Unix milliseconds.
        phases_ms: What each phase took.
    """

    def __init__(self) -> None:
        """Begin."""
        self.began_ms = now_ms()
        self.phases_ms: dict[str, float] = {}
        self._at = time.monotonic()

    @property
    def pause_ms(self) -> float:
        """How long all of it took."""
        return sum(self.phases_ms.values())

    def lap(self, phase: str) -> None:
        """A phase ended."""
        now = time.monotonic()
        self.phases_ms[phase] = self.phases_ms.get(phase, 0.0) + (now - self._at) * 1000
        self._at = now


class Ledger:
    """One engine's staged version, swaps, last failure, and how far its run is.

    Attributes:
        staged: What is staged.
        activating: The activation under way.
    """

    def __init__(self, engine: str, requests: Requests) -> None:
        """Remember nothing yet.

        Args:
            engine: Its kind, for its state.
            requests: What becomes of running requests.
        """
        self.staged: forms.Staged | None = None
        self.activating: forms.Activating | None = None
        self._engine = engine
        self._requests: Requests = requests
        self._run: str | None = None
        self._newest: int | None = None
        self._max_lag: int | None = None
        self._failure: forms.Failure | None = None
        self._since: dict[str, int] = {}
        self._steps: dict[str, int | None] = {}
        self._swaps: list[forms.Swap] = []
        self._count = 0

    # --- what happens -----------------------------------------------------------------------

    def stage(self, target: Target) -> None:
        """A version is staged."""
        self.staged = forms.Staged(
            run=target.run,
            version=target.version,
            digest=target.digest,
            step=target.step,
            path=str(target.path),
            since=now_ms(),
        )

    def at(self, phase: Phase, target: Target) -> None:
        """An activation enters a phase."""
        self.activating = forms.Activating(
            run=target.run,
            version=target.version,
            digest=target.digest,
            phase=phase,
            since=now_ms(),
        )

    def succeed(self, target: Target) -> None:
        """A version is served."""
        self.staged = self._failure = None
        self._since[target.digest] = now_ms()
        self._steps[target.digest] = target.step

    def fail(self, phase: Phase, reason: str, message: str, version: int) -> None:
        """Something failed."""
        self._failure = forms.Failure(
            phase=phase,
            code=reason,
            message=message[: forms.MAX_MESSAGE_CHARS],
            version=version,
            t=now_ms(),
        )

    def log(self, before: Identity | None, after: Identity | None, watch: Watch) -> None:
        """A pause is over."""
        self._count += 1
        self._swaps.append(
            forms.Swap(
                n=self._count,
                from_=None if before is None else str(before),
                to=None if after is None else str(after),
                paused_at=watch.began_ms,
                resumed_at=now_ms(),
                pause_ms=watch.pause_ms,
                requests=self._requests,
            )
        )
        del self._swaps[: -forms.MAX_SWAPS]

    def tell(self, run: str, newest: int, max_lag: int | None) -> None:
        """The run is so far."""
        self._run, self._newest, self._max_lag = run, newest, max_lag

    # --- what it says -----------------------------------------------------------------------

    def state(
        self,
        identity: Identity | None,
        *,
        paused: bool,
        poisoned: bool,
        version: str = "unknown",
        lora: Sequence[forms.Lora] = (),
    ) -> EngineState:
        """Return the engine's state.

        Args:
            identity: What it has loaded, None where that is none of ours.
            paused: Whether it answers no requests; then nobody counts on what it has loaded.
            poisoned: Whether nobody knows what it has loaded.
            version: Its release.
            lora: Its adapters.
        """
        served = None if poisoned or identity is None else self._served(identity)
        lag = None
        if served is not None and self._newest is not None:
            lag = max(self._newest - served.version, 0)
        behind = lag is not None and self._max_lag is not None and lag > self._max_lag
        return EngineState(
            engine=self._engine,
            engine_version=version,
            plugin_version="none",
            run=self._run if identity is None else identity.run,
            served=served,
            staged=self.staged,
            activating=self.activating,
            paused=paused,
            poisoned=poisoned,
            ready=served is not None and not paused and not behind,
            why=_why(paused=paused, served=served is not None, behind=behind),
            lag=lag,
            newest=self._newest,
            max_lag=self._max_lag,
            last_failure=self._failure,
            swap_count=self._count,
            swaps=list(self._swaps),
            lora=list(lora),
        )

    def _served(self, identity: Identity) -> forms.Served:
        return forms.Served(
            version=identity.version,
            digest=identity.digest,
            step=self._steps.get(identity.digest),
            since=self._since.setdefault(identity.digest, now_ms()),
        )


def _why(*, paused: bool, served: bool, behind: bool) -> str:
    if paused:
        return "an activation is under way or was interrupted"
    if not served:
        return "it was booted from elsewhere and nothing was activated"
    return "it is too far behind" if behind else ""


def now_ms() -> int:
    """Return this machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000

"""What an engine is, and what may become of it: the state of a swap. Pure, no clock, no I/O.

An activation goes ``begun`` -> (``in_phase``) -> ``pausing`` -> ``settled`` -> ``resumed``, and ends
in one of three ways, whatever fails:

a. the new version is served and labelled;
b. the old version is served and labelled, ``last_failure`` says in which phase what went wrong;
c. the engine is not ready and paused, and the message says what to do.

Between ``pausing`` and ``resumed`` no token is generated. ``settled`` is where it is known which
weights are loaded; label and count of swaps change there together, so that a request admitted
with the new count can only run on the new weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from shardcast.engine.forms import (
    MAX_MESSAGE_CHARS,
    MAX_SWAPS,
    STATUS_OF,
    UNKNOWN_VERSION,
    ActivateRequest,
    Activating,
    EngineState,
    Failure,
    Identity,
    Lora,
    NewestRequest,
    Phase,
    Requests,
    Served,
    Staged,
    Swap,
    label_of,
)
from shardcast.errors import EngineError
from trainer_adapter.vllm.ranks import Target

ACTIVATE_AGAIN: Final = (
    "send activate again (the same version or another one): it loads the whole version and resumes"
)
RESTART: Final = "restart the engine"


class SwapError(EngineError):
    """A request to an engine that was refused or has failed.

    Attributes:
        slug: One of ``forms.ErrorCode``.
        phase: Where it failed, or None where nothing was begun.
    """

    def __init__(self, slug: str, message: str, *, phase: Phase | None = None) -> None:
        super().__init__(message[:MAX_MESSAGE_CHARS])
        self.slug = slug if slug in STATUS_OF else "failed"
        self.phase = phase


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while a server runs."""

    engine_version: str
    plugin_version: str
    keep_refusal: str = "requests are not salted by version"
    """Why ``requests: keep`` is refused; empty where it is allowed."""
    unsupported: str = ""
    """Why this server cannot be driven at all, and who must do what; empty where it can."""
    may_sleep: bool = False
    """Whether sleep mode is on: somebody else may have the ranks throw their weights away."""
    start: str = ""
    """A random name of this start of the server, beside every count of swaps."""


@dataclass(frozen=True, slots=True)
class Running:
    """The weights that an engine runs."""

    target: Target
    since: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The state. Every method returns the next one."""

    served: Running | None = None
    staged: Staged | None = None
    activating: Activating | None = None
    requests: Requests = "recompute"
    paused_at: int | None = None
    late: str = ""
    """Why an activation is not over although its lease is."""
    poisoned: str = ""
    dead: str = ""
    newest: NewestRequest | None = None
    last_failure: Failure | None = None
    swap_count: int = 0
    swaps: tuple[Swap, ...] = ()
    lora: tuple[Lora, ...] = field(default=())

    # --- questions -----------------------------------------------------------------------------

    @property
    def identity(self) -> Identity | None:
        """What is served, or None where nobody can tell."""
        known = self.served is not None and not self.poisoned and not self.dead
        return self.served.target.identity if known and self.served is not None else None

    @property
    def left_paused(self) -> bool:
        """Whether an activation of ours has left it paused, and not somebody else."""
        return self.paused_at is not None and bool(self.swaps) and self.swaps[-1].resumed_at is None

    @property
    def label(self) -> str:
        """The version header's value."""
        return UNKNOWN_VERSION if self.identity is None else label_of(self.identity)

    @property
    def lag(self) -> int | None:
        """How many versions what is served is behind the newest one of its run."""
        if self.newest is None or self.identity is None or self.identity.run != self.newest.run:
            return None
        return max(0, self.newest.version - self.identity.version)

    def why_not_ready(self, *, must_serve: bool = False) -> str:
        """Return why no request should be sent here; empty where one may.

        Falling behind makes an engine not ready; it goes on answering whoever asks.

        Args:
            must_serve: Also demand that it serves a version of a run.
        """
        if self.dead:
            return f"the engine process is gone: {self.dead}; {RESTART}"
        if self.poisoned:
            return self.poisoned
        if self.late:
            return self.late
        if self.paused_at is not None and self.activating is not None:
            return f"paused: version {self.activating.version} is being activated"
        if self.paused_at is not None:
            return f"paused; {ACTIVATE_AGAIN}"
        if self.identity is None and must_serve:
            return "serves no version of a run: activate one"
        return self._why_behind()

    def _why_behind(self) -> str:
        if self.newest is None or self.newest.max_lag is None:
            return ""
        if self.lag is None:
            return f"serves no version of run {self.newest.run}, of which {self.newest.version} is the newest"
        if self.lag > self.newest.max_lag:
            return f"{self.lag} versions behind, more than {self.newest.max_lag}"
        return ""

    def already(self, request: ActivateRequest) -> bool:
        """Say whether the version is served, so that there is nothing to do.

        Raises:
            SwapError: If it cannot be activated now, or never.
        """
        if self.dead:
            raise SwapError("dead", self.why_not_ready())
        if self.activating is not None:
            raise SwapError("busy", f"version {self.activating.version} is being activated")
        known = [] if self.served is None else [self.served.target.identity]
        if self.staged is not None:
            known.append(Identity(self.staged.run, self.staged.version, self.staged.digest))
        check_names(request.identity, known)
        return self.identity == request.identity and self.paused_at is None

    def view(self, facts: Facts) -> EngineState:
        """Return what the engine says about itself."""
        served = self.served if self.identity is not None else None
        why = facts.unsupported or self.why_not_ready()
        return EngineState(
            engine="vllm",
            engine_version=facts.engine_version,
            plugin_version=facts.plugin_version,
            run=self._run(),
            served=None
            if served is None
            else Served(
                version=served.target.version,
                digest=served.target.digest,
                step=served.target.step,
                since=served.since,
                nonfinite=served.target.nonfinite[:MAX_MESSAGE_CHARS],
            ),
            staged=self.staged,
            activating=self.activating,
            paused=self.paused_at is not None,
            poisoned=bool(self.poisoned),
            ready=not why,
            why=why[:MAX_MESSAGE_CHARS],
            lag=self.lag,
            newest=None if self.newest is None else self.newest.version,
            max_lag=None if self.newest is None else self.newest.max_lag,
            last_failure=self.last_failure,
            swap_count=self.swap_count,
            start=facts.start,
            swaps=list(self.swaps),
            lora=list(self.lora),
            keep_allowed=not facts.keep_refusal,
        )

    def _run(self) -> str | None:
        if self.identity is not None:
            return self.identity.run
        return None if self.newest is None else self.newest.run

    # --- transitions ---------------------------------------------------------------------------

    def booted(self, target: Target | None, now: int) -> Machine:
        """Take what the ranks loaded at boot; None: from elsewhere, so it has no label of ours."""
        return replace(self, served=None if target is None else Running(target, now))

    def holds(self, target: Target | None, now: int) -> Machine:
        """Take what every rank has staged."""
        if target is None:
            return replace(self, staged=None)
        return replace(
            self,
            staged=Staged(
                run=target.run,
                version=target.version,
                digest=target.digest,
                step=target.step,
                path=target.path,
                since=now,
                nonfinite=target.nonfinite[:MAX_MESSAGE_CHARS],
            ),
        )

    def told(self, newest: NewestRequest) -> Machine:
        """Take how far the run is."""
        return replace(self, newest=newest)

    def begun(self, target: Target, requests: Requests, now: int) -> Machine:
        """Begin an activation."""
        return replace(
            self,
            requests=requests,
            activating=Activating(
                run=target.run,
                version=target.version,
                digest=target.digest,
                phase="stage",
                since=now,
            ),
        )

    def handling(self, requests: Requests) -> Machine:
        """Take down what becomes of running requests, where that is not what was asked for."""
        return replace(self, requests=requests)

    def in_phase(self, phase: Phase) -> Machine:
        """Go on to the next phase of the activation."""
        if self.activating is None:
            return self
        now = self.activating
        return replace(
            self,
            activating=Activating(
                run=now.run, version=now.version, digest=now.digest, phase=phase, since=now.since
            ),
        )

    def pausing(self, now: int) -> Machine:
        """Take down that the pause has begun. One that is found paused stays paused since then."""
        return replace(self, paused_at=now if self.paused_at is None else self.paused_at)

    def settled(self, to: Target | None, now: int) -> Machine:
        """Take down which weights are loaded after a pause: a new version, the old one, or unknown.

        The swap log's entry is made here, still without an end.
        """
        old = self.label if self.identity is not None else None
        swap = Swap(
            n=self.swap_count + 1,
            from_=old,
            to=None if to is None else label_of(to.identity),
            paused_at=now if self.paused_at is None else self.paused_at,
            resumed_at=None,
            pause_ms=0.0,
            requests=self.requests,
        )
        if to is None:
            served = self.served
        else:
            same = self.served is not None and self.served.target.identity == to.identity
            served = self.served if same else Running(to, now)
        return replace(
            self,
            served=served,
            poisoned="" if to is not None else self.poisoned,
            swap_count=swap.n,
            swaps=(*self.swaps, swap)[-MAX_SWAPS:],
        )

    def unsettled(self, now: int) -> Machine:
        """Take down a pause without any load: what was served (or was unknown) is what it was."""
        label = self.label if self.identity is not None else None
        swap = Swap(
            n=self.swap_count + 1,
            from_=label,
            to=label,
            paused_at=now if self.paused_at is None else self.paused_at,
            resumed_at=None,
            pause_ms=0.0,
            requests=self.requests,
        )
        return replace(self, swap_count=swap.n, swaps=(*self.swaps, swap)[-MAX_SWAPS:])

    def resumed(self, now: int, pause_ms: float) -> Machine:
        """Take down the end of the pause."""
        swaps = self.swaps
        if swaps and swaps[-1].resumed_at is None:
            last = swaps[-1]
            done = Swap(
                n=last.n,
                from_=last.from_,
                to=last.to,
                paused_at=last.paused_at,
                resumed_at=now,
                pause_ms=pause_ms,
                requests=last.requests,
            )
            swaps = (*swaps[:-1], done)
        return replace(self, paused_at=None, swaps=swaps)

    def poison(self, why: str, now: int) -> Machine:
        """Take down that nobody knows which weights are loaded. Idempotent but for the message."""
        counted = self if self.poisoned else self.settled(None, now)
        return replace(counted, poisoned=why[:MAX_MESSAGE_CHARS])

    def overdue(self, why: str) -> Machine:
        """Take down that the lease is over and the activation is not."""
        return replace(self, late=why[:MAX_MESSAGE_CHARS])

    def failed(self, error: SwapError, version: int | None, now: int) -> Machine:
        """Take down what went wrong last."""
        failure = Failure(
            phase=error.phase or "serve",
            code=error.slug,
            message=error.message,
            version=version,
            t=now,
        )
        return replace(self, last_failure=failure)

    def ended(self, *, well: bool) -> Machine:
        """End the activation. One that went well clears what was wrong before."""
        failure = None if well else self.last_failure
        return replace(self, activating=None, late="", last_failure=failure)

    def died(self, why: str) -> Machine:
        """Take down that the engine process is gone, for good."""
        return replace(self, dead=why[:MAX_MESSAGE_CHARS], staged=None)

    def with_lora(self, lora: tuple[Lora, ...]) -> Machine:
        """Take down which adapters there are."""
        return replace(self, lora=lora)


def check_names(wanted: Identity, known: list[Identity]) -> None:
    """Check that a version and a digest always mean each other, as far as is known.

    Raises:
        SwapError: If one digest stands under two names, of any runs, or one version has two digests.
    """
    for one in known:
        same = (one.run, one.version) == (wanted.run, wanted.version)
        if (one.digest == wanted.digest) != same:
            raise SwapError(
                "conflict",
                f"version {wanted.version} of run {wanted.run} with manifest {wanted.digest[:12]} was"
                f" asked for, but version {one.version} of run {one.run} with manifest"
                f" {one.digest[:12]} is here; a version and its manifest belong together for ever:"
                " ask the head",
            )

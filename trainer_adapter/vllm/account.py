"""What an activation tells while it runs: its server's state, its times, and the one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from shardcast.engine.forms import ActivateAnswer, Activated, Phase
from trainer_adapter.vllm.control import Clock
from trainer_adapter.vllm.machine import ACTIVATE_AGAIN, RESTART, Facts, Machine, SwapError
from trainer_adapter.vllm.ranks import Target


class Cell:
    """Where the current state lies; the one thing that an activation and its server share."""

    def __init__(self, machine: Machine, facts: Facts) -> None:
        self.machine = machine
        self.facts = facts


class Observer(Protocol):
    """Who wants to know how activations end (metrics)."""

    def ended(self, outcome: str, pause_seconds: float | None) -> None:
        """Take one activation: ``activated``, ``kept`` (the old version), ``not_ready``."""
        ...


class Account:
    """One activation's. Nothing here waits for anything.

    Attributes:
        target: What is activated; its step is the publisher's once the ranks have said it.
        answer: Set when the activation ends, or its lease before.
    """

    def __init__(
        self,
        cell: Cell,
        clock: Clock,
        target: Target,
        *,
        lease_s: float,
        observer: Observer | None,
        dead: Callable[[], str],
    ) -> None:
        """Begin one.

        Args:
            cell: Where the state lies.
            clock: Time.
            target: What is activated.
            lease_s: How long it may take.
            observer: Hears of its end.
            dead: Says why the engine process is gone.
        """
        self.target = target
        self.answer: asyncio.Future[ActivateAnswer] = asyncio.get_running_loop().create_future()
        self._cell = cell
        self._clock = clock
        self._lease_s = lease_s
        self._observer = observer
        self._dead = dead
        self._phases_ms: dict[str, float] = {}
        self._pause_began: float | None = None
        self._pause_seconds: float | None = None

    # --- while it runs -------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """The state."""
        return self._cell.machine

    @machine.setter
    def machine(self, machine: Machine) -> None:
        self._cell.machine = machine

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        activating = self.machine.activating
        return "serve" if activating is None else activating.phase

    @property
    def paused(self) -> bool:
        """Whether it has begun a pause that is not over."""
        return self._pause_began is not None and self._pause_seconds is None

    def begin(self, phase: Phase) -> None:
        """Take down that it goes on to the next phase."""
        self.machine = self.machine.in_phase(phase)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Take down how long something takes, in whichever way it ends."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self._phases_ms[phase] = (self._clock.monotonic() - began) * 1000

    def took(self, phases_ms: dict[str, float]) -> None:
        """Take down how long what took in the ranks."""
        self._phases_ms.update({f"load_{name}": ms for name, ms in phases_ms.items()})

    def pausing(self) -> None:
        """Take down that the pause begins."""
        self.machine = self.machine.in_phase("pause").pausing(self._clock.now())
        self._pause_began = self._clock.monotonic()

    def resumed(self) -> None:
        """Take down that the pause is over."""
        if self._pause_began is None:
            return
        self._pause_seconds = self._clock.monotonic() - self._pause_began
        self.machine = self.machine.resumed(self._clock.now(), self._pause_seconds * 1000)

    def poison(self, error: SwapError, said: str | None = None) -> None:
        """Take down that nobody knows which weights are loaded; the error says so, too."""
        said = f"{error.message}; " if said is None else said
        why = f"{said}nobody knows which weights are loaded, and the engine stays paused: {ACTIVATE_AGAIN}"
        why += f"; if that fails too, {RESTART}"
        self.machine = self.machine.poison(why, self._clock.now())
        error.message = why

    def late(self, phase: Phase, what: str) -> None:
        """Answer that the lease is over, while the activation goes on."""
        why = (
            f"{what} {self._lease_s:g} s; the engine is paused until it is, and this state"
            f" will say so; if it never is, {RESTART}"
        )
        error = SwapError("timeout", why, phase=phase)
        self.machine = self.machine.overdue(why)
        self.failed(error)
        self._say(error)

    def failed(self, error: SwapError) -> None:
        """Take down what went wrong."""
        self.machine = self.machine.failed(error, self.target.version, self._clock.now())

    # --- the end -------------------------------------------------------------------------------

    def end(self, error: SwapError | None, *, well: bool = True) -> None:
        """End it, and answer.

        Args:
            error: Why the version is not served; None if it is.
            well: Whether nothing else is wrong either.
        """
        if error is not None:
            self.failed(error)
            if error.slug == "dead":
                self.machine = self.machine.died(self._dead() or "it ended")
        self.machine = self.machine.ended(well=error is None and well)
        if self._observer is not None:
            kept = "not_ready" if self.machine.why_not_ready() else "kept"
            self._observer.ended("activated" if error is None else kept, self._pause_seconds)
        self._say(error)

    def _say(self, error: SwapError | None) -> None:
        if self.answer.done():
            return
        if error is not None:
            self.answer.set_exception(error)
            self.answer.exception()  # the client may be gone; that is no news for the log
            return
        target = self.target
        self.answer.set_result(
            ActivateAnswer(
                activated=Activated(
                    run=target.run, version=target.version, digest=target.digest, step=target.step
                ),
                pause_ms=(self._pause_seconds or 0.0) * 1000,
                phases_ms=self._phases_ms,
                state=self.machine.view(self._cell.facts),
            )
        )

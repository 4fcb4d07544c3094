"""One activation, from staging to resuming: pause - load - resume as a task of the server.

It belongs to the server and not to the request that asked for it: a client that goes away changes
nothing. Nothing here resumes in a ``finally``: every call to ``resume`` stands behind a report that
says which weights all ranks have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, Protocol, TypeVar

from msgspec.structs import replace

from shardcast.engine.forms import (
    ActivateAnswer,
    Activated,
    ActivateRequest,
    Phase,
    Requests,
    label_of,
)
from trainer_adapter.vllm.control import Calls, Clock, EngineControl
from trainer_adapter.vllm.machine import ACTIVATE_AGAIN, RESTART, Facts, Machine, SwapError
from trainer_adapter.vllm.ranks import Report, Target, activate_command, state_command
from trainer_adapter.vllm.staging import stage

log = logging.getLogger("vllm.shardcast")

GRACE_SECONDS: Final = 10.0
"""For going back to the old version after the lease is over."""


_T = TypeVar("_T")


class Cell:
    """Where the current state lies; the one thing that an activation and its server share."""

    def __init__(self, machine: Machine, facts: Facts) -> None:
        self.machine = machine
        self.facts = facts


class AfterLoad(Protocol):
    """What has to be put right after every reload, before the engine is resumed."""

    async def restore(self) -> list[str]:
        """Add the LoRA adapters again that vLLM has dropped; return what could not be."""
        ...


class Observer(Protocol):
    """Who wants to know how activations end (metrics)."""

    def ended(self, outcome: str, pause_seconds: float | None) -> None:
        """Take one activation: ``activated``, ``kept`` (the old version), ``not_ready``."""
        ...


class Activation:
    """One run through the phases. ``answer`` is set when the lease ends at the latest."""

    def __init__(
        self,
        request: ActivateRequest,
        target: Target,
        cell: Cell,
        control: EngineControl,
        calls: Calls,
        clock: Clock,
        *,
        after_load: AfterLoad | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._request = request
        self._target = target
        self._requests: Requests = request.requests
        self._cell = cell
        self._control = control
        self._calls = calls
        self._clock = clock
        self._after_load = after_load
        self._observer = observer
        self._name = f"version {target.version}"
        self._adapters_lost = False
        self._phases_ms: dict[str, float] = {}
        self._pause_began: float | None = None
        self._pause_seconds: float | None = None
        self._deadline: asyncio.Task[None] | None = None
        self.answer: asyncio.Future[ActivateAnswer] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Go through all phases, to one of the three outcomes."""
        self._deadline = self._timer(self._request.lease_s)
        try:
            await self._stage()
            await self._refuse_asleep()
            await self._pause()
            await self._load()
            await self._adapters()
            await self._resume()
        except SwapError as error:
            self._end(error)
        except asyncio.CancelledError:
            # The server is being stopped, and its engine with it.
            self._end(
                SwapError("failed", f"the server was stopped while {self._name} was activated")
            )
            raise
        except Exception as error:
            log.exception("activating %s failed in a way that nobody foresaw", self._name)
            unforeseen = SwapError("failed", f"{type(error).__name__}: {error}", phase=self._phase)
            if self._paused:
                self._poison(unforeseen)
            self._end(unforeseen)
        else:
            self._end(None)
        finally:
            self._deadline.cancel()

    # --- phases --------------------------------------------------------------------------------

    async def _stage(self) -> None:
        began = self._clock.monotonic()
        try:
            report = await self._calls.call(
                f"staging {self._name}",
                stage(self._control, self._clock, self._target),
                phase="stage",
                deadline=self._deadline,
            )
        except SwapError:  # the ranks have given up what they held before, and may still be at it
            self._move(self._cell.machine.holds(None, self._clock.now()))
            raise
        finally:
            self._took("stage", began)
        self._move(self._cell.machine.holds(report.staged, self._clock.now()))
        for has in (report.staged, report.served):
            if has is not None and has.identity == self._target.identity:
                self._target = has  # its step is the publisher's, whatever the request says
        if self._requests == "keep" and report.suspect:
            self._recompute(report.suspect)

    def _recompute(self, why: str) -> None:
        """Let no request keep what must be wiped: what it would go on with is NaN."""
        log.warning(
            "running requests are computed again instead of keeping their cache, because it may hold "
            "NaN and is wiped: %s",
            why,
        )
        self._requests = "recompute"
        self._move(self._cell.machine.handling(self._requests))

    async def _refuse_asleep(self) -> None:
        """Look whether there is a model to load into, as late as that can be known.

        vLLM says of every paused engine that it sleeps, so after the pause nobody can tell; staging
        asks nothing of the memory that a sleeping engine has given away.
        """
        self._move(self._cell.machine.in_phase("check"))
        asleep = await self._calls.call(
            "asking whether the engine sleeps",
            self._control.is_asleep(),
            phase="check",
            deadline=self._deadline,
        )
        if asleep and not self._cell.machine.left_paused:
            why = "the engine is asleep, or paused by somebody: wake it up, then activate"
            raise SwapError("refused", why, phase="check")

    async def _pause(self) -> None:
        self._move(self._cell.machine.in_phase("pause").pausing(self._clock.now()))
        self._pause_began = began = self._clock.monotonic()
        try:
            await self._calls.call(
                f"pausing (requests: {self._requests})",
                self._control.pause(self._requests),
                phase="pause",
                deadline=self._deadline,
            )
        except SwapError as error:
            await self._go_back(error)
            raise
        finally:
            self._took("pause", began)

    async def _load(self) -> None:
        self._move(self._cell.machine.in_phase("load"))
        began = self._clock.monotonic()
        try:
            report = await self._loaded()
        finally:
            self._took("load", began)
        self._phases_ms.update({f"load_{name}": ms for name, ms in report.phases_ms.items()})
        if report.outcome in {"activated", "already"}:
            await self._label()
            return
        phase: Phase = "check" if report.outcome == "refused" else "load"
        error = SwapError(report.code or "failed", report.message or report.outcome, phase=phase)
        intact = report.outcome in {"refused", "restored"} and not report.poisoned
        if not intact or self._cell.machine.poisoned:
            self._poison(error, f"{error.message}; " if error.message else "")
            raise error
        if report.outcome == "restored":
            await self._adapters()
        await self._go_back(error)
        raise error

    async def _loaded(self) -> Report:
        """Let the ranks load, and find out what they have when the call itself fails."""
        try:
            return await self._calls.call(
                f"loading {self._name}",
                self._control.tell(activate_command(self._target, keep=self._requests == "keep")),
                phase="load",
                deadline=self._deadline,
                late=self._late_load,
            )
        except SwapError as error:
            if error.slug == "dead":
                raise
            report = await self._asked()
            if report is None or report.poisoned:
                self._poison(error)
                raise
            served = self._cell.machine.served
            if report.served is not None and report.served.identity == self._target.identity:
                log.warning("%s is loaded, although the call failed: %s", self._name, error)
                return replace(report, outcome="activated", code=error.slug, message=error.message)
            if (
                served is not None
                and report.served is not None
                and report.served.identity == served.target.identity
            ):
                return replace(report, outcome="restored", code=error.slug, message=error.message)
            self._poison(error)
            raise

    async def _asked(self) -> Report | None:
        """Ask the ranks what they have; None where they do not say it beyond doubt."""
        asking = self._control.tell(state_command())
        report = await self._answer("asking the ranks what they have", asking)
        return report if report is not None and report.outcome == "ok" else None

    async def _runs(self, error: SwapError) -> bool:
        """Say whether the engine generates again, although the call that was to do it has failed."""
        if error.slug == "dead":
            raise error
        paused = await self._answer("asking whether it is paused", self._control.is_paused())
        return paused is False

    async def _answer(self, what: str, question: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the answer to a question; None where there is none."""
        grace = self._timer(GRACE_SECONDS)
        try:
            return await self._calls.call(what, question, phase=self._phase, deadline=grace)
        except SwapError as error:
            if error.slug == "dead":
                raise
            return None
        finally:
            grace.cancel()

    async def _label(self) -> None:
        try:
            await self._calls.call(
                "setting the engine's label",
                self._control.set_label(label_of(self._target.identity)),
                phase="load",
                deadline=self._deadline,
                late=self._late_load,
            )
        except SwapError as error:
            self._poison(
                error, f"{self._name} is loaded and cannot be labelled ({error.message}); "
            )
            raise
        machine = self._cell.machine.settled(self._target, self._clock.now())
        self._move(machine.holds(None, self._clock.now()))
        if self._target.nonfinite:
            log.warning(
                "%s is served, and its answers may be NaN: %s", self._name, self._target.nonfinite
            )

    async def _adapters(self) -> None:
        if self._after_load is None:
            return
        self._move(self._cell.machine.in_phase("lora"))
        began = self._clock.monotonic()
        problems: list[str] = []
        try:
            problems = await self._calls.call(
                "adding the LoRA adapters again",
                self._after_load.restore(),
                phase="lora",
                deadline=self._deadline,
                late=self._late_load,
            )
        except SwapError as error:
            if error.slug == "dead":
                raise
            problems = [error.message]
        finally:
            self._took("lora", began)
        self._adapters_lost = bool(problems)
        if problems:
            gone = SwapError("failed", "; ".join(problems), phase="lora")
            log.error("LoRA adapters are gone after the swap: %s", gone)
            self._move(self._cell.machine.failed(gone, self._target.version, self._clock.now()))

    async def _resume(self) -> None:
        self._move(self._cell.machine.in_phase("resume"))
        began = self._clock.monotonic()
        try:
            await self._calls.call(
                "resuming",
                self._control.resume(),
                phase="resume",
                deadline=self._deadline,
                late=self._late_resume,
            )
        except SwapError as error:
            if not await self._runs(error):
                why = f"{self._name} is loaded and the engine stays paused: {ACTIVATE_AGAIN}"
                raise SwapError(error.slug, f"{error.message}; {why}", phase="resume") from error
        finally:
            self._took("resume", began)
        self._resumed()

    async def _go_back(self, cause: SwapError) -> None:
        """Resume on the weights that were never touched, or were loaded again."""
        if cause.slug == "dead":
            return
        self._move(self._cell.machine.unsettled(self._clock.now()).in_phase("resume"))
        if self._cell.machine.poisoned:
            return
        grace = self._timer(GRACE_SECONDS)
        try:
            await self._calls.call(
                "resuming on the old version",
                self._control.resume(),
                phase="resume",
                deadline=grace,
                late=self._late_resume,
            )
        except SwapError as error:
            if not await self._runs(error):
                cause.message += f"; {error.message}: the engine stays paused, {ACTIVATE_AGAIN}"
                return
        finally:
            grace.cancel()
        self._resumed()

    # --- the state, and the answer -------------------------------------------------------------

    @property
    def _phase(self) -> Phase:
        activating = self._cell.machine.activating
        return "serve" if activating is None else activating.phase

    @property
    def _paused(self) -> bool:
        return self._pause_began is not None and self._pause_seconds is None

    def _move(self, machine: Machine) -> None:
        self._cell.machine = machine

    def _timer(self, seconds: float) -> asyncio.Task[None]:
        async def over() -> None:
            await self._clock.sleep(seconds)

        return asyncio.ensure_future(over())

    def _took(self, phase: str, began: float) -> None:
        self._phases_ms[phase] = (self._clock.monotonic() - began) * 1000

    def _resumed(self) -> None:
        if self._pause_began is None:
            return
        self._pause_seconds = self._clock.monotonic() - self._pause_began
        self._move(self._cell.machine.resumed(self._clock.now(), self._pause_seconds * 1000))

    def _poison(self, error: SwapError, said: str | None = None) -> None:
        said = f"{error.message}; " if said is None else said
        why = f"{said}nobody knows which weights are loaded, and the engine stays paused: {ACTIVATE_AGAIN}"
        why += f"; if that fails too, {RESTART}"
        self._move(self._cell.machine.poison(why, self._clock.now()))
        error.message = why

    def _late_load(self) -> None:
        self._late("load", f"loading {self._name} is not over after its lease of")

    def _late_resume(self) -> None:
        self._late("resume", "the engine is not resumed after the lease of")

    def _late(self, phase: Phase, what: str) -> None:
        why = (
            f"{what} {self._request.lease_s:g} s; the engine is paused until it is, and this state"
            f" will say so; if it never is, {RESTART}"
        )
        error = SwapError("timeout", why, phase=phase)
        now = self._clock.now()
        self._move(self._cell.machine.overdue(why).failed(error, self._target.version, now))
        self._say(error)

    def _end(self, error: SwapError | None) -> None:
        machine = self._cell.machine
        if error is not None:
            machine = machine.failed(error, self._target.version, self._clock.now())
            if error.slug == "dead":
                machine = machine.died(self._control.dead() or "it ended")
        self._move(machine.ended(well=error is None and not self._adapters_lost))
        if self._observer is not None:
            kept = "not_ready" if self._cell.machine.why_not_ready() else "kept"
            self._observer.ended("activated" if error is None else kept, self._pause_seconds)
        self._say(error)

    def _say(self, error: SwapError | None) -> None:
        if self.answer.done():
            return
        if error is not None:
            self.answer.set_exception(error)
            self.answer.exception()  # the client may be gone; that is no news for the log
            return
        self.answer.set_result(
            ActivateAnswer(
                activated=Activated(
                    run=self._target.run,
                    version=self._target.version,
                    digest=self._target.digest,
                    step=self._target.step,
                ),
                pause_ms=(self._pause_seconds or 0.0) * 1000,
                phases_ms=self._phases_ms,
                state=self._cell.machine.view(self._cell.facts),
            )
        )

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

from shardcast.engine.forms import ActivateAnswer, ActivateRequest, Phase, Requests, label_of
from trainer_adapter.vllm.account import Account, Cell, Observer
from trainer_adapter.vllm.control import Calls, Clock, EngineControl
from trainer_adapter.vllm.machine import ACTIVATE_AGAIN, SwapError
from trainer_adapter.vllm.ranks import Report, Target, activate_command, state_command
from trainer_adapter.vllm.staging import stage

log = logging.getLogger("vllm.shardcast")

GRACE_SECONDS: Final = 10.0
"""For going back to the old version after the lease is over."""


_T = TypeVar("_T")


class AfterLoad(Protocol):
    """What has to be put right after every reload, before the engine is resumed."""

    async def restore(self) -> list[str]:
        """Add the LoRA adapters again that vLLM has dropped; return what could not be."""
        ...


class Activation:
    """One run through the phases."""

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
        self._lease_s = request.lease_s
        self._requests: Requests = request.requests
        self._control = control
        self._calls = calls
        self._clock = clock
        self._after_load = after_load
        self._account = Account(
            cell, clock, target, lease_s=self._lease_s, observer=observer, dead=control.dead
        )
        self._name = f"version {target.version}"
        self._adapters_lost = False
        self._deadline: asyncio.Task[None] | None = None

    @property
    def answer(self) -> asyncio.Future[ActivateAnswer]:
        """What to tell whoever asked: set when it is over, or the lease at the latest."""
        return self._account.answer

    async def run(self) -> None:
        """Go through all phases, to one of the three outcomes."""
        account = self._account
        self._deadline = self._timer(self._lease_s)
        try:
            await self._stage()
            await self._refuse_asleep()
            await self._pause()
            await self._load()
            await self._adapters()
            await self._resume()
        except SwapError as error:
            account.end(error)
        except asyncio.CancelledError:
            # The server is being stopped, and its engine with it.
            account.end(
                SwapError("failed", f"the server was stopped while {self._name} was activated")
            )
            raise
        except Exception as error:
            log.exception("activating %s failed in a way that nobody foresaw", self._name)
            unforeseen = SwapError(
                "failed", f"{type(error).__name__}: {error}", phase=account.phase
            )
            if account.paused:
                account.poison(unforeseen)
            account.end(unforeseen)
        else:
            account.end(None, well=not self._adapters_lost)
        finally:
            self._deadline.cancel()

    # --- phases --------------------------------------------------------------------------------

    async def _stage(self) -> None:
        account = self._account
        try:
            with account.timing("stage"):
                report = await self._calls.call(
                    f"staging {self._name}",
                    stage(self._control, self._clock, account.target),
                    phase="stage",
                    deadline=self._deadline,
                )
        except SwapError:  # the ranks have given up what they held before, and may still be at it
            account.machine = account.machine.holds(None, self._clock.now())
            raise
        account.machine = account.machine.holds(report.staged, self._clock.now())
        for has in (report.staged, report.served):
            if has is not None and has.identity == account.target.identity:
                account.target = has  # its step is the publisher's, whatever the request says
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
        self._account.machine = self._account.machine.handling(self._requests)

    async def _refuse_asleep(self) -> None:
        """Look whether there is a model to load into, as late as that can be known.

        vLLM says of every paused engine that it sleeps, so after the pause nobody can tell; staging
        asks nothing of the memory that a sleeping engine has given away.
        """
        self._account.begin("check")
        asleep = await self._calls.call(
            "asking whether the engine sleeps",
            self._control.is_asleep(),
            phase="check",
            deadline=self._deadline,
        )
        if asleep and not self._account.machine.left_paused:
            why = "the engine is asleep, or paused by somebody: wake it up, then activate"
            raise SwapError("refused", why, phase="check")

    async def _pause(self) -> None:
        self._account.pausing()
        try:
            with self._account.timing("pause"):
                await self._calls.call(
                    f"pausing (requests: {self._requests})",
                    self._control.pause(self._requests),
                    phase="pause",
                    deadline=self._deadline,
                )
        except SwapError as error:
            await self._go_back(error)
            raise

    async def _load(self) -> None:
        account = self._account
        account.begin("load")
        with account.timing("load"):
            report = await self._loaded()
        account.took(report.phases_ms)
        if report.outcome in {"activated", "already"}:
            await self._label()
            return
        phase: Phase = "check" if report.outcome == "refused" else "load"
        error = SwapError(report.code or "failed", report.message or report.outcome, phase=phase)
        intact = report.outcome in {"refused", "restored"} and not report.poisoned
        if not intact or account.machine.poisoned:
            account.poison(error, f"{error.message}; " if error.message else "")
            raise error
        if report.outcome == "restored":
            await self._adapters()
        await self._go_back(error)
        raise error

    async def _loaded(self) -> Report:
        """Let the ranks load, and find out what they have when the call itself fails."""
        account = self._account
        try:
            return await self._calls.call(
                f"loading {self._name}",
                self._control.tell(activate_command(account.target, keep=self._requests == "keep")),
                phase="load",
                deadline=self._deadline,
                late=self._late_load,
            )
        except SwapError as error:
            if error.slug == "dead":
                raise
            report = await self._asked()
            if report is None or report.poisoned:
                account.poison(error)
                raise
            served = account.machine.served
            if report.served is not None and report.served.identity == account.target.identity:
                log.warning("%s is loaded, although the call failed: %s", self._name, error)
                return replace(report, outcome="activated", code=error.slug, message=error.message)
            if (
                served is not None
                and report.served is not None
                and report.served.identity == served.target.identity
            ):
                return replace(report, outcome="restored", code=error.slug, message=error.message)
            account.poison(error)
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
            return await self._calls.call(what, question, phase=self._account.phase, deadline=grace)
        except SwapError as error:
            if error.slug == "dead":
                raise
            return None
        finally:
            grace.cancel()

    async def _label(self) -> None:
        account = self._account
        target, now = account.target, self._clock.now
        try:
            await self._calls.call(
                "setting the engine's label",
                self._control.set_label(label_of(target.identity)),
                phase="load",
                deadline=self._deadline,
                late=self._late_load,
            )
        except SwapError as error:
            account.poison(
                error, f"{self._name} is loaded and cannot be labelled ({error.message}); "
            )
            raise
        account.machine = account.machine.settled(target, now()).holds(None, now())
        if target.nonfinite:
            log.warning(
                "%s is served, and its answers may be NaN: %s", self._name, target.nonfinite
            )

    async def _adapters(self) -> None:
        if self._after_load is None:
            return
        self._account.begin("lora")
        try:
            with self._account.timing("lora"):
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
        self._adapters_lost = bool(problems)
        if problems:
            gone = SwapError("failed", "; ".join(problems), phase="lora")
            log.error("LoRA adapters are gone after the swap: %s", gone)
            self._account.failed(gone)

    async def _resume(self) -> None:
        self._account.begin("resume")
        with self._account.timing("resume"):
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
                    said = f"{error.message}; {why}"
                    raise SwapError(error.slug, said, phase="resume") from error
        self._account.resumed()

    async def _go_back(self, cause: SwapError) -> None:
        """Resume on the weights that were never touched, or were loaded again."""
        if cause.slug == "dead":
            return
        account = self._account
        account.machine = account.machine.unsettled(self._clock.now())
        account.begin("resume")
        if account.machine.poisoned:
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
        account.resumed()

    def _timer(self, seconds: float) -> asyncio.Task[None]:
        async def over() -> None:
            await self._clock.sleep(seconds)

        return asyncio.ensure_future(over())

    def _late_load(self) -> None:
        self._account.late("load", f"loading {self._name} is not over after its lease of")

    def _late_resume(self) -> None:
        self._account.late("resume", "the engine is not resumed after the lease of")

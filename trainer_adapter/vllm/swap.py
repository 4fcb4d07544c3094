"""The server's side of hot swaps: one state, one activation at a time, whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from shardcast.engine.forms import (
    ActivateAnswer,
    Activated,
    ActivateRequest,
    EngineState,
    Identity,
    NewestRequest,
    StageRequest,
    label_of,
)
from trainer_adapter.vllm.account import Cell, Observer
from trainer_adapter.vllm.activation import Activation, AfterLoad
from trainer_adapter.vllm.control import Calls, Clock, EngineControl
from trainer_adapter.vllm.machine import Facts, Machine, SwapError, check_names
from trainer_adapter.vllm.ranks import Target, state_command
from trainer_adapter.vllm.staging import stage

_T = TypeVar("_T")

GLANCE_SECONDS: Final = 1.0
"""How long a look at the state may wait for the engine; then it says what is known here."""


class Swapper:
    """Stages and activates versions on one engine, and knows what it serves."""

    def __init__(
        self,
        control: EngineControl,
        facts: Facts,
        clock: Clock,
        *,
        after_load: AfterLoad | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._control = control
        self._clock = clock
        self._calls = Calls(control)
        self._cell = Cell(Machine(), facts)
        self.observer = observer
        self.after_load = after_load
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def machine(self) -> Machine:
        """The state as it is known here."""
        return self._cell.machine

    @machine.setter
    def machine(self, machine: Machine) -> None:
        self._cell.machine = machine

    @property
    def facts(self) -> Facts:
        """What does not change."""
        return self._cell.facts

    @property
    def state(self) -> EngineState:
        """The state as it is known here, without a look at the engine."""
        return self.machine.view(self.facts)

    async def boot(self) -> None:
        """Find out what was loaded at boot, and label it if it is a version of a run.

        Raises:
            SwapError: If the ranks do not answer, or the label cannot be set.
        """
        report = await self._calls.call(
            "asking the ranks what they have booted with",
            self._control.tell(state_command()),
            phase="boot",
        )
        if report.served is not None:
            await self._calls.call(
                "setting the engine's label",
                self._control.set_label(label_of(report.served.identity)),
                phase="boot",
            )
        self.machine = self.machine.booted(report.served, self._clock.now())
        if report.poisoned:
            self.machine = self.machine.poison(report.poisoned, self._clock.now())

    async def close(self) -> None:
        """Give up what is under way; the engine is going down as well."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._calls.close()

    # --- what may be asked ---------------------------------------------------------------------

    async def stage(self, request: StageRequest) -> EngineState:
        """Let every rank verify and hold a version; the engine goes on serving.

        A cancellation leaves the ranks at it.

        Raises:
            SwapError: If it was refused or has failed.
        """
        self._check_supported()
        machine = self.machine
        if machine.dead:
            raise SwapError("dead", machine.why_not_ready())
        if machine.activating is not None:
            raise SwapError("busy", f"version {machine.activating.version} is being activated")
        if machine.served is not None:
            check_names(request.identity, [machine.served.target.identity])
        target = Target(
            run=request.run,
            version=request.version,
            digest=request.digest,
            path=request.path,
            step=request.step,
        )
        if machine.staged is not None and machine.staged.digest != target.digest:
            self.machine = machine.holds(None, self._clock.now())
        return await asyncio.shield(self.begin(self._stage(target)))

    async def activate(self, request: ActivateRequest) -> ActivateAnswer:
        """Pause, load, check, resume. A cancellation (a client that goes away) changes nothing.

        Raises:
            SwapError: If it was refused or has failed, or the lease is over; the state tells which
                of the three outcomes it is.
        """
        self._check_supported()
        if self.machine.already(request):
            await self.look()  # somebody else may have paused it, or had its weights thrown away
            if self.machine.already(request):
                return self._already(request)
        if request.requests == "keep" and self.facts.keep_refusal:
            raise SwapError("refused", f"requests: keep is refused: {self.facts.keep_refusal}")
        target = self._target_of(request)
        self.machine = self.machine.begun(target, request.requests, self._clock.now())
        activation = Activation(
            request,
            target,
            self._cell,
            self._control,
            self._calls,
            self._clock,
            after_load=self.after_load,
            observer=self.observer,
        )
        self.begin(activation.run())
        return await asyncio.shield(activation.answer)

    def tell_newest(self, request: NewestRequest) -> EngineState:
        """Take how far the run is."""
        self.machine = self.machine.told(request)
        return self.state

    async def look(self) -> EngineState:
        """Return the state after a look at the engine, which somebody else may have paused."""
        machine = self.machine
        dead = self._control.dead()
        if dead and not machine.dead:
            self.machine = machine.died(dead)
        elif machine.activating is None and not machine.dead and not self.facts.unsupported:
            await self._glance()
        return self.state

    def begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin something that is the server's: it goes on when whoever asked for it goes away."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    # -------------------------------------------------------------------------------------------

    async def _glance(self) -> None:
        glance = asyncio.ensure_future(self._seen())
        timer = asyncio.ensure_future(self._clock.sleep(GLANCE_SECONDS))
        try:
            await asyncio.wait({glance, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not glance.done() or glance.cancelled() or glance.exception() is not None:
                return
            paused, lost = glance.result()
        finally:
            glance.cancel()
            timer.cancel()
        machine, now = self.machine, self._clock.now()
        if machine.activating is not None:
            return
        if lost and not machine.poisoned:
            self.machine = machine = machine.poison(lost, now)
        if paused == (machine.paused_at is not None):
            return
        if paused:
            self.machine = machine.pausing(now)
        elif machine.paused_at is not None:
            self.machine = machine.resumed(now, float(max(0, now - machine.paused_at)))

    async def _seen(self) -> tuple[bool, str]:
        """Return whether it is paused, and why the ranks do not know their weights."""
        paused = await self._control.is_paused()
        if not self.facts.may_sleep:
            return paused, ""
        return paused, (await self._control.tell(state_command())).poisoned

    async def _stage(self, target: Target) -> EngineState:
        try:
            report = await self._calls.call(
                f"staging version {target.version}",
                stage(self._control, self._clock, target),
                phase="stage",
            )
        except SwapError as error:
            held = self.machine.staged
            if held is not None and held.digest == target.digest:
                self.machine = self.machine.holds(None, self._clock.now())
            if error.slug != "superseded":  # another version was wanted instead: nothing has failed
                now = self._clock.now()
                self.machine = self.machine.failed(error, target.version, now)
            if error.slug == "dead":
                self.machine = self.machine.died(self._control.dead() or "it ended")
            raise
        if self.machine.activating is None:
            self.machine = self.machine.holds(report.staged, self._clock.now())
        return self.state

    def _target_of(self, request: ActivateRequest) -> Target:
        staged = self.machine.staged
        held = staged if staged is not None and staged.digest == request.digest else None
        served = self.machine.served
        path, step = request.path, request.step
        if held is not None:
            path, step = path or held.path, step if step is not None else held.step
        elif served is not None and served.target.digest == request.digest:
            path, step = (
                path or served.target.path,
                step if step is not None else served.target.step,
            )
        if path is None:
            raise SwapError(
                "conflict",
                f"version {request.version} is not staged: stage it, or say its path",
            )
        return Target(
            run=request.run, version=request.version, digest=request.digest, path=path, step=step
        )

    def _already(self, request: ActivateRequest) -> ActivateAnswer:
        state = self.state
        step = None if state.served is None else state.served.step
        identity = Identity(request.run, request.version, request.digest)
        return ActivateAnswer(
            activated=Activated(
                run=identity.run, version=identity.version, digest=identity.digest, step=step
            ),
            pause_ms=0.0,
            phases_ms={},
            state=state,
        )

    def _check_supported(self) -> None:
        if self.facts.unsupported:
            raise SwapError("unsupported", self.facts.unsupported)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it

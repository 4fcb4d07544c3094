"""Minds one engine: looks at its state, does what ``decide`` says, and waits until something changes.

Whatever the engine does meanwhile (restart, die, be activated by somebody else), the next look at its
state says what is to be done; nothing that this process remembers is needed to be right, so it may be
killed at any moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from shardcast.canary import Canary
from shardcast.engine.attempts import Attempts
from shardcast.engine.board import Board
from shardcast.engine.checking import Checks, Outcome
from shardcast.engine.decide import Action, Kind, Mode, View, decide, served_by
from shardcast.engine.driver import Engine, Target
from shardcast.engine.forms import EngineState, Identity, label_of
from shardcast.engine.metrics import EngineMetrics
from shardcast.engine.patience import Patience
from shardcast.engine.repairs import is_about_files
from shardcast.engine.reports import Reports, failed_there, missed, unlike_canary
from shardcast.engine.telling import Telling
from shardcast.engine.watching import SILENT_LOOKS, SilentError, watched
from shardcast.errors import (
    EngineError,
    EngineKeyError,
    EngineRefusedError,
    EngineUncertainError,
    EngineUnreachableError,
)
from shardcast.events import WorkerEvent

_T = TypeVar("_T")


class Minder:
    """Minds one engine until it is cancelled.

    Attributes:
        name: The engine's URL.
        wake: Set by whoever knows that something changed.
    """

    def __init__(
        self,
        engine: Engine,
        board: Board,
        emit: Callable[[WorkerEvent], None],
        metrics: EngineMetrics,
        *,
        canary: Callable[[Target], Canary | None] = lambda target: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            engine: The engine.
            board: What all engines have in common.
            emit: Takes events.
            metrics: Counts.
            canary: Returns a version's canary, None where it has none; raises ``EngineError`` where it
                cannot be read just now.
            clock: Monotonic seconds.
            rng: Spreads retries.
        """
        self.name = engine.name
        self.wake = asyncio.Event()
        self._engine = engine
        self._board = board
        self._options = board.options
        self._metrics = metrics
        self._reports = Reports(engine.name, board.run, emit, metrics)
        self._canary = canary
        self._clock = clock
        rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._patience = Patience(clock, rng)
        self._telling = Telling(engine, board.run, board.options.max_lag, clock, rng)
        self._state: EngineState | None = None
        self._seen: bool = False
        self._identity: Identity | None = None
        self._last: Target | None = None
        self._working: Target | None = None
        self._failure_at: int | None = None
        self._refused: set[str] = set()
        self._checks = Checks(engine, enabled=board.options.check_canary, clock=clock, rng=rng)
        self._attempts = Attempts()
        self._unsure: tuple[Action, float] | None = None
        self._explained: tuple[str, str] | None = None

    async def run(self) -> None:
        """Mind it. Ends by cancellation only; an activation that was begun goes on at the engine."""
        while True:
            self.wake.clear()
            pause_s = await self.round()
            if pause_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self.wake.wait()

    async def greet(self) -> None:
        """Look at it once, so that what it serves and has staged is leased before anything goes.

        An engine that does not answer is minded later.

        Raises:
            EngineKeyError, EngineUnsupportedError: If no later look would help.
        """
        with suppress(EngineRefusedError, EngineUncertainError, EngineUnreachableError):
            self._take(await self._engine.state())

    @property
    def needs(self) -> set[str]:
        """The digests that must stay on this disk for it."""
        wanted = (self._last, self._working, self._attempts.pending)
        found = {one.digest for one in wanted if one is not None}
        if self._state is not None:
            found |= {name.digest for name in _names_in(self._state)}
        return found

    # --- one round --------------------------------------------------------------------------

    async def round(self) -> float:
        """Look, decide, act; return how long to wait before the next round, 0: not at all."""
        try:
            state = await self._engine.state()
        except EngineError as error:
            return self._lost(error)
        self._take(state)
        if await self._check_canary(state):
            return 0.0
        self._explain()
        action, began = decide(self._view(state)), self._clock()
        try:
            return await self._perform(action, state)
        except EngineError as error:
            return self._heed(error, action, began)

    def _heed(self, error: EngineError, action: Action, began: float) -> float:
        """Take that the engine did not do it; return how long to wait before the next round."""
        if self._attempts.pending is not None and action.kind is Kind.ACTIVATE:
            return 0.0  # the state says what becomes of it
        if isinstance(error, EngineUncertainError):
            self._unsure = (action, began)
            if isinstance(error, SilentError):
                return self._lost(error)
            return self._fail(error, action.kind.value, action)
        if not isinstance(error, EngineRefusedError):
            return self._lost(error)
        if error.reason == "busy":  # somebody else is at it: no failure of the engine's
            return self._options.watch_s
        if self._patience.passes(error, action.kind):
            return 0.0
        return self._fail(error, error.phase, action)

    async def _perform(self, action: Action, state: EngineState) -> float:
        target = action.target
        if action.kind in (Kind.STAGE, Kind.LOAD):
            self._unsure = None
        match action.kind:
            case Kind.TELL if self._board.tellable is not None:
                refused = await self._telling.tell(self._board.tellable)
                if refused is not None:
                    self._reports.failed(refused, _phase_of(refused, "newest"))
            case Kind.STAGE if target is not None:
                with self._working_on(target):
                    await self._stage(target)
            case Kind.ACTIVATE if target is not None:
                with self._working_on(target):
                    return await self._activate(target)
            case Kind.LOAD if target is not None:
                with self._working_on(target):
                    await self._load(target)
            case Kind.UNLOAD if action.identity is not None and self._board.use.adapter:
                name = self._board.use.adapter
                await self._watched(self._engine.unload_adapter(name, action.identity))
            case _:
                return self._pause_s(state)
        return 0.0

    def _pause_s(self, state: EngineState) -> float:
        """Return when to look again, where nothing is to be done now."""
        soon = self._options.mode is Mode.MANUAL or state.activating is not None
        pause_s = self._options.watch_s if soon or self._attempts.pending else self._options.poll_s
        rests_s = (self._patience.left_s, self._telling.left_s)
        return max(min([pause_s, *(rest_s for rest_s in rests_s if rest_s > 0)]), 0.01)

    def _view(self, state: EngineState) -> View:
        board = self._board
        target = None if board.use.refusal else board.target
        digest = None if board.target is None else board.target.digest
        self._patience.at_stake((digest, board.repairs.count))
        rests = self._patience.left_s > 0
        mending = target is not None and board.repairs.under_way(target.digest)
        return View(
            state=state,
            target=target,
            last=self._last,
            held=board.leases.targets,
            withdrawn=board.withdrawn,
            refused=self._refused,
            suspects=self._suspects,
            hold=board.hold,
            mode=self._options.mode,
            newest=board.tellable,
            told=self._telling.known(state, board.tellable),
            resting=rests or mending or self._attempts.pending is not None,
            slot=board.slots.free_for(self.name),
            adapter=board.use.adapter,
        )

    def _explain(self) -> None:
        """Say once of a version why this engine is not told to take it."""
        target = self._board.target
        why = None if target is None else self._board.use.refusal or self._suspicion(target)
        if target is None or not why or self._explained == (target.digest, why):
            return
        self._explained = (target.digest, why)
        error = EngineRefusedError(why, source=self.name, phase="check", reason="refused")
        self._reports.failed(error, error.phase, target)

    def _suspicion(self, target: Target) -> str | None:
        if self._options.mode is Mode.MANUAL or target.digest not in self._suspects:
            return None
        return self._board.suspects.why(target, self.name)

    @property
    def _suspects(self) -> Collection[str]:
        """What it must not be paused for. A poisoned engine has nothing to lose."""
        poisoned = self._state is not None and self._state.poisoned
        return () if poisoned else self._board.suspects.for_engine(self.name)

    @contextmanager
    def _working_on(self, target: Target) -> Iterator[None]:
        """Keep a version on this disk while the engine is told to take it."""
        self._working = target
        try:
            yield
        finally:
            self._working = None

    # --- what it does -----------------------------------------------------------------------

    async def _stage(self, target: Target) -> None:
        started = self._clock()
        self._state = await self._watched(self._engine.stage(target), SILENT_LOOKS)
        self._metrics.seen(self.name, self._state, self._board.newest)
        self._reports.staged(target, self._clock() - started)
        self._patience.succeeded(Kind.STAGE)

    async def _activate(self, target: Target) -> float:
        slots = self._board.slots
        slots.take(self.name)
        self._attempts.begin(target)
        try:
            swapped = await self._watched(self._engine.activate(target))
        except (EngineUnreachableError, EngineKeyError):
            self._attempts.never_began()
            slots.give_back(self.name)
            raise
        except EngineError as error:
            slots.take(self.name)  # until it is seen to serve, it may be paused
            self._attempts.failed(target, error)
            raise
        news = target.identity != self._identity
        self._identity, self._seen = target.identity, True
        self._take(swapped.state)  # and with it give back the old version's lease
        if news:
            self._note(target.identity, target.step, swapped.pause_ms)
        return 0.0

    async def _watched(self, work: Coroutine[Any, Any, _T], silent_looks: int | None = None) -> _T:
        """Wait for an engine that takes long, and show meanwhile what it says of itself.

        One that pauses may be unable to answer: it has its lease, and is not given up before.
        """

        async def look() -> None:
            state = await self._engine.state()
            self._metrics.seen(self.name, state, self._board.newest)

        return await watched(work, look, every_s=self._options.poll_s, silent_looks=silent_looks)

    async def _load(self, target: Target) -> None:
        name = self._board.use.adapter
        assert name is not None
        state = await self._watched(self._engine.load_adapter(name, target))
        self._reports.loaded(target, _model_of(state, name, target))
        self._patience.succeeded(Kind.LOAD)

    # --- what it sees -----------------------------------------------------------------------

    def _take(self, state: EngineState) -> None:
        """Take in what the engine says."""
        self._state = state
        identity = served_by(state)
        for name in _names_in(state):
            self._board.leases.find(name)
        self._learn(state, identity)
        self._hear(state)
        if self._seen and identity is not None and identity != self._identity:
            self._announce_seen(state, identity)
        if identity is None and self._identity is not None:  # it was started again, or is poisoned
            self._checks.forget(self._identity)
            self._hurry()
        self._identity, self._seen = identity, True
        if identity is not None and not self._checks.open(identity):
            self._is_good(identity)
        if self._reports.back():  # perhaps started anew, by somebody who has mended something
            self._hurry()
        if self._options.mode is Mode.MANUAL:
            self._tell_failure(state)
        self._metrics.seen(self.name, state, self._board.newest)
        self._board.retain()

    def _hurry(self) -> None:
        self._patience.hurry()
        self._telling.hurry()

    def _learn(self, state: EngineState, identity: Identity | None) -> None:
        """Learn what became of an activation: who may pause now, and for which versions."""
        before, learned = self._attempts.pending, self._attempts.see(state)
        if identity is not None:
            self._board.suspects.clear(identity.digest)
        if learned.poisoned_by is not None:
            self._board.suspects.note(learned.poisoned_by.digest, self.name)
        if learned.overran is not None:  # what comes of it is told then
            self._reports.failed(learned.overran, learned.overran.phase, before)
        if learned.missed is not None:
            error = missed(self.name, learned.missed, state)
            self._fail(error, error.phase, Action(Kind.ACTIVATE, learned.missed))
        if learned.at_it:
            self._board.slots.take(self.name)
        else:
            self._board.slots.give_back(self.name)

    def _is_good(self, identity: Identity) -> None:
        """It serves that version, and well: to that it goes back."""
        if identity.digest not in self._refused:
            self._last = self._board.leases.targets.get(identity.digest, self._last)

    def _tell_failure(self, state: EngineState) -> None:
        """Somebody else activates, and the engine tells how that failed."""
        failure = state.last_failure
        if failure is None or failure.t == self._failure_at:
            return
        self._failure_at = failure.t
        error = failed_there(self.name, failure)
        self._reports.failed(error, failure.phase)
        held = [
            one for one in self._board.leases.targets.values() if one.version == failure.version
        ]
        if held and is_about_files(error):
            self._board.repairs.ask(held[0], self.name)

    def _hear(self, state: EngineState) -> None:
        """Tell of a version that it did take, though no answer came when it was told to."""
        if self._unsure is None or self._unsure[0].target is None:
            return
        (action, began), target = self._unsure, self._unsure[0].target
        if action.kind is Kind.STAGE:
            if state.staged is None or state.staged.digest != target.digest:
                return
            self._reports.staged(target, self._clock() - began)
        else:
            model = _model_of(state, self._board.use.adapter, target)
            if model is None:
                return
            self._reports.loaded(target, model)
        self._unsure = None
        self._patience.succeeded(action.kind)

    def _announce_seen(self, state: EngineState, identity: Identity) -> None:
        """It serves another version: somebody else activated, or the answer did not reach us."""
        pause = [swap.pause_ms for swap in state.swaps if swap.to == label_of(identity)]
        held = self._board.leases.targets.get(identity.digest)
        step = state.served.step if state.served is not None else None
        self._note(identity, held.step if held is not None else step, pause[-1] if pause else None)

    def _note(self, identity: Identity, step: int | None, pause_ms: float | None) -> None:
        self._reports.activated(identity, step, pause_ms)
        self._patience.succeeded(Kind.ACTIVATE)

    # --- canaries ---------------------------------------------------------------------------

    async def _check_canary(self, state: EngineState) -> bool:
        """Check what it serves, once; return whether that changed what is to be done."""
        identity = self._identity
        if identity is None or not self._checks.due(identity, state):
            return False
        target = self._board.leases.targets.get(identity.digest)
        if target is None and self._board.leases.is_refused(identity.digest):
            return False  # it is here, and cannot be read just now
        try:
            canary = None if target is None else self._canary(target)
            asking = self._checks.ask(identity, canary, state)
            verdict = await self._watched(asking, SILENT_LOOKS)
        except EngineError as unanswered:
            self._checks.unanswered(unanswered)
            self._reports.failed(unanswered, "check", target)
            return False
        if verdict.outcome is Outcome.RIGHT:
            self._is_good(identity)
        if verdict.outcome is not Outcome.WRONG:
            return verdict.outcome is Outcome.MOVED
        self._refused.add(identity.digest)
        back = self._last if self._options.mode is Mode.AUTO else None
        error = unlike_canary(self.name, identity, verdict.why, back)
        self._reports.failed(error, "check", target)
        return True

    # --- failures ---------------------------------------------------------------------------

    def _lost(self, error: EngineError) -> float:
        """It does not answer, or not as an engine: the others go on, this one is asked again."""
        self._reports.away(error)
        self._metrics.seen(self.name, None, self._board.newest)
        if self._board.slots.may_be_paused(self.name):
            return self._options.watch_s
        self._attempts.give_up()
        self._board.slots.give_back(self.name)
        return self._options.poll_s

    def _fail(self, error: EngineError, phase: str, action: Action) -> float:
        self._patience.failed(error, action.kind)
        self._reports.failed(error, phase, action.target)
        about_files = isinstance(error, EngineRefusedError) and is_about_files(error)
        if about_files and action.target is not None:
            self._board.repairs.ask(action.target, self.name)
        # What it is at after an activation that failed is seen at once: the others wait for that.
        return 0.0 if action.kind is Kind.ACTIVATE else self._options.watch_s


def _phase_of(error: EngineError, asked: str) -> str:
    return error.phase if isinstance(error, EngineRefusedError) else asked


def _model_of(state: EngineState, name: str | None, target: Target) -> str | None:
    """Return what requests call an adapter that an engine has loaded."""
    found = [one for one in state.lora if (one.name, one.digest) == (name, target.digest)]
    return found[0].model if found and found[0].loaded else None


def _names_in(state: EngineState) -> Iterator[Identity]:
    """Yield every version that an engine has something to do with."""
    served = served_by(state)
    if served is not None:
        yield served
    for one in (state.staged, state.activating, *state.lora):
        if one is not None:
            yield Identity(one.run, one.version, one.digest)

"""Compares what one engine answers with what a version's canary says: each version that it serves, once.

An answer is of whatever the engine serves when it answers. So it counts only if the engine serves the same
version afterwards, and has not swapped meanwhile: an orchestrator may swap at any moment.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from shardcast.canary import Canary, difference
from shardcast.engine.decide import Kind, served_by
from shardcast.engine.driver import Engine
from shardcast.engine.forms import EngineState, Identity
from shardcast.engine.patience import Patience
from shardcast.errors import EngineError


class Outcome(enum.Enum):
    """What a check came to."""

    RIGHT = "right"
    WRONG = "wrong"
    MOVED = "moved"
    """It serves something else by now: nobody knows whose answers these are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check came to; ``why`` says what is wrong."""

    outcome: Outcome
    why: str = ""


class Checks:
    """The versions of one engine that were checked."""

    def __init__(
        self, engine: Engine, *, enabled: bool, clock: Callable[[], float], rng: random.Random
    ) -> None:
        """Nothing was checked.

        Args:
            engine: The engine.
            enabled: Whether anything is.
            clock: Monotonic seconds.
            rng: Spreads retries.
        """
        self._engine = engine
        self._enabled = enabled
        self._patience = Patience(clock, rng)
        self._done: set[str] = set()

    def open(self, identity: Identity) -> bool:
        """Say whether a version was not checked yet, and is to be."""
        return self._enabled and identity.digest not in self._done

    def due(self, identity: Identity, state: EngineState) -> bool:
        """Say whether to check it now: not a paused engine, nor soon after it did not answer."""
        self._patience.at_stake(identity)
        still = state.paused or state.activating is not None
        return self.open(identity) and not still and self._patience.left_s <= 0

    def forget(self, identity: Identity) -> None:
        """The engine was started anew, or lost its weights: what it loads next is checked again."""
        self._done.discard(identity.digest)

    async def ask(self, identity: Identity, canary: Canary | None, before: EngineState) -> Verdict:
        """Check what it serves.

        Args:
            identity: What it serves.
            canary: That version's; None: whatever it answers is right.
            before: What the engine said of itself last.

        Raises:
            EngineError: If it cannot be asked (``unanswered``).
        """
        why = None
        if canary is not None:
            why = await self._compare(canary)
            after = await self._engine.state()
            if served_by(after) != identity or after.swap_count != before.swap_count:
                return Verdict(Outcome.MOVED)
        self._done.add(identity.digest)
        return Verdict(Outcome.RIGHT) if why is None else Verdict(Outcome.WRONG, why)

    def unanswered(self, error: EngineError) -> None:
        """It could not be asked: it is asked again after a rest."""
        self._patience.failed(error, Kind.WAIT)

    async def _compare(self, canary: Canary) -> str | None:
        for number, prompt in enumerate(canary.prompts):
            wrong = difference(canary, number, await self._engine.score(prompt.tokens))
            if wrong is not None:
                return wrong
        return None

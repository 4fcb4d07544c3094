"""Tells one engine how far its run is: once for each version, and nothing waits for it.

An engine that does not take it knows its lag less well. That is no reason to keep a version from it, so
it is told again after a rest, as whatever fails is, and until then counts as told.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from shardcast.engine.decide import Kind
from shardcast.engine.driver import Engine
from shardcast.engine.forms import EngineState
from shardcast.engine.patience import Patience
from shardcast.errors import EngineError, EngineUnreachableError


class Telling:
    """What one engine was told."""

    def __init__(
        self,
        engine: Engine,
        run: str,
        max_lag: int | None,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Tell nothing yet.

        Args:
            engine: The engine.
            run: The run.
            max_lag: What it is told with how far the run is.
            clock: Monotonic seconds.
            rng: Spreads retries.
        """
        self._engine = engine
        self._run = run
        self._max_lag = max_lag
        self._patience = Patience(clock, rng)
        self._told: int | None = None
        self._remembers = True

    def known(self, state: EngineState, newest: int | None) -> int | None:
        """Return how far the run is for all that the engine need be told, None for nothing.

        Args:
            state: What it says: one that was started anew knows nothing.
            newest: How far the run is.
        """
        self._patience.at_stake(newest)
        if self._patience.left_s > 0:
            return newest
        return self._told if state.newest is not None or not self._remembers else None

    @property
    def left_s(self) -> float:
        """How long it is not told again; zero or less where it may be."""
        return self._patience.left_s

    async def tell(self, newest: int) -> EngineError | None:
        """Tell it; return why it did not take it.

        Raises:
            EngineUnreachableError: If it does not answer at all.
        """
        try:
            state = await self._engine.tell(self._run, newest, self._max_lag)
        except EngineUnreachableError:
            raise
        except EngineError as error:
            self._patience.failed(error, Kind.TELL)
            return error
        self._told, self._remembers = newest, state.newest is not None
        self._patience.succeeded(Kind.TELL)
        return None

    def hurry(self) -> None:
        """It was started anew, or is back: tell it at once."""
        self._patience.hurry()

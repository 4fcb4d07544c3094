"""When an engine is told again what it could not do: pure, the clock is passed in."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Final

from shardcast.engine.decide import Kind
from shardcast.errors import EngineError, EngineRefusedError

RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
"""What an engine could not do is tried again after so long at most; a newer version, at once."""
MISFIT_S: Final = 600.0
"""The same where the version does not fit the engine's model: to find out costs hashing all of it."""
MISFITS: Final = frozenset({"incompatible", "malformed"})
"""Only a new version, or an engine that was started anew, makes these good. ``unsupported`` and
``conflict`` cost the engine nothing, and an operator may mend them at any moment."""
PASSING: Final = frozenset({"superseded", "conflict"})
"""The engine's state was another one than it seemed: what is to be done now is seen by looking."""


class Patience:
    """With one engine."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        """Nothing has failed.

        Args:
            clock: Monotonic seconds.
            rng: Spreads retries.
        """
        self._clock = clock
        self._rng = rng
        self._failures = 0
        self._until = 0.0
        self._stake: Hashable = None
        self._at: Kind | None = None

    @property
    def left_s(self) -> float:
        """How long it rests; zero or less where it does not."""
        return self._until - self._clock()

    def at_stake(self, stake: Hashable) -> None:
        """Say what is to be done now: where that is something else than what failed, there is new hope."""
        if stake != self._stake:
            self._stake = stake
            self._failures, self._until, self._at = 0, 0.0, None

    def passes(self, error: EngineRefusedError, kind: Kind) -> bool:
        """Say whether a refusal only means: look again. Once; then somebody else drives the engine, too."""
        if error.reason not in PASSING or self._failures:
            return False
        self._failures, self._at = 1, kind
        return True

    def failed(self, error: EngineError, kind: Kind) -> None:
        """Something failed: rest, longer each time."""
        self._failures, self._at = self._failures + 1, kind
        cap_s = min(RETRY_FIRST_S * 2.0 ** min(self._failures, 16), RETRY_CAP_S)
        if isinstance(error, EngineRefusedError) and error.reason in MISFITS:
            cap_s = MISFIT_S
        self._until = self._clock() + self._rng.uniform(cap_s / 2, cap_s)

    def succeeded(self, kind: Kind) -> None:
        """Something went well. A version that was staged may yet fail again as it did after that."""
        if kind is not Kind.STAGE or self._at is Kind.STAGE:
            self._failures, self._until, self._at = 0, 0.0, None

    def hurry(self) -> None:
        """Rest no longer: the engine is another one now, or was started anew."""
        self._until = 0.0

"""What becomes of one engine's activations, as its states tell: pure.

An answer may be lost, and a lease may end while the load goes on. What the engine serves then, and whether
it is paused still, is seen by looking. So is what somebody else begins: an earlier agent, an orchestrator.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardcast.engine.decide import served_by
from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState, Identity
from shardcast.errors import EngineError, EngineRefusedError, EngineUncertainError


@dataclass(frozen=True, slots=True)
class Learned:
    """What a look at the state has shown of an activation.

    Attributes:
        at_it: Whether one is under way.
        overran: Why it is, although its lease is over; once.
        missed: The version that it did not get to, where no answer said so.
        poisoned_by: The version whose load took its weights; not where nobody knew them before either.
    """

    at_it: bool = False
    overran: EngineRefusedError | None = None
    missed: Target | None = None
    poisoned_by: Identity | None = None


class Attempts:
    """The activations of one engine.

    Attributes:
        pending: The version that it was told to activate, while no answer says what became of that.
    """

    def __init__(self) -> None:
        """Nothing was begun."""
        self.pending: Target | None = None
        self._begun: Identity | None = None
        self._overran: EngineRefusedError | None = None
        self._well = True

    def begin(self, target: Target) -> None:
        """It is told to activate a version."""
        self._begun, self._overran = target.identity, None

    def never_began(self) -> None:
        """It did not hear of it."""
        self._begun = None

    def failed(self, target: Target, error: EngineError) -> None:
        """It was told, and this is the answer."""
        if isinstance(error, EngineRefusedError) and error.reason == "timeout":
            self.pending, self._overran = target, error  # a load goes on after its lease
        elif isinstance(error, EngineUncertainError):
            self.pending = target

    def give_up(self) -> None:
        """It has said nothing for so long that nobody waits for it."""
        self.pending = None

    def see(self, state: EngineState) -> Learned:
        """Learn from what it says of itself."""
        activating = state.activating
        if activating is not None:
            self._begun = Identity(activating.run, activating.version, activating.digest)
            self._well = self._well and not state.poisoned
            overran, self._overran = self._overran, None
            return Learned(at_it=True, overran=overran)
        guilty = self._begun if state.poisoned and self._well else None
        target, served = self.pending, served_by(state)
        missed = target is not None and (served is None or served.digest != target.digest)
        self._well, self._begun, self._overran, self.pending = not state.poisoned, None, None, None
        return Learned(missed=target if missed else None, poisoned_by=guilty)

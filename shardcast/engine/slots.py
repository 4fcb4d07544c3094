"""Which engines may be paused, and for which versions: pure, the clock is passed in.

An engine has a slot from when it is told to activate, or is seen at it, until it is seen to be through:
an answer that says nothing of that (a lease that is over while the load goes on, a lost answer, no answer
at all) proves nothing. One that says nothing any more may be paused for as long as its lease can last;
after that the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardcast.engine.driver import Target


class Slots:
    """So many engines may pause at once. An engine that somebody else makes pause counts as well."""

    def __init__(
        self,
        count: int,
        freed: Callable[[], None],
        *,
        clock: Callable[[], float],
        silent_s: float,
    ) -> None:
        """All are free.

        Args:
            count: How many there are.
            freed: Called when one becomes free.
            clock: Monotonic seconds.
            silent_s: How long an engine that has one and says nothing may be paused still.
        """
        self._count = count
        self._freed = freed
        self._clock = clock
        self._silent_s = silent_s
        self._until: dict[str, float] = {}

    def free_for(self, engine: str) -> bool:
        """Say whether an engine may take one, or has one."""
        return engine in self._until or len(self._until) < self._count

    def take(self, engine: str) -> None:
        """The engine pauses, is about to, or may have begun to: its time without a word begins now."""
        self._until[engine] = self._clock() + self._silent_s

    def may_be_paused(self, engine: str) -> bool:
        """Say whether an engine that does not answer has one, and its time is not over."""
        return engine in self._until and self._clock() < self._until[engine]

    def give_back(self, engine: str) -> None:
        """It serves again, or is gone; harmless if it had none."""
        if self._until.pop(engine, None) is not None:
            self._freed()


class Suspects:
    """Versions whose load left an engine paused, without weights that anybody knows (poisoned).

    Such an engine does not keep its slot: it may never be well again, and the others must get newer
    versions. So that one bad version cannot take down one engine after another, no other engine that
    serves is paused for that version until some engine serves it. That an engine which was poisoned
    before could not load a version either says nothing about the version.
    """

    def __init__(self) -> None:
        """Suspect none."""
        self._engine_of: dict[str, str] = {}

    def note(self, digest: str, engine: str) -> None:
        """A version's load poisoned an engine that served before."""
        self._engine_of.setdefault(digest, engine)

    def clear(self, digest: str) -> None:
        """An engine serves that version; harmless if it was not suspected."""
        self._engine_of.pop(digest, None)

    def why(self, target: Target, engine: str) -> str | None:
        """Return why an engine must not be paused for a version, None where it may."""
        first = self._engine_of.get(target.digest)
        if first is None or first == engine:
            return None
        return (
            f"engine {engine} is not paused for version {target.version}, whose load left engine "
            f"{first} without weights that anybody knows: it goes on with what it has until {first} "
            f"serves that version, or another one comes. Restart {first} if it does not recover"
        )

    def for_engine(self, engine: str) -> Collection[str]:
        """Return the digests that an engine which serves must not be paused for."""
        return {digest for digest, first in self._engine_of.items() if first != engine}

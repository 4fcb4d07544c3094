"""What goes wrong when, decided beforehand: a seed gives the same list of acts on every machine.

Nothing here acts. `plan` deals the kinds of harm like cards from a shuffled deck, so that a short soak
sees each of them, and leaves a victim alone until it has recovered from the act before.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


class Kind(enum.StrEnum):
    """A kind of harm.

    Attributes:
        KILL: SIGKILL, down for a while, started again.
        RESTART: SIGTERM, awaited, started again.
        REPLACE: A second process takes a relay's place while it serves (`--take-over`).
        STALL: SIGSTOP, SIGCONT after a while.
        FLIP: One bit of a committed version's file on disk, under the running process.
        DAMAGE: SIGKILL, damage to a file of its directory (a bit, a cut or zeroed end), started again.
        FILL: A small file system is filled to its last byte, and freed after a while.
        CLOCK: The process's wall clock is wrong for a while.
        FREEZE: A link passes nothing on for a while; its connections stay.
        CUT: A link's connections break, and new ones too, for a while.
    """

    KILL = "kill"
    RESTART = "restart"
    REPLACE = "replace"
    STALL = "stall"
    FLIP = "flip"
    DAMAGE = "damage"
    FILL = "fill"
    CLOCK = "clock"
    FREEZE = "freeze"
    CUT = "cut"


@dataclass(frozen=True)
class Act:
    """One harm.

    Attributes:
        at: Seconds from the start of the soak.
        kind: What.
        target: Whom: a process, a file system or a link, by name.
        seconds: For how long.
        amount: How much: the clock's error in seconds.
        draw: Chooses among what is there at that moment, such as files: 0 to below 1.
    """

    at: float
    kind: Kind
    target: str
    seconds: float
    amount: float = 0.0
    draw: float = 0.0

    def __str__(self) -> str:
        more = f" by {self.amount:+.0f} s" if self.kind is Kind.CLOCK else ""
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:7.2f} {self.kind.value:<9} {self.target}{more}{lasting}"


WEIGHTS: Final[Mapping[Kind, int]] = {
    Kind.KILL: 5,
    Kind.RESTART: 2,
    Kind.REPLACE: 2,
    Kind.STALL: 3,
    Kind.FLIP: 2,
    Kind.DAMAGE: 2,
    Kind.FILL: 2,
    Kind.CLOCK: 2,
    Kind.FREEZE: 2,
    Kind.CUT: 2,
}
"""How often a kind is in the deck."""

_LASTING: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.KILL: (0.0, 4.0),
    Kind.RESTART: (0.0, 1.0),
    Kind.REPLACE: (0.0, 0.0),
    Kind.STALL: (0.5, 12.0),  # up to a stall that readers give up on, and shorter ones
    Kind.FLIP: (0.0, 0.0),
    Kind.DAMAGE: (0.0, 1.0),
    Kind.FILL: (2.0, 10.0),
    Kind.CLOCK: (3.0, 12.0),
    Kind.FREEZE: (1.0, 12.0),
    Kind.CUT: (0.5, 8.0),
}
_ERRORS_S: Final = (-30 * 86400.0, -86400.0, -3600.0, 3600.0, 86400.0, 30 * 86400.0)
"""Clocks are wrong by hours (a time zone), a day, or long enough for every head to expire."""

_MEAN_GAP_S: Final = 1.5
_RECOVERY_S: Final = 5.0
"""A victim is left alone for so long after an act: what it does then is what is watched."""


def plan(
    seed: int, targets: Mapping[Kind, Sequence[str]], *, start: float, end: float
) -> list[Act]:
    """Return what happens between `start` and `end`, in order of time; nothing lasts beyond `end`.

    Args:
        seed: Another seed, another list.
        targets: Who can suffer what.
        start: Seconds from the start of the soak to the first act.
        end: By then everything is as it should be again, up to restarts.
    """
    rng = random.Random(seed)
    deck: list[Kind] = []
    victims = {kind: _Rotation(names, rng) for kind, names in targets.items() if names}
    free_at: dict[str, float] = {}
    acts: list[Act] = []
    now = start
    while True:
        now += rng.uniform(0.25, 1.75) * _MEAN_GAP_S
        if now >= end:
            return acts
        if not deck:
            deck = [kind for kind in victims for _ in range(WEIGHTS[kind])]
            rng.shuffle(deck)
        hurt = {name for name, at in free_at.items() if at > now}
        for position in range(len(deck) - 1, -1, -1):
            target = victims[deck[position]].next(hurt)
            if target is not None:
                kind = deck.pop(position)
                seconds = min(rng.uniform(*_LASTING[kind]), end - now)
                amount = rng.choice(_ERRORS_S) if kind is Kind.CLOCK else 0.0
                acts.append(Act(now, kind, target, seconds, amount, rng.random()))
                free_at[target] = now + seconds + _RECOVERY_S
                break


class _Rotation:
    """Everyone's turn comes: names in random order, again and again, passing over who may not."""

    def __init__(self, names: Sequence[str], rng: random.Random) -> None:
        self._names = list(names)
        self._rng = rng
        self._waiting: list[str] = []

    def next(self, but: Collection[str]) -> str | None:
        """Return whose turn it is, passing over some; None if nobody is left."""
        for refilled in (False, True):
            if refilled:
                fresh = [name for name in self._names if name not in self._waiting]
                self._rng.shuffle(fresh)
                self._waiting = fresh + self._waiting
            for position in range(len(self._waiting) - 1, -1, -1):
                if self._waiting[position] not in but:
                    return self._waiting.pop(position)
        return None


class Step(enum.StrEnum):
    """What the trainer's side does.

    Attributes:
        FRESH: Publishes new weights.
        SHARED: Publishes a version of which most files are those of the one before.
        LINK: Publishes new weights by hard links.
        STREAMED: Opens a version, adds its parts one by one, closes it.
        KILLED: Begins to publish and is killed in the middle.
        STREAM_KILLED: Opens a version and is killed before it is closed.
        WITHDRAW: Withdraws the newest version.
        HOLD: Holds activations for a while.
        ROTATE: Hands the run over to a new key with the next version.
    """

    FRESH = "fresh"
    SHARED = "shared"
    LINK = "link"
    STREAMED = "streamed"
    KILLED = "killed"
    STREAM_KILLED = "stream-killed"
    WITHDRAW = "withdraw"
    HOLD = "hold"
    ROTATE = "rotate"


@dataclass(frozen=True)
class Lesson:
    """One step of the trainer's side.

    Attributes:
        at: Not before so many seconds from the start of the soak.
        step: What it does.
        seconds: For how long (a hold), or after how long it is killed.
    """

    at: float
    step: Step
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" ({self.seconds:.2f} s)" if self.seconds else ""
        return f"{self.at:7.2f} publisher {self.step.value}{lasting}"


_STEPS: Final = (
    *(Step.FRESH,) * 4,
    *(Step.SHARED,) * 3,
    *(Step.LINK,) * 2,
    *(Step.STREAMED,) * 2,
    *(Step.KILLED,) * 2,
    Step.STREAM_KILLED,
    Step.WITHDRAW,
    Step.HOLD,
    Step.ROTATE,
)
_PUBLISH_GAP_S: Final = (2.0, 7.0)


def lessons(seed: int, *, start: float, end: float) -> list[Lesson]:
    """Return what the publisher does between `start` and `end`, in order of time."""
    rng = random.Random(seed ^ 0x5EED)
    deck: list[Step] = []
    found: list[Lesson] = []
    now = start
    while True:
        now += rng.uniform(*_PUBLISH_GAP_S)
        if now >= end:
            return found
        if not deck:
            deck = list(_STEPS)
            rng.shuffle(deck)
        step = deck.pop()
        seconds = 0.0
        if step is Step.HOLD:
            seconds = min(rng.uniform(3.0, 8.0), end - now)
        elif step is Step.KILLED:
            seconds = rng.uniform(0.2, 1.2)  # from the start of the interpreter to the commit
        elif step is Step.STREAM_KILLED:
            seconds = rng.uniform(0.6, 1.6)
        found.append(Lesson(now, step, seconds))

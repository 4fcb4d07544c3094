"""What one engine does next: pure.

An engine is never moved to an older version, unless the one it serves was withdrawn or turned out
wrong. What is staged and better than what is served is activated even when something newer has come
meanwhile: else an engine that stages more slowly than a trainer publishes would never swap.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState, Identity, Lora


class Mode(enum.StrEnum):
    """Who activates: the agent, or the orchestrator that owns the engines."""

    AUTO = "auto"
    MANUAL = "manual"


class Kind(enum.Enum):
    """What to do."""

    WAIT = "wait"
    TELL = "tell"
    STAGE = "stage"
    ACTIVATE = "activate"
    LOAD = "load"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class Action:
    """What to do, with which version; ``why`` says what is waited for."""

    kind: Kind
    target: Target | None = None
    identity: Identity | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known when it is decided.

    Attributes:
        state: What the engine says.
        target: The version that is current on this disk.
        last: The version that it was last seen to serve well, if that is on this disk.
        held: Versions that are on this disk and leased, by digest.
        withdrawn: Numbers of versions that nobody should run.
        refused: Digests that turned out wrong at this engine.
        suspects: Digests that it must not be paused for until another engine serves them.
        hold: Whether the publisher holds activations.
        mode: Who activates.
        newest: How far the run is, as its head says.
        told: What the engine was told last of that.
        resting: Whether something failed a moment ago.
        slot: Whether it may pause now, for all that the other engines do.
        adapter: What the run's versions are called, if they are adapters.
    """

    state: EngineState
    target: Target | None = None
    last: Target | None = None
    held: Mapping[str, Target] = field(default_factory=dict)
    withdrawn: Collection[int] = ()
    refused: Collection[str] = ()
    suspects: Collection[str] = ()
    hold: bool = False
    mode: Mode = Mode.AUTO
    newest: int | None = None
    told: int | None = None
    resting: bool = False
    slot: bool = True
    adapter: str | None = None


def decide(view: View) -> Action:
    """Decide."""
    state = view.state
    if view.newest is not None and view.told != view.newest:
        return Action(Kind.TELL)
    if state.activating is not None:
        return Action(Kind.WAIT, why=f"it activates version {state.activating.version}")
    if view.resting:
        return Action(Kind.WAIT, why="something failed a moment ago")
    return _decide_weights(view) if view.adapter is None else _decide_adapter(view, view.adapter)


# --- weights --------------------------------------------------------------------------------------


def _decide_weights(view: View) -> Action:
    state, goal = view.state, _goal(view)
    if view.mode is Mode.AUTO:
        ready = _ready(view, goal) or _left_paused(view)
        if ready is not None:
            if view.slot:
                return Action(Kind.ACTIVATE, ready)
            return Action(Kind.WAIT, why="other engines are swapping")
    if goal is None:
        return Action(Kind.WAIT, why="it serves what it should")
    if state.staged is None or state.staged.digest != goal.digest:
        return Action(Kind.STAGE, goal)
    if view.mode is Mode.MANUAL:
        return Action(Kind.WAIT, why="the orchestrator activates")
    if goal.digest in view.suspects:
        return Action(Kind.WAIT, why="another engine did not survive that version")
    return Action(Kind.WAIT, why="the publisher holds activations")


def served_by(state: EngineState) -> Identity | None:
    """Return what an engine serves, None where nobody knows."""
    return None if state.poisoned else state.identity


def _goal(view: View) -> Target | None:
    """Return the version that it should be moved to, None where it is on the right one.

    Under ``hold`` an engine that lost its weights gets back those that it had: that moves nobody.
    """
    candidates = [view.target, view.last]
    if view.hold and view.mode is Mode.AUTO and served_by(view.state) is None:
        candidates.reverse()
    better = [one for one in candidates if one is not None and _better(view, one)]
    # An engine that lost its weights gets what it had, before it waits for a suspected version.
    return next(
        (one for one in better if one.digest not in view.suspects), next(iter(better), None)
    )


def _ready(view: View, goal: Target | None) -> Target | None:
    """Return the staged version if it should be activated now."""
    staged = view.state.staged
    if staged is None:
        return None
    target = goal if goal is not None and goal.digest == staged.digest else None
    target = target or view.held.get(staged.digest)
    if target is None or target.run != staged.run or not _better(view, target):
        return None
    if target.digest in view.suspects:
        return None
    return target if not view.hold or _gives_back(view, target) else None


def _left_paused(view: View) -> Target | None:
    """Return the version that it serves if an activation has loaded it and could not resume.

    One that somebody else has paused (its log of swaps ends with a resume) is left to them.
    """
    state, served = view.state, served_by(view.state)
    if served is None or not state.paused or not state.swaps:
        return None
    if state.swaps[-1].resumed_at is not None or served.version in view.withdrawn:
        return None
    return None if served.digest in view.refused else view.held.get(served.digest)


def _gives_back(view: View, target: Target) -> bool:
    lost = served_by(view.state) is None
    return lost and view.last is not None and view.last.digest == target.digest


def _better(view: View, target: Target) -> bool:
    """Say whether a version is a better one to serve than the one that is served."""
    if target.version in view.withdrawn or target.digest in view.refused:
        return False
    served = served_by(view.state)
    if served is None or served.run != target.run:
        return True
    if served.digest == target.digest:
        return False
    wrong = served.version in view.withdrawn or served.digest in view.refused
    return wrong or target.version >= served.version


# --- adapters -------------------------------------------------------------------------------------


def _decide_adapter(view: View, name: str) -> Action:
    """The current version's adapter is loaded first, then what was loaded before it is given up."""
    target = view.target
    mine = [one for one in view.state.lora if one.name == name]
    if target is None:
        return Action(Kind.WAIT, why="no version is here")
    run = [one for one in mine if one.run == target.run]
    loaded = next((one for one in run if one.digest == target.digest and one.loaded), None)
    if loaded is None:
        if view.hold:
            return Action(Kind.WAIT, why="the publisher holds activations")
        if not _better_adapter(view, target, run):
            return Action(Kind.WAIT, why="it has a newer one")
        return Action(Kind.LOAD, target)
    over = next((one for one in mine if one is not loaded), None)
    if over is None:
        return Action(Kind.WAIT, why="it has what it should")
    return Action(Kind.UNLOAD, identity=Identity(over.run, over.version, over.digest))


def _better_adapter(view: View, target: Target, loaded: Collection[Lora]) -> bool:
    if target.version in view.withdrawn or target.digest in view.refused:
        return False
    good = [one.version for one in loaded if one.loaded and one.version not in view.withdrawn]
    return target.version >= max(good, default=0)

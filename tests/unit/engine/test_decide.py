"""What an engine does next: a table, and engines that anything happens to, in virtual rounds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shardcast.engine.decide import Action, Kind, Mode, View, decide, served_by
from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState, Lora
from tests.engines import activating_of, fresh_state, lora_of, served_state, staged_of


def target(number: int, run: str = "policy") -> Target:
    return Target(run, number, f"{number:064x}", Path(f"/out/versions/{number:06d}"))


def state(
    served: int | None = None,
    staged: int | None = None,
    activating: int | None = None,
    *,
    poisoned: bool = False,
    run: str = "policy",
) -> EngineState:
    made = fresh_state("fake")
    if served is not None:
        made = served_state(made, target(served, run), None)
    return replace_state(
        made,
        staged=None if staged is None else staged_of(target(staged)),
        activating=None if activating is None else activating_of(target(activating)),
        poisoned=poisoned,
    )


def paused(served: int, *, by_us: bool, staged: int | None = None) -> EngineState:
    """Of an engine whose last swap was not resumed, or was, and somebody paused it later."""
    made = state(served, staged)
    last = msgspec.structs.replace(made.swaps[-1], resumed_at=None if by_us else 7)
    return replace_state(made, paused=True, ready=False, swaps=[*made.swaps[:-1], last])


def replace_state(made: EngineState, **changes: object) -> EngineState:
    return msgspec.structs.replace(made, **changes)


def view(made: EngineState, newest: int | None = 5, **more: object) -> View:
    known = {target(n).digest: target(n) for n in range(1, 10)}
    base = View(
        state=made,
        target=None if newest is None else target(newest),
        held=known,
        newest=newest,
        told=newest,
    )
    return replace(base, **more)  # type: ignore[arg-type]


STAGE_5 = Action(Kind.STAGE, target(5))
ACTIVATE_5 = Action(Kind.ACTIVATE, target(5))


@pytest.mark.parametrize(
    ("made", "action"),
    [
        (view(state()), STAGE_5),  # booted from elsewhere: it is made to sync
        (view(state(4)), STAGE_5),
        (view(state(1)), STAGE_5),  # versions are skipped
        (view(state(4, staged=5)), ACTIVATE_5),
        (view(state(staged=5)), ACTIVATE_5),
        (view(state(5, staged=4)), Kind.WAIT),
        (view(state(5)), Kind.WAIT),
        (view(state(6)), Kind.WAIT),  # never to an older one
        (view(state(6, staged=5)), Kind.WAIT),
        (view(state(6), withdrawn=[6]), STAGE_5),  # but for one that was withdrawn
        (view(state(6, staged=5), withdrawn=[6]), ACTIVATE_5),
        (view(state(4), withdrawn=[5]), Kind.WAIT),
        (view(state(4, staged=5), withdrawn=[5]), Kind.WAIT),
        (view(state(9, run="other")), STAGE_5),  # weights of another run
        (view(state(4, staged=5), slot=False), Kind.WAIT),
        (view(state(4), slot=False), STAGE_5),  # staging waits for nobody
        (view(state(4, staged=5), resting=True), Kind.WAIT),
        (view(state(4, activating=5)), Kind.WAIT),
        (view(state(4), newest=None), Kind.WAIT),
        # What is staged and better than what is served is activated, though newer ones have come.
        (view(state(2, staged=3)), Action(Kind.ACTIVATE, target(3))),
        (view(state(3, staged=2)), STAGE_5),
        (view(state(2, staged=3), held={}), STAGE_5),  # it is not on this disk any more
        # hold: no activations, but an engine that lost its weights gets back what it had
        (view(state(4, staged=5), hold=True), Kind.WAIT),
        (view(state(4), hold=True), STAGE_5),
        (view(state(), hold=True, last=target(4)), Action(Kind.STAGE, target(4))),
        (view(state(staged=4), hold=True, last=target(4)), Action(Kind.ACTIVATE, target(4))),
        (view(state(staged=5), hold=True), Kind.WAIT),
        (view(state(4, poisoned=True), hold=True, last=target(4)), Action(Kind.STAGE, target(4))),
        # poisoned: a full activation, of the newest
        (view(state(poisoned=True), last=target(4)), STAGE_5),
        (view(state(poisoned=True, staged=5)), ACTIVATE_5),
        (view(state(5, poisoned=True, staged=5)), ACTIVATE_5),
        # a canary that failed: back to what was good, also downwards
        (view(state(5), refused=[target(5).digest], last=target(4)), Action(Kind.STAGE, target(4))),
        (view(state(5), refused=[target(5).digest]), Kind.WAIT),
        (view(state(4), refused=[target(5).digest], last=target(4)), Kind.WAIT),
        # a version that another engine did not survive: it is staged, and waited with
        (view(state(4), suspects=[target(5).digest]), STAGE_5),
        (view(state(4, staged=5), suspects=[target(5).digest]), Kind.WAIT),
        (view(state(4, staged=5), 6, suspects=[target(5).digest]), Action(Kind.STAGE, target(6))),
        (
            view(state(4, staged=6), 6, suspects=[target(5).digest]),
            Action(Kind.ACTIVATE, target(6)),
        ),
        (view(state(5), suspects=[target(5).digest]), Kind.WAIT),
        # but an engine that lost its weights gets those that it had
        (view(state(), suspects=[target(5).digest], last=target(4)), Action(Kind.STAGE, target(4))),
        (
            view(state(staged=4), suspects=[target(5).digest], last=target(4)),
            Action(Kind.ACTIVATE, target(4)),
        ),
        (view(state(), suspects=[target(5).digest]), STAGE_5),
        # an activation could not resume what it had loaded: again, which moves nobody
        (view(paused(5, by_us=True)), ACTIVATE_5),
        (view(paused(5, by_us=True), hold=True), ACTIVATE_5),
        (view(paused(4, by_us=True)), Action(Kind.ACTIVATE, target(4))),  # before hashing the next
        (view(paused(4, by_us=True, staged=5)), ACTIVATE_5),
        (view(paused(5, by_us=True), slot=False), Kind.WAIT),
        (view(paused(5, by_us=True), held={}), Kind.WAIT),
        (view(paused(5, by_us=True), mode=Mode.MANUAL), Kind.WAIT),
        (view(paused(5, by_us=True), 4, withdrawn=[5]), Action(Kind.STAGE, target(4))),
        (view(paused(5, by_us=True), refused=[target(5).digest]), Kind.WAIT),
        (view(paused(5, by_us=False)), Kind.WAIT),  # somebody else's pause
        # manual: it stages, and somebody else activates
        (view(state(4), mode=Mode.MANUAL), STAGE_5),
        (view(state(4), mode=Mode.MANUAL, hold=True), STAGE_5),
        (view(state(4, staged=5), mode=Mode.MANUAL), Kind.WAIT),
        (view(state(2, staged=3), mode=Mode.MANUAL), STAGE_5),
        (view(state(poisoned=True, staged=5), mode=Mode.MANUAL), Kind.WAIT),
        # how far the run is: told first, and once
        (view(state(4, staged=5), told=4), Action(Kind.TELL)),
        (view(state(4, activating=5), told=None), Action(Kind.TELL)),
    ],
)
def test_the_table(made: View, action: Action | Kind) -> None:
    decided = decide(made)
    if isinstance(action, Kind):
        assert decided.kind is action
        assert decided.why
    else:
        assert (decided.kind, decided.target) == (action.kind, action.target)


# --- adapters -------------------------------------------------------------------------------------


def adapters(*loaded: int, name: str = "math") -> EngineState:
    return replace_state(fresh_state("fake"), lora=[lora_of(name, target(n)) for n in loaded])


@pytest.mark.parametrize(
    ("made", "kind", "number"),
    [
        (view(adapters(), adapter="math"), Kind.LOAD, 5),
        (view(adapters(4), adapter="math"), Kind.LOAD, 5),  # the new one first
        (view(adapters(4, 5), adapter="math"), Kind.UNLOAD, 4),
        (view(adapters(5), adapter="math"), Kind.WAIT, None),
        (view(adapters(4, 5, name="code"), adapter="math"), Kind.LOAD, 5),  # not ours to touch
        (view(adapters(6), adapter="math"), Kind.WAIT, None),
        (view(adapters(6), adapter="math", withdrawn=[6]), Kind.LOAD, 5),
        (view(adapters(4), adapter="math", withdrawn=[5]), Kind.WAIT, None),
        (view(adapters(4), adapter="math", hold=True), Kind.WAIT, None),
        (view(adapters(), newest=None, adapter="math"), Kind.WAIT, None),
    ],
)
def test_adapters(made: View, kind: Kind, number: int | None) -> None:
    decided = decide(made)
    assert decided.kind is kind
    if kind is Kind.UNLOAD:
        assert decided.identity is not None
        assert decided.identity.version == number
    else:
        assert (decided.target and decided.target.version) == number


def test_an_adapter_that_was_dropped_is_loaded_again() -> None:
    made = adapters(5)
    dropped: list[Lora] = [msgspec.structs.replace(one, loaded=False) for one in made.lora]
    decided = decide(view(replace_state(made, lora=dropped), adapter="math"))
    assert decided.kind is Kind.LOAD


# --- anything happens -----------------------------------------------------------------------------


class World:
    """A run, its publisher and an engine; each round something may happen to one of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.newest = 1
        self.withdrawn: set[int] = set()
        self.hold = False
        self.state = fresh_state("fake")
        self.last: Target | None = None
        self.history: list[tuple[int | None, int]] = []

    @property
    def current(self) -> int:
        good = [n for n in range(1, self.newest + 1) if n not in self.withdrawn]
        return max(good)

    def happen(self) -> None:
        """Publish, withdraw, hold, restart, poison."""
        match self.rng.randrange(12):
            case 0 | 1 | 2:
                self.newest += 1
            case 3 if self.newest - len(self.withdrawn) > 1:
                self.withdrawn.add(self.current)
            case 4:
                self.hold = not self.hold
            case 5:
                self.state = fresh_state("fake")
            case 6:
                self.state = replace_state(self.state, poisoned=True, staged=None)
            case 7:
                self.state = replace_state(self.state, staged=None)

    def view(self) -> View:
        numbers = range(1, self.newest + 1)
        return View(
            state=self.state,
            target=target(self.current),
            last=self.last,
            held={target(n).digest: target(n) for n in numbers},
            withdrawn=self.withdrawn,
            hold=self.hold,
            newest=self.current,
            told=self.current,
        )

    def step(self) -> Action:
        """Decide and do it."""
        action = decide(self.view())
        if action.kind is Kind.STAGE and action.target is not None:
            self.state = replace_state(self.state, staged=staged_of(action.target))
        if action.kind is Kind.ACTIVATE and action.target is not None:
            self.activate(action.target)
        return action

    def activate(self, new: Target) -> None:
        before = served_by(self.state)
        assert self.state.staged is not None, "nothing is activated that was not staged"
        assert self.state.staged.digest == new.digest
        assert new.version not in self.withdrawn
        if before is not None and before.version not in self.withdrawn:
            assert new.version > before.version, "it went back"
        if self.hold:
            assert before is None, "it moved although the publisher holds"
            assert self.last is not None
            assert new == self.last
        self.state = served_state(self.state, new, before)
        self.last = new


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_it_ends_on_the_newest_good_version(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.happen()
        for _ in range(world.rng.randrange(3)):
            world.step()
    world.hold = False
    steps = 0
    while (action := world.step()).kind is not Kind.WAIT:
        steps += 1
        assert steps < 6, f"it does not come to rest: {action}"
    served = served_by(world.state)
    assert served is not None
    assert served.version == world.current


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_stages_more_slowly_than_a_trainer_publishes_still_swaps(seed: int) -> None:
    world = World(seed)
    swaps = 0
    for _ in range(30):
        world.newest += 1  # a version comes while each step is under way
        swaps += world.step().kind is Kind.ACTIVATE
    assert swaps == 15

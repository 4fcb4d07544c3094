"""What every engine driver must do, whatever it drives: subclass it and give it a harness."""

from __future__ import annotations

import asyncio
from typing import Protocol

import pytest

from shardcast.engine.decide import served_by
from shardcast.engine.driver import Engine, Target
from shardcast.engine.repairs import is_about_files
from shardcast.errors import EngineError, EngineRefusedError

WAIT_S = 120
"""A real engine may be slow; nothing here measures."""


class Harness(Protocol):
    """An engine under test, its driver, and the truth about it."""

    @property
    def engine(self) -> Engine:
        """The driver."""
        ...

    def version(self, number: int) -> Target:
        """Return a version that the engine can load; the same one for the same number."""
        ...

    async def loaded(self) -> int | None:
        """Return the number of the version whose weights it really answers with, None: others.

        Raises:
            AssertionError: If it answers with something that is no version at all.
        """
        ...

    def break_next_loads(self, count: int) -> None:
        """Let the next loads fail in the middle."""
        ...

    async def restart(self) -> None:
        """End the engine and start it again, as it was booted."""
        ...

    def adapter(self, number: int) -> Target | None:
        """Return an adapter version, None where the engine takes none."""
        ...


class EngineContract:
    """The suite. A subclass has a fixture ``harness``."""

    async def test_booted_from_elsewhere_it_serves_none_of_ours(self, harness: Harness) -> None:
        await harness.restart()
        state = await harness.engine.state()
        assert state.served is None
        assert not state.poisoned
        assert state.activating is None
        assert await harness.loaded() is None

    async def test_staging_changes_nothing_that_is_served(self, harness: Harness) -> None:
        target = harness.version(1)
        before, loaded = await harness.engine.state(), await harness.loaded()
        state = await harness.engine.stage(target)
        assert state.staged is not None
        assert (state.staged.version, state.staged.digest) == (1, target.digest)
        assert served_by(state) == served_by(before)
        assert not state.paused
        assert await harness.loaded() == loaded != 1

    async def test_an_activation_loads_resumes_and_labels(self, harness: Harness) -> None:
        target = harness.version(1)
        await harness.engine.stage(target)
        swapped = await harness.engine.activate(target)
        assert swapped.pause_ms >= 0
        for state in (swapped.state, await harness.engine.state()):
            assert served_by(state) == target.identity
            assert state.served is not None
            assert state.served.step == target.step
            assert not state.paused
            assert state.ready
            assert state.last_failure is None
            assert state.swaps[-1].to == str(target.identity)
        assert await harness.loaded() == 1

    async def test_what_is_served_already_is_not_loaded_again(self, harness: Harness) -> None:
        first = await harness.engine.activate(harness.version(1))
        again = await harness.engine.activate(harness.version(1))
        assert again.pause_ms == 0
        assert again.state.swap_count == first.state.swap_count

    async def test_any_version_follows_any_other(self, harness: Harness) -> None:
        """Skipping, and back: which version is better is not the engine's to say."""
        for number in (1, 3, 1, 2):
            await harness.engine.activate(harness.version(number))
            state = await harness.engine.state()
            assert served_by(state) == harness.version(number).identity
            assert await harness.loaded() == number

    async def test_a_version_that_is_not_there_leaves_the_old_one(self, harness: Harness) -> None:
        await harness.engine.activate(harness.version(1))
        lost = harness.version(2)
        gone = Target("policy", 2, lost.digest, lost.path.with_name("gone"), lost.step)
        for act in (harness.engine.stage, harness.engine.activate):
            with pytest.raises(EngineRefusedError) as refused:
                await act(gone)
            assert refused.value.reason == "unavailable"
            assert is_about_files(refused.value)  # so the agent has it repaired
        assert served_by(await harness.engine.state()) == harness.version(1).identity
        assert await harness.loaded() == 1
        state = await harness.engine.stage(lost)  # and takes it once it is whole again
        assert state.staged is not None
        assert state.staged.digest == lost.digest

    async def test_a_load_that_breaks_gives_the_old_version_back(self, harness: Harness) -> None:
        await harness.engine.activate(harness.version(1))
        harness.break_next_loads(1)
        with pytest.raises(EngineRefusedError) as failed:
            await harness.engine.activate(harness.version(2))
        state = await harness.engine.state()
        assert served_by(state) == harness.version(1).identity
        assert not state.paused
        assert state.last_failure is not None
        assert state.last_failure.version == 2
        assert failed.value.phase == state.last_failure.phase == "load"
        assert await harness.loaded() == 1

    async def test_without_a_way_back_it_is_paused_and_the_next_activation_recovers(
        self, harness: Harness
    ) -> None:
        await harness.engine.activate(harness.version(1))
        harness.break_next_loads(2)
        with pytest.raises(EngineError):
            await harness.engine.activate(harness.version(2))
        state = await harness.engine.state()
        assert served_by(state) is None
        assert (state.poisoned, state.paused, state.ready) == (True, True, False)
        await harness.engine.activate(harness.version(3))
        state = await harness.engine.state()
        assert served_by(state) == harness.version(3).identity
        assert (state.poisoned, state.paused, state.ready) == (False, False, True)
        assert await harness.loaded() == 3

    async def test_two_activations_at_once_never_mix(self, harness: Harness) -> None:
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(
                harness.engine.activate(harness.version(1)),
                harness.engine.activate(harness.version(2)),
                return_exceptions=True,
            )
        assert all(isinstance(r, EngineRefusedError) for r in results if isinstance(r, Exception))
        assert not all(isinstance(one, Exception) for one in results)
        served = served_by(await harness.engine.state())
        assert served is not None
        assert await harness.loaded() == served.version

    async def test_it_knows_its_lag_and_says_when_that_is_too_much(self, harness: Harness) -> None:
        await harness.engine.activate(harness.version(1))
        state = await harness.engine.tell("policy", 3, 1)
        assert (state.newest, state.lag, state.max_lag, state.ready) == (3, 2, 1, False)
        assert not state.paused
        await harness.engine.activate(harness.version(3))
        state = await harness.engine.state()
        assert (state.lag, state.ready) == (0, True)

    async def test_after_a_restart_it_has_none_of_ours_and_takes_them(
        self, harness: Harness
    ) -> None:
        await harness.engine.activate(harness.version(1))
        await harness.restart()
        assert served_by(await harness.engine.state()) is None
        await harness.engine.activate(harness.version(1))
        assert await harness.loaded() == 1

    async def test_it_scores_tokens_with_what_it_serves(self, harness: Harness) -> None:
        tokens = [3, 1, 4, 1, 5]
        await harness.engine.activate(harness.version(1))
        first = await harness.engine.score(tokens)
        assert len(first) == len(tokens) - 1
        assert all(one <= 0 for one in first)
        await harness.engine.activate(harness.version(2))
        second = await harness.engine.score(tokens)
        assert second != pytest.approx(first, abs=1e-4)
        await harness.engine.activate(harness.version(1))
        assert await harness.engine.score(tokens) == pytest.approx(first, abs=1e-4)

    async def test_adapters_have_names_of_their_own(self, harness: Harness) -> None:
        first, second = harness.adapter(1), harness.adapter(2)
        if first is None or second is None:
            with pytest.raises(EngineRefusedError) as refused:
                await harness.engine.load_adapter("math", harness.version(1))
            assert refused.value.reason == "unsupported"
            return
        state = await harness.engine.load_adapter("math", first)
        state = await harness.engine.load_adapter("math", second)
        models = {one.model for one in state.lora if one.name == "math" and one.loaded}
        assert len(models) == 2
        state = await harness.engine.unload_adapter("math", first.identity)
        (left,) = [one for one in state.lora if one.name == "math" and one.loaded]
        assert (left.version, left.digest, left.run) == (2, second.digest, "policy")
        state = await harness.engine.unload_adapter("math", first.identity)  # harmless
        assert [one.version for one in state.lora if one.loaded] == [2]

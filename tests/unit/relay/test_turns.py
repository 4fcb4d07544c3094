"""Turns between runs, and who is moved on from whom: rules of waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relay.turns import Turns
from relay.watching import PULSE_AGAIN_S, STUCK_LOOKS, Watch


async def granted(turns: Turns, run: str, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(turns.take(run)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def done(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() for task in tasks)


async def test_a_single_run_has_all_slots() -> None:
    turns = Turns(4)
    tasks = await granted(turns, "a", 6)
    assert (done(tasks), turns.free) == (4, 0)
    turns.give("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done(tasks) == 5
    for task in tasks:
        task.cancel()


async def test_one_run_leaves_a_quarter_to_the_others() -> None:
    turns = Turns(8)
    other = await granted(turns, "b", 1)
    assert done(other) == 1
    turns.give("b")
    greedy = await granted(turns, "a", 20)
    assert (done(greedy), turns.free) == (6, 2)
    others = await granted(turns, "b", 2)
    assert done(others) == 2
    for task in greedy:
        task.cancel()


async def test_who_has_the_fewest_is_next() -> None:
    turns = Turns(4)
    greedy = await granted(turns, "a", 8)
    assert done(greedy) == 4
    late = await granted(turns, "b", 3)
    for _ in range(2):
        turns.give("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert (done(greedy), done(late)) == (4, 2)
    for task in (*greedy, *late):
        task.cancel()


async def test_within_a_run_the_newest_version_comes_first() -> None:
    """However many blobs of old versions were asked for before."""
    turns = Turns(1)
    await turns.take("a")
    old = [asyncio.create_task(turns.take("a", 2)) for _ in range(50)]
    await asyncio.sleep(0)
    new = [asyncio.create_task(turns.take("a", 0)) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in range(3):
        turns.give("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert (done(new), done(old), old[0].done()) == (2, 1, True)
    for task in (*old, *new):
        task.cancel()


async def test_who_leaves_while_waiting_or_just_granted_leaves_nothing_behind() -> None:
    turns = Turns(1)
    await turns.take("a")
    waiting = asyncio.create_task(turns.take("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    late = asyncio.create_task(turns.take("b"))
    await asyncio.sleep(0)
    turns.give("a")  # granted to b, who has not run since ...
    late.cancel()  # ... and leaves
    with pytest.raises(asyncio.CancelledError):
        await late
    assert turns.free == 1
    async with turns.turn("c"):
        assert turns.free == 0
    assert turns.free == 1


class FakeFill:
    """What a watch sees of a fill."""

    def __init__(self, source: str | None = "http://a") -> None:
        self.source = source
        self.attempts = 1
        self.watermark = 0
        self.moved = 0

    def move_on(self) -> None:
        self.moved += 1
        self.attempts += 1


def watch(*fills: Any, leads_up: bool = True, pulse: bool = True) -> tuple[Watch, list[str], Any]:
    silent: list[str] = []
    now = [100.0]

    async def feel(_url: str) -> bool:
        return pulse

    watching = Watch(
        lambda: list(fills), lambda _fill: leads_up, feel, silent.append, lambda: now[0]
    )
    return watching, silent, now


def test_a_fill_that_gets_bytes_is_left_alone_wherever_its_server_stands() -> None:
    fill = FakeFill()
    watching, _, _ = watch(fill, leads_up=False)
    for _ in range(20):
        fill.watermark += 1
        assert watching.look() == []
    assert fill.moved == 0


def test_a_fill_that_waits_for_a_server_that_leads_nowhere_moves_on() -> None:
    fill, pausing = FakeFill(), FakeFill(None)
    watching, _, _ = watch(fill, pausing, leads_up=False)
    watching.look()
    assert fill.moved == 0
    watching.look()
    assert (fill.moved, pausing.moved) == (1, 0)


def test_the_pulse_is_felt_once_for_all_that_wait_and_not_at_every_look() -> None:
    fills = [FakeFill(), FakeFill(), FakeFill("http://b")]
    watching, _, now = watch(*fills)
    for _ in range(STUCK_LOOKS):
        assert watching.look() == []
    assert watching.look() == ["http://a", "http://b"]
    assert watching.look() == []
    now[0] += PULSE_AGAIN_S + 1
    assert watching.look() == []  # nobody has answered for the first ones yet


async def test_without_a_pulse_all_that_wait_there_move_on_and_it_is_told() -> None:
    fills = [FakeFill(), FakeFill(), FakeFill("http://b")]
    watching, silent, _ = watch(*fills, pulse=False)
    for _ in range(STUCK_LOOKS):
        watching.look()
    assert "http://a" in watching.look()
    fresh = FakeFill()
    await watching._feel("http://a")
    assert silent == ["http://a"]
    assert [fill.moved for fill in (*fills, fresh)] == [1, 1, 0, 0]


async def test_a_server_with_a_pulse_is_waited_for() -> None:
    fill = FakeFill()
    watching, silent, _ = watch(fill, pulse=True)
    for _ in range(STUCK_LOOKS + 1):
        watching.look()
    await watching._feel("http://a")
    assert (silent, fill.moved) == ([], 0)

"""Claims: a set like any other, whose removals can be waited for."""

import asyncio

import pytest

from relay.claims import Claims


def test_it_is_a_set_of_extents() -> None:
    claims = Claims()
    claims |= {(1, 2), (1, 3)}
    assert set(claims) == {(1, 2), (1, 3)}
    assert len(claims) == 2
    assert {(1, 3), (1, 4)} - claims == {(1, 4)}
    assert claims - {(1, 3)} == {(1, 2)}
    assert claims.isdisjoint({(2, 2)})
    claims -= {(1, 2), (1, 3)}
    assert not claims


async def test_all_who_wait_go_on_when_it_is_let_go() -> None:
    claims = Claims()
    claims |= {(1, 2), (1, 3)}
    waiting = [asyncio.create_task(claims.freed((1, 2), 10)) for _ in range(3)]
    await asyncio.sleep(0)
    claims.discard((1, 3))
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    claims -= {(1, 2)}
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_a_claim_that_is_taken_again_is_waited_for_again() -> None:
    claims = Claims()
    claims.add((1, 2))
    waiting = asyncio.create_task(claims.freed((1, 2), 10))
    await asyncio.sleep(0)
    claims.discard((1, 2))
    claims.add((1, 2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    claims.discard((1, 2))
    assert await waiting


async def test_nobody_waits_longer_than_he_would() -> None:
    claims = Claims()
    claims.add((1, 2))
    assert not await claims.freed((1, 2), 0)
    assert await claims.freed((1, 3), 0)


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    claims = Claims()
    claims.add((1, 2))
    waiting = asyncio.create_task(claims.freed((1, 2), 10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert claims._waiters == {}

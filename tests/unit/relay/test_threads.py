"""What a thread returns has an owner, whenever a cancellation comes."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from relay.threads import in_thread_or
from tests.contract.wire_client import PATIENCE_S, eventually


class Held:
    """Work that begins, waits to be told, and returns something; what was undone."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.undone: list[str] = []

    def work(self) -> str:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return "a descriptor"


async def test_a_result_that_is_seen_is_not_undone() -> None:
    held = Held()
    held.go.set()
    assert await in_thread_or(held.work, held.undone.append) == "a descriptor"
    assert not held.undone


async def test_what_comes_after_a_cancellation_is_undone() -> None:
    held = Held()
    task = asyncio.create_task(in_thread_or(held.work, held.undone.append))
    await eventually(held.begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # at once, though the thread goes on
    held.go.set()
    await eventually(lambda: held.undone == ["a descriptor"])


async def test_what_came_unseen_before_a_cancellation_is_undone() -> None:
    held = Held()
    with ThreadPoolExecutor(1) as pool:
        task = asyncio.create_task(in_thread_or(held.work, held.undone.append, pool))
        await eventually(held.begun.is_set)
        held.go.set()
        pool.submit(int).result(PATIENCE_S)  # the loop stands still: it is done, and nobody knows
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert held.undone == ["a descriptor"]


async def test_what_had_not_begun_is_dropped() -> None:
    first, second = Held(), Held()
    with ThreadPoolExecutor(1) as pool:
        one = asyncio.create_task(in_thread_or(first.work, first.undone.append, pool))
        await eventually(first.begun.is_set)
        two = asyncio.create_task(in_thread_or(second.work, second.undone.append, pool))
        await asyncio.sleep(0)
        two.cancel()
        with pytest.raises(asyncio.CancelledError):
            await two
        first.go.set()
        await one
    assert not second.begun.is_set()


async def test_trouble_comes_through() -> None:
    held = Held()
    with pytest.raises(ZeroDivisionError):
        await in_thread_or(lambda: str(1 // 0), held.undone.append)
    assert not held.undone

"""What a swap needs of an engine, and how a call to it ends: done, failed, late, or with its death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from shardcast.engine.forms import Phase, Requests, read_coded
from trainer_adapter.vllm.machine import RESTART, SwapError
from trainer_adapter.vllm.ranks import Report

_T = TypeVar("_T")


class EngineControl(Protocol):
    """An engine in other processes. Every method may raise anything, or never return."""

    async def tell(self, command: dict[str, Any]) -> Report:
        """Give all ranks a command of ``trainer_adapter.vllm.ranks``; return what they say."""
        ...

    async def pause(self, requests: Requests) -> None:
        """Stop generating; return when nothing runs any more and the caches are as asked for."""
        ...

    async def resume(self) -> None:
        """Generate again."""
        ...

    async def is_paused(self) -> bool:
        """Say whether it is paused, by whomever."""
        ...

    async def is_asleep(self) -> bool:
        """Say whether its memory may have been given away (sleep mode)."""
        ...

    async def set_label(self, label: str) -> None:
        """Set the version that the engine stamps its tokens with."""
        ...

    async def death(self) -> str:
        """Return, once the engine process is gone, why."""
        ...

    def dead(self) -> str:
        """Say whether (and why) the engine process is gone; empty while it lives."""
        ...


class Clock(Protocol):
    """Time, as it can be put in a test's hands."""

    def now(self) -> int:
        """Return Unix milliseconds."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...


class SystemClock:
    """The machine's."""

    def now(self) -> int:
        """Return Unix milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        await asyncio.sleep(seconds)


class Calls:
    """Calls to an engine that end, whatever the engine does.

    vLLM leaves a call without an answer for ever when its engine process dies, so every wait also
    watches for that.
    """

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._death: asyncio.Task[str] | None = None

    async def close(self) -> None:
        """Stop watching."""
        if self._death is not None:
            self._death.cancel()
            await asyncio.wait({self._death})

    async def call(
        self,
        what: str,
        work: Coroutine[Any, Any, _T],
        *,
        phase: Phase,
        deadline: asyncio.Task[None] | None = None,
        late: Callable[[], None] | None = None,
    ) -> _T:
        """Run one call to the engine.

        Args:
            what: Names it in messages: "pausing", "loading version 7".
            work: The call.
            phase: Where it stands in an activation.
            deadline: Ends when the lease does.
            late: Called once when the deadline passes, and the call is waited for further. Without
                it the call is given up: what it has sent to the engine by then comes before all
                that is sent later, and what it has not is never sent.

        Raises:
            SwapError: ``dead``, ``timeout`` where it was given up, or what the call raised, with
                its code.
        """
        task = asyncio.ensure_future(work)
        try:
            await self._wait(what, task, phase, deadline, late)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_seen)
        return self._result(what, task, phase)

    async def _wait(
        self,
        what: str,
        task: asyncio.Task[_T],
        phase: Phase,
        deadline: asyncio.Task[None] | None,
        late: Callable[[], None] | None,
    ) -> None:
        death = self._watch()
        while not task.done():
            watched: set[asyncio.Task[Any]] = {task, death}
            if deadline is not None:
                watched.add(deadline)
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return
            if death.done():
                raise self._is_dead(phase)
            if late is None:
                raise SwapError("timeout", f"{what} took longer than the lease", phase=phase)
            late()
            deadline = None

    def _result(self, what: str, task: asyncio.Task[_T], phase: Phase) -> _T:
        if task.cancelled():
            raise SwapError("failed", f"{what}: the call was cancelled", phase=phase)
        error = task.exception()
        if error is None:
            return task.result()
        if self._control.dead():
            raise self._is_dead(phase) from error
        if isinstance(error, SwapError):
            raise error
        if not isinstance(error, Exception):
            raise error
        slug, message = read_coded(str(error) or type(error).__name__)
        raise SwapError(slug, f"{what}: {message}", phase=phase) from error

    def _is_dead(self, phase: Phase) -> SwapError:
        why = self._control.dead() or "it ended"
        return SwapError("dead", f"the engine process is gone: {why}; {RESTART}", phase=phase)

    def _watch(self) -> asyncio.Task[str]:
        if self._death is None:
            self._death = asyncio.ensure_future(_plain(self._control.death()))
        return self._death


def _seen(call: asyncio.Task[Any]) -> None:
    """Take notice of how a call that nobody waits for has ended."""
    if not call.cancelled():
        call.exception()


async def _plain(work: Awaitable[str]) -> str:
    return await work

"""Looks at an engine while something is waited for that takes long.

An engine that is stuck may leave a request open for as long as an honest one would take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

from shardcast.errors import EngineError, EngineUncertainError

_T = TypeVar("_T")

SILENT_LOOKS: Final = 3
"""An engine that was looked at so often in a row and did not answer is not waited for any more."""


class SilentError(EngineUncertainError):
    """An engine was told to do something, and does not answer anything any more."""


async def watched(
    work: Coroutine[Any, Any, _T],
    look: Callable[[], Awaitable[object]],
    *,
    every_s: float,
    silent_looks: int | None = None,
) -> _T:
    """Return what comes of ``work``; look at the engine meanwhile.

    A cancellation cancels ``work`` and waits until that has ended.

    Args:
        work: What is waited for.
        look: Looks once. That it raises ``EngineError`` is a look that was not answered.
        every_s: How long to wait between two looks.
        silent_looks: After so many in a row that were not answered ``work`` is cancelled; None: never.

    Raises:
        SilentError: If it was cancelled so.
    """
    doing = asyncio.ensure_future(work)
    looking = asyncio.ensure_future(_look_on(look, every_s, silent_looks))
    try:
        await asyncio.wait([doing, looking], return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else looking.result()
    finally:
        doing.cancel()
        looking.cancel()
        await asyncio.gather(doing, looking, return_exceptions=True)


async def _look_on(
    look: Callable[[], Awaitable[object]], every_s: float, silent_looks: int | None
) -> NoReturn:
    silent = 0
    while True:
        await asyncio.sleep(every_s)
        try:
            await look()
        except EngineError as error:
            silent += 1
            if silent == silent_looks:
                raise SilentError(error.message, source=error.source) from error
        else:
            silent = 0

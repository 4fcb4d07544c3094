"""Background work over all runs: trouble with one keeps none of the others from it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from relay.runs import RelayRun
from shardcast.errors import ShardcastError

log = logging.getLogger("relay.isolation")


async def for_each(
    runs: Iterable[RelayRun], what: str, act: Callable[[RelayRun], Awaitable[None]]
) -> None:
    """Do something for every run, one after the other; what goes wrong is logged.

    Args:
        runs: The runs as they are now; more may come meanwhile.
        what: What is done, for the log.
        act: Does it for one.
    """
    for run in list(runs):
        try:
            await act(run)
        except ShardcastError as error:
            log.warning("run %s: %s: %s", run.name, what, error)
        except Exception:
            log.exception("run %s: %s broke; the other runs go on", run.name, what)

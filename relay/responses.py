"""Which versions are being sent, and to whom: a few that nobody needs any more may be, and no others.

A response keeps the files of its version on the disk until it has ended, and nobody can be made to
read fast. So readers could fill a disk with one slow connection a version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Final

from relay.catalog import MOST_LINGERING
from relay.respond import AbortedResponseError
from shardcast.protocol.limits import KIB

GRACE_S: Final = 30.0
SLOWEST_BYTES_PER_S: Final = 8 * KIB
"""What workers accept of a source (docs/OPERATIONS.md): who reads slower is no worker."""


def overdue(
    sent: Collection[int],
    listed: Collection[int],
    evicted: Collection[int],
    lingering: Collection[int],
) -> list[int]:
    """Return the versions of which no reader is waited for any more. Pure.

    Args:
        sent: Versions that are being sent.
        listed: Versions of the head.
        evicted: Versions that are beyond what the options say.
        lingering: Versions that left the head, and that are served: they are waited for.
    """
    beyond = {n for n in sent if n in evicted or n not in listed}.union(lingering)
    order = sorted(beyond, key=lambda n: (n in lingering, n), reverse=True)
    return sorted(set(order[MOST_LINGERING:]).intersection(sent))


class _Response:
    """A response under way, by when it has ended at any worker, and whether it was cut off."""

    def __init__(self, until: float) -> None:
        self.task = asyncio.current_task()
        self.until = until
        self.cut = False


class Responses:
    """The responses under way. Used on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sending: dict[tuple[str, int], set[_Response]] = {}

    @contextlib.contextmanager
    def sending(self, run: str, number: int | None, length: int) -> Iterator[None]:
        """Send bytes of a version (None: of no version) in the block, by the current task.

        Args:
            run: The run.
            number: The version.
            length: How many bytes at most.

        Raises:
            AbortedResponseError: If it was cut off; the connection is unusable then.
        """
        if number is None:
            yield
            return
        responses = self._sending.setdefault((run, number), set())
        own = _Response(self._clock() + GRACE_S + length / SLOWEST_BYTES_PER_S)
        responses.add(own)
        try:
            yield
        except asyncio.CancelledError:
            if not own.cut or own.task is None or own.task.uncancel():
                raise
            raise AbortedResponseError(f"version {number} of run {run} must go") from None
        finally:
            responses.discard(own)
            if not responses:
                self._sending.pop((run, number), None)

    def versions(self, run: str) -> set[int]:
        """Return the versions of a run that are being sent."""
        return {number for name, number in self._sending if name == run}

    def cut(self, run: str, number: int, *, late: bool = False) -> int:
        """Cut off the responses with bytes of a version; return how many there were.

        Args:
            run: The run.
            number: The version.
            late: Only those that take longer than at any worker.
        """
        responses = [
            response
            for response in self._sending.get((run, number), ())
            if not response.cut and (not late or self._clock() > response.until)
        ]
        for response in responses:
            response.cut = True
            # Its connection follows: asyncio cannot abort one that sends a file.
            if response.task is not None:
                response.task.cancel()
        return len(responses)

"""A total deadline for a pull: what is missing is said, what is here stays for the next try."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shardcast.errors import NetworkError, ShardcastError, said_of


class Deadline:
    """Seconds from its making for everything that may wait for others. For one event loop."""

    def __init__(self, seconds: float | None) -> None:
        """Begin now; None means without end."""
        self.seconds = seconds
        self._when = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def within(self, late: Callable[[float], ShardcastError]) -> AsyncIterator[None]:
        """Run the block, and cancel it at the deadline: what it had under way ends first.

        Args:
            late: Makes the error, of the seconds that were given.

        Raises:
            ShardcastError: What ``late`` made.
        """
        running = asyncio.timeout_at(self._when)
        try:
            async with running:
                yield
        except TimeoutError as error:
            if not running.expired() or self.seconds is None:
                raise
            raise late(self.seconds) from error


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a version is.

    Attributes:
        version: Its number.
        missing: Shards that are not here, None while its documents are not.
        shards: Shards in all.
        bytes_here: Verified bytes.
        bytes_total: Bytes in all.
    """

    version: int
    missing: int | None
    shards: int
    bytes_here: int
    bytes_total: int


def too_late(
    run: str,
    seconds: float,
    progress: Progress | None,
    errors: Mapping[str, ShardcastError],
    sources: Collection[str],
) -> NetworkError:
    """Return the error of a pull that was not done in time.

    Args:
        run: The run.
        seconds: The time that it had.
        progress: How far it came, None without a version to pull.
        errors: The last failure of each source that had one.
        sources: All sources: those without a failure are being waited for.
    """
    if progress is None:
        what = f"run {run!r}: no acceptable head came within {seconds:g} s"
    elif progress.missing is None:
        what = (
            f"version {progress.version} of run {run!r} did not come within {seconds:g} s: "
            "documents that describe it are missing"
        )
    else:
        what = (
            f"version {progress.version} of run {run!r} did not come within {seconds:g} s: "
            f"{progress.missing} of {progress.shards} shards are missing, "
            f"{progress.bytes_here} of {progress.bytes_total} bytes are here and kept for "
            "the next pull"
        )
    each = [said_of(url, error) for url, error in errors.items()]
    waiting = [url for url in sources if url not in errors]
    each += [f"{url}: no failure, it is still being waited for" for url in waiting]
    return NetworkError("; ".join([what, *each]), source=next(iter([*errors, *waiting]), None))

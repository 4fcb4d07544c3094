"""Blobs that no source has any more: pure.

A 404 says that a source has not got a blob, perhaps only not yet. Once the head lists its version no longer,
nobody will come to have it: then one 404 of each source that lives is enough, and no time is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardcast.errors import ShardcastError, SourceStatusError
from shardcast.flights import Job
from shardcast.optional import is_alive
from shardcast.selector import Rating

_ABSENT: Final = frozenset({404, 410})


class Absence:
    """Which sources said last that they have not got which blob. Not thread-safe."""

    def __init__(self) -> None:
        """Nobody has said anything yet."""
        self._said: dict[Job, dict[str, ShardcastError]] = {}

    def __bool__(self) -> bool:
        """Say whether any source has said so of any blob."""
        return bool(self._said)

    def note(self, job: Job, source: str, error: ShardcastError) -> None:
        """A source failed to give a blob: for this reason, or for another."""
        if isinstance(error, SourceStatusError) and error.status in _ABSENT:
            self._said.setdefault(job, {})[source] = error
        elif job in self._said:
            self._said[job].pop(source, None)
            if not self._said[job]:
                del self._said[job]

    def forget(self, job: Job) -> None:
        """A blob is here, or given up."""
        self._said.pop(job, None)

    def complete(self, ratings: Mapping[str, Rating]) -> list[tuple[Job, ShardcastError]]:
        """Return the blobs that no source which lives has, and what one of them said."""
        alive = {url for url, rating in ratings.items() if is_alive(rating)}
        return [
            (job, next(iter(said.values())))
            for job, said in self._said.items()
            if alive <= said.keys() and job.main is None and job.hedge is None
        ]

"""What people are told of deltas that did not bring what they should: once for each cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from shardcast.errors import IntegrityError, MalformedError, NetworkError, ShardcastError
from shardcast.events import EventKind, WorkerEvent
from shardcast.protocol.head import VersionRef
from shardcast.rebuilding import DeltaFailure

_REMEMBERED: Final = 256


class DeltaReports:
    """Tells of deltas that failed. One thread at a time calls ``tell``; any calls ``refused``."""

    def __init__(self, run: str, emit: Callable[[WorkerEvent], None]) -> None:
        """Tell nothing yet.

        Args:
            run: The run.
            emit: Takes events.
        """
        self._run = run
        self._emit = emit
        self._refused: dict[tuple[str, str], None] = {}

    def refused(self, ref: VersionRef, error: ShardcastError) -> None:
        """A delta's documents are of no use; a version that is weighed and tried says so once."""
        key = (ref.manifest, error.message)
        if key in self._refused:
            return
        self._refused[key] = None
        for old in list(self._refused)[:-_REMEMBERED]:
            del self._refused[old]
        self._tell(ref.version, error)

    def tell(self, failures: Iterable[DeltaFailure]) -> None:
        """Tell of frames that failed in one pull: one event for each delta and kind of cause."""
        causes: dict[tuple[int, int | None, type[ShardcastError]], list[DeltaFailure]] = {}
        for failure in failures:
            key = (failure.version, failure.base, type(failure.error))
            causes.setdefault(key, []).append(failure)
        for (version, base, _), found in causes.items():
            shards = sorted(shard for failure in found for shard in failure.shards)
            name = "a compressed copy" if base is None else f"the delta from version {base}"
            error = found[0].error
            kind = type(error) if type(error) in _KINDS else ShardcastError
            message = f"version {version}, {_numbers(shards)}: {name} did not bring them, so they "
            message += f"are fetched plainly: {error.message}"
            self._tell(version, kind(message, source=error.source))

    def _tell(self, version: int, error: ShardcastError) -> None:
        self._emit(
            WorkerEvent(kind=EventKind.DELTA_FAILED, run=self._run, version=version, error=error)
        )


_KINDS: Final = (IntegrityError, MalformedError, NetworkError)


def _numbers(shards: Sequence[int]) -> str:
    """Return shards as runs, of which the first few are named."""
    runs: list[list[int]] = []
    for shard in shards:
        if runs and runs[-1][1] == shard - 1:
            runs[-1][1] = shard
        else:
            runs.append([shard, shard])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    more = f" and {len(texts) - 8} more ranges" if len(texts) > 8 else ""
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(texts[:8])}{more}"

"""Which deltas lead to a version from what is here: their parts, fetched, checked and put together.

They stay in memory: they are small, and of no use once the version is here. A delta whose parts
cannot be had, or are not what the head promised, is left out and told; shards do without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardcast.documents import OpenPool
from shardcast.errors import (
    LimitError,
    MalformedError,
    NetworkError,
    ShardcastError,
    TrustError,
)
from shardcast.fetch import MemorySink, Transfer
from shardcast.protocol.delta import CODECS, DeltaPart, assemble_deltas, decode_delta_part
from shardcast.protocol.head import DeltaRef, OpenDeltaRef, OpenRef, VersionRef
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Delta

MAX_PARTS_BYTES: Final = 4 * MAX_DOCUMENT_BYTES
"""Parts of one delta in memory: more than 62 GB in frames of one shard each need."""

MISSING_S: Final = 30.0
"""Parts that could not be had are not asked for again for so long: a version is weighed, then tried."""

_REMEMBERED: Final = 64
"""Parts that are kept for a version's next try, or for weighing it."""


@dataclass(frozen=True, slots=True)
class Base:
    """A version on this disk that a delta may start from: its number, how much of it is there."""

    number: int
    share: float


class DeltaDocuments:
    """Brings delta parts. Thread-safe; remembers the last ones, and which could not be had."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet.

        Args:
            clock: Monotonic seconds.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, DeltaPart] = {}
        self._missing: dict[str, tuple[float, ShardcastError]] = {}

    def fetch(
        self,
        ref: VersionRef,
        version: Version,
        bases: Mapping[str, Base],
        open_pool: OpenPool,
        *,
        count: Callable[[int], None] = lambda n: None,
        refused: Callable[[ShardcastError], None] = lambda error: None,
    ) -> list[Delta]:
        """Return the deltas that lead to a version from the bases, or from nothing; best first.

        Args:
            ref: The head's entry for the version.
            version: The version.
            bases: What is on this disk, by manifest.
            open_pool: Makes the pool that fetches.
            count: Called with the bytes that came.
            refused: Told why a delta is of no use.

        Raises:
            TransferCancelledError: If it was cancelled.
        """
        usable = sorted(
            (d for d in ref.deltas if d.parts and (d.base is None or d.base in bases)),
            key=lambda delta: _price(ref, delta, bases),
        )
        found: list[Delta] = []
        for delta in usable:
            try:
                parts = self._parts(delta, version, open_pool, count)
            except (MalformedError, TrustError) as error:
                refused(MalformedError(_useless(error, version, delta)))
                continue
            except _PartLostError as lost:
                source = lost.error.source
                refused(NetworkError(_useless(lost.error, version, delta), source=source))
                continue
            number = None if delta.base is None else bases[delta.base].number
            found += [Delta(number, part) for part in parts]
        return found

    def fetch_open(
        self,
        ref: OpenRef,
        version: Version,
        bases: Mapping[str, Base],
        open_pool: OpenPool,
        *,
        count: Callable[[int], None] = lambda n: None,
    ) -> list[Delta] | None:
        """Return what is announced of a delta to an open version, from a base that is whole here.

        What cannot be had yet is left out: there will be another head.

        Returns:
            None if no such delta comes: plain shards are all that can be fetched ahead.

        Raises:
            TransferCancelledError: If it was cancelled.
        """
        for delta in ref.deltas:
            base = None if delta.base is None else bases.get(delta.base)
            if base is None or base.share < 1.0:
                continue
            try:
                parts = self._parts(delta, version, open_pool, count)
            except (MalformedError, TrustError, _PartLostError):
                return []
            return [Delta(base.number, part) for part in parts]
        return None

    def _parts(
        self,
        delta: DeltaRef | OpenDeltaRef,
        version: Version,
        open_pool: OpenPool,
        count: Callable[[int], None],
    ) -> Sequence[DeltaPart]:
        """Return the parts of one delta.

        Raises:
            MalformedError, MixAndMatchError: If they are not what they should be.
        """
        if len(delta.parts) > version.layout.shard_count:
            raise LimitError(f"{len(delta.parts)} parts for {version.layout.shard_count} shards")
        with self._lock:
            known = {d: self._known[d] for d in delta.parts if d in self._known}
            missing = [digest for digest in dict.fromkeys(delta.parts) if digest not in known]
            now = self._clock()
            self._missing = {d: m for d, m in self._missing.items() if m[0] > now}
            for digest in missing:
                if digest in self._missing:
                    raise _PartLostError(digest, self._missing[digest][1])
        try:
            instead = version.layout.total_bytes // len(delta.parts)
            got = _get(missing, open_pool, count, instead)
        except _PartLostError as lost:
            with self._lock:
                self._missing[lost.digest] = (self._clock() + MISSING_S, lost.error)
            raise
        known |= {digest: decode_delta_part(data) for digest, data in got.items()}
        with self._lock:
            self._known |= known
            # An open version lists more and more parts: none of them is asked for at every head.
            most = max(_REMEMBERED, len(delta.parts))
            for digest in list(self._known)[: max(len(self._known) - most, 0)]:
                del self._known[digest]
        parts = [known[digest] for digest in delta.parts]
        for part in parts:
            if part.codec not in CODECS:
                raise MalformedError(f"frames of an unknown format {part.codec!r}")
        return assemble_deltas(delta, version.layout_digest, version.layout, parts)


def _get(
    digests: Sequence[str], open_pool: OpenPool, count: Callable[[int], None], instead: int
) -> dict[str, bytes]:
    """Return documents by digest; each is optional, so none makes this wait for long.

    Args:
        digests: Which.
        open_pool: Makes the pool that fetches.
        count: Called with the bytes that came.
        instead: About how many bytes of shards each of them saves.

    Raises:
        LimitError: If they are too large in all.
    """
    found: dict[str, bytes] = {}
    lost: list[_PartLostError] = []
    if not digests:
        return found
    weight = 0
    with open_pool() as pool:
        for digest in digests:
            sink = MemorySink()

            def keep(transfer: Transfer, sink: MemorySink = sink) -> None:
                nonlocal weight
                weight += len(sink.data)
                if weight <= MAX_PARTS_BYTES:
                    found[transfer.digest] = bytes(sink.data)

            def lose(error: ShardcastError, digest: str = digest) -> None:
                lost.append(_PartLostError(digest, error))

            name = f"delta part {digest}"
            pool.submit(digest, None, sink, name=name, done=keep, lost=lose, instead=instead)
        try:
            pool.finish()
        finally:
            count(pool.received_bytes)
    if weight > MAX_PARTS_BYTES:
        raise LimitError(f"delta parts of {weight} bytes are over the limit of {MAX_PARTS_BYTES}")
    if lost:
        raise lost[0]
    return found


class _PartLostError(Exception):
    """A part could not be had."""

    def __init__(self, digest: str, error: ShardcastError) -> None:
        super().__init__(str(error))
        self.digest = digest
        self.error = error


def _price(ref: VersionRef, delta: DeltaRef, bases: Mapping[str, Base]) -> float:
    share = 1.0 if delta.base is None else bases[delta.base].share
    return share * delta.bytes + (1.0 - share) * ref.bytes


def _useless(error: ShardcastError, version: Version, delta: DeltaRef) -> str:
    base = "nothing" if delta.base is None else f"version {delta.base_version}"
    return f"the delta to version {version.number} from {base} is of no use: {error.message}"

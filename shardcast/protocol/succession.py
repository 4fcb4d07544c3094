"""The next head of a run, from the last one and what happened: pure, unsigned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shardcast.errors import NotFoundError, WithdrawnError
from shardcast.protocol.envelope import encode_key
from shardcast.protocol.head import DeltaRef, Head, OpenRef, VersionRef, next_sequence
from shardcast.protocol.limits import (
    HEAD_DELTA_PARTS,
    MAX_VERSIONS,
    MAX_WITHDRAWN,
    ONE_SHOT_EXPIRY_MS,
)


@dataclass(frozen=True, slots=True)
class Issue:
    """What every new head takes from its issuer.

    Attributes:
        run: The run.
        now_ms: The issuer's clock, Unix milliseconds.
        keys: Raw public keys that may sign heads from now on.
        expiry_ms: How long the head is fresh.
    """

    run: str
    now_ms: int
    keys: tuple[bytes, ...]
    expiry_ms: int = ONE_SHOT_EXPIRY_MS


def first_head(issue: Issue) -> Head:
    """Return a run's head before its first version."""
    return Head(
        run=issue.run,
        sequence=next_sequence(None, issue.now_ms),
        issued_at=issue.now_ms,
        expires_at=issue.now_ms + issue.expiry_ms,
        keys=[encode_key(key) for key in issue.keys],
        version=None,
        versions=[],
        open=None,
        withdrawn=[],
        hold=False,
    )


def renewed(previous: Head | None, issue: Issue) -> Head:
    """Return the same statement with a new sequence, expiry and keys.

    Raises:
        ClockError: If the previous sequence is more than a day ahead of the clock.
    """
    if previous is None:
        return first_head(issue)
    return msgspec.structs.replace(
        previous,
        sequence=next_sequence(previous.sequence, issue.now_ms),
        issued_at=issue.now_ms,
        expires_at=issue.now_ms + issue.expiry_ms,
        keys=[encode_key(key) for key in issue.keys],
    )


def with_version(previous: Head | None, issue: Issue, ref: VersionRef, *, keep: int) -> Head:
    """Return the head that announces a complete version and retains the newest ``keep``.

    An open version of the same number is closed by it.
    """
    head = renewed(previous, issue)
    older = [old for old in head.versions if old.version != ref.version]
    still_open = head.open if head.open and head.open.version > ref.version else None
    return msgspec.structs.replace(
        head,
        version=ref.version,
        versions=_bounded([ref, *older][: max(1, min(keep, MAX_VERSIONS))]),
        open=still_open,
    )


def _bounded(versions: list[VersionRef]) -> list[VersionRef]:
    """Return versions, newest first, without deltas beyond what a head has room for.

    Whoever is so far behind that only such a delta would help fetches the version itself.
    """
    bounded: list[VersionRef] = []
    room = HEAD_DELTA_PARTS
    for ref in versions:
        room -= sum(len(delta.parts) for delta in ref.deltas)
        bounded.append(ref if room >= 0 else msgspec.structs.replace(ref, deltas=[]))
    return bounded


def with_open(previous: Head | None, issue: Issue, ref: OpenRef | None) -> Head:
    """Return the head that says what of a version is ready while it is being published.

    Args:
        previous: The last head.
        issue: What is taken from the issuer.
        ref: The open version; None: the one that was open is given up.
    """
    return msgspec.structs.replace(renewed(previous, issue), open=ref)


def with_deltas(previous: Head, issue: Issue, version: int, deltas: Sequence[DeltaRef]) -> Head:
    """Return the head that announces further deltas of a version, one for each base at most.

    Raises:
        NotFoundError: If the head does not retain that version.
    """
    ref = previous.ref(version)
    if ref is None:
        raise NotFoundError(f"run {previous.run!r} does not retain version {version}")
    bases = {delta.base for delta in deltas}
    known = [delta for delta in ref.deltas if delta.base not in bases]
    grown = msgspec.structs.replace(ref, deltas=[*known, *deltas])
    return msgspec.structs.replace(
        renewed(previous, issue),
        versions=_bounded([grown if old is ref else old for old in previous.versions]),
    )


def with_withdrawn(previous: Head, issue: Issue, version: int) -> Head:
    """Return the head that withdraws a version; followers move to the newest that is left.

    Raises:
        NotFoundError: If the head does not retain that version.
        WithdrawnError: If it is withdrawn already.
    """
    if version in previous.withdrawn:
        raise WithdrawnError(f"version {version} of run {previous.run!r} is withdrawn already")
    if previous.ref(version) is None:
        kept = ", ".join(str(ref.version) for ref in previous.versions) or "none"
        raise NotFoundError(
            f"run {previous.run!r} does not retain version {version}; retained: {kept}"
        )
    withdrawn = [*previous.withdrawn, version][-MAX_WITHDRAWN:]
    left = [ref.version for ref in previous.versions if ref.version not in withdrawn]
    return msgspec.structs.replace(
        renewed(previous, issue), withdrawn=withdrawn, version=max(left, default=None)
    )


def with_hold(previous: Head, issue: Issue, *, hold: bool) -> Head:
    """Return the head that stops activations, or lets them go on."""
    return msgspec.structs.replace(renewed(previous, issue), hold=hold)


def next_version(previous: Head | None, seen: Iterable[int] = ()) -> int:
    """Return the number of the next version: above every one that was ever announced."""
    numbers = list(seen)
    if previous is not None:
        numbers += [ref.version for ref in previous.versions] + previous.withdrawn
        if previous.open is not None:
            numbers.append(previous.open.version)
    return max(numbers, default=0) + 1

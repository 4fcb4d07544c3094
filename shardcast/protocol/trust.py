"""Whether a head is accepted: one pure state machine (docs/THREATS.md).

It follows the order of The Update Framework's client workflow (specification, section 5):
signature, identity, version, freshness. Nothing of a head is looked at before a trusted key
signed it. The state is what must survive a restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import (
    ClockError,
    EquivocationError,
    ExpiredError,
    MalformedError,
    NotFoundError,
    RollbackError,
    UnknownKeyError,
    UsageError,
    WithdrawnError,
    WrongRunError,
)
from shardcast.protocol.clock import describe_clock, describe_span
from shardcast.protocol.digest import digest_of
from shardcast.protocol.documents import (
    Digest,
    Document,
    Positive,
    RunName,
    check_run,
    decode,
    encode,
)
from shardcast.protocol.envelope import (
    Envelope,
    check_public_key,
    decode_key,
    encode_key,
    key_id,
    open_unverified,
    verify,
)
from shardcast.protocol.head import Head, VersionRef, decode_head
from shardcast.protocol.limits import (
    MAX_DOCUMENT_BYTES,
    MAX_FUTURE_MS,
    MAX_KEYS,
    SKEW_MS,
)
from shardcast.protocol.manifest import Version

TRUST_FORMAT: Final = "shardcast.trust/1"
MAX_REMEMBERED: Final = 256
"""How many versions' identities are remembered: four times what a head can list."""

Keys = Annotated[list[str], msgspec.Meta(max_length=MAX_KEYS)]


class TrustState(Document, frozen=True, kw_only=True):
    """What is remembered about a run between heads and between restarts.

    Attributes:
        anchors: Keys that the user pinned (base64); empty after trust on first use.
        keys: Keys trusted now; empty before the first head of a trust-on-first-use.
        retired: Keys that rotations replaced, newest last, for a better message.
        sequence: Last accepted sequence.
        payload: Digest of the payload that had it.
        manifests: Version number to manifest, of versions ever seen complete.
        layouts: Version number to layout, of versions ever seen open.
    """

    format: Literal["shardcast.trust/1"] = TRUST_FORMAT
    run: RunName
    anchors: Keys
    keys: Keys
    retired: Annotated[list[str], msgspec.Meta(max_length=4 * MAX_KEYS)]
    sequence: Positive | None
    payload: Digest | None
    manifests: Annotated[dict[Positive, Digest], msgspec.Meta(max_length=MAX_REMEMBERED)]
    layouts: Annotated[dict[Positive, Digest], msgspec.Meta(max_length=MAX_REMEMBERED)]

    def check(self) -> None:
        """Check that keys are keys, and that what belongs together is there.

        Raises:
            MalformedError: If something is not.
        """
        check_run(self.run)
        for key in (*self.anchors, *self.keys, *self.retired):
            decode_key(key)
        if (self.sequence is None) != (self.payload is None):
            raise MalformedError("sequence and payload disagree")
        if not self.keys and (self.anchors or self.sequence is not None):
            raise MalformedError("no keys, though some were trusted before")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A head that was accepted.

    Attributes:
        head: The head.
        envelope: Its bytes, verbatim.
        state: The state to remember from now on.
        changed: False if it is the head that was accepted last.
        expired_ms: How long ago it expired by the clock given, beyond the skew; 0 if it did not.
    """

    head: Head
    envelope: bytes
    state: TrustState
    changed: bool
    expired_ms: int

    @property
    def expired(self) -> bool:
        """Whether the head is past its expiry (freeze)."""
        return self.expired_ms > 0


def encode_state(state: TrustState) -> bytes:
    """Return the bytes to store.

    Raises:
        MalformedError: If ``decode_state`` would refuse them.
    """
    return encode(state)


def decode_state(data: bytes) -> TrustState:
    """Decode a stored state.

    Raises:
        MalformedError: If it is damaged.
    """
    return decode(data, TrustState, limit=MAX_DOCUMENT_BYTES, what="trust state")


def fresh(run: str, keys: Iterable[bytes] = ()) -> TrustState:
    """Return the state before the first head: pinned to ``keys``, or trusting on first use.

    Raises:
        UsageError: If a key is unusable, or there are too many.
    """
    pinned = _pin(keys)
    return TrustState(
        run=run,
        anchors=pinned,
        keys=pinned,
        retired=[],
        sequence=None,
        payload=None,
        manifests={},
        layouts={},
    )


def _pin(keys: Iterable[bytes]) -> list[str]:
    try:
        pinned = sorted({encode_key(check_public_key(key)) for key in keys})
    except MalformedError as error:
        raise UsageError(f"public key: {error.message}") from error
    if len(pinned) > MAX_KEYS:
        raise UsageError(f"{len(pinned)} public keys are given; {MAX_KEYS} are the most")
    return pinned


def begin(
    run: str,
    *,
    pinned: Iterable[bytes] = (),
    first_use: bool = False,
    remembered: TrustState | None = None,
) -> TrustState:
    """Decide what to trust at start-up from the options and what is remembered.

    A pin that the remembered state grew from (the same anchor, perhaps rotated since) keeps that
    state; another pin replaces the keys, while the last-seen sequence survives.

    Raises:
        UsageError: If both a pin and trust-on-first-use are given, or neither is and nothing is
            remembered, or a key is unusable.
        WrongRunError: If the remembered state is of another run.
    """
    pinned = tuple(pinned)
    keys = _pin(pinned)
    if keys and first_use:
        raise UsageError("give either a public key or trust on first use, not both")
    if remembered is not None and remembered.run != run:
        raise WrongRunError(f"remembered trust is for run {remembered.run!r}, not {run!r}")
    if remembered is None or not (remembered.keys or keys or first_use):
        if not keys and not first_use:
            raise UsageError(
                f"no key is known for run {run!r}: give --pubkey FILE or --trust-on-first-use"
            )
        return fresh(run, pinned)
    if not keys or keys in (remembered.anchors, remembered.keys):
        return remembered
    return msgspec.structs.replace(remembered, anchors=keys, keys=keys, retired=[])


def accept(state: TrustState, data: bytes, now_ms: int) -> Accepted:
    """Decide whether the envelope ``data`` is the run's head now.

    Expiry is reported, not refused: an expired head is still forwarded, and who must refuse it
    calls ``require_fresh``.

    Args:
        state: What is remembered.
        data: The envelope as received.
        now_ms: This machine's clock, Unix milliseconds.

    Raises:
        MalformedError: If it is not a head.
        UnknownKeyError: If no trusted key signed it, or only one that was rotated out.
        BadSignatureError: If a trusted key's signature does not verify.
        WrongRunError: If it is another run's head.
        ClockError: If its sequence is more than a day ahead of the clock.
        RollbackError: If its sequence is below the last accepted, or an open version is replayed.
        EquivocationError: If its sequence or a version number was used for something else.
    """
    envelope, payload = open_unverified(data)
    head = _authenticate(state, envelope, payload)
    if head.run != state.run:
        raise WrongRunError(f"head of run {head.run!r} where {state.run!r} was asked for")
    digest = digest_of(payload)
    _check_sequence(state, head, digest, now_ms)
    _check_identities(state, head)
    return Accepted(
        head=head,
        envelope=data,
        state=_remember(state, head, digest),
        changed=head.sequence != state.sequence,
        expired_ms=max(0, now_ms - head.expires_at - SKEW_MS),
    )


def _authenticate(state: TrustState, envelope: Envelope, payload: bytes) -> Head:
    if not state.keys:  # trust on first use: the head must be signed by a key that it lists
        head = decode_head(payload)
        verify(envelope, payload, head.raw_keys())
        return head
    trusted = [decode_key(key) for key in state.keys]
    try:
        verify(envelope, payload, trusted)
    except UnknownKeyError:
        retired = {key_id(decode_key(key)) for key in state.retired}
        by = sorted(s.keyid for s in envelope.signatures if s.keyid in retired)
        if by:
            raise UnknownKeyError(
                f"head is signed only by key {by[0][:16]}, which was rotated out"
            ) from None
        raise
    return decode_head(payload)


def _check_sequence(state: TrustState, head: Head, digest: str, now_ms: int) -> None:
    if head.sequence > now_ms + MAX_FUTURE_MS:
        days = (head.sequence - now_ms) / MAX_FUTURE_MS
        raise ClockError(
            f"head sequence {head.sequence} is {days:.1f} days ahead of this machine's clock "
            f"{now_ms}: this clock or the publisher's is wrong"
        )
    if state.sequence is None:
        return
    if head.sequence < state.sequence:
        raise RollbackError(
            f"head sequence {head.sequence} is older than {state.sequence}, accepted before"
        )
    if head.sequence == state.sequence and digest != state.payload:
        raise EquivocationError(
            f"two different heads have sequence {head.sequence}: the signing key is misused"
        )


def _check_identities(state: TrustState, head: Head) -> None:
    for ref in head.versions:
        known = state.manifests.get(ref.version)
        if known is not None and known != ref.manifest:
            raise EquivocationError(
                f"version {ref.version} was manifest {known} and is now {ref.manifest}"
            )
    if head.open is None:
        return
    number = head.open.version
    if number in state.manifests:
        raise RollbackError(f"version {number} is open again after it was complete (replay)")
    layout = state.layouts.get(number)
    if layout is not None and layout != head.open.layout:
        raise EquivocationError(
            f"open version {number} had layout {layout} and has now {head.open.layout}"
        )


def _remember(state: TrustState, head: Head, digest: str) -> TrustState:
    keys = sorted(head.keys)
    gone = [key for key in state.keys if key not in keys]
    retired = [key for key in state.retired if key not in gone and key not in keys] + gone
    return msgspec.structs.replace(
        with_numbers(state, head),
        keys=keys,
        retired=retired[-4 * MAX_KEYS :],
        sequence=head.sequence,
        payload=digest,
    )


def with_numbers(state: TrustState, head: Head) -> TrustState:
    """Return the state with the identities of the versions that a head names, and nothing else of it.

    For who issues the head: before anybody can read it, so that no number is used for something else.
    """
    manifests = {**state.manifests, **{ref.version: ref.manifest for ref in head.versions}}
    layouts = dict(state.layouts)
    if head.open is not None:
        layouts[head.open.version] = head.open.layout
    return msgspec.structs.replace(state, manifests=_newest(manifests), layouts=_newest(layouts))


def _newest(numbered: dict[int, str]) -> dict[int, str]:
    return dict(sorted(numbered.items())[-MAX_REMEMBERED:])


def check_version(state: TrustState, version: Version) -> None:
    """Check an assembled version against what was seen of it while it was open.

    Raises:
        EquivocationError: If the number was used for another layout.
    """
    seen = state.layouts.get(version.number)
    if seen is not None and seen != version.layout_digest:
        raise EquivocationError(
            f"version {version.number} was opened with layout {seen} "
            f"and is now {version.layout_digest}"
        )


def require_fresh(accepted: Accepted, now_ms: int, clock_error_ms: int = 0) -> None:
    """Refuse an expired head, for callers that have no version yet.

    Args:
        accepted: The head, as it was judged at ``now_ms``.
        now_ms: This machine's clock, Unix milliseconds.
        clock_error_ms: By how much that clock seems to be wrong (``clock.clock_error_ms``). It
            only decides what the message says: the sources that it is measured by are not trusted.

    Raises:
        ClockError: If the head would be fresh, were this clock right.
        ExpiredError: If it is not; names both clocks, since either may be wrong.
    """
    if not accepted.expired:
        return
    head = accepted.head
    what = (
        f"head {head.sequence} of run {head.run!r} expired {describe_span(now_ms - head.expires_at)} "
        f"ago (expires_at {head.expires_at}, this machine's clock {now_ms})"
    )
    if now_ms - clock_error_ms <= head.expires_at + SKEW_MS:
        raise ClockError(f"{what}, but {describe_clock(clock_error_ms)}: set it right")
    if clock_error_ms:
        raise ExpiredError(
            f"{what}; {describe_clock(clock_error_ms)}, but it has expired by theirs"
        )
    raise ExpiredError(
        f"{what}: the publisher is gone, a relay withholds newer heads, or a clock is wrong, this "
        "machine's or the publisher's"
    )


def require_version(head: Head, version: int | None) -> VersionRef:
    """Return the entry to pull: of ``version``, or of the newest.

    Raises:
        WithdrawnError: If the publisher withdrew it.
        NotFoundError: If the head does not retain it (the message lists what it does).
    """
    if version is not None and version in head.withdrawn:
        raise WithdrawnError(f"version {version} of run {head.run!r} was withdrawn")
    ref = head.newest() if version is None else head.ref(version)
    if ref is not None:
        return ref
    if version is None and head.versions:
        raise WithdrawnError(f"every version that run {head.run!r} retains was withdrawn")
    if version is None:
        raise NotFoundError(f"run {head.run!r} has no complete version yet")
    kept = ", ".join(str(r.version) for r in head.versions) or "none"
    raise NotFoundError(f"run {head.run!r} does not retain version {version}; retained: {kept}")

"""Heads of a run in a local store: who may sign the next one, and the commit point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from shardcast.errors import (
    BusyError,
    ClockError,
    DiskError,
    MalformedError,
    NotFoundError,
    StateError,
    UnknownKeyError,
    about,
)
from shardcast.protocol import succession, trust
from shardcast.protocol.envelope import Signer, encode_key, key_id, seal
from shardcast.protocol.head import Head, encode_head
from shardcast.protocol.limits import (
    ONE_SHOT_EXPIRY_MS,
)
from shardcast.publishing import PublishObserver, SilentObserver
from shardcast.store.roles import claim_for_publishing
from shardcast.store.run import RunStore

LOCK_WAIT_S: Final = 600.0
"""How long a publisher waits for another one of the same run."""


@contextlib.contextmanager
def publishing(run: RunStore, watch: PublishObserver) -> Iterator[None]:
    """Keep other publishers of the run out, waiting for the one that is at work.

    What one that was killed while it removed a version left of it goes first: its number is free.
    """
    lock = run.lock("publish", what=f"publishing to run {run.run!r}")
    try:
        lock.acquire()
    except BusyError as busy:
        watch.waiting(f"{busy.message}; waiting for it")
        lock.acquire(wait_s=LOCK_WAIT_S)
    try:
        run.clean_version_state()
        yield
    finally:
        lock.release()


def last_head(run: RunStore, signers: Sequence[Signer], now_ms: int) -> Head | None:
    """Return the run's head, after checking that our keys may sign the next one.

    Raises:
        UnknownKeyError: If the run belongs to another key.
        StateError: If the stored head is damaged; says how to go on.
        ClockError: If it is of the future; says how to go on.
        TrustError: If the stored head is not what was accepted last.
    """
    state = remembered(run, signers)
    data = run.read_head()
    if data is None:
        return None
    place = str(run.root / "head.json")
    try:
        with about(place):
            accepted = trust.accept(state, data, now_ms)
    except ClockError as error:
        error.message += (
            ". Set this clock if it is behind. If it is right, the last publication was made with a "
            f"clock ahead, and readers refuse it: put what any relay serves as /v1/{run.run}/head in "
            f"the place of {place}, remove state/trust.json beside it, and publish again"
        )
        raise
    except MalformedError as error:
        raise StateError(
            f"the stored head is damaged ({error.message}); put back what any relay serves as "
            f"/v1/{run.run}/head, or remove the file to begin a new list of versions",
            source=place,
        ) from error
    require_owner(accepted.state, signers, source=str(run.root))
    return accepted.head


def require_owner(state: trust.TrustState, signers: Sequence[Signer], *, source: str) -> None:
    """Check that one of our keys is trusted for the run.

    Raises:
        UnknownKeyError: If none is: readers would refuse the head.
    """
    if any(encode_key(signer.public_key) in state.keys for signer in signers):
        return
    ours = key_id(signers[0].public_key)[:16]
    if encode_key(signers[0].public_key) in state.retired:
        raise UnknownKeyError(
            f"key {ours} was rotated out of run {state.run!r}: use the key it was rotated to",
            source=source,
        )
    raise UnknownKeyError(
        f"run {state.run!r} belongs to another key than {ours}: give it with --key, "
        "or publish under another run name",
        source=source,
    )


def issue_for(run: str, signers: Sequence[Signer], now_ms: int, expiry_ms: int) -> succession.Issue:
    """Return what the next head takes from us: the first signer's key is the one to trust."""
    return succession.Issue(
        run=run, now_ms=now_ms, keys=(signers[0].public_key,), expiry_ms=expiry_ms
    )


def remembered(run: RunStore, signers: Sequence[Signer]) -> trust.TrustState:
    """Return what is trusted; before the first head that is our keys, whatever was noted with others.

    Also after a kill between the first head and its trust.
    """
    state = run.read_trust()
    begun = trust.fresh(run.run, [signer.public_key for signer in signers])
    if state is None:
        return begun
    if state.sequence is None:
        return msgspec.structs.replace(begun, manifests=state.manifests, layouts=state.layouts)
    return state


def announce(
    run: RunStore,
    head: Head,
    signers: Sequence[Signer],
    issue: succession.Issue,
    watch: PublishObserver | None = None,
) -> bytes:
    """Sign a head, check it as a reader will, and replace the stored one: the commit point.

    Once it can be read, what fails is said and does not undo it: a head above what is remembered is
    accepted, and its numbers were noted.

    Raises:
        TrustError: If readers that follow this store would refuse it; nothing is changed then.
        DiskError: If the system refuses; nobody has read it then.
    """
    envelope = seal(encode_head(head), signers)
    state = remembered(run, signers)
    accepted = trust.accept(state, envelope, issue.now_ms)
    run.note_numbers(state, head)
    try:
        run.write_head(envelope)
        run.write_trust(accepted.state)
    except DiskError as error:
        if run.read_head() != envelope:
            raise
        (watch or SilentObserver()).noticed(f"announced, although the disk fails: {error}")
    return envelope


def give_up_open(
    run: RunStore, signers: Sequence[Signer], now_ms: int, expiry_ms: int
) -> Head | None:
    """Say that the version which the stored head names as open will not come; return the new head.

    Its number stays used: readers remember its layout, and so does this store.

    Raises:
        TrustError: If the stored head is not what was accepted last.
        DiskError: If the system refuses.
    """
    data, state = run.read_head(), remembered(run, signers)
    if data is None:
        return None
    accepted = trust.accept(state, data, now_ms)
    if accepted.head.open is None:
        return accepted.head
    run.write_trust(accepted.state)
    issue = issue_for(run.run, signers, now_ms, expiry_ms)
    head = succession.with_open(accepted.head, issue, None)
    announce(run, head, signers, issue)
    return head


def amend(
    run: RunStore,
    signers: Sequence[Signer],
    now_ms: Callable[[], int],
    change: Callable[[Head, succession.Issue], Head],
    watch: PublishObserver | None = None,
) -> Head:
    """Replace the head of a local run by a changed one (withdraw, hold, renew).

    Args:
        run: The run in the store.
        signers: The run's key first; during a rotation the old key too.
        now_ms: The clock, Unix milliseconds.
        change: Makes the new head from the last one.
        watch: Hears if a publisher must be waited for.

    Raises:
        NotFoundError: If the run has no head.
        UsageError: If the store is a relay's.
        TrustError: If the run belongs to another key.
        BusyError: If a publisher of the run does not end within ten minutes.
    """
    claim_for_publishing(run.root.parent)
    with publishing(run, watch or SilentObserver()):
        now = now_ms()
        head = last_head(run, signers, now)
        if head is None:
            raise NotFoundError(f"run {run.run!r} has no head yet", source=str(run.root))
        issue = issue_for(run.run, signers, now, ONE_SHOT_EXPIRY_MS)
        changed = change(head, issue)
        announce(run, changed, signers, issue)
        return changed

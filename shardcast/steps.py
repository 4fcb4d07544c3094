"""What a follower does next: pure.

Newest wins: when a newer version is announced, work on an older one stops if that throws little
away (``protocol.plan.worth_switching``); what was verified of it stays on disk and serves the newer
one. Otherwise the older one is finished first, so that a slow worker reaches versions, too.

Who has nothing else to do fetches what is announced of an open version. It is never activated: that takes
the head which lists it with a manifest, and every shard verified against that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardcast.protocol.head import Head, OpenRef, VersionRef


@dataclass(frozen=True, slots=True)
class Situation:
    """Where a follower stands.

    Attributes:
        head: The newest accepted head, None before the first.
        expired: Whether it has expired, and versions of an expired head are not taken.
        current: Number of the version that ``current`` names, if it is whole.
        manifest: Its manifest.
        obtaining: Number of the version that is being fetched.
        weighed: The newer version that it was last compared with.
        switch: Whether the newer one is worth dropping it for.
        ready: Number of the version that is complete and not activated yet.
        activating: Number of the version that is being activated.
        ahead: Number of the open version of which shards are being fetched.
        gone_through: What a head said of an open version, all of which is here that can be.
    """

    head: Head | None = None
    expired: bool = False
    current: int | None = None
    manifest: str | None = None
    obtaining: int | None = None
    weighed: int | None = None
    switch: bool = False
    ready: int | None = None
    activating: int | None = None
    ahead: int | None = None
    gone_through: OpenRef | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now; None and False mean nothing.

    Attributes:
        stop: Drop what is being fetched.
        weigh: Compare what is being fetched with this newer version.
        obtain: Begin to fetch this.
        activate: Begin to activate what is ready.
        held: What is ready waits because the publisher holds activations.
        ahead: Begin to fetch what is announced of this open version.
        drop: Stop fetching what is announced of an open version.
    """

    stop: bool = False
    weigh: VersionRef | None = None
    obtain: VersionRef | None = None
    activate: bool = False
    held: bool = False
    ahead: OpenRef | None = None
    drop: bool = False


def wanted(situation: Situation) -> VersionRef | None:
    """Return the version to be on, None for the one that is current.

    That is the head's ``version``: where it is newer, or where the current one was withdrawn or
    is not retained any more; an expired head moves a follower only away from a withdrawn one.
    """
    head = situation.head
    target = None if head is None else head.newest()
    if head is None or target is None:
        return None
    current = situation.current
    if current is None:
        return None if situation.expired else target
    if current == target.version and situation.manifest == target.manifest:
        return None
    if current in head.withdrawn:
        return target
    if situation.expired:
        return None
    if target.version > current or head.ref(current) is None:
        return target
    return None


def gone(head: Head | None, version: int) -> bool:
    """Say whether a version is one that nobody need have any more: the head moved on without it."""
    newest = None if head is None else head.newest()
    if head is None or newest is None or newest.version <= version:
        return False
    return head.ref(version) is None


def next_step(situation: Situation) -> Step:
    """Decide."""
    step = _next_step(situation)
    if situation.ahead is None:
        if step.obtain is None and _idle(situation):
            coming = worth_fetching_ahead(situation)
            if coming is not None and coming != situation.gone_through:
                return replace(step, ahead=coming)
        return step
    if step.obtain is not None:
        # What was fetched ahead of this very version ends by itself soon, and is all of use.
        return replace(step, obtain=None, drop=step.obtain.version != situation.ahead)
    coming = worth_fetching_ahead(situation)
    return replace(step, drop=coming is None or coming.version != situation.ahead)


def worth_fetching_ahead(situation: Situation) -> OpenRef | None:
    """Return the open version that a follower may fetch shards of, if there is one."""
    head = situation.head
    if head is None or head.open is None or situation.expired:
        return None
    if situation.current is not None and head.open.version <= situation.current:
        return None
    return head.open


def _idle(situation: Situation) -> bool:
    """Say whether a follower is on the newest version: nothing waits that could be run."""
    return situation.obtaining is situation.ready is situation.activating is None


def _next_step(situation: Situation) -> Step:
    target = wanted(situation)
    if target is None or target.version == situation.activating:
        return Step(stop=situation.obtaining is not None)
    if situation.ready == target.version:
        held = situation.head is not None and situation.head.hold
        return Step(
            stop=situation.obtaining is not None,
            activate=not held and situation.activating is None,
            held=held,
        )
    activate = _worth_activating(situation)
    if situation.obtaining == target.version:
        return Step(activate=activate)
    if situation.obtaining is None:
        return Step(obtain=target, activate=activate)
    if not _worth_finishing(situation, target):
        return Step(stop=True, activate=activate)
    if situation.weighed == target.version:
        return Step(stop=situation.switch, activate=activate)
    return Step(weigh=target, activate=activate)


def _worth_finishing(situation: Situation, target: VersionRef) -> bool:
    """Say whether what is being fetched, though no longer the newest, would be of any use."""
    head, obtaining = situation.head, situation.obtaining
    if head is None or obtaining is None or obtaining in head.withdrawn:
        return False
    if obtaining > target.version:
        return False
    return situation.current is None or obtaining > situation.current


def _worth_activating(situation: Situation) -> bool:
    """Say whether what is ready, though no longer the newest, is better than what is current.

    The head need not list it any more: a slow worker reaches it after that.
    """
    head, ready = situation.head, situation.ready
    if head is None or ready is None or situation.activating is not None or head.hold:
        return False
    newest = head.newest()
    if ready in head.withdrawn or newest is None or ready > newest.version:
        return False
    return situation.current is None or ready > situation.current

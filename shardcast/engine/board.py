"""What the engines of one agent have in common: the run, this disk, how they are minded, who may pause."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from shardcast.engine.adapters import Use
from shardcast.engine.decide import Mode
from shardcast.engine.driver import MARGIN_S, Target
from shardcast.engine.forms import DEFAULT_LEASE_SECONDS
from shardcast.engine.leases import Leases
from shardcast.engine.repairs import Repairs
from shardcast.engine.slots import Slots, Suspects
from shardcast.errors import MalformedError, UsageError
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.store.run import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How an agent minds its engines.

    Attributes:
        mode: Who activates.
        max_swapping: How many of its engines may be paused at once.
        max_lag: An engine that is more versions behind says that it is not ready; None: never.
        lease_s: How long an activation may take.
        margin_s: How much longer an engine that says nothing at all may hold up the others.
        adapter: The run's versions are adapters, and this is what they are called; None: the versions
            say what they are.
        check_canary: Compare what an engine answers with the version's canary.
        poll_s: How often an engine is asked for its state.
        watch_s: The same while somebody else is to activate, or an activation is under way.
    """

    mode: Mode = Mode.AUTO
    max_swapping: int = 1
    max_lag: int | None = None
    lease_s: float = DEFAULT_LEASE_SECONDS
    margin_s: float = MARGIN_S
    adapter: str | None = None
    check_canary: bool = False
    poll_s: float = 2.0
    watch_s: float = 0.25

    def __post_init__(self) -> None:
        """Check what cannot work.

        Raises:
            UsageError: Naming it.
        """
        if self.max_swapping < 1:
            raise UsageError(f"--max-swapping is at least 1, not {self.max_swapping}")
        if self.adapter is not None and self.mode is Mode.MANUAL:
            raise UsageError("--lora loads adapters itself: it cannot go with --activate manual")
        if self.adapter is not None and self.check_canary:
            raise UsageError("--check-canary asks the base model: it cannot go with --lora")


@dataclass(slots=True)
class Board:
    """What all minders look at.

    Attributes:
        run: The run.
        options: How engines are minded.
        leases: Versions that are needed on this disk.
        slots: Who may pause.
        head: Returns the newest accepted head, None before the first.
        retain: Gives back the leases of versions that no engine needs any more.
        repairs: Has versions repaired that engines call damaged.
        target: The version that is current on this disk, leased.
        use: What engines are to do with that.
        suspects: Versions that one engine could not survive.
    """

    run: str
    options: AgentOptions
    leases: Leases
    slots: Slots
    head: Callable[[], Head | None]
    retain: Callable[[], None]
    repairs: Repairs
    target: Target | None = None
    use: Use = Use()  # noqa: RUF009 - immutable
    suspects: Suspects = field(default_factory=Suspects)

    @property
    def withdrawn(self) -> Collection[int]:
        """Versions that nobody should run."""
        head = self.head()
        return () if head is None else head.withdrawn

    @property
    def hold(self) -> bool:
        """Whether the publisher holds activations."""
        head = self.head()
        return head is not None and head.hold

    @property
    def tellable(self) -> int | None:
        """How far the run is, for engines to know their lag; None where that says nothing of it.

        What is known of an engine's base model is told by whoever minds that: not by an agent that
        brings adapters, nor before it is known what the run's versions are.
        """
        known = self.target is not None or self.options.max_lag is not None
        return self.newest if known and self.use.adapter is None else None

    @property
    def newest(self) -> int | None:
        """How far the run is."""
        head = self.head()
        if head is not None and head.version is not None:
            return head.version
        return None if self.target is None else self.target.version


def stored_head(store: RunStore) -> Head | None:
    """Return the head that was accepted last, by an earlier process: it may hold, or withdraw.

    It is believed as far as everything in OUT is: whoever wrote it had checked the signature.
    """
    data = store.read_head()
    if data is not None:
        with suppress(MalformedError):
            return decode_head(open_unverified(data)[1])
    return None

"""The values that a pull's schedule hands out: jobs, their flights, and what a thread does next."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcast.cancel import Cancel
from shardcast.errors import IntegrityError, ShardcastError
from shardcast.fetch import Branch, Transfer


@dataclass(slots=True, eq=False)
class Job:
    """A blob to get.

    Attributes:
        transfer: How far it is.
        name: What it is, for messages.
        bytes: Its length, 0 where only a source knows it.
        tries: Failures so far, by source.
        avoid_until: When a source may be asked for it again.
        whole: It must come in one answer, since a stitched one was wrong.
        best: Most bytes it ever had.
        main: The flight that feeds its transfer, if there is one.
        hedge: The flight that races it, if there is one.
        done: It is verified.
        won: The hedge that brought it, until the flight that it raced has ended.
        suspects: Sources whose hedge was wrong together with bytes of another, the generation of
            those, and the error: when they turn out good, the hedge was to blame.
        optional: There is another way to what it is for, so it is given up sooner.
        instead: How many bytes that other way costs, None where that is not known.
        faults: How much each source failed because of it, and not in general, if it is optional.
        failing_since: When it failed first since it last came on, if it is optional.
        put_off: What a source said of it the last time, if it is optional and that was an answer.
        lost: Why it was given up, None while it was not.
    """

    transfer: Transfer
    name: str
    bytes: int = 0
    tries: dict[str, int] = field(default_factory=dict)
    avoid_until: dict[str, float] = field(default_factory=dict)
    whole: bool = False
    best: int = 0
    main: Flight | None = None
    hedge: Flight | None = None
    done: bool = False
    won: Flight | None = None
    suspects: dict[str, tuple[int, IntegrityError]] = field(default_factory=dict)
    optional: bool = False
    instead: int | None = None
    faults: dict[str, int] = field(default_factory=dict)
    failing_since: float | None = None
    put_off: ShardcastError | None = None
    lost: ShardcastError | None = None


@dataclass(slots=True, eq=False)
class Flight:
    """A job on its way from a source.

    Attributes:
        job: The job.
        source: URL of the source.
        cancel: Ends it.
        started: When.
        transfer: Where its bytes go: the job's own, or a branch; None until a hedge has one.
        start_offset: Where it began.
        first_at: When it last was seen without a byte.
        seen_offset: How far it was when it last had progressed...
        seen_at: ... and when that was.
        mark_offset: How far it was at ``mark_at``: its recent rate is measured from there.
        mark_at: A moment ago.
        recent: Bytes per second a moment ago, None before that was measured.
        hedge: It races another flight of the same job.
        whole: A hedge that fetches the blob from its first byte.
        reserved: Bytes of the hedge budget that it may waste.
        overtaken: It was cancelled because it lags, or because it was beaten.
    """

    job: Job
    source: str
    cancel: Cancel
    started: float
    transfer: Transfer | Branch | None
    start_offset: int = 0
    first_at: float = 0.0
    seen_offset: int = 0
    seen_at: float = 0.0
    mark_offset: int = 0
    mark_at: float = 0.0
    recent: float | None = None
    hedge: bool = False
    whole: bool = False
    reserved: int = 0
    overtaken: bool = False

    def begin(self, transfer: Transfer, now: float) -> None:
        """Its bytes go into ``transfer`` from now on."""
        self.transfer = transfer
        self.start_offset = self.seen_offset = self.mark_offset = transfer.offset
        self.first_at = self.seen_at = self.mark_at = now

    @property
    def got(self) -> int:
        """Bytes that it brought (less than none after a restart)."""
        transfer = self.transfer
        if transfer is None:
            return 0
        offset = transfer.offset if transfer.beaten_at is None else transfer.beaten_at
        return offset - self.start_offset


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to start now: look again after so many seconds, or when something changed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Every job is done, or ``error`` says why not."""

    error: ShardcastError | None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person may want to know: which source failed, and how."""

    source: str
    error: ShardcastError
    banned: bool = False

"""A worker's side of trust: which heads it accepted, remembered before they are acted on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from shardcast.errors import (
    ClockError,
    DiskError,
    NetworkError,
    NotFoundError,
    RollbackError,
    ShardcastError,
    SourceStatusError,
    TrustError,
    said_of,
)
from shardcast.events import EventKind, WorkerEvent
from shardcast.protocol import trust
from shardcast.protocol.clock import clock_error_ms, describe_clock
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.protocol.limits import SKEW_MS
from shardcast.protocol.trust import Accepted, TrustState
from shardcast.store.run import RunStore
from shardcast.upstream import HeadAnswer
from shardcast.watcher import UpstreamState


def unix_ms() -> int:
    """Return this machine's clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


class HeadKeeper:
    """Judges heads from any number of sources; keeps the newest accepted one.

    Attributes:
        state: What is trusted and was last seen.
        accepted: The newest accepted head of this process, None before.
        errors: Each source's last failure or refusal, by URL; gone once it gave a good head.
        heard: Sources that answered or failed at least once.
        clock_ms: This machine's clock.
        remembers: Whether what it accepts is remembered on disk.
        changed: Set whenever any of these changes; whoever waits clears it.
    """

    def __init__(
        self,
        store: RunStore,
        state: TrustState,
        emit: Callable[[WorkerEvent], None],
        clock_ms: Callable[[], int] = unix_ms,
        *,
        remember: bool = True,
    ) -> None:
        """Take the state to start from.

        Args:
            store: Where it is remembered.
            state: What is trusted and was last seen.
            emit: Takes events.
            clock_ms: This machine's clock.
            remember: False where another process does it: nothing is written then.
        """
        self.state = state
        self.accepted: Accepted | None = None
        self.errors: dict[str, ShardcastError] = {}
        self.heard: set[str] = set()
        self.changed = asyncio.Event()
        self._store = store
        self.remembers = remember
        self._emit = emit
        self.clock_ms = clock_ms
        self._lock = asyncio.Lock()
        self._given: dict[str, int] = {}
        self._offsets_ms: dict[str, int] = {}

    @property
    def clock_error_ms(self) -> int:
        """By how much this machine's clock is wrong, by all its sources' clocks; 0 if it is not."""
        return clock_error_ms(self._offsets_ms.values())

    def why_expired(self) -> TrustError | None:
        """Return why versions of the newest head are not taken now; None if they are."""
        if self.accepted is None:
            return None
        now_ms = self.clock_ms()
        over_ms = max(0, now_ms - self.accepted.head.expires_at - SKEW_MS)
        try:
            trust.require_fresh(
                replace(self.accepted, expired_ms=over_ms), now_ms, self.clock_error_ms
            )
        except TrustError as error:
            return error
        return None

    async def on_head(self, answer: HeadAnswer) -> int | None:
        """Judge a head; the callback of ``HeadWatcher``.

        A source that is merely behind the others is no news. One that goes back behind what it
        gave before, or that is behind what an earlier process accepted, is: newer heads may be
        withheld.
        """
        async with self._lock:
            self.heard.add(answer.url)
            if answer.date_s is not None:
                self._offsets_ms[answer.url] = self.clock_ms() - int(answer.date_s * 1000)
            try:
                accepted = trust.accept(self.state, answer.envelope, self.clock_ms())
            except ShardcastError as error:
                if isinstance(error, RollbackError) and self._merely_behind(answer):
                    self.errors.pop(answer.url, None)
                    return self.state.sequence
                error.source = error.source or answer.url
                if isinstance(error, ClockError) and self.clock_error_ms:
                    error.message += f"; {describe_clock(self.clock_error_ms)}"
                self.on_error(answer.url, error)
                return None
            if accepted.changed or self.accepted is None:
                try:  # remembered first: a crash after it cannot be talked into an older head
                    await asyncio.to_thread(self._remember, accepted)
                except ShardcastError as error:
                    self.on_error(answer.url, error)
                    return None
                self.state = accepted.state
                self.accepted = accepted
                self._emit(_seen(accepted.head, answer.url))
            self.errors.pop(answer.url, None)
            self._given[answer.url] = accepted.head.sequence
            self.changed.set()
            return accepted.head.sequence

    def _merely_behind(self, answer: HeadAnswer) -> bool:
        """Say whether a good head is old only because the source has not caught up yet."""
        if self.accepted is None:
            return False
        head = decode_head(open_unverified(answer.envelope)[1])
        return head.sequence >= self._given.get(answer.url, 0)

    def _remember(self, accepted: Accepted) -> None:
        if not self.remembers:
            return
        self._store.write_trust(accepted.state)
        self._store.write_head(accepted.envelope)

    def on_change(self, url: str, state: UpstreamState) -> None:
        """Note that a source failed; the other callback of ``HeadWatcher``."""
        if state.error is not None:
            self.on_error(url, state.error)

    def on_error(self, url: str, error: ShardcastError) -> None:
        """Note a failure and tell it, once for each new reason."""
        known = self.errors.get(url)
        self.heard.add(url)
        self.errors[url] = error
        self.changed.set()
        if known is None or type(known) is not type(error):
            # What this machine's disk refuses to remember is no fault of who sent it.
            ours = isinstance(error, DiskError)
            self._emit(
                WorkerEvent(
                    kind=EventKind.ERROR if ours else EventKind.SOURCE,
                    run=self.state.run,
                    source=error.source if ours else url,
                    error=error,
                )
            )

    def verdict(self) -> ShardcastError:
        """Return why there is no head, from what each source did."""
        refusals = [error for error in self.errors.values() if isinstance(error, TrustError)]
        others = [e for e in self.errors.values() if not isinstance(e, NetworkError)]
        if refusals or others:
            return (refusals or others)[0]
        if self.errors and all(_unknown(error) for error in self.errors.values()):
            return NotFoundError(
                f"no source knows run {self.state.run!r}: {', '.join(self.errors)}",
                source=next(iter(self.errors)),
            )
        each = "; ".join(said_of(url, error) for url, error in self.errors.items())
        return NetworkError(
            f"no source has a head of run {self.state.run!r}: {each or 'none answered'}",
            source=next(iter(self.errors), None),
        )


def _unknown(error: ShardcastError) -> bool:
    return isinstance(error, SourceStatusError) and error.status == 404


def _seen(head: Head, url: str) -> WorkerEvent:
    newest = head.newest()
    return WorkerEvent(
        kind=EventKind.HEAD,
        run=head.run,
        version=head.version,
        step=None if newest is None else newest.step,
        manifest=None if newest is None else newest.manifest,
        source=url,
    )

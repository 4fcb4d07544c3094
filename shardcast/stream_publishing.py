"""Announcing a version while it is being published: a thread tells what is ready, at a bounded pace.

Streaming is a service: whatever goes wrong with it is said, and the publication goes on and announces the
version once it is whole, as ever. docs/adr/0019 has the reasons and the crash windows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, Self

from shardcast.announcing import announce, give_up_open, issue_for
from shardcast.delta_making import DeltaMaker
from shardcast.errors import ShardcastError
from shardcast.hashing import Done, ShardHash
from shardcast.protocol import succession
from shardcast.protocol.delta import DeltaPart
from shardcast.protocol.envelope import Signer
from shardcast.protocol.head import Head
from shardcast.protocol.layout import Layout
from shardcast.protocol.manifest import Version
from shardcast.publishing import PublishObserver, PublishOptions
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from shardcast.streaming import Growing, Opened, Pace, Piece

_LEAST_WAIT_S: Final = 0.005
"""Between two looks at what is ready, however quick the pace."""


class Outlet(Protocol):
    """Where an open version is announced."""

    def most_bytes(self) -> int | None:
        """Return how many bytes of shards the next head should list at most; None: any."""
        ...

    @property
    def after_delta(self) -> bool:
        """Whether shards may be told only after the part of a delta that rebuilds them."""
        ...

    def tell(self, opened: Opened, pieces: Sequence[Piece], delta: Sequence[DeltaPart]) -> None:
        """Bring further shards and parts of the delta to where readers ask, then announce them.

        Raises:
            ShardcastError: If that fails; the version is announced once it is whole.
        """
        ...


class Stream:
    """Tells of one version while it is made.

    Attributes:
        heads: How many heads said that it is open.
    """

    def __init__(
        self,
        layout: Layout,
        outlet: Outlet,
        pace: Pace | None,
        watch: PublishObserver,
        *,
        drains: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tell nothing yet.

        Args:
            layout: The version's layout.
            outlet: Where to tell it.
            pace: How often; None: never.
            watch: Hears why no more is told.
            drains: Go on after everything is hashed until ``finish``, which waits until all was told.
            clock: Monotonic seconds.
        """
        self.heads = 0
        self._layout = layout
        self._outlet = outlet
        self._pace = pace
        self._watch = watch
        self._drains = drains
        self._clock = clock
        self._growing = Growing(layout)
        self._changed = threading.Condition()
        self._ended = self._aborted = self._failed = False
        self._opened: Opened | None = None
        self._maker: DeltaMaker | None = None
        self._began = self._last = 0.0
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def during(self, maker: DeltaMaker | None) -> Iterator[Done | None]:
        """Tell what is ready while the block hashes; yield what must hear of each shard.

        Args:
            maker: Makes the delta of the same bytes.
        """
        if self._pace is None:
            yield None
            return
        base = None if maker is None else maker.base
        self._opened = Opened(self._layout, None if base is None else _identity(base))
        self._maker = maker
        self._began = self._last = self._clock()
        self._thread = threading.Thread(target=self._run, name="stream")
        self._thread.start()
        try:
            yield self._done
        except BaseException:
            self._end(abort=True)
            self.finish()
            raise
        if not self._drains:
            self.finish()

    @classmethod
    def silent(cls, layout: Layout, watch: PublishObserver) -> Self:
        """Return one that tells nothing."""
        return cls(layout, _Nowhere(), None, watch)

    @property
    def running(self) -> bool:
        """Whether its thread has not been waited for."""
        return self._thread is not None

    @property
    def left_bytes(self) -> int:
        """Bytes of shards that are ready and not told of."""
        return self._growing.fresh_bytes

    def finish(self) -> None:
        """Wait until the thread has ended: at once, or after all was told where it drains."""
        self._end(abort=False)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abort(self) -> None:
        """Tell nothing more, and wait until that is so."""
        self._end(abort=True)
        self.finish()

    def settle(self) -> None:
        """Tell what is left of a version that is open: what follows may take long."""
        if self.heads and not self._failed and self._growing.fresh_bytes:
            self._guarded(self._step)

    # --- the thread -------------------------------------------------------------------------

    def _done(self, shard: int, found: ShardHash) -> None:
        with self._changed:
            self._growing.add(shard, found)

    def _end(self, *, abort: bool) -> None:
        with self._changed:
            self._ended = True
            self._aborted = self._aborted or abort
            self._changed.notify_all()

    def _run(self) -> None:
        self._guarded(self._work)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except ShardcastError as error:
            self._failed = True
            self._watch.noticed(f"announced once it is whole: {error}")

    def _work(self) -> None:
        told = True
        while self._wait(rest=not told):
            told = self._step()
            if not told and self._ended:
                return

    def _wait(self, *, rest: bool) -> bool:
        """Wait until a head is due; False if none will be.

        Args:
            rest: There was nothing to tell a moment ago.
        """
        assert self._pace is not None
        pause = max(_LEAST_WAIT_S, self._pace.every_s)
        with self._changed:
            if rest and not self._ended:
                self._changed.wait(pause)
            while True:
                left = self._growing.fresh_bytes > 0
                if self._aborted or (self._ended and not (self._drains and left)):
                    return False
                if self._due(self._pace):
                    return True
                self._changed.wait(pause)

    def _due(self, pace: Pace) -> bool:
        growing, total = self._growing, self._layout.total_bytes
        now = self._clock()
        if not self.heads:
            return pace.opens(now - self._began, growing.done_bytes, total)
        return self._ended or pace.grows(now - self._last, growing.fresh_bytes, total)

    def _step(self) -> bool:
        """Tell what is ready; False if that is nothing."""
        opened, maker = self._opened, self._maker
        assert opened is not None
        delta: Sequence[DeltaPart] = ()
        before: int | None = None
        if maker is not None:
            delta = maker.fresh()
            if not maker.promising:
                opened.without_delta()
            elif self._outlet.after_delta:
                before = maker.told_before
        # What a part of the delta rebuilds is told with it: it is sent only if it does not come out.
        most = None if before is not None else self._outlet.most_bytes()
        with self._changed:
            pieces = self._growing.take(most, before)
        if self.heads and not pieces and not delta:
            return False
        self._outlet.tell(opened, pieces, delta)
        self.heads += 1
        self._last = self._clock()
        return True


class _Nowhere:
    """Where nothing is announced."""

    after_delta: Final = False

    def most_bytes(self) -> int | None:
        return None

    def tell(self, opened: Opened, pieces: Sequence[Piece], delta: Sequence[DeltaPart]) -> None:
        pass


def _identity(base: Version) -> tuple[str, int] | None:
    return None if base.manifest is None else (base.manifest, base.number)


class LocalOutlet:
    """Announces an open version in a store on this machine.

    Only the publisher writes: shards are recorded in the version's journal, and then named by the parts that
    the head lists. An origin beside it reads both (``RunStore.followed``).

    Attributes:
        head: The last head, with what is open.
    """

    def __init__(
        self,
        options: PublishOptions,
        run: RunStore,
        signers: Sequence[Signer],
        now_ms: Callable[[], int],
        layout: Layout,
        head: Head | None,
    ) -> None:
        """Announce nothing yet."""
        self.head = head
        self._options = options
        self._run = run
        self._signers = signers
        self._now_ms = now_ms
        self._layout = layout
        self._stored: StoredVersion | None = None

    after_delta: Final = False

    def most_bytes(self) -> int | None:
        """Return None: shards lie here already."""
        return None

    def tell(self, opened: Opened, pieces: Sequence[Piece], delta: Sequence[DeltaPart]) -> None:
        """Record shards, write parts, then the head.

        Raises:
            DiskError: If the system refuses.
            TrustError: If readers would refuse the head.
        """
        run = self._run
        if self._stored is None:
            self._stored = run.begin(_nothing_known(self._layout, opened.layout_digest))
            run.write_blob(*opened.layout_document())
        self._stored.record_all(
            {
                piece.first + n: found.xxh3
                for piece in pieces
                for n, found in enumerate(piece.hashes)
            }
        )
        for digest, data in {
            **opened.list_pieces(pieces),
            **opened.list_delta_parts(delta),
        }.items():
            run.write_blob(digest, data)
        issue = issue_for(run.run, self._signers, self._now_ms(), self._options.expiry_ms)
        self.head = succession.with_open(self.head, issue, opened.ref())
        announce(run, self.head, self._signers, issue)

    @contextlib.contextmanager
    def or_given_up(self) -> Iterator[None]:
        """Say that the version is not open any more if the block fails; as far as that is possible."""
        try:
            yield
        except BaseException:
            if self._stored is not None:
                with contextlib.suppress(ShardcastError):
                    give_up_open(self._run, self._signers, self._now_ms(), self._options.expiry_ms)
            raise


def _nothing_known(layout: Layout, digest: str) -> Version:
    return Version(
        layout=layout,
        layout_digest=digest,
        digests=(None,) * layout.shard_count,
        manifest=None,
        documents=(digest,),
    )

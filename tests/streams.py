"""Publishers that wait in the middle of a checkpoint, so that tests see what is announced until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, OpenRef, decode_head
from shardcast.protocol.layout import decode_part
from shardcast.publishing import SilentObserver
from shardcast.store.run import RunStore
from shardcast.streaming import Pace

WAIT_S = 30.0
AT_ONCE = Pace(first_s=0.0, every_s=0.0, steps=1 << 30, least_upload_bytes=0)
"""Every shard is worth a head."""


def head_in(run: RunStore) -> Head | None:
    """The stored head."""
    data = run.read_head()
    return None if data is None else decode_head(open_unverified(data)[1])


def open_in(run: RunStore) -> OpenRef | None:
    """What the stored head says of an open version."""
    head = head_in(run)
    return None if head is None else head.open


def listed_in(run: RunStore, opened: OpenRef | None) -> dict[int, str]:
    """Digest by number of the shards that the parts of an open version name."""
    found: dict[int, str] = {}
    for digest in [] if opened is None else opened.parts:
        part = decode_part(run.read_blob(digest) or b"")
        for shard, one in zip(part.shards, part.shard_digests, strict=True):
            assert shard not in found
            found[shard] = one
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait, bounded, until something holds."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, f"never: {what}"
        threading.Event().wait(0.002)


class StepByStep(SilentObserver):
    """Lets no shard be finished before the head lists those that were.

    Called for each shard of at most a chunk, in one hashing thread: so what a head lists is exact.

    Attributes:
        seen: The open version as each head said it, as far as somebody looked.
        listed: Digest by number of the shards that its parts named then.
    """

    def __init__(self, run: RunStore, *, until: int | None = None) -> None:
        """Wait for heads of ``run``.

        Args:
            run: The run.
            until: Do not wait any more after so many shards.
        """
        self.seen: list[OpenRef] = []
        self.listed: list[dict[int, str]] = []
        self.notices: list[str] = []
        self._run = run
        self._until = until
        self._shards = 0

    def hashed(self, count: int) -> None:
        """The next shard was read."""
        del count
        before, self._shards = self._shards, self._shards + 1
        if self._until is not None and before > self._until:
            return
        wait_for(lambda: self._listed() >= before, f"{before} shards in a head")
        self.reached(before)

    def reached(self, shards: int) -> None:
        """The head lists so many shards; for tests to fill in."""

    def noticed(self, message: str) -> None:
        """Remember it."""
        self.notices.append(message)

    def _listed(self) -> int:
        opened = open_in(self._run)
        if opened is None:
            return -1
        if not self.seen or self.seen[-1] != opened:
            self.seen.append(opened)
            self.listed.append(listed_in(self._run, opened))
        return len(self.listed[-1])

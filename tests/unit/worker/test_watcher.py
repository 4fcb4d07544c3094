"""Long polls at several sources: who is asked when, and what is handed on."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from shardcast.errors import NetworkError, ShardcastError, SourceStatusError
from shardcast.upstream import HeadAnswer
from shardcast.watcher import HeadWatcher, UpstreamState, WaitSlots
from tests.unit.worker.conftest import with_config


@dataclass
class FakeSource:
    """A head source in simulated time: sequences are bodies."""

    url: str
    clock: FakeClock
    sequence: int = 0
    waits: bool = True
    depth: int = 1
    error: ShardcastError | None = None
    asked: list[tuple[float, int | None]] = field(default_factory=list)

    async def head(self, run: str, *, after: int | None = None, wait_s: int = 0) -> HeadAnswer:
        self.asked.append((self.clock.now, after))
        if self.error is not None:
            raise self.error
        begun, depth = self.clock.now, self.depth
        while (
            self.waits
            and self.depth == depth
            and after is not None
            and self.sequence <= after
            and self.clock.now < begun + wait_s
            and self.error is None
        ):
            await self.clock.sleep(0.01)
        if self.error is not None:
            raise self.error
        return HeadAnswer(b"%d" % self.sequence, self.depth, "node", self.url)


class FakeClock:
    """Time that goes on when everybody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + seconds, future))
        await future

    async def run_until(self, end: float) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            self.sleepers = [(at, f) for at, f in self.sleepers if not f.done()]
            due = min((at for at, _ in self.sleepers), default=end)
            if due > end:
                self.now = end
                return
            self.now = max(self.now, due)
            for at, future in self.sleepers:
                if at <= self.now and not future.done():
                    future.set_result(None)


class Watch:
    """A watcher over fake sources, and what it handed on."""

    def __init__(
        self, clock: FakeClock, *sources: FakeSource, slots: WaitSlots | None = None
    ) -> None:
        self.heads: list[tuple[float, str, bytes]] = []
        self.changes: list[tuple[str, UpstreamState]] = []
        self.refuse: set[str] = set()
        self.clock = clock
        self.watcher = HeadWatcher(
            "policy",
            sources,
            with_config(head_wait_s=25, head_poll_s=2.0, backoff_first_s=0.25, backoff_cap_s=10.0),
            self._on_head,
            on_change=lambda url, state: self.changes.append((url, state)),
            slots=slots,
            rng=random.Random(1),
            clock=clock,
            sleep=clock.sleep,
        )

    async def _on_head(self, answer: HeadAnswer) -> int | None:
        self.heads.append((self.clock.now, answer.url, answer.envelope))
        return None if answer.url in self.refuse else int(answer.envelope)

    async def until(self, end: float) -> None:
        task = asyncio.ensure_future(self.watcher.watch())
        await self.clock.run_until(end)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_new_head_is_handed_on_at_once_from_whoever_has_it_first() -> None:
    clock = FakeClock()
    a, b = FakeSource("a", clock, 1), FakeSource("b", clock, 1)
    watch = Watch(clock, a, b)
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(5)
    b.sequence = 2
    await clock.run_until(5.1)
    assert [(url, body) for now, url, body in watch.heads if now >= 5] == [("b", b"2")]
    a.sequence = 2
    await clock.run_until(5.2)
    assert (5 < watch.heads[-1][0] < 5.2, watch.heads[-1][1:]) == (True, ("a", b"2"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    states = watch.watcher.states
    assert all(states[url].live and states[url].depth == 1 for url in "ab")


async def test_a_source_of_ever_other_heads_that_are_not_new_is_not_asked_all_the_time() -> None:
    """It answers long polls at once, with old heads in turn: each one differs from the last."""

    @dataclass
    class Turning(FakeSource):
        async def head(self, run: str, *, after: int | None = None, wait_s: int = 0) -> HeadAnswer:
            self.asked.append((self.clock.now, after))
            await self.clock.sleep(0.001)
            return HeadAnswer(b"%d" % (3 + len(self.asked) % 2), 1, "node", self.url)

    clock = FakeClock()
    good, turning = FakeSource("a", clock, 9), Turning("b", clock)
    await Watch(clock, good, turning).until(60)
    assert len(turning.asked) < 70  # a second or two each; without pauses 60,000


async def test_a_server_that_waits_is_asked_once_per_wait() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 7)
    watch = Watch(clock, source)
    await watch.until(100)
    assert len(source.asked) in (5, 6)  # at once, then every 25 s
    assert [after for _, after in source.asked] == [None] + [7] * (len(source.asked) - 1)
    assert len(watch.heads) == 1
    assert watch.watcher.states["a"].waits


async def test_a_server_that_tells_of_a_new_depth_is_waited_for_again() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 7)
    watch = Watch(clock, source)
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(5)
    source.depth = 4
    await clock.run_until(5.1)
    assert watch.watcher.states["a"].depth == 4
    await clock.run_until(5.5)
    source.sequence = 8
    await clock.run_until(5.6)  # it was waited for again by now
    assert watch.heads[-1][2] == b"8"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_server_that_does_not_wait_is_polled_every_two_seconds() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 7, waits=False)
    watch = Watch(clock, source)
    await watch.until(100)
    assert 45 <= len(source.asked) <= 60
    assert watch.watcher.states["a"].waits is False


async def test_failures_back_off_and_heal_within_seconds() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 1, error=NetworkError("down"))
    watch = Watch(clock, source)
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(600)
    assert 60 < len(source.asked) < 250
    before = watch.watcher.states["a"]
    assert (before.live, before.error) == (False, source.error)
    source.error = None
    await clock.run_until(610.1)
    after = watch.watcher.states["a"]
    assert (after.live, after.error) == (True, None)
    assert watch.changes[-1][1].live
    assert watch.heads
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_retry_after_is_honoured() -> None:
    clock = FakeClock()
    error = SourceStatusError("busy", status=503, retry_after=0.3)
    source = FakeSource("a", clock, error=error)
    await Watch(clock, source).until(100)
    times = [now for now, _ in source.asked]
    assert min(later - now for now, later in pairwise(times)) > 0.3 - 1e-6


async def test_a_run_that_is_not_known_yet_is_polled_and_counts_as_live() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, error=SourceStatusError("no", status=404))
    watch = Watch(clock, source)
    await watch.until(60)
    assert 30 <= len(source.asked) <= 70
    assert watch.watcher.states["a"].live


async def test_a_refused_head_is_judged_again_but_in_no_hurry() -> None:
    clock = FakeClock()
    source = FakeSource("a", clock, 1)
    watch = Watch(clock, source)
    watch.refuse = {"a"}
    task = asyncio.ensure_future(watch.watcher.watch())
    await clock.run_until(60)
    assert 5 < len(source.asked) <= 31
    watch.refuse = set()  # a clock was set right
    await clock.run_until(80)
    count = len(source.asked)
    await clock.run_until(99)
    assert len(source.asked) <= count + 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_refresh_asks_everyone_now() -> None:
    clock = FakeClock()
    a = FakeSource("a", clock, 3)
    b = FakeSource("b", clock, error=NetworkError("down"))
    watch = Watch(clock, a, b)
    await watch.watcher.refresh()
    assert [after for _, after in a.asked] == [None]
    assert watch.heads == [(0.0, "a", b"3")]
    a.sequence = 4
    await watch.watcher.refresh()
    assert [after for _, after in a.asked] == [None, None]
    assert len(watch.heads) == 2


async def test_of_many_watchers_some_wait_and_the_others_poll() -> None:
    """Each request that waits takes a connection: with few descriptors not every run has one."""
    clock, slots = FakeClock(), WaitSlots(2)
    sources = [FakeSource("a", clock, 1) for _ in range(5)]
    watches = [Watch(clock, source, slots=slots) for source in sources]
    tasks = [asyncio.ensure_future(watch.watcher.watch()) for watch in watches]
    await clock.run_until(20)
    waiting = [source for source in sources if len(source.asked) == 2]
    polling = [source for source in sources if source not in waiting]
    assert len(waiting) == 2
    for source in polling:
        assert all(1.7 < b - a < 2.3 for (a, _), (b, _) in pairwise(source.asked[1:]))
        assert all(after is None for _, after in source.asked)
        source.sequence = 2
    await clock.run_until(22.5)
    assert all(
        watch.heads[-1][2] == b"2"
        for watch, s in zip(watches, sources, strict=True)
        if s in polling
    )
    tasks[sources.index(waiting[0])].cancel()  # its slot becomes free
    await clock.run_until(30)
    assert sum(source.asked[-1][1] is not None for source in polling) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(slots.take("a") for _ in range(2))

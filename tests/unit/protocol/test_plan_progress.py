"""A worker whose link is slower than versions come still reaches them: the plan, simulated.

Virtual time, whole runs: every version changes every shard, as a training step does. What the
network carries is what `plan_version` says; which version is worked on is what `worth_switching`
says. The link needs 165 minutes for a full copy and a version is published every 5.
"""

import itertools
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from shardcast.protocol.delta import DeltaBlob, DeltaPart
from shardcast.protocol.layout import FileEntry, Layout
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Delta, Holding, Plan, plan_version, worth_switching

MIB = 1024 * 1024
SHARDS = 990
SHARD = MIB
COPY_MIN = 165.0
INTERVAL_MIN = 5.0
BYTES_PER_MIN = SHARDS * SHARD / COPY_MIN
RATIO = 400
"""A step costs so many times less as a delta."""


class Rule(Protocol):
    """Whether to drop the version on its way: `worth_switching`, or what it is compared with."""

    def __call__(
        self, left_bytes: int, fresh_bytes: int, *, wasted_bytes: int, spent_bytes: int
    ) -> bool: ...


def always(left_bytes: int, fresh_bytes: int, *, wasted_bytes: int, spent_bytes: int) -> bool:
    return True


def made(number: int, *, changed: int = SHARDS) -> Version:
    """Version `number`: its first `changed` shards are new, the others never change."""
    layout = Layout(
        run="demo",
        version=number,
        step=None,
        lineage="",
        created_at=0,
        shard_bytes=SHARD,
        metadata={},
        files=[FileEntry(path="model", bytes=SHARDS * SHARD)],
    )
    digests = tuple(f"{number if s < changed else 0:032x}{s:032x}" for s in range(SHARDS))
    return Version(
        layout=layout,
        layout_digest=f"{number:064x}",
        digests=digests,
        manifest=f"{number:064x}",
        documents=(),
    )


def step_delta(number: int) -> Delta:
    """From the version before: one blob of one frame for each shard."""
    blobs = [
        DeltaBlob(
            digest=f"{number:032x}{s:032x}", bytes=SHARD // RATIO, frames=[(1, SHARD // RATIO)]
        )
        for s in range(SHARDS)
    ]
    part = DeltaPart(layout=f"{number:064x}", base="0" * 64, codec="t", first_shard=0, blobs=blobs)
    return Delta(number - 1, part)


@dataclass
class SlowWorker:
    """Fetches what the plan says, at the link's rate, and switches as the rule says.

    `reached` is (minute, version) of every version that became complete; `carried` all bytes. Where
    sources keep so many versions only (`kept`), one that left is given up for the newest (`gone`).
    """

    rule: Rule
    deltas: bool
    changed: int = SHARDS
    rate: float = BYTES_PER_MIN
    kept: int | None = None
    gone: int = 0
    verified: dict[int, set[int]] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    reached: list[tuple[float, int]] = field(default_factory=list)
    target: int | None = None
    wasted: int = 0
    spent: int = 0
    carried: int = 0

    def run(self, minutes: float, announcements: list[float]) -> None:
        """Live through announcements of version 1, 2, ... at these minutes."""
        newest, now = 0, 0.0
        for at in [*announcements, minutes]:
            now = self._work(now, min(at, minutes), newest)
            if at < minutes:
                newest += 1
                self.versions[newest] = made(newest, changed=self.changed)
                self._announced(newest)

    def plan(self, number: int) -> Plan:
        """What the network must carry for a version now, by plan_version."""
        holdings = [
            Holding(self.versions[other], shards)
            for other, shards in sorted(self.verified.items(), reverse=True)
            if other != number
        ]
        deltas = [step_delta(number)] if self.deltas else []
        done = self.verified.get(number, set())
        return plan_version(self.versions[number], done, holdings, deltas)

    def _announced(self, newest: int) -> None:
        if self.target is None:
            self.target = newest
            return
        if self.kept is not None and self.target <= newest - self.kept:
            self.gone += 1
            self.target = newest
            return
        left, fresh = self.plan(self.target).fetch_bytes, self.plan(newest).fetch_bytes
        if self.rule(left, fresh, wasted_bytes=self.wasted, spent_bytes=self.spent):
            self.wasted += max(fresh - left, 0)
            self.target = newest

    def _work(self, now: float, until: float, newest: int) -> float:
        """Fetch until the given minute, item by item; what is half done then starts again."""
        while self.target is not None:
            plan = self.plan(self.target)
            done = self.verified.setdefault(self.target, set())
            for copy in plan.copies:
                done.add(copy.target.shard)
            items = [(f.blob.bytes, f.targets) for f in plan.deltas]
            items += [(f.length, f.targets) for f in plan.fetches]
            for size, targets in items:
                if now + size / self.rate > until:
                    return until
                now += size / self.rate
                self.carried += size
                self.spent += size
                done.update(extent.shard for extent in targets)
            assert len(done) == SHARDS
            self._finished(now, newest)
        return until

    def _finished(self, now: float, newest: int) -> None:
        assert self.target is not None
        self.reached.append((now, self.target))
        self.verified = {self.target: self.verified[self.target]}
        self.wasted = self.spent = 0
        self.target = newest if newest > self.target else None


EVERY_5 = [INTERVAL_MIN * n for n in range(120)]
MINUTES = INTERVAL_MIN * len(EVERY_5)


def test_with_deltas_it_reaches_a_version_in_the_time_of_one_copy_and_stays_at_the_head() -> None:
    """Each switch costs the deltas of what is here already: 33 of them a thousandth or two each."""
    worker = SlowWorker(worth_switching, deltas=True)
    worker.run(MINUTES, EVERY_5)
    first, version = worker.reached[0]
    assert first <= COPY_MIN * 1.05 + INTERVAL_MIN
    assert version >= first / INTERVAL_MIN - 1  # the newest at that time, or the one before
    later = [(at, number) for at, number in worker.reached[1:]]
    assert [number for _, number in later] == list(range(version + 1, len(EVERY_5) + 1))
    lags = [at - EVERY_5[number - 1] for at, number in later]
    assert max(lags[2:]) <= 1.0


def test_without_deltas_it_reaches_versions_too() -> None:
    """One in about the time of a full copy, and at most a quarter of it is thrown away."""
    worker = SlowWorker(worth_switching, deltas=False)
    worker.run(MINUTES, EVERY_5)
    times = [0.0, *(at for at, _ in worker.reached)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(gaps) >= 2
    assert max(gaps) <= COPY_MIN * 1.25 + 2 * INTERVAL_MIN
    assert worker.carried <= MINUTES * BYTES_PER_MIN


def test_always_switching_never_reaches_any() -> None:
    """What the rule is for: this is how newest-wins alone starves."""
    worker = SlowWorker(always, deltas=False)
    worker.run(MINUTES, EVERY_5)
    assert worker.reached == []


def test_where_nobody_keeps_what_leaves_the_head_deltas_lead_to_one_all_the_same() -> None:
    """It stays with the head, so what it fetches never leaves; nothing is begun anew."""
    worker = SlowWorker(worth_switching, deltas=True, kept=4)
    worker.run(2 * COPY_MIN, EVERY_5)
    assert worker.gone == 0
    assert worker.reached[0][0] <= COPY_MIN * 1.05 + INTERVAL_MIN


def test_without_deltas_none_is_reached_where_nobody_keeps_it() -> None:
    """What relays keep versions for."""
    worker = SlowWorker(worth_switching, deltas=False, kept=4)
    worker.run(2 * COPY_MIN, EVERY_5)
    assert (worker.reached, worker.gone > 0) == ([], True)


def test_shards_of_unfinished_versions_carry_over() -> None:
    """Where a version changes a tenth of the shards, the first costs a copy, the next a tenth."""
    worker = SlowWorker(worth_switching, deltas=False, changed=SHARDS // 10)
    worker.run(MINUTES, EVERY_5)
    first, _ = worker.reached[0]
    assert first <= COPY_MIN * 1.25 + INTERVAL_MIN
    tenth = COPY_MIN / 10
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(worker.reached)]
    assert max(gaps) <= tenth * 1.25 + 2 * INTERVAL_MIN


@pytest.mark.parametrize("copy_min", [0.5, 4.0, 5.5, 9.0, 40.0])
def test_at_any_speed_versions_are_reached_in_time(copy_min: float) -> None:
    """At most 1.25 copies and an interval or two after the one before; in order; never starving."""
    worker = SlowWorker(worth_switching, deltas=False, rate=SHARDS * SHARD / copy_min)
    worker.run(MINUTES, EVERY_5)
    times = [0.0, *(at for at, _ in worker.reached)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= copy_min * 1.25 + 2 * INTERVAL_MIN
    numbers = [number for _, number in worker.reached]
    assert numbers == sorted(set(numbers))
    if copy_min < INTERVAL_MIN:
        assert numbers == list(range(1, len(EVERY_5) + 1))


def test_a_burst_of_versions_costs_little() -> None:
    """Three versions within seconds: the last one is reached, the first two are let go."""
    worker = SlowWorker(worth_switching, deltas=False, rate=SHARDS * SHARD / 1.0)
    worker.run(10.0, [0.0, 0.05, 0.1])
    assert [number for _, number in worker.reached] == [3]
    assert worker.reached[0][0] <= 1.1 + 0.02

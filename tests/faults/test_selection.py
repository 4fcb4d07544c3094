"""Relays that stop, die, flap or crawl in the middle of a pull: real processes, bytes counted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcast.events import EventKind, WorkerEvent
from shardcast.keys import load_public_key
from shardcast.store.stored import Durability
from shardcast.worker import Update, Worker
from tests.faults.criteria import Verdict, criteria, directories, reports
from tests.tree import MiB, Relay, Tree, last, shard_bytes_of, small_checkpoint, tree

SIZE = 24 * MiB
LIMIT = ("--limit-rate", "16MB")
"""A pull lasts long enough that something can happen in its middle, and no longer."""


@dataclass
class Standing:
    """An origin and relays that hold everything."""

    made: Tree
    relays: list[Relay]
    needed: int
    shard: int
    checkpoint: Path

    def worker(self, out: Path, *relays: Relay, observer: object = None) -> Worker:
        return Worker(
            out,
            self.made.run,
            [relay.url for relay in relays or self.relays],
            keys=[load_public_key(self.made.keys / "shardcast.pub")],
            durability=Durability.NONE,
            observer=observer,  # type: ignore[arg-type]
        )


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    checkpoint = small_checkpoint(tmp_path / "ckpt", size=SIZE)
    with tree(tmp_path / "tree") as made:
        made.publish(checkpoint)
        origin = made.origin()
        relays = [made.relay(f"relay-{n}", *LIMIT, parents=[origin.url]) for n in range(3)]
        fills = [
            made.start_pull(f"fill-{n}", tmp_path / f"fill-{n}", sources=[relay.url])
            for n, relay in enumerate(relays)
        ]
        for fill in fills:
            assert fill.wait(timeout=60) == 0  # now each relay holds all of it
        needed = int(last(fills[0], "ready")["bytes_fetched"])  # from one source: nothing twice
        yield Standing(made, relays, needed, shard_bytes_of(SIZE), checkpoint)


class At:
    """An observer that does something once, when a share of the version is here."""

    def __init__(self, share: float, act: Callable[[], None]) -> None:
        self.events: list[WorkerEvent] = []
        self._share = share
        self._act: Callable[[], None] | None = act

    def on_event(self, event: WorkerEvent) -> None:
        self.events.append(event)
        done, total, act = event.bytes_done, event.bytes_total, self._act
        if event.kind is not EventKind.PROGRESS or not done or not total or act is None:
            return
        if done >= self._share * total:
            self._act = None
            act()

    @property
    def acted(self) -> bool:
        return self._act is None

    @property
    def hedged(self) -> int:
        return next(e.bytes_hedged or 0 for e in self.events if e.kind is EventKind.READY)


def pulled(standing: Standing, verdict: Verdict, out: Path, watch: At, *, failures: int) -> Update:
    """Pull while something happens; judge what is the same for all."""
    verdict.watch(out)
    update = standing.worker(out, observer=watch).pull()
    assert watch.acted, "nothing happened in the middle of this pull"
    assert not [event for event in watch.events if event.kind is EventKind.BANNED]
    verdict.fetched(
        update.bytes_fetched,
        standing.needed,
        failures=failures,
        hedged=watch.hedged,
        unit=standing.shard,
    )
    assert watch.hedged <= 0.02 * standing.needed
    verdict.recovered(out, 1)
    return update


def bystander(standing: Standing, verdict: Verdict, out: Path, *relays: Relay) -> None:
    """Another worker, at the other relays."""
    watch = At(2.0, lambda: None)
    update = standing.worker(out, *relays, observer=watch).pull()
    verdict.unaffected(
        out,
        directories({1: standing.checkpoint}),
        1,
        reports(watch.events),
        extra=update.bytes_fetched - standing.needed - watch.hedged,
    )


@pytest.mark.fault(12)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_relay_that_is_stopped_keeps_no_shard(
    tmp_path: Path, standing: Standing, share: float
) -> None:
    """SIGSTOP: its connections stay, its kernel accepts new ones, and no byte comes."""
    victim = standing.relays[0].process.pid
    watch = At(share, lambda: os.kill(victim, signal.SIGSTOP))
    with criteria(directories({1: standing.checkpoint})) as verdict:
        try:
            pulled(standing, verdict, tmp_path / "out", watch, failures=2)
            bystander(standing, verdict, tmp_path / "bystander", *standing.relays[1:])
        finally:
            os.kill(victim, signal.SIGCONT)
        # Nobody waited for a timeout: what the relay held was asked for elsewhere before.
        timeouts = [line for line in reports(watch.events) if "nothing came" in line]
        assert timeouts == []
        verdict.waive("b", "no source failed: it was only overtaken")


@pytest.mark.fault(12)
def test_a_relay_that_is_killed_in_the_middle_costs_what_it_had_under_way(
    tmp_path: Path, standing: Standing
) -> None:
    victim = standing.relays[0]
    watch = At(0.4, lambda: os.kill(victim.process.pid, signal.SIGKILL))
    with criteria(directories({1: standing.checkpoint})) as verdict:
        pulled(standing, verdict, tmp_path / "out", watch, failures=2)
        bystander(standing, verdict, tmp_path / "bystander", *standing.relays[1:])
        verdict.named(reports(watch.events), victim.url)


@pytest.mark.fault(12)
def test_a_relay_that_crawls_never_keeps_the_last_shard(tmp_path: Path, standing: Standing) -> None:
    """It gives a hundredth of what the others give: more than any stall, far too little."""
    made = standing.made
    crawling = made.relay("crawling", "--limit-rate", "100kB", parents=[standing.relays[1].url])
    watch = At(0.1, lambda: None)
    relays = [crawling, *standing.relays[:2]]
    with criteria(directories({1: standing.checkpoint})) as verdict:
        verdict.watch(tmp_path / "out")
        update = standing.worker(tmp_path / "out", *relays, observer=watch).pull()
        verdict.fetched(
            update.bytes_fetched,
            standing.needed,
            failures=2,
            hedged=watch.hedged,
            unit=standing.shard,
        )
        assert watch.hedged <= 0.02 * standing.needed
        verdict.recovered(tmp_path / "out", 1)
        bystander(standing, verdict, tmp_path / "bystander", *standing.relays[1:])
        verdict.waive("b", "no source failed: one was slow")

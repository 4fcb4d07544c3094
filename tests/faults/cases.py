"""Cases on the wire: what one is, and the two who meet it, a worker and a relay with ten readers.

While the fault stands, a bystander pulls another run from the same upstream (or through the same
relay); it must not notice anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from relay.config import Prefetch
from shardcast.config import NetConfig
from shardcast.events import EventKind
from tests.contract.relays import config, limits, running, wait_head
from tests.contract.wire_client import PATIENCE_S, eventually
from tests.fakes import FakeRun
from tests.faults.criteria import Verdict, criteria, published
from tests.faults.upstream import Play, Upstream
from tests.faults.world import PATIENT, Follower, Reader, following, needed_bytes, small_version

READERS = 10
FIRST = "the first shard"
DOCUMENT = "the layout"


@dataclass(frozen=True)
class Case:
    """One fault on the wire.

    Attributes:
        name: Names the test.
        plays: What the upstream does. Scripts that name no digest answer for ``on``.
        says: What the report about the source says (regex); None: there is nothing to report.
        again: Most body bytes that may come a second time, or in vain.
        on: The blob that is spoiled.
        banned: The source sent wrong bytes and is left alone for a while.
        lasts: The fault stands until the follower gave up once and said so; then it ends.
        held: The fault stands until the bystander is done; then it ends.
        config: How patient the client is.
    """

    name: str
    plays: Sequence[Play]
    says: str | None
    again: int = 0
    on: str = FIRST
    banned: bool = False
    lasts: bool = False
    held: bool = False
    config: NetConfig = PATIENT


@dataclass
class Scene:
    """A case being played.

    Attributes:
        case: The case.
        run: The run that the fault is for, with version 1.
        steady: The bystander's run.
        upstream: Plays the script.
        target: The digest that is spoiled.
        verdict: What it comes to.
        root: Everything is below it.
    """

    case: Case
    run: FakeRun
    steady: FakeRun
    upstream: Upstream
    target: str
    verdict: Verdict
    root: Path

    @property
    def asked(self) -> int:
        """How often the upstream was asked for what is spoiled."""
        return sum(answer.digest == self.target for answer in self.upstream.answers)

    async def hit(self) -> None:
        """Wait until a script has begun to answer."""
        assert await asyncio.to_thread(self.upstream.hit.wait, PATIENCE_S), "nobody was hit"

    async def stood_by(self, url: str) -> None:
        """Let a bystander get its version while the fault stands."""
        out = self.root / "steady"
        async with following(out, self.steady, url) as bystander:
            await bystander.reaches(1)
        extra = self.upstream.sent_for(self.steady) - needed_bytes(self.steady)
        self.verdict.unaffected(out, published(self.steady), 1, bystander.log.reports, extra)

    async def given_up(self, follower: Follower) -> None:
        """Wait until a follower reports that it could not get the version."""
        await follower.says(EventKind.ERROR)

    async def counted(self) -> None:
        """Judge how much came twice; what would never end was not read to the end."""
        endless = [answer for answer in self.upstream.answers if answer.endless]
        await eventually(lambda: all(answer.left for answer in endless), what="client leaves")
        received = self.upstream.sent_for(self.run)
        again = self.verdict.fetched(
            received, needed_bytes(self.run), failures=self.upstream.failures
        )
        assert again <= self.case.again, f"{again} bytes again, not {self.case.again}"

    def reported(self, told: Sequence[str]) -> None:
        """Judge what was said about the upstream."""
        if self.case.says is None:
            self.verdict.waive(
                "b", "an answer that only means later, or from the start, is no error"
            )
        else:
            self.verdict.named(told, self.upstream.url, self.case.says)


@asynccontextmanager
async def playing(case: Case, root: Path) -> AsyncIterator[Scene]:
    """Set the scene; at the end every criterion must have been judged."""
    run = FakeRun()
    run.publish(small_version(), step=10)
    steady = FakeRun("steady", run.signers)
    steady.publish(small_version(7))
    layouts = [d for d, data in run.blobs.items() if b"shardcast.layout/1" in data[:64]]
    target = run.shard_digests(1)[0] if case.on == FIRST else layouts[0]
    plays = [p if p.on is not None else replace(p, on=frozenset({target})) for p in case.plays]
    with Upstream(run, steady) as upstream, criteria(published(run)) as verdict:
        upstream.play(*plays, run=run.name)
        yield Scene(case, run, steady, upstream, target, verdict, root)


async def worker_survives(case: Case, root: Path) -> None:
    """A follower meets the fault at its only source."""
    async with playing(case, root) as scene:
        out = root / "out"
        scene.verdict.watch(out)
        urls = [scene.upstream.url]
        async with following(out, scene.run, *urls, config=case.config) as follower:
            await scene.hit()
            await scene.stood_by(scene.upstream.url)
            if case.lasts:
                await scene.given_up(follower)
            if case.lasts or case.held:
                scene.upstream.heal()
            await follower.reaches(1)
        bans = follower.log.of(EventKind.BANNED)
        assert bool(bans) == case.banned, follower.log.reports
        scene.reported(follower.log.reports)
        await scene.counted()
        scene.verdict.recovered(out, 1)


async def relay_survives(case: Case, root: Path, logged: Callable[[], list[str]]) -> None:
    """A relay with ten readers and a follower meets the fault at its only parent."""
    async with playing(case, root) as scene:
        store, out = root / "relay", root / "out"
        scene.verdict.watch(out, store / scene.run.name)
        settings = config(
            store,
            scene.upstream.url,
            key=None,
            pubkeys=scene.run.keys,
            runs=(scene.run.name, scene.steady.name),
            prefetch=Prefetch.DEMAND,
            net=case.config,
            limits=limits(fill_deadline_s=5.0),
        )
        async with running(settings) as url:
            await wait_head(url, scene.run.name)
            await wait_head(url, scene.steady.name)
            readers = [
                Reader(url, scene.run.name, scene.target, scene.verdict) for _ in range(READERS)
            ]
            async with following(out, scene.run, url) as follower, asyncio.TaskGroup() as group:
                for reader in readers:
                    group.create_task(reader.read())
                await scene.hit()
                await scene.stood_by(url)
                if case.lasts or case.held:
                    scene.upstream.heal()
                await follower.reaches(1)
        assert not follower.log.of(EventKind.BANNED), "the relay passed wrong bytes on"
        scene.reported(logged())
        await scene.counted()
        asked = scene.asked
        assert asked <= scene.upstream.failures + 1, f"{asked} requests for ten readers"
        scene.verdict.recovered(out, 1)

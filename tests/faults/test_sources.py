"""Several sources of which one is at fault: replicas that differ, a port that never accepts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.config import Limits
from shardcast.config import NetConfig
from shardcast.events import EventKind
from tests.contract.relays import config, running
from tests.contract.wire_client import eventually
from tests.fakes import FakeRun, Unaccepting
from tests.faults.criteria import SHARD, Verdict, criteria, published
from tests.faults.upstream import Body, Flipped, Head, Part, Play, Shut, Upstream
from tests.faults.world import BRISK, PATIENT, Follower, following, needed_bytes, small_version

SUBJECTS = pytest.mark.parametrize("subject", ["worker", "relay"])


@asynccontextmanager
async def below(
    subject: str, root: Path, run: FakeRun, *urls: str, net: NetConfig = PATIENT
) -> AsyncIterator[list[str]]:
    """Sources for a follower: the URLs themselves, or one relay below all of them."""
    if subject == "worker":
        yield list(urls)
        return
    settings = config(root / "relay", *urls, key=None, pubkeys=run.keys, runs=(run.name,), net=net)
    async with running(settings) as url:
        yield [url]


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.publish(small_version())
    return run


async def bystander(root: Path, run: FakeRun, verdict: Verdict, url: str) -> None:
    """Somebody at the good source alone."""
    out = root / "bystander"
    async with following(out, run, url) as other:
        await other.reaches(1)
    verdict.unaffected(out, published(run), 1, other.log.reports)


def whole_with(etag: str) -> list[Play]:
    """A replica that has its own ETags: what another one began, it sends from the start."""
    return [
        Play((Head(headers={"ETag": etag}), Body()), times=None, ranged=False),
        Play((Head(200, {"ETag": etag}, SHARD), Body(0)), times=None, ranged=True),
    ]


@pytest.mark.fault(7)
@SUBJECTS
async def test_replicas_with_etags_of_their_own(
    tmp_path: Path, run: FakeRun, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What one of them cut short is had whole from either; nothing of two replicas is mixed."""
    caplog.set_level(logging.INFO, logger="relay")
    target = frozenset(run.shard_digests(1)[:1])
    with Upstream(run) as one, Upstream(run) as two, criteria(published(run)) as verdict:
        verdict.watch(tmp_path / "out", tmp_path / "relay" / run.name)
        for replica, etag in ((one, '"one"'), (two, 'W/"two"')):
            cut = (Head(headers={"ETag": etag}), Part(SHARD // 2), Shut())
            replica.play(Play(cut, on=target, ranged=False), *whole_with(etag))
        async with (
            below(subject, tmp_path, run, one.url, two.url) as urls,
            following(tmp_path / "out", run, *urls) as follower,
        ):
            await follower.reaches(1)
        told = [*follower.log.reports, *(record.getMessage() for record in caplog.records)]
        cutter = next(r for r in (one, two) if any(a.body == SHARD // 2 for a in r.answers))
        verdict.named(told, cutter.url, "closed the connection")
        assert not follower.log.of(EventKind.BANNED)
        cuts = sum(a.body == SHARD // 2 for r in (one, two) for a in r.answers)
        verdict.fetched(one.sent_for(run) + two.sent_for(run), needed_bytes(run), failures=cuts)
        verdict.recovered(tmp_path / "out", 1)
        verdict.waive("c", "both sources are at fault, and nobody else asks them")


@pytest.mark.fault(5)
@pytest.mark.fault(18)
@SUBJECTS
async def test_a_source_that_flips_bits_is_left_for_the_other_one(
    tmp_path: Path, run: FakeRun, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="relay")
    most = PATIENT.connections_per_source if subject == "worker" else Limits().fill_threads
    with Upstream(run) as bad, Upstream(run) as good, criteria(published(run)) as verdict:
        verdict.watch(tmp_path / "out", tmp_path / "relay" / run.name)
        bad.play(Play((Head(), Flipped(0)), times=None))
        async with (
            below(subject, tmp_path, run, bad.url, good.url) as urls,
            following(tmp_path / "out", run, *urls) as follower,
        ):
            await follower.reaches(1)
            before = good.sent_for(run)
            await bystander(tmp_path, run, verdict, good.url)
            others = good.sent_for(run) - before
            # Asked by at most as many connections as were open before it was known for what it is.
            wrong = list(bad.answers)
            assert len(wrong) <= most
            run.publish(small_version(2))
            await follower.reaches(2)
            assert len(bad.answers) <= most
            assert not wrong or len(bad.answers) == len(wrong), "a banned source was asked"
        if bad.answers:
            told = [*follower.log.reports, *_parents(caplog)]
            verdict.named(told, bad.url, "digest|wrong blob")
        else:
            verdict.waive("b", "by chance it was never asked")
        received = bad.sent_for(run) + good.sent_for(run) - others
        verdict.fetched(received, needed_bytes(run), failures=len(bad.answers))
        verdict.recovered(tmp_path / "out", 2)


@pytest.mark.fault(12)
@SUBJECTS
async def test_a_connection_that_is_never_accepted(
    tmp_path: Path, run: FakeRun, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two sources never accepts: everything comes from the other one."""
    caplog.set_level(logging.INFO, logger="relay")
    with Unaccepting() as deaf, Upstream(run) as good, criteria(published(run)) as verdict:
        verdict.watch(tmp_path / "out", tmp_path / "relay" / run.name)
        async with (
            below(subject, tmp_path, run, deaf.url, good.url, net=BRISK) as urls,
            following(tmp_path / "out", run, *urls, config=BRISK) as follower,
        ):
            await follower.reaches(1)
            verdict.fetched(good.sent_for(run), needed_bytes(run), failures=0)
            await bystander(tmp_path, run, verdict, good.url)
            await eventually(
                lambda: any(deaf.url in line for line in _told(follower, caplog)), what="a report"
            )
        verdict.named(_told(follower, caplog), deaf.url)
        verdict.recovered(tmp_path / "out", 1)


def _parents(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.fault(12)
@SUBJECTS
async def test_the_only_source_accepts_at_last(
    tmp_path: Path, run: FakeRun, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="relay")
    with criteria(published(run)) as verdict:
        verdict.watch(tmp_path / "out", tmp_path / "relay" / run.name)
        deaf = Unaccepting()
        port = int(deaf.url.rpartition(":")[2])
        async with (
            below(subject, tmp_path, run, deaf.url, net=BRISK) as urls,
            following(tmp_path / "out", run, *urls, config=BRISK) as follower,
        ):
            await eventually(
                lambda: any(deaf.url in line for line in _told(follower, caplog)), what="a report"
            )
            deaf.__exit__()
            with Upstream(run, port=port) as upstream:
                await follower.reaches(1)
                verdict.fetched(upstream.sent_for(run), needed_bytes(run), failures=0)
        verdict.named(_told(follower, caplog), deaf.url, "not accepted|connect")
        verdict.recovered(tmp_path / "out", 1)
        verdict.waive("c", "nobody else can be served by a port that is dead")


def _told(follower: Follower, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [*follower.log.reports, *_parents(caplog)]

"""Clocks, expiry and keys: what changes under a worker while it works."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from shardcast.errors import ClockError, ExpiredError
from shardcast.events import EventKind
from tests.contract.relays import config, running
from tests.contract.wire_client import eventually
from tests.fakes import FakeRun, RunServer, new_signer
from tests.faults.criteria import criteria, published
from tests.faults.world import following, needed_bytes, small_version, worker

HOUR_MS = 3_600_000


def age(run: FakeRun, hours: float) -> None:
    """Announce the head again as if it had been issued long ago."""
    assert run.head is not None
    now = run.now_ms()
    run.announce(
        msgspec.structs.replace(
            run.head,
            sequence=run.head.sequence + 1,
            issued_at=now - int(hours * HOUR_MS),
            expires_at=now - int((hours - 1) * HOUR_MS),
        )
    )


@pytest.mark.fault(19)
async def test_an_expired_head_freezes_followers_and_heals_through_a_relay(tmp_path: Path) -> None:
    """It is forwarded all the same; nobody is stopped, and nothing is fetched again."""
    run = FakeRun()
    run.publish(small_version(1))
    out, bystander = tmp_path / "out", tmp_path / "bystander"
    with RunServer(run) as origin, criteria(published(run)) as verdict:
        verdict.watch(out, bystander, tmp_path / "relay" / run.name)
        below = config(tmp_path / "relay", origin.url, key=None, pubkeys=run.keys, runs=(run.name,))
        async with (
            running(below) as relay,
            following(out, run, relay) as follower,
            following(bystander, run, relay, accept_expired=True) as other,
        ):
            await asyncio.gather(follower.reaches(1), other.reaches(1))
            age(run, 24)
            frozen = await follower.says(EventKind.FROZEN)
            assert frozen.version == 1
            assert isinstance(frozen.error, ExpiredError)
            assert "expired 23" in frozen.error.message or "expired 22" in frozen.error.message
            run.publish(small_version(2))
            age(run, 24)  # a version that only an expired head names
            await other.reaches(2)
            assert [update.version for update in follower.updates] == [1]
            verdict.unaffected(bystander, published(run), 2)
            run.amend()
            await follower.says(EventKind.THAWED)
            await follower.reaches(2)
        verdict.waive("b", "no source is at fault: the publisher was silent")
        verdict.fetched(sum(origin.sent.values()), needed_bytes(run), failures=0)
        verdict.recovered(out, 2)


@pytest.mark.fault(19)
async def test_a_clock_that_is_a_day_ahead_is_named_and_heals_when_it_is_set_right(
    tmp_path: Path,
) -> None:
    """To this machine the publisher and every source seem to live yesterday."""
    run = FakeRun()
    behind_ms = 24 * HOUR_MS
    real = run.now_ms
    run.now_ms = lambda: real() - behind_ms
    run.publish(small_version(1))
    with RunServer(run) as origin, criteria(published(run)) as verdict:
        origin.date_s = run.now_ms() / 1000
        out = tmp_path / "out"
        verdict.watch(out)
        with pytest.raises(ClockError, match=r"24\.0 hours ahead of all its sources'"):
            await worker(out, run, origin.url).apull()
        async with following(out, run, origin.url) as follower:
            frozen = await follower.says(EventKind.FROZEN)
            assert isinstance(frozen.error, ClockError)
            assert not follower.updates
            run.now_ms = real  # from here on the clocks agree
            origin.date_s = None
            run.amend()
            await follower.reaches(1)
        verdict.waive("b", "the clock is named, not a source")
        verdict.waive("c", "one machine's clock")
        verdict.fetched(sum(origin.sent.values()), needed_bytes(run), failures=0)
        verdict.recovered(out, 1)


@pytest.mark.fault(19)
async def test_keys_are_rotated_while_a_version_is_on_its_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker was given the old key only; afterwards the old key alone is refused."""
    old, new = new_signer(), new_signer()
    run = FakeRun(signers=(old,))
    pinned = run.keys
    run.publish(small_version(1))
    out, store = tmp_path / "out", tmp_path / "relay"
    with RunServer(run) as origin, criteria(published(run)) as verdict:
        verdict.watch(out, store / run.name)
        below = config(store, origin.url, key=None, pubkeys=pinned, runs=(run.name,))
        async with running(below) as relay, following(out, run, relay, keys=pinned) as follower:
            await follower.reaches(1)
            run.publish(small_version(2))
            run.signers = (old, new)  # before version 2 can have come
            run.amend()
            await follower.reaches(2)
            run.signers = (new,)
            run.publish(small_version(3))
            await follower.reaches(3)
            run.signers = (old,)
            run.publish(small_version(4))
            await eventually(
                lambda: [line for line in caplog.messages if "rotated out" in line],
                what="the retired key is refused",
            )
            assert [update.version for update in follower.updates] == [1, 2, 3]
            run.signers = (new,)
            run.amend()
            await follower.reaches(4)
        verdict.named(caplog.messages, origin.url, "signed only by key .* which was rotated out")
        verdict.waive("c", "the only worker")
        verdict.fetched(sum(origin.sent.values()), needed_bytes(run), failures=0)
        verdict.recovered(out, 4)

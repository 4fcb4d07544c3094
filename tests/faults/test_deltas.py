"""Deltas that are wrong, random or of something else: a version comes all the same, by plain shards.

Nothing of such a delta is ever committed, whoever is to blame: the source that sends other bytes
than the ones named, or the publisher that signed nonsense.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest

from relay.config import Prefetch
from shardcast.errors import MalformedError, NetworkError
from shardcast.events import EventKind
from shardcast.protocol.delta import DeltaBlob, DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import DeltaRef
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from tests.contract.relays import config, limits, running, wait_head
from tests.fakes import FakeRun
from tests.faults.criteria import criteria, published
from tests.faults.upstream import Flipped, Head, Play, Raw, Script, Stall, Upstream, status
from tests.faults.world import PATIENT, following, needed_bytes, small_version

FRAME: Final = random.Random(25).randbytes(100_000)


@dataclass(frozen=True)
class Delta:
    """A delta that a head lists.

    Attributes:
        part: Its document, by the version's layout digest and base manifest.
        spoiled: Which of its blobs is answered by ``script``: the part or the frame.
        script: What the upstream sends instead.
        full: It claims to be a compressed copy, without a base.
    """

    part: Callable[[str, str], bytes]
    spoiled: str = ""
    script: Script = ()
    full: bool = False


def proper(layout: str, base: str | None, **changes: object) -> bytes:
    part = DeltaPart(
        layout=layout,
        base=base,
        codec="scf/1",
        first_shard=0,
        blobs=[DeltaBlob(digest=digest_of(FRAME), bytes=len(FRAME), frames=[(1, len(FRAME))])],
    )
    return encode_delta_part(msgspec.structs.replace(part, **changes))


DELTAS: Final[dict[str, Delta]] = {
    "a-frame-of-random-bytes": Delta(proper),
    "a-copy-of-random-bytes": Delta(lambda lay, base: proper(lay, None), full=True),
    "a-part-of-random-bytes": Delta(lambda lay, base: FRAME[::-1]),
    "a-part-of-another-layout": Delta(lambda lay, base: proper("1" * 64, base)),
    "a-part-of-another-base": Delta(lambda lay, base: proper(lay, "2" * 64)),
    "a-part-for-shards-beyond": Delta(lambda lay, base: proper(lay, base, first_shard=4000)),
    "an-unknown-codec": Delta(lambda lay, base: proper(lay, base, codec="nobody.knows/9")),
    "a-part-with-a-flipped-bit": Delta(proper, "part", (Head(), Flipped(30))),
    "a-frame-with-a-flipped-bit": Delta(proper, "frame", (Head(), Flipped(50_000))),
    "a-part-that-is-missing": Delta(proper, "part", status(404)),
    "a-frame-that-is-missing": Delta(proper, "frame", status(404)),
    "a-frame-of-another-length": Delta(proper, "frame", (Head(length=5), Raw(b"12345"))),
    "a-huge-part": Delta(proper, "part", (Head(length=MAX_DOCUMENT_BYTES + 1), Stall())),
    "a-frame-that-fails": Delta(proper, "frame", status(500)),
}


def with_delta(run: FakeRun, delta: Delta) -> tuple[str, str]:
    """Publish version 2 and a delta to it; return the digests of part and frame."""
    assert run.head is not None
    base = run.head.versions[0]
    ref = run.add_version(2, small_version(2))
    layout = msgspec.json.decode(run.blobs[ref.manifest])["layout"]
    part = delta.part(layout, base.manifest)
    for data in (part, FRAME):
        run.blobs[digest_of(data)] = data
    listed = DeltaRef(
        base=None if delta.full else base.manifest,
        base_version=None if delta.full else 1,
        parts=[digest_of(part)],
        bytes=len(FRAME) + len(part),
    )
    ref = msgspec.structs.replace(ref, deltas=[listed])
    run.amend(version=2, versions=[ref, base])
    return digest_of(part), digest_of(FRAME)


@pytest.mark.fault(25)
@pytest.mark.parametrize("subject", ["worker", "relay", "materializing relay"])
@pytest.mark.parametrize("name", DELTAS)
async def test_a_delta_that_is_no_good_costs_nothing_but_the_delta(
    tmp_path: Path, subject: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="relay")
    delta = DELTAS[name]
    run = FakeRun()
    run.publish(small_version())
    steady = FakeRun("steady", run.signers)
    steady.publish(small_version(7))
    out, store = tmp_path / "out", tmp_path / "relay"
    with Upstream(run, steady) as upstream, criteria(published(run)) as verdict:
        verdict.watch(out, store / run.name)
        settings = config(
            store, upstream.url, key=None, pubkeys=run.keys, runs=(run.name, steady.name),
            net=PATIENT, prefetch=Prefetch.ALL, materialize=subject == "materializing relay",
            limits=limits(rebuild_patience_s=2.0),
        )  # fmt: skip
        async with running(settings) as relay:
            url = upstream.url if subject == "worker" else relay
            await wait_head(relay, steady.name)
            async with following(out, run, url) as follower:
                await follower.reaches(1)
                layouts = set(run.blobs)
                part, frame = with_delta(run, delta)
                if delta.spoiled:
                    digest = part if delta.spoiled == "part" else frame
                    upstream.play(Play(delta.script, on=frozenset({digest}), times=None))
                await follower.reaches(2)
                other = tmp_path / "steady"
                async with following(other, steady, url) as bystander:
                    await bystander.reaches(1)
                verdict.unaffected(other, published(steady), 1, bystander.log.reports)
        assert layouts < set(run.blobs)
        for digest in (part, frame):
            assert not blob(out, digest).exists(), "kept by a worker that cannot use it"
        if delta.spoiled:
            digest = part if delta.spoiled == "part" else frame
            assert not blob(store / run.name, digest).exists()
            told = [r.getMessage() for r in caplog.records if digest in r.getMessage()]
            verdict.named(told, upstream.url)
        else:
            verdict.waive("b", "each source sends what was signed; plain shards do without it")
        (failed,) = follower.log.of(EventKind.DELTA_FAILED)
        assert failed.version == 2
        assert isinstance(failed.error, NetworkError if delta.spoiled else MalformedError)
        spoiled = [a for a in upstream.answers if a.scripted]
        verdict.fetched(
            sum(update.bytes_fetched for update in follower.updates),
            needed_bytes(run) - len(FRAME) - len(run.blobs[part]),
            failures=1 + len(spoiled),
            unit=len(FRAME) + len(run.blobs[part]),
        )
        assert len(spoiled) <= 100, "a delta that does not come is not asked for without a pause"
        verdict.recovered(out, 2)


def blob(root: Path, digest: str) -> Path:
    return root / "blobs" / f"{digest}.bin"

"""A source that lies about the run: older, frozen, foreign and huge heads, documents that must not be.

Each lie is met by a worker, and by a relay that a worker is attached to. A bystander pulls another
run from the same place meanwhile.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import pytest

from shardcast.events import EventKind
from shardcast.protocol import succession
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import VersionRef
from shardcast.protocol.layout import FileEntry, Layout, encode_layout, encode_part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_HEAD_BYTES
from shardcast.protocol.manifest import encode_manifest
from tests.contract.relays import config, running, wait_head
from tests.contract.wire_client import eventually, http
from tests.fakes import KIB, Action, FakeRun, Gone, Request, response
from tests.faults.criteria import SHARD, Verdict, criteria, published
from tests.faults.upstream import Head, Play, Raw, Stall, Upstream
from tests.faults.world import PATIENT, Follower, following, needed_bytes, small_version

SUBJECTS: Final = pytest.mark.parametrize("subject", ["worker", "relay"])


@dataclass
class Scene:
    """A follower of ``run`` at an upstream, or at a relay below it.

    Attributes:
        told: What the one that meets the lie says: the worker's events, or the relay's log.
    """

    run: FakeRun
    steady: FakeRun
    upstream: Upstream
    verdict: Verdict
    follower: Follower
    url: str
    root: Path
    told: Callable[[], list[str]]
    sequences: list[int] = field(default_factory=list)

    async def named(self, says: str) -> None:
        """Wait until the lie was reported; judge the report."""

        def reported() -> bool:
            return any(self.upstream.url in x and re.search(says, x) for x in self.told())

        await eventually(reported, what=f"{says!r} said of {self.upstream.url}")
        self.verdict.named(self.told(), self.upstream.url, says)

    async def stood_by(self) -> None:
        out = self.root / "steady"
        async with following(out, self.steady, self.url) as bystander:
            await bystander.reaches(1)
        extra = self.upstream.sent_for(self.steady) - needed_bytes(self.steady)
        self.verdict.unaffected(out, published(self.steady), 1, bystander.log.reports, extra)

    async def heals(self, version: int) -> None:
        """The lie ends; the same process gets what is published then."""
        self.upstream.heal()
        self.upstream.head_fault = lambda request: None
        self.run.publish(small_version(40 + version))
        assert self.run.head is not None
        await self.follower.reaches(max(self.run.files))
        self.verdict.recovered(self.root / "out", max(self.run.files))

    def counted(self, failures: int, unit: int = SHARD) -> None:
        received = self.upstream.sent_for(self.run)
        unread = sum(a.body for a in self.upstream.answers if a.scripted)
        needed = sum(
            len(self.run.blobs[d])
            for d in {a.digest for a in self.upstream.answers if a.run == self.run.name}
        )
        self.verdict.fetched(received - unread, needed, failures=failures, unit=unit)


@asynccontextmanager
async def scene(subject: str, root: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Scene]:
    caplog.set_level(logging.INFO, logger="relay")
    run = FakeRun()
    run.publish(small_version())
    steady = FakeRun("steady", run.signers)
    steady.publish(small_version(7))
    out, store = root / "out", root / "relay"
    with Upstream(run, steady) as upstream, criteria(published(run)) as verdict:
        verdict.watch(out)
        if subject == "worker":
            async with following(out, run, upstream.url) as follower:
                yield Scene(
                    run, steady, upstream, verdict, follower, upstream.url, root,
                    lambda: follower.log.reports,
                )  # fmt: skip
            return
        verdict.watch(store / run.name)
        settings = config(
            store, upstream.url, key=None, pubkeys=run.keys, runs=(run.name, steady.name),
            net=PATIENT,
        )  # fmt: skip
        async with running(settings) as url:
            await wait_head(url, steady.name)
            async with following(out, run, url) as follower:
                yield Scene(
                    run, steady, upstream, verdict, follower, url, root,
                    lambda: [record.getMessage() for record in caplog.records],
                )  # fmt: skip


def only_for(run: str, answer: Iterable[Action]) -> Callable[[Request], Iterable[Action] | None]:
    """A head fault for one run."""
    actions = list(answer)
    return lambda request: actions if request.target.startswith(f"/v1/{run}/head") else None


def foreign_head(key: FakeRun, name: str = "policy") -> bytes:
    other = FakeRun(name, key.signers)
    other.publish(small_version(99))
    return other.envelope


def broken_signature(run: FakeRun) -> bytes:
    envelope = msgspec.json.decode(run.envelope)
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    signature[0] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    return msgspec.json.encode(envelope)


HEADS: Final[dict[str, tuple[Callable[[FakeRun, bytes], list[Action]], str]]] = {
    "older": (lambda run, old: [response(200, old)], "behind|older|rollback|below"),
    "by-another-key": (lambda run, old: [response(200, foreign_head(FakeRun()))], "key"),
    "of-another-run": (lambda run, old: [response(200, foreign_head(run, "other"))], "run"),
    "with-a-wrong-signature": (lambda run, old: [response(200, broken_signature(run))], "signature"),
    "a-page": (lambda run, old: [response(200, b"<html>login</html>")], "malformed|not|JSON"),
    "huge": (lambda run, old: [response(200, bytes(MAX_HEAD_BYTES + 1))], "over|limit"),
    "huge-by-its-length": (lambda run, old: [response(200, length=1 << 50), Gone()], "over|limit"),
    "endless-in-chunks": (
        lambda run, old: [
            response(200, headers={"Transfer-Encoding": "chunked"}, length=-1),
            *[b"40000\r\n" + bytes(256 * KIB) + b"\r\n"] * 5,
            Gone(),
        ],
        "over|limit",
    ),
    "endless-in-its-head": (
        lambda run, old: [b"HTTP/1.1 200 OK\r\n", *[b"X-More: " + b"y" * 8000 + b"\r\n"] * 20, Gone()],
        "too long|over",
    ),
    "nothing": (lambda run, old: [response(204)], "204"),
    "an-error": (lambda run, old: [response(500)], "500"),
}  # fmt: skip


@pytest.mark.fault(18)
@SUBJECTS
@pytest.mark.parametrize("lie", HEADS)
async def test_a_head_that_is_no_good_is_named_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subject: str, lie: str
) -> None:
    make, says = HEADS[lie]
    async with scene(subject, tmp_path, caplog) as it:
        await it.follower.reaches(1)
        old = it.run.envelope
        it.run.publish(small_version(2))
        await it.follower.reaches(2)
        served = it.run.envelope
        it.upstream.head_fault = only_for("policy", make(it.run, old))
        it.upstream.drop_connections()  # out of the long poll
        await it.named(says)
        if subject == "relay":
            assert (await http(it.url, "/v1/policy/head")).body == served
        await it.stood_by()
        assert [update.version for update in it.follower.updates][-1] == 2
        await it.heals(3)
        it.counted(failures=0)


@pytest.mark.fault(18)
@SUBJECTS
async def test_a_frozen_head_is_no_obstacle_where_another_source_is_newer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subject: str
) -> None:
    run = FakeRun()
    run.publish(small_version())
    frozen = run.envelope
    out, store = tmp_path / "out", tmp_path / "relay"
    with Upstream(run) as liar, Upstream(run) as honest, criteria(published(run)) as verdict:
        verdict.watch(out)
        liar.head_fault = lambda request: (
            [Gone()]
            if f"after={sequence_of(frozen)}" in request.target
            else [response(200, frozen)]
        )
        urls = [liar.url, honest.url]
        async with (
            below(subject, store, run, urls) as sources,
            following(out, run, *sources) as follower,
        ):
            await follower.reaches(1)
            run.publish(small_version(2))
            await follower.reaches(2)
        assert all("rollback" not in line for line in follower.log.reports)
        verdict.recovered(out, 2)
        received = liar.sent_for(run) + honest.sent_for(run)
        verdict.fetched(received, needed_bytes(run), failures=0)
        verdict.waive("b", "whoever is merely behind is not to blame")
        verdict.waive("c", "the follower is its own bystander: nothing failed")


@asynccontextmanager
async def below(
    subject: str, store: Path, run: FakeRun, urls: list[str]
) -> AsyncIterator[list[str]]:
    """Sources for a follower: the URLs themselves, or a relay below them."""
    if subject == "worker":
        yield urls
        return
    settings = config(store, *urls, key=None, pubkeys=run.keys, runs=(run.name,), net=PATIENT)
    async with running(settings) as url:
        yield [url]


def sequence_of(envelope: bytes) -> int:
    payload = msgspec.json.decode(envelope)["payload"]
    return int(msgspec.json.decode(base64.b64decode(payload))["sequence"])


@pytest.mark.fault(18)
@SUBJECTS
async def test_a_head_that_stays_frozen_is_told_once_it_expires_and_thaws_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subject: str
) -> None:
    async with scene(subject, tmp_path, caplog) as it:
        await it.follower.reaches(1)
        long_ago = it.run.now_ms() - 3_600_000
        it.run.amend(issued_at=long_ago, expires_at=long_ago)
        await it.follower.says(EventKind.FROZEN)
        await it.stood_by()
        await it.heals(2)
        assert it.follower.log.of(EventKind.THAWED)
        it.verdict.waive("b", "whether the publisher or a relay is silent, nobody can tell: frozen")
        it.counted(failures=0)


# --- documents --------------------------------------------------------------------------------


def announce(run: FakeRun, *documents: bytes, manifest: bytes, total: int) -> None:
    """Sign a head that names any manifest at all, as the next version but one."""
    for data in (*documents, manifest):
        run.blobs[digest_of(data)] = data
    number = max(run.files) + 1
    ref = VersionRef(
        version=number, step=None, manifest=digest_of(manifest), bytes=total, deltas=[]
    )
    issue = succession.Issue(run=run.name, now_ms=run.now_ms(), keys=run.keys)
    run.announce(succession.with_version(run.head, issue, ref, keep=16))


def layout_bytes(path: str, version: int = 2, size: int = 5) -> bytes:
    layout = Layout(
        run="policy", version=version, step=None, lineage="x", created_at=0, shard_bytes=SHARD,
        metadata={}, files=[FileEntry(path="model", bytes=size)],
    )  # fmt: skip
    return encode_layout(layout).replace(b'"path":"model"', b'"path":' + msgspec.json.encode(path))


def a_path(path: str) -> Callable[[FakeRun], None]:
    def lie(run: FakeRun) -> None:
        layout = layout_bytes(path)
        part = encode_part(digest_of(layout), 0, [digest_of(b"12345")])
        run.blobs[digest_of(b"12345")] = b"12345"
        manifest = encode_manifest(digest_of(layout), [digest_of(part)])
        announce(run, layout, part, manifest=manifest, total=5)

    return lie


def more_parts_than_shards(run: FakeRun) -> None:
    layout = layout_bytes("model")
    parts = [digest_of(str(n).encode()) for n in range(20_000)]
    announce(run, layout, manifest=encode_manifest(digest_of(layout), parts), total=5)


def more_parts_than_any_version_has(run: FakeRun) -> None:
    layout = layout_bytes("model")
    parts = [digest_of(str(n).encode()) for n in range(2)]
    manifest = encode_manifest(digest_of(layout), parts)
    many = b",".join(b'"' + digest_of(str(n).encode()).encode() + b'"' for n in range(65_537))
    head, _, _ = manifest.partition(b"[")
    announce(run, layout, manifest=head + b"[" + many + b"]}", total=5)


def a_part_of_another_layout(run: FakeRun) -> None:
    layout = layout_bytes("model")
    part = encode_part("0" * 64, 0, [digest_of(b"12345")])
    manifest = encode_manifest(digest_of(layout), [digest_of(part)])
    announce(run, layout, part, manifest=manifest, total=5)


def shards_of_another_version(run: FakeRun) -> None:
    """A manifest that names the layout and parts of version 1 for version 2."""
    assert run.head is not None
    old = run.head.versions[0]
    announce(run, manifest=run.blobs[old.manifest] + b" ", total=old.bytes)


def not_a_document(run: FakeRun) -> None:
    announce(run, manifest=b"\x00" * 1000, total=5)


def deep_json(run: FakeRun) -> None:
    announce(run, manifest=b'{"format":"shardcast.manifest/1","x":' + b"[" * 500_000, total=5)


SIGNED: Final[dict[str, Callable[[FakeRun], None]]] = {
    "a-path-up": a_path("../evil"),
    "a-path-up-within": a_path("a/../../../../evil"),
    "an-absolute-path": a_path("/tmp/evil"),
    "a-path-with-nul": a_path("evil\x00"),
    "more-parts-than-shards": more_parts_than_shards,
    "more-parts-than-any": more_parts_than_any_version_has,
    "a-part-of-another-layout": a_part_of_another_layout,
    "documents-of-another-version": shards_of_another_version,
    "no-document": not_a_document,
    "deep-json": deep_json,
}


def found(root: Path, pattern: str) -> list[Path]:
    return list(root.rglob(pattern))


@pytest.mark.fault(18)
@SUBJECTS
@pytest.mark.parametrize("lie", SIGNED)
async def test_documents_that_must_not_be_are_refused_before_anything_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subject: str, lie: str
) -> None:
    """Properly signed: what a stolen key or a broken publisher can do."""
    async with scene(subject, tmp_path, caplog) as it:
        await it.follower.reaches(1)
        asked = len(it.upstream.answers)
        SIGNED[lie](it.run)
        error = await it.follower.says(EventKind.ERROR)
        assert error.version == 2
        it.verdict.named([f"version {error.version}: {error.error}"], "version 2")
        await it.stood_by()
        documents = [a for a in it.upstream.answers[asked:] if a.run == "policy"]
        assert len({a.digest for a in documents}) <= 4, "what is refused is not fetched"
        assert not found(tmp_path, "*evil*")
        assert not found(tmp_path / "out" / "state", "staging/*")
        it.run.files[2] = {}  # the number is spent
        await it.heals(3)
        it.counted(failures=len(documents))


@pytest.mark.fault(18)
@SUBJECTS
@pytest.mark.parametrize("what", ["manifest", "layout"])
async def test_a_huge_document_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subject: str, what: str
) -> None:
    async with scene(subject, tmp_path, caplog) as it:
        await it.follower.reaches(1)
        with it.upstream.changed:
            ref = it.run.add_version(2, small_version(2))
            digest = ref.manifest
            if what == "layout":
                digest = msgspec.json.decode(it.run.blobs[digest])["layout"]
            length = MAX_DOCUMENT_BYTES + 1
            it.upstream.play(
                Play(
                    (Head(length=length), Raw(bytes(1000)), Stall()),
                    on=frozenset({digest}),
                    times=2,
                )
            )
        issue = succession.Issue(run="policy", now_ms=it.run.now_ms(), keys=it.run.keys)
        it.run.announce(succession.with_version(it.run.head, issue, ref, keep=16))
        await it.named(f"announced with {length}|limit")
        await it.stood_by()
        await it.follower.reaches(2)
        assert it.run.head is not None
        await it.heals(3)
        it.counted(failures=2)

"""What a power cut leaves: short files, zeros, lost and torn journals. Found before it is served."""

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardcast.announcing import remembered
from shardcast.errors import ShardcastError
from shardcast.protocol import succession, trust
from shardcast.protocol.envelope import encode_key, open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.journal import MAGIC
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from shardcast.streaming import Pace
from shardcast.verify import verify_directory
from shardcast.worker import EventKind
from tests.contract.made import RUN, SHARD, make_head, make_version, noise, publish, signer
from tests.contract.relays import config, path_of, running, wait_head, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import eventually, http
from tests.fakes import FakeRun, RunServer
from tests.faults.criteria import assert_version, published
from tests.faults.machine import cut_tail, flip_bit, zero_tail
from tests.faults.world import PATIENT, Log, worker
from tests.streams import AT_ONCE, StepByStep

FILES = {"big": noise(4 * SHARD, 1), "small": noise(1000, 2), "empty": b""}
VERSION = make_version(1, FILES)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def _gone(path: Path) -> None:
    path.unlink()


def _cut(count: int) -> Callable[[Path], None]:
    return lambda path: cut_tail(path, count)


def _zeros(path: Path) -> None:
    zero_tail(path, path.stat().st_size)


def _another_layout(path: Path) -> None:
    path.write_bytes(MAGIC + bytes(32) + path.read_bytes()[40:])


def _noise(path: Path) -> None:
    path.write_bytes(noise(300, 9))


DAMAGE: dict[str, tuple[Callable[[Path], None], int]] = {
    # what happens to the file of four shards, and how many of them are bad then
    "tail cut": (_cut(SHARD + 10), 2),
    "one byte short": (_cut(1), 1),
    "tail zeroed": (lambda path: zero_tail(path, SHARD + 4096), 2),
    "all zeros": (_zeros, 4),
    "no bytes": (_empty, 4),
    "gone": (_gone, 4),
    "a bit": (lambda path: flip_bit(path, 2 * SHARD + 17, 3), 1),
    "longer": (_longer, 0),
}
"""Same size, times and inode where a power cut leaves them so."""

JOURNALS: dict[str, Callable[[Path], None]] = {
    "gone": _gone,
    "empty": _empty,
    "torn": lambda path: cut_tail(path, 30),
    "half": lambda path: cut_tail(path, (path.stat().st_size - 40) // 2),
    "zeroed": _zeros,
    "tail zeroed": lambda path: zero_tail(path, 50),
    "another layout": _another_layout,
    "noise": _noise,
}


async def assert_serves(url: str, digests: Sequence[str] = VERSION.shards) -> None:
    for digest in (*VERSION.documents, *digests):
        answer = await http(url, path_of(digest))
        assert answer.status == 200
        assert answer.body == VERSION.blobs[digest]


def shard_bytes(parent: ScriptedParent) -> int:
    return sum(len(ask.data) for ask in parent.asks if ask.digest in VERSION.shards)


# --- relay --------------------------------------------------------------------------------------


async def filled_relay(tmp_path: Path, parent: ScriptedParent) -> Path:
    """Let a relay get the version, and stop it; return the version's directory."""
    parent.serve(make_head(VERSION), VERSION)
    async with running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        directory = tmp_path / "r" / RUN / "versions" / "000001"
        await eventually(directory.is_dir)
    parent.asks.clear()
    return directory


@pytest.mark.fault(4)
@pytest.mark.fault(5)
@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_relay_serves_nothing_wrong_and_fetches_only_what_is_bad(
    tmp_path: Path, kind: str
) -> None:
    damage, bad = DAMAGE[kind]
    parent = ScriptedParent()
    async with parent.running():
        directory = await filled_relay(tmp_path, parent)
        damage(directory / "big")
        async with running(config(tmp_path / "r", parent.url)) as url:
            await wait_head(url)
            await assert_serves(url)  # at once, whatever is being repaired
            await wait_ready(url)
            await eventually(lambda: not verify_directory(tmp_path / "r" / RUN).damage)
        assert (directory / "big").read_bytes() == FILES["big"]
        assert shard_bytes(parent) == bad * SHARD


@pytest.mark.fault(4)
@pytest.mark.parametrize("kind", JOURNALS)
async def test_a_relay_that_lost_its_journal_reads_and_fetches_nothing(
    tmp_path: Path, kind: str
) -> None:
    parent = ScriptedParent()
    async with parent.running():
        await filled_relay(tmp_path, parent)
        JOURNALS[kind](tmp_path / "r" / RUN / "state" / "000001.shards")
        async with running(config(tmp_path / "r", parent.url)) as url:
            await wait_ready(url)
            await assert_serves(url)
            assert shard_bytes(parent) == 0


@pytest.mark.fault(4)
@pytest.mark.fault(3)
@pytest.mark.parametrize("kind", ["tail cut", "tail zeroed", "no bytes", "a bit"])
async def test_a_staged_version_is_looked_at_before_it_gets_its_name(
    tmp_path: Path, kind: str
) -> None:
    """Cut off between the last record and the commit: what is bad must not be committed."""
    damage, bad = DAMAGE[kind]
    parent = ScriptedParent()
    async with parent.running():
        directory = await filled_relay(tmp_path, parent)
        staged = tmp_path / "r" / RUN / "state" / "staging" / "000001"
        staged.parent.mkdir(exist_ok=True)
        directory.rename(staged)
        damage(staged / "big")
        async with running(config(tmp_path / "r", parent.url)) as url:
            await eventually(directory.is_dir)
            assert (directory / "big").read_bytes() == FILES["big"]
            await wait_ready(url)
            await assert_serves(url)
        assert shard_bytes(parent) == bad * SHARD


@pytest.mark.fault(4)
@pytest.mark.parametrize("name", ["state", "document", "head", "trust"])
async def test_a_relay_whose_small_files_are_lost_starts_all_the_same(
    tmp_path: Path, name: str
) -> None:
    parent = ScriptedParent()
    async with parent.running():
        await filled_relay(tmp_path, parent)
        root = tmp_path / "r" / RUN
        path = {
            "state": root / "state" / "000001.json",
            "document": root / "blobs" / f"{VERSION.layout}.bin",
            "head": root / "head.json",
            "trust": root / "state" / "trust.json",
        }[name]
        path.unlink()  # each is replaced atomically and synced: it is there or not
        async with running(config(tmp_path / "r", parent.url)) as url:
            await wait_ready(url)
            await assert_serves(url)
            assert shard_bytes(parent) <= len(FILES["big"]) + len(FILES["small"])


# --- origin -------------------------------------------------------------------------------------


@pytest.mark.fault(4)
@pytest.mark.fault(5)
@pytest.mark.parametrize("kind", DAMAGE)
async def test_an_origin_serves_what_is_good_and_says_what_is_not(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, bad = DAMAGE[kind]
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", FILES)
    store = tmp_path / "s" / RUN
    damage(store / "versions" / "000001" / "big")
    run_digests = VERSION.shards  # the same bytes: the same digests, whatever the layout says
    async with running(config(tmp_path / "s")) as url:
        await wait_head(url)
        statuses = []
        for digest in run_digests:
            answer = await http(url, path_of(digest))
            statuses.append(answer.status)
            if answer.status == 200:
                assert answer.body == VERSION.blobs[digest]
        assert statuses.count(200) == 5 - bad
        assert statuses.count(404) == bad
        status = (await http(url, "/v1/status")).body.decode()
        assert re.search(r'"damaged":"version 1', status)
        metrics = (await http(url, "/metrics")).body.decode()
        assert f'shardcast_damaged_versions{{run="{RUN}"}} 1.0' in metrics

        def told() -> bool:
            loud = [r for r in caplog.records if r.levelname == "ERROR"]
            return any("version 1" in r.getMessage() for r in loud)

        await eventually(told)
        assert (await http(url, "/readyz")).status == 503


@pytest.mark.fault(4)
@pytest.mark.parametrize("kind", JOURNALS)
async def test_an_origin_that_lost_its_journal_serves_everything(tmp_path: Path, kind: str) -> None:
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", FILES)
    JOURNALS[kind](tmp_path / "s" / RUN / "state" / "000001.shards")
    async with running(config(tmp_path / "s")) as url:
        await wait_ready(url)
        for digest in VERSION.shards:
            assert (await http(url, path_of(digest))).body == VERSION.blobs[digest]


class Cut:
    """Keeps what the disk has while a new head can be read already and its name is not durable yet."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, loses: Callable[[Head], bool]):
        """Watch for the first head that is to be lost."""
        self.root = root
        self.read: bytes | None = None
        self._kept: dict[Path, bytes | None] = {}
        self._loses = loses
        self._rename = os.replace
        monkeypatch.setattr(os, "replace", self._replace)

    def _replace(self, source: Path, target: Path) -> None:
        if target == self.root / "head.json" and self.read is None:
            envelope = source.read_bytes()
            if self._loses(decode_head(open_unverified(envelope)[1])):
                self.read = envelope
                paths = target, self.root / "state" / "trust.json"
                self._kept = {path: path.read_bytes() if path.exists() else None for path in paths}
        self._rename(source, target)

    def restore(self) -> bytes:
        """Put it back, as the reboot does; return the head that was read and is lost."""
        assert self.read is not None
        for path, data in self._kept.items():
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)
        return self.read


LOST_HEADS: dict[str, tuple[Pace | None, Callable[[Head], bool]]] = {
    "whole": (None, lambda head: head.version == 2),
    "first open": (AT_ONCE, lambda head: head.open is not None and head.open.version == 2),
    "closing": (AT_ONCE, lambda head: head.version == 2),
    "very first": (None, lambda head: head.version == 1),
}


@pytest.mark.fault(4)
@pytest.mark.fault(22)
@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("kind", LOST_HEADS)
def test_a_head_that_was_read_and_lost_does_not_lend_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, durability: Durability
) -> None:
    """Between the rename of the head and the sync of its directory: readers have it, the disk has not."""
    pace, loses = LOST_HEADS[kind]
    source, root = tmp_path / "c", tmp_path / "s" / RUN
    source.mkdir()
    moments = itertools.count(1_800_000_000_000)

    def make(number: int, stream: Pace | None = None) -> None:
        (source / "big").write_bytes(noise(4 * SHARD, number))
        run = RunStore(root, RUN)
        how = PublishOptions(
            source=source, durability=durability, threads=1, stream=stream, delta=False
        )
        watch = None if stream is None else StepByStep(run)
        publish_directory(how, run, [signer()], lambda: next(moments), watch)
        run.close()

    run = RunStore(root, RUN)
    reader = trust.fresh(RUN, [signer().public_key])
    if kind != "very first":
        make(1)
        reader = trust.accept(reader, run.read_head() or b"", next(moments)).state
    with monkeypatch.context() as patch:
        cut = Cut(root, patch, loses)
        make(2, pace)
    reader = trust.accept(reader, cut.restore(), next(moments)).state
    taken = max(*reader.manifests, *reader.layouts, 1)

    make(3)

    envelope = run.read_head()
    assert envelope is not None
    accepted = trust.accept(reader, envelope, next(moments))
    assert accepted.head.version == taken + 1
    assert accepted.head.open is None
    version = run.load_version(accepted.head.versions[0])
    assert version is not None
    trust.check_version(accepted.state, version)
    assert run.staged() == []
    assert set(run.committed()) == {ref.version for ref in accepted.head.versions}
    run.close()


@pytest.mark.fault(4)
@pytest.mark.parametrize("again", [1, 2])
def test_a_number_that_a_lost_head_named_belongs_to_no_key(tmp_path: Path, again: int) -> None:
    """Nothing was announced: the run is anybody's still, and version 1 is taken."""
    run = RunStore(tmp_path / "s" / RUN, RUN)
    issue = succession.Issue(run=RUN, now_ms=1_800_000_000_000, keys=(signer().public_key,))
    ref = decode_head(open_unverified(make_head(VERSION))[1]).versions[0]
    head = succession.with_version(None, issue, ref, keep=1)
    run.note_numbers(remembered(run, [signer()]), head)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    options = PublishOptions(source=tmp_path / "c", stream=None)
    done = publish_directory(options, run, [signer(again)], lambda: 1_800_000_001_000)
    assert done.ref.version == ref.version + 1
    state = run.read_trust()
    assert state is not None
    assert state.keys == [encode_key(signer(again).public_key)]
    run.close()


# --- worker -------------------------------------------------------------------------------------


@pytest.fixture
def run() -> FakeRun:
    made = FakeRun()
    made.publish(FILES)
    return made


def sent(server: RunServer, run: FakeRun) -> int:
    shards = set(run.shard_digests(1))
    return sum(count for digest, count in server.sent.items() if digest in shards)


def rebooted(out: Path) -> None:
    """A power cut means another boot: nothing that was scanned before counts."""
    (out / "state" / "scanned.json").unlink(missing_ok=True)


@pytest.mark.fault(4)
@pytest.mark.fault(5)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_worker_repairs_what_a_power_cut_took(tmp_path: Path, run: FakeRun, kind: str) -> None:
    damage, bad = DAMAGE[kind]
    out = tmp_path / "out"
    with RunServer(run) as server:
        update = worker(out, run, server.url).pull()
        damage(update.path / "big")
        rebooted(out)
        server.sent.clear()
        log = Log()
        worker(out, run, server.url, observer=log).pull()
        assert_version(out, published(run), 1)
        assert sent(server, run) == bad * SHARD
        told = log.of(EventKind.DAMAGED)
        assert told
        assert all("version 1" in str(event.error) for event in told)


@pytest.mark.fault(4)
@pytest.mark.fault(5)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_worker_finds_zeros_beside_what_it_knows_to_be_missing(
    tmp_path: Path, run: FakeRun, kind: str
) -> None:
    """That one file has another size is seen at once; of the other only its bytes tell."""
    damage, bad = DAMAGE[kind]
    out = tmp_path / "out"
    with RunServer(run) as server:
        update = worker(out, run, server.url).pull()
        damage(update.path / "big")
        zero_tail(update.path / "small", 100)
        rebooted(out)
        server.sent.clear()
        worker(out, run, server.url).pull()
        assert_version(out, published(run), 1)
        assert sent(server, run) == bad * SHARD + len(FILES["small"])


@pytest.mark.fault(4)
@pytest.mark.parametrize("kind", JOURNALS)
def test_a_worker_that_lost_its_journal_fetches_nothing(
    tmp_path: Path, run: FakeRun, kind: str
) -> None:
    out = tmp_path / "out"
    with RunServer(run) as server:
        worker(out, run, server.url).pull()
        JOURNALS[kind](out / "state" / "000001.shards")
        rebooted(out)
        server.sent.clear()
        worker(out, run, server.url).pull()
        assert_version(out, published(run), 1)
        assert sent(server, run) == 0


@pytest.mark.fault(4)
@pytest.mark.parametrize("kind", ["tail cut", "tail zeroed", "a bit"])
def test_a_worker_without_a_source_never_calls_a_damaged_version_whole(
    tmp_path: Path, run: FakeRun, kind: str
) -> None:
    damage, bad = DAMAGE[kind]
    out = tmp_path / "out"
    with RunServer(run) as server:
        update = worker(out, run, server.url).pull()
        damage(update.path / "big")
        rebooted(out)
        server.fault = lambda request, data: [] if request.digest in run.shard_digests(1) else None
        with pytest.raises(ShardcastError):
            worker(out, run, server.url, config=replace(PATIENT, give_up_after_s=1.0)).pull()
        report = verify_directory(out, threads=1)
        assert len(report.damage) >= 1
        server.fault = lambda request, data: None
        server.sent.clear()
        worker(out, run, server.url).pull()
        assert_version(out, published(run), 1)
        assert sent(server, run) == bad * SHARD

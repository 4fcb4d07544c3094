"""Pulls by deltas over loopback: right ones, wrong ones, hostile ones, over damaged bases, in chains.

Whatever a delta is, the version that comes is the one that was signed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardcast import base_files, frames, rebuilding
from shardcast.errors import IntegrityError, MalformedError, NetworkError
from shardcast.events import EventKind, WorkerEvent
from shardcast.protocol.delta import DeltaPart, decode_delta_part, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import DeltaRef, VersionRef
from shardcast.protocol.limits import MAX_DELTA_BLOB_BYTES
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from shardcast.worker import Update, Worker
from tests.deltas import MadeDelta, checkpoint, make_delta, publish, stepped
from tests.fakes import KIB, Action, FakeRun, Request, RunServer, Until, response
from tests.unit.worker.conftest import QUICK, some_bytes, with_config

SHARD = 256 * KIB
MODEL = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"


class Log:
    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []

    def on_event(self, event: WorkerEvent) -> None:
        self.events.append(event)

    def of(self, kind: EventKind) -> list[WorkerEvent]:
        return [event for event in self.events if event.kind is kind]

    @property
    def ready(self) -> WorkerEvent:
        return self.of(EventKind.READY)[-1]

    def failure(self) -> Exception:
        """The one reason why a delta did not bring something."""
        (event,) = self.of(EventKind.DELTA_FAILED)
        assert event.error is not None
        return event.error


def make_worker(out: Path, run: FakeRun, *servers: RunServer, **options: Any) -> Worker:
    given = {"keys": run.keys, "config": QUICK, "durability": Durability.NONE, **options}
    return Worker(out, run.name, [server.url for server in servers], **given)


def pull(
    out: Path, run: FakeRun, *servers: RunServer, version: int | None = None, **options: Any
) -> tuple[Update, Log]:
    log = Log()
    update = make_worker(out, run, *servers, observer=log, **options).pull(version)
    for path, data in run.files[update.version].items():
        assert (update.path / path).read_bytes() == data, path
    return update, log


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.publish(checkpoint(), step=1)
    return run


@pytest.fixture
def out(tmp_path: Path, run: FakeRun) -> Path:
    """A worker's directory that holds version 1."""
    with RunServer(run) as server:
        pull(tmp_path / "out", run, server)
    return tmp_path / "out"


def documents(run: FakeRun, ref: VersionRef) -> int:
    """Bytes of a version's documents."""
    return sum(
        len(data)
        for digest, data in run.blobs.items()
        if data.startswith(b'{"format"')
        and f'"{digest}'.encode() not in data
        and digest in document_digests(run, ref)
    )


def document_digests(run: FakeRun, ref: VersionRef) -> set[str]:
    manifest = msgspec.json.decode(run.blobs[ref.manifest])
    return {ref.manifest, manifest["layout"], *manifest["parts"]}


def replace_delta(run: FakeRun, **changes: Any) -> None:
    """Announce the newest version with another entry for its one delta."""
    assert run.head is not None
    newest, *older = run.head.versions
    (delta,) = newest.deltas
    changed = msgspec.structs.replace(delta, **changes)
    run.amend(versions=[msgspec.structs.replace(newest, deltas=[changed]), *older])


def replace_part(run: FakeRun, made: MadeDelta, data: bytes) -> None:
    run.blobs[digest_of(data)] = data
    replace_delta(run, parts=[digest_of(data)])


# --- what is right ----------------------------------------------------------------------------


def test_a_step_comes_as_its_delta(out: Path, run: FakeRun) -> None:
    ref, (made,) = publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
        assert set(server.sent) == {*made.parts, *made.blobs, *document_digests(run, ref)}
    assert update.bytes_fetched == made.bytes + documents(run, ref)
    assert update.bytes_fetched < ref.bytes / 20
    assert log.ready.bytes_delta == sum(len(run.blobs[blob]) for blob in made.blobs)
    assert log.ready.bytes_fetched == update.bytes_fetched
    assert not log.of(EventKind.DELTA_FAILED)


def test_progress_ends_at_the_whole(out: Path, run: FakeRun) -> None:
    ref, _ = publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    progress = log.of(EventKind.PROGRESS)
    assert progress[-1].bytes_done == progress[-1].bytes_total == ref.bytes
    assert progress[-1].bytes_fetched == log.ready.bytes_fetched


def test_a_compressed_copy_serves_who_has_nothing(tmp_path: Path) -> None:
    run = FakeRun()
    ref, _ = publish(run, checkpoint(), None)
    with RunServer(run) as server:
        update, log = pull(tmp_path / "out", run, server)
    assert log.ready.bytes_delta
    assert update.bytes_fetched < ref.bytes - 100 * KIB


def test_a_base_that_is_half_here_serves_for_its_half(tmp_path: Path, run: FakeRun) -> None:
    """An unfinished version 1 is a base for version 2, frame by frame."""
    second = run.files[1][OTHER]
    missing = {digest_of(second[at : at + SHARD]) for at in range(0, len(second), SHARD)}
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(404)] if r.digest in missing else None
        with pytest.raises(NetworkError):
            pull(tmp_path, run, server)
    publish(run, stepped(run.files[1], 2), 1, frame_shards=1)
    with RunServer(run) as server:
        _, log = pull(tmp_path, run, server)
        asked = server.sent
    assert log.ready.bytes_delta
    new = run.files[2]
    plain = {digest_of(new[OTHER][at : at + SHARD]) for at in range(0, len(second), SHARD)}
    assert plain <= set(asked)
    first = {digest_of(new[MODEL][at : at + SHARD]) for at in range(0, len(new[MODEL]), SHARD)}
    assert first.isdisjoint(asked)


def test_shards_that_repeat_are_rebuilt_once(tmp_path: Path) -> None:
    run = FakeRun()
    block = checkpoint()[MODEL][:SHARD]
    run.publish({"a": block, "b": some_bytes(SHARD)})
    new = stepped({"a.safetensors": block}, 3)["a.safetensors"]
    with RunServer(run) as server:
        pull(tmp_path, run, server)
        publish(run, {"a": new, "b": new}, 1, frame_shards=1, blob_frames=1)
        update, _ = pull(tmp_path, run, server)
    assert update.bytes_fetched < SHARD / 4


def test_unchanged_files_are_neither_fetched_nor_rebuilt(out: Path, run: FakeRun) -> None:
    new = {**run.files[1], MODEL: stepped(run.files[1], 2)[MODEL]}
    _, (made,) = publish(run, new, 1, blob_frames=1)
    with RunServer(run) as server:
        update, _ = pull(out, run, server)
        used = [blob for blob in made.blobs if blob in server.sent]
    assert 0 < len(used) < len(made.blobs)
    assert (update.path / OTHER).stat().st_ino == (out / "versions/000001" / OTHER).stat().st_ino


def test_a_file_that_is_new_comes_by_frames_without_a_base(out: Path, run: FakeRun) -> None:
    new = {**run.files[1], "added.safetensors": checkpoint(9)[MODEL]}
    publish(run, new, 1)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    assert log.ready.bytes_delta
    assert update.bytes_fetched < len(new["added.safetensors"])


def test_a_committed_version_is_repaired_by_its_delta(out: Path, run: FakeRun) -> None:
    publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        path = pull(out, run, server)[0].path / MODEL
        data = bytearray(path.read_bytes())
        data[1000:1010] = b"x" * 10
        path.write_bytes(data)
        update, log = pull(out, run, server)
    assert log.of(EventKind.DAMAGED)
    assert 0 < update.bytes_fetched < SHARD / 4


# --- chains -----------------------------------------------------------------------------------


def run_of(steps: int, *backs: int, run: FakeRun, **options: Any) -> None:
    """Versions 2 and following, with deltas from so many versions before."""
    for number in range(2, steps + 1):
        bases = [number - back for back in backs if number > back]
        publish(run, stepped(run.files[number - 1], number), *bases, **options)


def test_deltas_are_chained_where_no_other_leads_there(out: Path, run: FakeRun) -> None:
    run_of(4, 1, run=run)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    assert update.version == 4
    assert log.ready.via == (2, 3)
    assert update.bytes_fetched < run.head.versions[0].bytes / 10  # type: ignore[union-attr]
    assert [event.version for event in log.of(EventKind.COMMITTED)] == [4]
    store = RunStore(out, run.name)
    assert (store.committed(), store.staged()) == ([4, 1], [])


def test_skip_deltas_beat_chains(out: Path, run: FakeRun) -> None:
    run_of(5, 1, 2, 4, run=run)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    assert (update.version, log.ready.via) == (5, ())


def test_a_certain_version_comes_by_deltas_too(out: Path, run: FakeRun) -> None:
    run_of(4, 1, run=run)
    with RunServer(run) as server:
        update, log = pull(out, run, server, version=3)
    assert (update.version, log.ready.via) == (3, (2,))


async def test_by_manifest_too(out: Path, run: FakeRun) -> None:
    ref, (made,) = publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        update = await make_worker(out, run, server).apull(manifest=ref.manifest)
    assert update.bytes_fetched < made.bytes + 10 * KIB


def test_without_room_for_two_versions_there_is_no_chain(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(3, 1, run=run)
    monkeypatch.setattr("shardcast.ways.Ways._fits", lambda self, route: False)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    assert (update.version, log.ready.via) == (3, ())
    assert log.ready.bytes_delta == 0


def test_a_version_on_the_way_that_is_gone_costs_a_copy_of_the_wanted_one(
    out: Path, run: FakeRun
) -> None:
    run_of(3, 1, run=run)
    assert run.head is not None
    gone = run.head.ref(2)
    assert gone is not None
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(404)] if r.digest == gone.manifest else None
        update, log = pull(out, run, server)
    assert (update.version, log.ready.via) == (3, ())


def test_a_version_on_the_way_that_turns_out_dear_is_given_up(out: Path, run: FakeRun) -> None:
    """Its delta is nonsense: a copy of it, which nobody wants, is not fetched."""
    publish(run, stepped(run.files[1], 2), 1, spoil=lambda n, frame: frame[::-1])
    publish(run, stepped(run.files[2], 3), 2)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
        fetched = update.bytes_fetched
    assert (update.version, log.ready.via) == (3, ())
    assert fetched < 1.3 * run.head.versions[0].bytes  # type: ignore[union-attr]


def test_an_interrupted_chain_goes_on_where_it_was(out: Path, run: FakeRun) -> None:
    run_of(3, 1, run=run)
    assert run.head is not None
    last = run.head.versions[0]
    blobs = {blob.digest for blob in decode_delta_part(run.blobs[last.deltas[0].parts[0]]).blobs}
    plain = set(run.shard_digests(3))
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(503)] if r.digest in blobs | plain else None
        with pytest.raises(NetworkError):
            pull(out, run, server)
    assert RunStore(out, run.name).staged() == [3, 2]
    with RunServer(run) as server:
        _, log = pull(out, run, server)
        assert set(server.sent) == {*last.deltas[0].parts, *blobs}
    assert log.ready.via == ()
    assert RunStore(out, run.name).staged() == []


# --- malicious sources ------------------------------------------------------------------------


def lying(blobs: Iterable[str]) -> Any:
    """Sends other bytes of the right length for some blobs."""
    wrong = set(blobs)

    def fault(request: Request, data: bytes) -> Iterable[Action] | None:
        if request.digest not in wrong:
            return None
        return [response(200, bytes(len(data)), {"ETag": f'"blake3-{request.digest}"'})]

    return fault


@pytest.mark.parametrize("what", ["blobs", "parts"])
def test_a_relay_that_sends_wrong_deltas_is_banned_and_the_other_asked(
    out: Path, run: FakeRun, what: str
) -> None:
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as bad, RunServer(run) as good:
        bad.fault = lying(getattr(made, what))
        good.fault = lambda r, d: (
            [Until(asked), *good.good(r, d)] if r.digest in getattr(made, what) else None
        )
        asked = threading.Event()
        inner = bad.fault

        def first(request: Request, data: bytes) -> Iterable[Action] | None:
            answer = inner(request, data)
            if answer is not None:
                asked.set()
            return answer

        bad.fault = first
        patient = with_config(give_up_after_s=20.0)
        _, log = pull(out, run, bad, good, config=patient)
    assert {e.source for e in log.of(EventKind.BANNED)} == {bad.url}
    assert not log.of(EventKind.DELTA_FAILED)
    assert log.ready.bytes_delta == sum(len(run.blobs[blob]) for blob in made.blobs)


@pytest.mark.parametrize("what", ["blobs", "parts"])
def test_if_the_only_source_has_no_right_delta_shards_come_plainly(
    out: Path, run: FakeRun, what: str
) -> None:
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        server.fault = lying(getattr(made, what))
        update, log = pull(out, run, server)
        assert set(run.shard_digests(2)) - set(run.shard_digests(1)) <= set(server.sent)
    assert isinstance(log.failure(), NetworkError)
    assert update.version == 2


@pytest.mark.parametrize("what", ["blobs", "parts"])
def test_deltas_that_no_source_has_are_not_waited_for(out: Path, run: FakeRun, what: str) -> None:
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(404)] if r.digest in getattr(made, what) else None
        _, log = pull(out, run, server, config=with_config(give_up_after_s=20.0))
        tries = [digest for digest in server.blob_requests if digest in getattr(made, what)]
    assert isinstance(log.failure(), NetworkError)
    assert len(tries) == 3 * len(getattr(made, what))


def test_a_busy_source_is_asked_again_for_deltas(out: Path, run: FakeRun) -> None:
    """Plain shards would only make it busier."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    left = dict.fromkeys(made.blobs, 5)

    def fault(request: Request, data: bytes) -> Iterable[Action] | None:
        if not left.get(request.digest or ""):
            return None
        left[request.digest or ""] -= 1
        return [response(503, headers={"Retry-After": "0"})]

    with RunServer(run) as server:
        server.fault = fault
        update, log = pull(out, run, server, config=with_config(give_up_after_s=20.0))
    assert not any(left.values())
    assert not log.of(EventKind.DELTA_FAILED)
    assert update.bytes_fetched < SHARD


@pytest.mark.parametrize("what", ["blobs", "parts"])
def test_who_is_put_off_goes_on_with_plain_shards_and_does_not_sit_out_a_retry_after(
    out: Path, run: FakeRun, what: str
) -> None:
    """A relay that cannot fill a delta blob says 503 for ever: ten minutes, if it likes."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    stuck = getattr(made, what)[0]
    with RunServer(run) as server:
        server.fault = lambda r, _: (
            [response(503, headers={"Retry-After": "600"})] if r.digest == stuck else None
        )
        patient = with_config(give_up_after_s=2.0, retry_after_cap_s=600.0)
        update, log = pull(out, run, server, config=patient)
        assert server.blob_requests.count(stuck) == 1
        plain = set(run.shard_digests(2)) & set(server.sent)
    assert isinstance(log.failure(), NetworkError)
    assert "answers 503" in str(log.failure())
    assert update.version == 2
    changed = set(run.shard_digests(2)) - set(run.shard_digests(1))
    assert plain == changed if what == "parts" else set() < plain < changed


# --- a publisher that is wrong ----------------------------------------------------------------


WRONG = {
    "nonsense": lambda n, frame: some_bytes(len(frame), n),
    "cut": lambda n, frame: frame[:-1],
    "longer": lambda n, frame: frame + b"\0",
    "empty-header": lambda n, frame: b"SCF1",
    "one-of-them": lambda n, frame: frame[::-1] if n == 1 else frame,
    "flipped": lambda n, frame: frame[:-2] + bytes([frame[-2] ^ 1]) + frame[-1:],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_signed_delta_that_is_wrong_costs_its_shards(out: Path, run: FakeRun, name: str) -> None:
    ref, (made,) = publish(run, stepped(run.files[1], 2), 1, spoil=WRONG[name])
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    error = log.failure()
    assert isinstance(error, MalformedError)
    assert "publisher" in error.message
    assert "shard" in error.message
    assert update.bytes_fetched <= ref.bytes + made.bytes + documents(run, ref)
    if name == "one-of-them":
        assert "shards 2-3:" in error.message
        assert update.bytes_fetched < 3 * SHARD


def test_a_codec_bug_that_makes_other_bytes_is_found(out: Path, run: FakeRun) -> None:
    """A frame of another step: the decoder is content, the signed digests are not."""
    target = stepped(run.files[1], 2)
    run.add_version(77, stepped(run.files[1], 99))
    one = run.head.versions[0]  # type: ignore[union-attr]
    other = run.add_version(77, stepped(run.files[1], 99))
    wrong = make_delta(run, other, one)
    frames = [run.blobs[blob.digest] for blob in decode_delta_part(run.blobs[wrong.parts[0]]).blobs]
    sizes = [f for b in decode_delta_part(run.blobs[wrong.parts[0]]).blobs for f in b.frames]
    stream = b"".join(frames)
    cuts = [sum(size for _, size in sizes[:n]) for n in range(len(sizes) + 1)]
    del run.files[77]
    publish(run, target, 1, spoil=lambda n, _: stream[cuts[n] : cuts[n + 1]])
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert "digest" in log.failure().message  # type: ignore[attr-defined]


def test_a_crash_of_the_decoder_ends_nothing(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("shardcast.codec.decode.decode_frame_into", bug)
    publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert "ZeroDivisionError" in log.failure().message  # type: ignore[attr-defined]


def test_a_frame_that_starts_outside_of_its_base(out: Path, run: FakeRun) -> None:
    """Version 1 on disk is shorter than the base that the frames were made from."""
    one = run.head.versions[0]  # type: ignore[union-attr]
    longer = {path: data + some_bytes(SHARD) for path, data in run.files[1].items()}
    target = stepped(longer, 2)
    other = run.add_version(76, longer)
    ref = run.add_version(2, target)
    made = make_delta(run, ref, other)
    part = decode_delta_part(run.blobs[made.parts[0]])
    data = encode_delta_part(msgspec.structs.replace(part, base=one.manifest))
    run.blobs[digest_of(data)] = data
    delta = DeltaRef(
        base=one.manifest, base_version=1, parts=[digest_of(data)], bytes=made.bytes + 100
    )
    del run.files[76]
    run.amend(version=2, versions=[msgspec.structs.replace(ref, deltas=[delta]), one])
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert "which has" in log.failure().message  # type: ignore[attr-defined]


def part_of(run: FakeRun, made: MadeDelta) -> DeltaPart:
    return decode_delta_part(run.blobs[made.parts[0]])


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "1" * 64},
        {"base": "2" * 64},
        {"codec": "nobody.knows/9"},
        {"first_shard": 4000},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_part_of_something_else_is_left_out(
    out: Path, run: FakeRun, changes: dict[str, Any]
) -> None:
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    replace_part(
        run, made, encode_delta_part(msgspec.structs.replace(part_of(run, made), **changes))
    )
    with RunServer(run) as server:
        _, log = pull(out, run, server)
        assert set(made.blobs).isdisjoint(server.sent)
    assert isinstance(log.failure(), MalformedError)
    assert "version 1" in log.failure().message  # type: ignore[attr-defined]


def test_a_part_that_is_none(out: Path, run: FakeRun) -> None:
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    replace_part(run, made, some_bytes(1000))
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert isinstance(log.failure(), MalformedError)


def test_blobs_that_weigh_more_than_the_head_says(out: Path, run: FakeRun) -> None:
    publish(run, stepped(run.files[1], 2), 1)
    replace_delta(run, bytes=10)
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert isinstance(log.failure(), MalformedError)


def test_a_huge_frame_is_not_even_asked_for(out: Path, run: FakeRun) -> None:
    """It is dearer than the shards; and no head can promise less than its blobs weigh."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1)
    part = part_of(run, made)
    huge = msgspec.structs.replace(
        part.blobs[0],
        bytes=MAX_DELTA_BLOB_BYTES,
        frames=[(2, MAX_DELTA_BLOB_BYTES - 1), (2, 1)],
    )
    data = encode_delta_part(msgspec.structs.replace(part, blobs=[huge, *part.blobs[1:]]))
    run.blobs[digest_of(data)] = data
    replace_delta(run, parts=[digest_of(data)], bytes=2 * MAX_DELTA_BLOB_BYTES)
    with RunServer(run) as server:
        pull(out, run, server)
        assert huge.digest not in server.blob_requests


def test_more_parts_than_shards_are_not_asked_for(out: Path, run: FakeRun) -> None:
    publish(run, stepped(run.files[1], 2), 1)
    replace_delta(run, parts=[f"{n:064x}" for n in range(9000)])
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert isinstance(log.failure(), MalformedError)


# --- this disk --------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def test_a_base_that_is_damaged_here_is_found_out(out: Path, run: FakeRun) -> None:
    """A bit flips on the disk behind our back, in one shard: nobody else is blamed."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1, frame_shards=1)
    flip(out / "versions/000001" / MODEL, SHARD + 5)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    error = log.failure()
    assert isinstance(error, IntegrityError)
    assert "damaged here" in error.message
    assert "shard 1:" in error.message
    (damaged,) = log.of(EventKind.DAMAGED)
    assert damaged.version == 1
    assert update.bytes_fetched < made.bytes + SHARD + 10 * KIB


def test_a_base_that_was_cut_short_is_no_bus_error(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between plan and decoding a file of the base is truncated."""
    publish(run, stepped(run.files[1], 2), 1)
    real = frames.decoded

    def cut(*arguments: Any) -> Any:
        with (out / "versions/000001" / MODEL).open("r+b") as file:
            file.truncate(1000)
        return real(*arguments)

    monkeypatch.setattr(rebuilding, "decoded", cut)
    with RunServer(run) as server:
        _, log = pull(out, run, server)
    assert isinstance(log.failure(), IntegrityError)


def test_a_base_with_gaps_that_a_frame_needs_after_all_is_nobody_s_fault(
    tmp_path: Path, run: FakeRun
) -> None:
    """The plan looks where the shard lies; its tensor lay elsewhere, where nothing came yet."""
    old = run.files[1][MODEL]
    gone = {digest_of(old[SHARD : 2 * SHARD])}
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(404)] if r.digest in gone else None
        with pytest.raises(NetworkError):
            pull(tmp_path, run, server)
    length = int.from_bytes(old[:8], "little")
    front = b'{"weight":{"dtype":"BF16","shape":[%d],"data_offsets":[%d,%d]}}'
    size = len(old) - 8 - length
    text = front % (size // 2, 150 * KIB, 150 * KIB + size)
    moved = len(text).to_bytes(8, "little") + text + bytes(150 * KIB) + old[8 + length :]
    publish(run, stepped({**run.files[1], MODEL: moved}, 2), 1, frame_shards=1)
    with RunServer(run) as server:
        update, log = pull(tmp_path, run, server)
    assert update.version == 2
    assert log.ready.bytes_delta
    assert not log.of(EventKind.DAMAGED)
    assert not log.of(EventKind.DELTA_FAILED)


def test_files_of_a_base_are_opened_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_files, "_MAX_OPEN", 1)
    run = FakeRun()
    files = {f"{n}.bin": some_bytes(60 * KIB, n) for n in range(5)}
    run.publish(files)
    new = {path: data[:-1] + b"!" for path, data in files.items()}
    with RunServer(run) as server:
        pull(tmp_path, run, server)
        publish(run, new, 1, frame_shards=5)
        _, log = pull(tmp_path, run, server)
    assert log.ready.bytes_delta
    assert not log.of(EventKind.DELTA_FAILED)


# --- interruptions ----------------------------------------------------------------------------


async def test_cancelled_while_decoding(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the next shard is written; what was rebuilt stays for the next pull."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1, frame_shards=1, blob_frames=1)
    decoding, go_on = threading.Event(), threading.Event()
    real, lock, count = frames.decoded, threading.Lock(), [0]

    def slow(*arguments: Any) -> Any:
        with lock:
            count[0] += 1
            third = count[0] == 3
        if count[0] >= 3:
            if third:
                decoding.set()
            assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(rebuilding, "decoded", slow)
    with RunServer(run) as server:
        pulling = asyncio.ensure_future(make_worker(out, run, server).apull())
        assert await asyncio.to_thread(decoding.wait, 30)
        await asyncio.sleep(0)
        pulling.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        monkeypatch.undo()
        here = RunStore(out, run.name).stored(2)
        assert here is not None
        kept = len(here.present())
        assert 0 < kept < here.version.layout.shard_count
        server.sent.clear()
        await asyncio.to_thread(pull, out, run, server)
        assert len([blob for blob in made.blobs if blob in server.sent]) < len(made.blobs)


def test_the_window_bounds_what_is_asked_for(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One blob at a time, and plain shards only after all of them."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1, blob_frames=1)
    monkeypatch.setattr(rebuilding, "WINDOW_BYTES", 1)
    with RunServer(run) as server:
        _, log = pull(out, run, server)
        asked = [digest for digest in server.blob_requests if digest in made.blobs]
    assert asked == [blob for blob in made.blobs if blob in asked]  # the text needs none
    assert len(asked) >= len(made.blobs) - 1
    assert not log.of(EventKind.DELTA_FAILED)


def test_blobs_are_decoded_and_written_as_they_arrive(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One blob does not come before a shard of another is on the disk."""
    _, (made,) = publish(run, stepped(run.files[1], 2), 1, frame_shards=1, blob_frames=1)
    held = made.blobs[1]
    written = threading.Event()
    in_time: list[bool] = []
    place = rebuilding.Rebuilding._place

    def placed(*arguments: Any) -> None:
        place(*arguments)
        written.set()

    def answer(server: RunServer, request: Request, data: bytes) -> Iterable[Action]:
        yield Until(written)
        in_time.append(written.is_set())
        yield from server.good(request, data)

    monkeypatch.setattr(rebuilding.Rebuilding, "_place", placed)
    with RunServer(run) as server:
        server.fault = lambda r, d: answer(server, r, d) if r.digest == held else None
        _, log = pull(out, run, server)
    assert in_time == [True]
    assert not log.of(EventKind.DELTA_FAILED)
    assert log.ready.bytes_delta


def test_a_disk_that_refuses_the_rebuilt_bytes_ends_the_pull(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardcast.errors import DiskError

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    publish(run, stepped(run.files[1], 2), 1)
    monkeypatch.setattr(rebuilding, "write_all", full)
    with RunServer(run) as server, pytest.raises(DiskError):
        pull(out, run, server)


def test_without_the_compiled_kernel_shards_come_plainly(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "shardcast.codec.decode", None)
    publish(run, stepped(run.files[1], 2), 1)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    assert update.version == 2
    assert "shardcast.codec.decode" in log.failure().message  # type: ignore[attr-defined]


# --- whatever is offered ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_deltas_are_offered_the_bytes_are_right(tmp_path: Path, seed: int) -> None:
    """Random versions, random deltas, some of their frames random, over a worker with anything."""
    rng = random.Random(seed)
    run = FakeRun()
    run.publish(checkpoint(seed, 300 * KIB))

    def spoil(number: int, frame: bytes) -> bytes:
        return rng.choice(
            [frame, frame, frame, rng.randbytes(len(frame)), frame[::-1], frame + b"!", frame[:9]]
        )

    with RunServer(run) as server:
        for number in range(2, 5):
            new = stepped(run.files[number - 1], rng.randrange(1000), rng.choice([0, 0.01, 0.3]))
            if rng.random() < 0.3:
                new[OTHER] = rng.randbytes(rng.randrange(1, 400 * KIB))
            if rng.random() < 0.3:
                new = dict(reversed(new.items()))
            bases = rng.sample([None, *range(1, number)], rng.randint(0, 2))
            publish(
                run, new, *bases, spoil=spoil if rng.random() < 0.7 else lambda n, f: f,
                frame_shards=rng.randint(1, 3), blob_frames=rng.randint(1, 3),
            )  # fmt: skip
            if rng.random() < 0.6:
                pull(tmp_path, run, server)
            if rng.random() < 0.3:
                current = RunStore(tmp_path, run.name).current()
                for path in (tmp_path / f"versions/{current or 0:06d}").glob("*.safetensors"):
                    flip(path, rng.randrange(path.stat().st_size))
        update, _ = pull(tmp_path, run, server)
    assert update.version == 4


# --- what is remembered and told --------------------------------------------------------------


async def test_a_follower_says_once_of_each_version_why_its_delta_failed(
    tmp_path: Path, run: FakeRun
) -> None:
    log = Log()
    spoil = WRONG["nonsense"]
    with RunServer(run) as server:
        worker = make_worker(tmp_path, run, server, observer=log)
        reached = 0
        async for update in worker.follow():
            reached = update.version
            if reached == 4:
                break
            new = stepped(run.files[reached], reached)
            publish(run, new, reached, spoil=spoil if reached != 2 else lambda n, frame: frame)
    assert [event.version for event in log.of(EventKind.DELTA_FAILED)] == [2, 4]
    assert [event.bytes_delta == 0 for event in log.of(EventKind.READY)] == [
        True,
        False,
        False,
        False,
    ]


def test_parts_that_were_missing_are_not_asked_for_again_at_once(run: FakeRun) -> None:
    from shardcast.cancel import Cancel
    from shardcast.delta_documents import MISSING_S, Base, DeltaDocuments
    from shardcast.fetch import BlobSource
    from shardcast.protocol.manifest import Version
    from shardcast.pulling import FetchPool
    from shardcast.selector import Selector
    from tests.deltas import layout_of

    ref, (made,) = publish(run, stepped(run.files[1], 2), 1)
    digest, layout = layout_of(run, ref)
    version = Version(layout, digest, (None,) * layout.shard_count, ref.manifest, ())
    now = [0.0]
    errors: list[Exception] = []
    documents = DeltaDocuments(lambda: now[0])
    with RunServer(run) as server, BlobSource(server.url, QUICK) as source:
        kept = run.blobs.pop(made.parts[0])

        def pool() -> FetchPool:
            rng = random.Random(1)
            selector = Selector([server.url], clock=lambda: 0.0, rng=rng)
            return FetchPool(run.name, {server.url: source}, selector, QUICK, Cancel())

        def ask() -> int:
            bases = {run.head.versions[1].manifest: Base(1, 1.0)}  # type: ignore[union-attr]
            return len(documents.fetch(ref, version, bases, pool, refused=errors.append))

        assert (ask(), len(server.requests)) == (0, 3)
        run.blobs[made.parts[0]] = kept
        assert (ask(), len(server.requests)) == (0, 3)
        now[0] = MISSING_S
        assert (ask(), len(server.requests)) == (1, 4)
        assert (ask(), len(server.requests)) == (1, 4)
    assert [type(error) for error in errors] == [NetworkError, NetworkError]


def test_no_room_on_the_way_means_no_detour(
    out: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up although there seemed to be room: what was on the way is given up."""
    from shardcast.errors import DiskFullError
    from shardcast.store import files, version_files

    run_of(4, 1, run=run)
    real = files.require_space

    def full(directory: Path, needed: int, *, what: str) -> None:
        staged = RunStore(out, run.name).staged()
        if needed and what.startswith("version 4") and set(staged) - {4}:
            raise DiskFullError("no room", source=str(directory))
        real(directory, needed, what=what)

    monkeypatch.setattr(version_files, "require_space", full)
    with RunServer(run) as server:
        update, log = pull(out, run, server)
    assert (update.version, log.ready.via) == (4, ())
    assert RunStore(out, run.name).staged() == []


def test_a_newer_version_is_weighed_with_its_delta(tmp_path: Path, run: FakeRun) -> None:
    """What is here of version 1 counts for version 2 by the delta, so it is worth the switch."""
    from shardcast.store.run import RunStore as Store
    from shardcast.ways import Wanted, Ways

    shards = run.shard_digests(1)
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(404)] if r.digest == shards[-2] else None
        with pytest.raises(NetworkError):
            pull(tmp_path, run, server)
    ref, (made,) = publish(run, stepped(run.files[1], 2), 1)
    store = Store(tmp_path, run.name)
    assert run.head is not None
    ways = Ways(store, lambda: run.head.versions if run.head else ())
    here = store.stored(1)
    assert here is not None
    first = run.head.versions[1]
    left = ways.ahead(Wanted(first, here.version)).bytes
    from tests.deltas import layout_of

    assert 0 < left <= SHARD
    digest, layout = layout_of(run, ref)
    digests = tuple(
        digest_of(run.files[2][e.path][e.offset : e.offset + e.length]) for e in layout.extents()
    )
    from shardcast.protocol.manifest import Version

    version = Version(layout, digest, digests, ref.manifest, ())
    assert ways.ahead(Wanted(ref, version)).bytes <= left + made.bytes + 1
    store.close()


def test_what_leads_to_the_newer_version_is_not_dropped_for_it(
    tmp_path: Path, run: FakeRun
) -> None:
    """Version 1 is half here, and version 2 a delta away from it: version 1 is finished first."""
    from shardcast.effort import Effort
    from shardcast.plan_work import Tally
    from shardcast.protocol.manifest import Version
    from shardcast.ways import Wanted, Ways
    from tests.deltas import layout_of

    shards = run.shard_digests(1)
    with RunServer(run) as server:
        server.fault = lambda r, _: [response(404)] if r.digest == shards[-2] else None
        with pytest.raises(NetworkError):
            pull(tmp_path, run, server)
    ref, _ = publish(run, stepped(run.files[1], 2), 1)
    assert run.head is not None
    digest, layout = layout_of(run, ref)
    digests = tuple(
        digest_of(run.files[2][e.path][e.offset : e.offset + e.length]) for e in layout.extents()
    )
    newer = Wanted(ref, Version(layout, digest, digests, ref.manifest, ()))
    store = RunStore(tmp_path, run.name)
    here = store.stored(1)
    assert here is not None
    listed = list(run.head.versions)
    for over in (True, False):  # once version 1 has left the head nobody can go over it
        versions = listed if over else [entry for entry in listed if entry.version == 2]
        effort = Effort(Ways(store, lambda versions=versions: versions).ahead)  # type: ignore[misc]
        with effort.on(Wanted(listed[1], here.version), Tally(fetched_bytes=1 << 30), []):
            assert effort.switch_to(newer) is not over
    store.close()

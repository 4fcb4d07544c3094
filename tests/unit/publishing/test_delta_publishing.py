"""Publications announce deltas that rebuild the version, and nothing that does not."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcast import delta_making, keys
from shardcast.codec.encode import encode_frame
from shardcast.deltas import frame_runs, run_bytes
from shardcast.errors import DiskFullError, ModifiedError, UsageError
from shardcast.hashing import ShardHash
from shardcast.protocol.envelope import Signer
from shardcast.protocol.head import DeltaRef, Head
from shardcast.publisher import publish_directory
from shardcast.publishing import Published, PublishOptions, SilentObserver
from shardcast.store.run import RunStore
from tests.models import U16, changed_elements, make_model, real_steps, step, write_model
from tests.unit.publishing.conftest import Clock
from tests.unit.publishing.rebuilding import load, not_in_base, parts_of, rebuild
from tests.unit.publishing.test_publisher import head_of

KIB = 1024
Publish = Callable[..., Published]


class Listener(SilentObserver):
    """Remembers what people were told."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def noticed(self, message: str) -> None:
        self.notices.append(message)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def publish(
    tmp_path: Path, run: RunStore, signer: Signer, clock: Clock, listener: Listener
) -> Publish:
    """Publishes a model, or what lies in the directory already."""

    def do(model: dict[str, U16] | None = None, **options: Any) -> Published:
        source = tmp_path / "model"
        if model is not None:
            write_model(source / "model.safetensors", model)
        return publish_directory(
            PublishOptions(source=source, **options), run, [signer], clock, listener
        )

    return do


def only_delta(done: Published) -> DeltaRef:
    (delta,) = done.ref.deltas
    return delta


def check(run: RunStore, head: Head, number: int) -> dict[int | None, set[int]]:
    """Rebuild a version by each of its deltas; return which shards each one made."""
    ref = head.ref(number)
    assert ref is not None
    target = load(run, ref)
    made: dict[int | None, set[int]] = {}
    for delta in ref.deltas:
        base_ref = None if delta.base_version is None else head.ref(delta.base_version)
        base = None if base_ref is None else load(run, base_ref)
        directory = None if base is None else run.version_directory(base.number)
        found = rebuild(run, target, delta, base, directory)
        made[delta.base_version] = set(found)
        weight = sum(blob.bytes for p in parts_of(run, target, delta) for blob in p.blobs)
        documents = sum(run.blob_path(digest).stat().st_size for digest in delta.parts)
        left = not_in_base(target, base) - set(found)
        plain = {target.digests[s]: target.layout.extent(s).length for s in left}
        assert delta.bytes == weight + documents + sum(plain.values())
    return made


# --- what is announced ------------------------------------------------------------------------


def test_a_step_is_announced_with_a_delta_that_rebuilds_it(publish: Publish, run: RunStore) -> None:
    old = make_model()
    new = step(old, 1)
    assert publish(old).ref.deltas == []  # nothing to start from
    done = publish(new)
    delta = only_delta(done)
    assert (delta.base, delta.base_version) == (head_of(run).versions[1].manifest, 1)
    assert delta.bytes < 1.5 * changed_elements(old, new)
    target = load(run, done.ref)
    assert check(run, head_of(run), 2) == {1: set(range(target.layout.shard_count))}
    assert done.deltas[0].rebuilt == target.layout.shard_count
    assert done.deltas[0].ratio == done.ref.bytes / delta.bytes


def test_the_head_never_comes_before_what_it_names(
    publish: Publish, run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(make_model())
    order: list[str] = []
    blob, head = RunStore.write_blob, RunStore.write_head

    def write_blob(self: RunStore, digest: str, data: bytes) -> None:
        kind = data[:20].decode("latin-1").partition("/")[0].rpartition(".")[2]
        order.append("data" if data.startswith(b"SCF1") else kind)
        blob(self, digest, data)

    def write_head(self: RunStore, envelope: bytes) -> None:
        order.append("head")
        head(self, envelope)

    monkeypatch.setattr(RunStore, "write_blob", write_blob)
    monkeypatch.setattr(RunStore, "write_head", write_head)
    publish(step(make_model(), 1))
    kinds = list(dict.fromkeys(order))
    assert kinds[0] == "data"
    assert kinds[1].startswith("{")  # the delta part
    assert kinds[-1] == "head"
    assert order.count("head") == 1


def test_an_unchanged_version_costs_nothing(publish: Publish, run: RunStore) -> None:
    publish(make_model())
    delta = only_delta(publish())
    assert (delta.parts, delta.bytes) == ([], 0)
    assert len(run.blobs()) == 2 * 3  # layout, part and manifest of each


def test_unchanged_shards_are_left_out_and_rebuilt_ones_are_not(
    publish: Publish, run: RunStore
) -> None:
    old = make_model(tensors=4)
    new = dict(old, **{"layer.3": step(old, 1)["layer.3"]})
    publish(old)
    done = publish(new)
    target = load(run, done.ref)
    changed = not_in_base(target, load(run, head_of(run).versions[1]))
    assert check(run, head_of(run), 2) == {1: changed}
    assert 0 < len(changed) < target.layout.shard_count
    assert done.deltas[0].same == target.layout.shard_count - len(changed)


def test_what_does_not_compress_is_left_out(
    publish: Publish, run: RunStore, tmp_path: Path
) -> None:
    path = tmp_path / "model" / "noise.bin"
    path.parent.mkdir()
    path.write_bytes(os.urandom(20 << 20))
    model = make_model()
    publish(model)
    path.write_bytes(os.urandom(20 << 20))
    done = publish(step(model, 1))
    target = load(run, done.ref)
    (made,) = check(run, head_of(run), 2).values()
    noise = {e.shard for e in target.layout.extents() if e.path == "noise.bin"}
    assert len(made & noise) < 3 * len(made - noise)  # as much as sparse shards may drag along
    assert done.deltas[0].plain == len(noise - made)
    assert sum(p.stat().st_size for p in (run.root / "blobs").iterdir()) < 6 << 20


def test_all_new_noise_is_announced_without_a_delta(publish: Publish, tmp_path: Path) -> None:
    path = tmp_path / "model" / "noise.bin"
    path.parent.mkdir()
    for _ in range(2):
        path.write_bytes(os.urandom(2 << 20))
        assert publish().ref.deltas == []


def test_no_delta_means_none(publish: Publish, run: RunStore) -> None:
    publish(make_model())
    assert publish(step(make_model(), 1), delta=False).ref.deltas == []
    assert len(run.blobs()) == 2 * 3


# --- layouts that change ----------------------------------------------------------------------


def test_a_longer_header_moves_every_tensor_and_costs_little(
    publish: Publish, run: RunStore, tmp_path: Path
) -> None:
    old = make_model()
    new = step(old, 1)
    publish(old)
    write_model(tmp_path / "model" / "model.safetensors", new, metadata={"step": "100" * 4})
    delta = only_delta(publish())
    assert delta.bytes < 1.5 * changed_elements(old, new) + 400
    check(run, head_of(run), 2)


def test_tensors_spread_over_other_files_start_from_where_they_were(
    publish: Publish, run: RunStore, tmp_path: Path
) -> None:
    old = make_model(tensors=4)
    new = step(old, 1)
    publish(old)
    names = list(new)
    (tmp_path / "model" / "model.safetensors").unlink()
    for number, some in enumerate((names[2:], names[:2])):
        write_model(tmp_path / "model" / f"{number}.safetensors", {n: new[n] for n in some})
    delta = only_delta(publish())
    assert delta.bytes < 1.5 * changed_elements(old, new) + 1200
    check(run, head_of(run), 2)


def test_a_tensor_that_is_new_is_coded_without_a_base(publish: Publish, run: RunStore) -> None:
    old = make_model()
    new = {**step(old, 1), "added": make_model(7)["layer.0"]}
    publish(old)
    delta = only_delta(publish(new))
    assert delta.bytes < 1.5 * changed_elements(old, step(old, 1)) + new["added"].nbytes
    check(run, head_of(run), 2)


@pytest.mark.parametrize("elements", [8, 130_000, 5_000_000])
def test_sizes(publish: Publish, run: RunStore, elements: int) -> None:
    """Less than a shard; one frame; shards of another size than the version before had."""
    old = make_model(elements=elements, tensors=2)
    publish(make_model(elements=200_000, tensors=1))
    publish(old)
    publish(step(old, 1))
    head = head_of(run)
    # A delta starts from the base: of 5 million elements it has too few, of 8 a delta saves nothing.
    assert [len(check(run, head, number)) for number in (2, 3)] == [elements == 130_000, 1]


def test_a_frame_holds_16_mib_and_blobs_follow_each_other(publish: Publish, run: RunStore) -> None:
    old = make_model(elements=6_000_000, tensors=4)  # 48 MB
    publish(old)
    done = publish({name: np.roll(values, 1) for name, values in old.items()})  # all is dense
    target = load(run, done.ref)
    (made,) = check(run, head_of(run), 2).values()
    assert made == set(range(target.layout.shard_count))
    (part,) = parts_of(run, target, only_delta(done))
    assert len(part.blobs) == 3  # a dense frame fills a blob


# --- more bases, a compressed copy ------------------------------------------------------------


def test_further_bases_and_a_copy_are_announced_by_a_second_head(
    publish: Publish, run: RunStore
) -> None:
    model = make_model()
    for seed in range(3):
        model = step(model, seed)
        publish(model, delta_bases=(2, 4, 8), compress=True)
    model = step(model, 3)
    done = publish(model, delta_bases=(2, 4, 8), compress=True)
    head = head_of(run)
    assert [delta.base_version for delta in done.ref.deltas] == [3, 2, None]
    assert head.versions[0] == done.ref
    made = check(run, head, 4)
    assert made[None] == set(range(load(run, done.ref).layout.shard_count))
    sizes = {delta.base_version: delta.bytes for delta in done.ref.deltas}
    assert sizes[3] is not None
    assert sizes[3] < sizes[2] < 2 * sizes[3]
    assert sizes[None] < 0.8 * done.ref.bytes
    done = publish(step(model, 9), delta_bases=(2, 4, 8))
    assert [delta.base_version for delta in done.ref.deltas] == [4, 3, 1]  # still here at the time
    assert head_of(run).ref(1) is None


def test_the_announcement_does_not_wait_for_further_bases(
    publish: Publish, run: RunStore, monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    model = make_model()
    publish(model)
    publish(step(model, 1))
    announced: list[list[int | None]] = []
    real = delta_making.make_delta

    def look_first(*args: Any, **named: Any) -> Any:
        announced.append([delta.base_version for delta in head_of(run).versions[0].deltas])
        if len(announced) == 2:
            raise DiskFullError("no room")
        return real(*args, **named)

    monkeypatch.setattr("shardcast.delta_publishing.make_delta", look_first)
    done = publish(step(model, 2), delta_bases=(2,), compress=True)
    assert announced == [[2], [2]]
    assert [delta.base_version for delta in done.ref.deltas] == [2, 1]
    assert any("no room" in notice for notice in listener.notices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta_bases": (0,)}, "from 1 to 64"),
        ({"delta_bases": (65,)}, "from 1 to 64"),
        ({"delta_bases": tuple(range(2, 17))}, "at most 14"),
        ({"delta_bases": (2,), "delta": False}, "--no-delta"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PublishOptions(source=tmp_path, **options)


# --- bases that are not what they should be ---------------------------------------------------


def flip(path: Path, offset: int) -> None:
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0x40]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_damaged_base_costs_the_shards_that_start_from_it(
    publish: Publish, run: RunStore, listener: Listener, tmp_path: Path, recorded: bool
) -> None:
    model = make_model()
    publish(model)
    good = tmp_path / "good"
    shutil.copytree(run.version_directory(1), good)
    flip(run.version_directory(1) / "model.safetensors", 300 * KIB)
    if not recorded:  # without its journal, the base's digests tell
        run.close()
        (run.root / "state" / "000001.shards").unlink()
    done = publish(step(model, 1))
    head = head_of(run)
    target, base = load(run, head.versions[0]), load(run, head.versions[1])
    found = rebuild(run, target, only_delta(done), base, good)
    assert set(range(target.layout.shard_count)) - set(found) == {1}
    assert done.deltas[0].plain == 1
    assert any("base is damaged" in notice for notice in listener.notices)


def test_a_base_that_is_gone_or_cut_off_is_no_reason_to_fail(
    publish: Publish, run: RunStore, listener: Listener
) -> None:
    model = make_model()
    publish(model)
    os.truncate(run.version_directory(1) / "model.safetensors", 10)
    assert publish(step(model, 1)).ref.deltas == []
    run.close()
    shutil.rmtree(run.version_directory(2))
    assert publish(step(model, 2)).ref.deltas == []
    assert any("version 2: it is not here" in notice for notice in listener.notices)
    assert len(only_delta(publish(step(model, 3))).parts) == 1


def test_a_base_under_a_link_that_the_trainer_wrote_into_is_damaged(
    publish: Publish, run: RunStore, listener: Listener
) -> None:
    model = make_model()
    publish(model, link=True)
    done = publish(step(model, 1), link=True)  # into the same file: version 1 is lost
    assert done.ref.deltas == []
    assert any("base is damaged" in notice for notice in listener.notices)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_codec_that_errs_is_found_out_before_anything_is_announced(
    publish: Publish,
    run: RunStore,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    model = make_model()
    publish(model)

    def wrong(new: memoryview, *args: Any) -> bytes:
        if fault == "raises":
            raise ZeroDivisionError("a bug")
        other = bytearray(new)
        other[len(other) // 2] ^= 1
        return encode_frame(memoryview(other), *args)

    monkeypatch.setattr(delta_making, "encode_frame", wrong)
    done = publish(step(model, 1))
    assert done.ref.deltas == []
    assert run.committed() == [2, 1]
    said = "ZeroDivisionError" if fault == "raises" else "does not rebuild"
    assert any(said in notice for notice in listener.notices)


# --- trouble on the way -----------------------------------------------------------------------


def test_a_disk_without_room_for_deltas_publishes_without(
    publish: Publish, run: RunStore, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(make_model())
    real = RunStore.write_blob

    def full(self: RunStore, digest: str, data: bytes) -> None:
        if data.startswith(b"SCF1"):
            raise DiskFullError(os.strerror(errno.ENOSPC))
        real(self, digest, data)

    monkeypatch.setattr(RunStore, "write_blob", full)
    assert publish(step(make_model(), 1)).ref.deltas == []
    assert any("No space" in notice for notice in listener.notices)
    assert head_of(run).version == 2


def test_a_disk_that_fills_up_with_deltas_publishes_without(
    publish: Publish, run: RunStore, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first blob finds room, the second does not, the last part of the way is not gone."""
    old = make_model(elements=6_000_000, tensors=4)
    publish(old)
    real = RunStore.write_blob
    written: list[str] = []

    def full(self: RunStore, digest: str, data: bytes) -> None:
        if data.startswith(b"SCF1"):
            if written:
                raise DiskFullError(os.strerror(errno.ENOSPC))
            written.append(digest)
        real(self, digest, data)

    monkeypatch.setattr(RunStore, "write_blob", full)
    new = {name: np.roll(values, 1) for name, values in old.items()}
    assert publish(new, threads=1).ref.deltas == []
    assert len([notice for notice in listener.notices if "No space" in notice]) == 1
    assert written
    assert not run.has_blob(written[0])  # collected


def test_a_part_that_cannot_be_written_costs_the_delta(
    publish: Publish, run: RunStore, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(make_model())
    real = RunStore.write_blob

    def full(self: RunStore, digest: str, data: bytes) -> None:
        if b"shardcast.delta/1" in data[:40]:
            raise DiskFullError(os.strerror(errno.ENOSPC))
        real(self, digest, data)

    monkeypatch.setattr(RunStore, "write_blob", full)
    done = publish(step(make_model(), 1), compress=True)
    assert (done.ref.deltas, done.deltas) == ([], ())
    assert len([notice for notice in listener.notices if "No space" in notice]) == 2
    assert len(run.blobs()) == 2 * 3


def test_frames_done_early_wait_for_those_before_them(
    publish: Publish, run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no more than a few wait in memory, however long one takes."""
    monkeypatch.setattr(delta_making, "RUN_AHEAD", 1)
    done = publish(make_model(elements=6_000_000, tensors=4))
    stored = run.stored(1)
    assert stored is not None
    layout = stored.version.layout
    runs = frame_runs(layout)
    kept: dict[str, bytes] = {}
    tensors = delta_making.tensors_of(layout, lambda file: stored.directory / "model.safetensors")
    maker = delta_making.DeltaMaker("0" * 64, tensors, None, kept.__setitem__, threads=1)
    data = memoryview((stored.directory / "model.safetensors").read_bytes())

    def use(shards: range, stopping: Callable[[], bool] = lambda: False) -> None:
        start = layout.extent(shards.start).offset
        stop = start + run_bytes(layout, shards)
        hashes = [ShardHash(stored.version.digests[shard] or "", b"") for shard in shards]
        maker.use(shards, data[start:stop], hashes, stopping)

    stop = threading.Event()
    given_up = threading.Thread(target=use, args=(runs[1], stop.is_set))
    given_up.start()
    stop.set()
    given_up.join(timeout=30)
    assert not given_up.is_alive()
    late = threading.Thread(target=use, args=(runs[1],))
    late.start()
    use(runs[0])
    late.join(timeout=30)
    assert not late.is_alive()
    use(runs[2])
    delta = maker.finish(stored.version)
    assert delta is not None
    assert set(delta.blobs) == set(kept)
    assert delta.rebuilt == layout.shard_count
    assert done.ref.bytes > delta.ref.bytes


@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_changes_while_a_delta_is_made_is_detected(
    publish: Publish, run: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    publish(make_model())
    before = run.read_head()

    def change(*args: Any) -> bytes:
        with open(tmp_path / "model" / "model.safetensors", "r+b") as file:
            file.seek(400 * KIB)
            file.write(b"another step")
        return encode_frame(*args)

    monkeypatch.setattr(delta_making, "encode_frame", change)
    with pytest.raises(ModifiedError):
        publish(step(make_model(), 1), link=link)
    assert run.read_head() == before


def test_deltas_of_dropped_versions_are_collected(publish: Publish, run: RunStore) -> None:
    model = make_model()
    for seed in range(5):
        model = step(model, seed)
        publish(model, keep=2, delta_bases=(2,), compress=True)
    head = head_of(run)
    named = {ref.manifest for ref in head.versions}
    for ref in head.versions:
        target = load(run, ref)
        named |= set(target.documents)
        for delta in ref.deltas:
            named |= set(delta.parts)
            named |= {blob.digest for p in parts_of(run, target, delta) for blob in p.blobs}
    assert set(run.blobs()) == named
    assert run.committed() == [5, 4]


_KILL_SCRIPT = """
import os, signal, sys
from pathlib import Path
from shardcast import delta_making, delta_publishing, keys, publisher, publishing
from shardcast.store.run import RunStore
from shardcast.store.store import Store

store, source, key, where = sys.argv[1:]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

real = RunStore.write_blob

def after_blob(self, digest, data):
    real(self, digest, data)
    if data.startswith(b"SCF1"):
        die()

def after_part(self, digest, data):
    real(self, digest, data)
    if b"shardcast.delta/1" in data[:40]:
        die()

if where == "blob":
    RunStore.write_blob = after_blob
elif where == "part":
    RunStore.write_blob = after_part
elif where == "encoding":
    delta_making.decode_frame_into = die
elif where == "further":
    delta_publishing.make_delta = die
signers = keys.load_signers(Path(key), 0)
run = Store(Path(store)).run("default")
publisher.publish_directory(
    publishing.PublishOptions(source=Path(source), compress=True), run, signers,
    lambda: 1_800_000_100_000,
)
"""


@pytest.mark.parametrize("where", ["encoding", "blob", "part", "further"])
def test_a_kill_announces_nothing_that_is_not_there_and_leaves_nothing_behind(
    tmp_path: Path, run: RunStore, clock: Clock, where: str
) -> None:
    key, _ = keys.generate(tmp_path / "k")
    signer = keys.load_signer(key)
    source = tmp_path / "model"
    write_model(source / "model.safetensors", make_model())
    publish_directory(PublishOptions(source=source), run, [signer], clock)
    write_model(source / "model.safetensors", step(make_model(), 1))
    ended = subprocess.run(
        [sys.executable, "-c", _KILL_SCRIPT, str(run.root.parent), str(source), str(key), where],
        check=False,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL
    fresh = RunStore(run.root, run.run)
    newest = head_of(fresh).version
    assert newest == (2 if where == "further" else 1)
    check(fresh, head_of(fresh), newest)
    clock.now += 200_000
    done = publish_directory(PublishOptions(source=source), fresh, [signer], clock)
    assert done.ref.version == newest + 1
    check(fresh, head_of(fresh), done.ref.version)
    assert len(fresh.blobs()) == sum(
        3 + len(delta.parts) * 2 for ref in head_of(fresh).versions for delta in ref.deltas
    ) + (3 if len(head_of(fresh).versions) > 1 else 0)


# --- real steps -------------------------------------------------------------------------------


def test_real_fine_tuning_steps_cost_less_than_a_byte_per_changed_element(
    publish: Publish, run: RunStore, tmp_path: Path, signer: Signer, clock: Clock
) -> None:
    steps = real_steps(tmp_path / "steps", 0, 3)
    if not steps:
        pytest.skip("the real steps are not beside the repository")
    made = [
        publish_directory(PublishOptions(source=directory), run, [signer], clock)
        for directory in steps
    ]
    travelled = changed = 0
    for old, new in itertools.pairwise(steps):
        a, b = (np.fromfile(s / "model.safetensors", np.uint16) for s in (old, new))
        changed += int((a != b).sum())
    head = head_of(run)
    for ref in head.versions[:-1]:
        travelled += ref.deltas[0].bytes
        check(run, head, ref.version)
    assert travelled <= 0.98 * changed
    assert made[-1].deltas[0].same == 2  # the configuration, and one shard of the model

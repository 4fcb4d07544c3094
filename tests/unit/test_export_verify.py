"""Export and verification of a version that is still being published."""

from pathlib import Path

import msgspec
import pytest
import xxhash

from shardcast import keys, publisher, publishing, verify
from shardcast.export import export_run
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified, seal
from shardcast.protocol.head import OpenRef, decode_head, encode_head
from shardcast.protocol.layout import FileEntry, Layout, encode_layout, encode_part
from shardcast.protocol.manifest import Version
from shardcast.store.run import RunStore

SHARD = 256 * 1024
NOW = 1_700_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    """Version 1 complete; version 2 open: of its three shards two are named, one is here."""
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / "model.bin").write_bytes(b"1" * 2 * SHARD)
    signer = keys.load_signer(keys.generate(tmp_path / "keys")[0])
    store = RunStore(tmp_path / "store/policy", "policy")
    options = publishing.PublishOptions(source=ckpt, include=["*.bin"])
    publisher.publish_directory(options, store, [signer], lambda: NOW)
    shards = [bytes([65 + n]) * SHARD for n in range(3)]
    layout = Layout(
        run="policy",
        version=2,
        step=None,
        lineage="x",
        created_at=NOW,
        shard_bytes=SHARD,
        metadata={},
        files=[FileEntry(path="model.bin", bytes=3 * SHARD)],
    )
    data = encode_layout(layout)
    part = encode_part(digest_of(data), 0, [digest_of(shard) for shard in shards[:2]])
    for document in (data, part):
        store.write_blob(digest_of(document), document)
    version = Version(
        layout=layout,
        layout_digest=digest_of(data),
        digests=(digest_of(shards[0]), digest_of(shards[1]), None),
        manifest=None,
        documents=(digest_of(data), digest_of(part)),
    )
    stored = store.stage(version)
    with (stored.directory / "model.bin").open("r+b") as file:
        file.write(shards[0])
    stored.record(0, xxhash.xxh3_128(shards[0]).digest())
    head = decode_head(open_unverified(store.read_head() or b"")[1])
    opened = msgspec.structs.replace(
        head,
        sequence=head.sequence + 1,
        open=OpenRef(
            version=2, step=None, layout=digest_of(data), parts=[digest_of(part)], deltas=[]
        ),
    )
    store.write_head(seal(encode_head(opened), [signer]))
    return store


def test_of_an_open_version_what_is_here_is_exported(run: RunStore, tmp_path: Path) -> None:
    written: list[int] = []
    done = export_run(run, tmp_path / "out", progress=written.append)
    blobs = {path.name for path in (tmp_path / "out/v1/policy/blobs").iterdir()}
    assert f"{digest_of(b'A' * SHARD)}.bin" in blobs
    assert f"{digest_of(b'B' * SHARD)}.bin" not in blobs
    assert done.head.open is not None
    assert f"{done.head.open.layout}.bin" in blobs
    assert sum(written) == done.written_bytes
    for path in (tmp_path / "out/v1/policy/blobs").iterdir():
        assert digest_of(path.read_bytes()) == path.stem


def test_of_a_staged_version_recorded_shards_are_verified(run: RunStore) -> None:
    report = verify.verify_directory(run.root)
    assert report.damage == []
    assert ("policy", 2) in report.versions
    path = run.staging_directory(2) / "model.bin"
    with path.open("r+b") as file:
        file.write(b"x")
    (damage,) = verify.verify_directory(run.root.parent).damage
    assert (damage.version, damage.path, damage.shard) == (2, "model.bin", 0)
    path.unlink()
    assert verify.verify_directory(run.root).damage == []  # it is fetched again: nothing is lost


def test_a_run_without_a_head_is_named_by_its_trust(run: RunStore) -> None:
    (run.root / "head.json").unlink()
    report = verify.verify_directory(run.root)
    assert report.runs == ["policy"]
    assert report.unsigned == []


def test_what_cannot_be_read_is_damage(run: RunStore) -> None:
    (run.root / "versions/000001/model.bin").unlink()
    (run.root / "versions/000001/model.bin").mkdir()
    reasons = {one.reason for one in verify.verify_directory(run.root).damage}
    assert any("unreadable" in reason for reason in reasons)

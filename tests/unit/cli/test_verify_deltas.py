"""``verify`` and the deltas that a head announces: what of them is gone, or damaged."""

import shutil
from pathlib import Path

import pytest

from shardcast.announced_deltas import lacking_deltas
from shardcast.protocol.delta import decode_delta_part
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import DeltaRef, decode_head
from shardcast.store.roles import Role, claim_role
from shardcast.store.run import RunStore
from tests.models import make_model, step, write_model
from tests.unit.cli.conftest import Cli


@pytest.fixture
def store(cli: Cli, tmp_path: Path) -> Path:
    """An origin's: version 1, and version 2 with a delta from it and a compressed copy."""
    model, path = make_model(), tmp_path / "m" / "model.safetensors"
    for seed, options in ((0, ()), (1, ("--compress",))):
        write_model(path, step(model, seed) if seed else model)
        assert cli("publish", path.parent, "--store", tmp_path / "s", *options).code == 0
    return tmp_path / "s"


def run_of(store: Path) -> RunStore:
    return RunStore(store / "default", "default")


def deltas_of(store: Path) -> tuple[DeltaRef, DeltaRef]:
    """The delta and the compressed copy of version 2."""
    data = run_of(store).read_head()
    assert data is not None
    delta, copy = decode_head(open_unverified(data)[1]).versions[0].deltas
    assert (delta.base_version, copy.base_version) == (1, None)
    return delta, copy


def blobs_of(store: Path, delta: DeltaRef) -> list[str]:
    data = run_of(store).read_blob(delta.parts[0])
    assert data is not None
    return [blob.digest for blob in decode_delta_part(data).blobs]


def drop(store: Path, digest: str) -> str:
    """Loses a document or delta blob; returns how it is named."""
    run_of(store).blob_path(digest).unlink()
    return f"blobs/{digest}.bin"


def test_a_delta_blob_that_an_origin_lost_is_damage(cli: Cli, store: Path) -> None:
    delta, copy = deltas_of(store)
    first = drop(store, blobs_of(store, delta)[0])
    second = drop(store, copy.parts[0])
    ran = cli("verify", store, "--json")
    assert ran.code == 11
    damaged = [event for event in ran.events if event["event"] == "damaged"]
    reasons = {event["path"]: (event["version"], event["reason"]) for event in damaged}
    assert reasons == {
        first: (2, "missing: the delta from version 1 of version 2 needs it"),
        second: (2, "missing: the compressed copy of version 2 needs it"),
    }
    assert {event["path"]: event["stop"] > 0 for event in damaged} == {first: True, second: False}
    assert ran.event("verified")["lacking"] == []
    assert f"run default version 2: {first}" in cli("verify", store / "default").stdout
    assert cli("verify", store / "default/versions/000001").code == 0  # it stands without them
    assert cli("verify", store / "default/versions/000002").code == 11


def test_a_delta_part_that_is_damaged_is_told_once_and_left_in_place(cli: Cli, store: Path) -> None:
    path = run_of(store).blob_path(deltas_of(store)[0].parts[0])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    ran = cli("verify", store, "--json")
    assert ran.code == 11
    damaged = [event for event in ran.events if event["event"] == "damaged"]
    assert [event["path"] for event in damaged] == [f"blobs/{path.name}"]
    assert path.exists()


def test_a_relay_may_lack_what_it_can_fetch(cli: Cli, store: Path) -> None:
    claim_role(store, Role.RELAY, take_over=True)
    drop(store, blobs_of(store, deltas_of(store)[0])[0])
    ran = cli("verify", store, "--json")
    assert ran.code == 0
    assert ran.event("verified")["lacking"] == [
        {"run": "default", "version": 2, "base_version": 1, "blobs": 1}
    ]
    assert "the delta from version 1 of version 2 is not whole here: 1 blob" in ran.stderr


def test_a_worker_keeps_no_deltas(cli: Cli, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "workers" / "out"
    shutil.copytree(store / "default", out)
    for delta in deltas_of(store):
        for digest in (*blobs_of(store, delta), *delta.parts):
            (out / "blobs" / f"{digest}.bin").unlink()
    ran = cli("verify", out, "--json")
    assert ran.code == 0
    assert ran.event("verified")["lacking"] == []
    assert ran.stderr == ""


def test_what_a_new_head_let_go_of_while_it_was_looked_for_is_not_lacking(
    cli: Cli, store: Path, tmp_path: Path
) -> None:
    before = run_of(store).read_head()
    assert before is not None
    cli("publish", tmp_path / "m", "--store", store, "--keep", "1", "--no-delta")

    class Late(RunStore):
        """Reads the head that the publisher replaced, the first time."""

        reads = 0

        def read_head(self) -> bytes | None:
            self.reads += 1
            return before if self.reads == 1 else super().read_head()

    late = Late(store / "default", "default")
    assert lacking_deltas(late, None, ()) == []
    assert late.reads == 3

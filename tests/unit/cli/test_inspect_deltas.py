"""`inspect` looks into deltas: from the head, from their documents, and tensor by tensor."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_publishing import serving
from tests.unit.safetensors import safetensors, write

SIZE = 3 * 256 * 1024
OLD = bytes(range(256)) * (SIZE // 256)
TAIL = bytes(reversed(range(256))) * 4000


def model(*places: int) -> dict[str, bytes]:
    data = bytearray(OLD)
    for at in places:
        data[at] ^= 1
    tensors = {
        "first": ("BF16", [SIZE // 2], bytes(data)),
        "second": ("F32", [len(TAIL) // 4], TAIL),
    }
    return {"model.safetensors": safetensors(tensors), "config.json": b"{}"}


@pytest.fixture
def www(cli: Cli, tmp_path: Path) -> Iterator[str]:
    """A static server with three versions: five elements, then two more."""
    store = tmp_path / "store"
    for places in ((), (1, 3, 100_000, 500_000, 700_001), (1, 3, 100_000, 500_000, 700_001, 9, 11)):
        write(tmp_path / "ckpt", model(*places))
        published = cli("publish", tmp_path / "ckpt", "--run", "policy", "--store", store)
        assert published.code == 0, published.stderr
    assert cli("export", "policy", "--store", store, "--out", tmp_path / "www").code == 0
    with serving(tmp_path / "www") as url:
        yield url


def test_inspect_shows_the_deltas_of_each_version(cli: Cli, www: str) -> None:
    event = cli("inspect", "policy", "--from", www, "--json").event("inspected")
    (delta,) = event["deltas"]
    assert (delta["base_version"], delta["codecs"], delta["problem"]) == (2, ["scf/1"], None)
    assert delta["blobs"] == 1
    assert 0 < delta["blob_bytes"] < delta["bytes"] < 2000
    lines = cli("inspect", "policy", "--from", www).stdout.splitlines()
    (row,) = [line.split() for line in lines if "scf/1" in line]
    assert row[0] == "2"
    assert any(line.split()[:2] == ["VERSION", "STEP"] and "RATIO" in line for line in lines)
    older = cli("inspect", "policy", "--from", www, "--version", 1, "--json").event("inspected")
    assert older["deltas"] == []


def test_inspect_counts_what_a_delta_changes_in_each_tensor(cli: Cli, www: str) -> None:
    ran = cli("inspect", "policy", "--from", www, "--version", 2, "--tensors", "--json")
    assert ran.code == 0
    tensors = {event["tensor"]: event for event in ran.events if event["event"] == "tensor"}
    assert tensors["first"].items() >= {
        "changed": 5, "compared": SIZE // 2, "change": "changed", "codec": "changes",
    }.items()  # fmt: skip
    assert tensors["second"].items() >= {"changed": 0, "change": "same", "wire_bytes": 0}.items()
    (delta,) = ran.event("inspected")["deltas"]
    assert 0 < tensors["first"]["wire_bytes"] <= delta["blob_bytes"]
    shown = cli("inspect", "policy", "--from", www, "--tensors").stdout
    assert "delta from version 2" in shown
    assert "2 of " in shown


def test_inspect_without_a_delta_to_look_into_says_so(cli: Cli, www: str) -> None:
    ran = cli("inspect", "policy", "--from", www, "--version", 1, "--tensors")
    assert ran.code == 2
    assert "no delta whose base the head retains" in ran.stderr


def test_a_delta_that_cannot_be_had_is_named(cli: Cli, www: str, tmp_path: Path) -> None:
    blobs = tmp_path / "www" / "v1" / "policy" / "blobs"
    for blob in blobs.iterdir():
        if b"shardcast.delta/1" in blob.read_bytes()[:200]:
            blob.write_bytes(b"x" * blob.stat().st_size)
    ran = cli("inspect", "policy", "--from", www, "--json")
    assert ran.code == 0
    assert ran.event("inspected")["deltas"][0]["problem"]
    assert cli("inspect", "policy", "--from", www, "--tensors").code == 2


def test_a_blob_that_was_spoiled_ends_with_11_and_never_reaches_the_decoder(
    cli: Cli, www: str, tmp_path: Path
) -> None:
    blobs = tmp_path / "www" / "v1" / "policy" / "blobs"
    for blob in blobs.iterdir():
        data = blob.read_bytes()
        if data[:4] == b"SCF1":
            blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert cli("inspect", "policy", "--from", www, "--tensors").code == 11

"""The demonstration's checkpoints, judged by the safetensors package and by arithmetic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from shardcast.demo import checkpoint, training
from shardcast.demo.safetensors import Tensor, encode_header, read_spans
from shardcast.errors import MalformedError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoint.write_checkpoint(directory, 8_000_000)
    return directory


def read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Its tensors as the reference implementation reads them."""
    entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return entries


def tensors_of(path: Path) -> dict[str, bytes]:
    """The bytes of its tensors by name."""
    return {name: bytes(entry["data"]) for name, entry in read(path)}


def weights(directory: Path) -> np.ndarray:
    parts = [
        np.frombuffer(data, "<u2")
        for path in sorted(directory.glob("*.safetensors"))
        for _, data in sorted(tensors_of(path).items())
    ]
    return np.concatenate(parts)


def test_the_reference_implementation_reads_every_file(model: Path) -> None:
    files = sorted(model.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    index = json.loads((model / "model.safetensors.index.json").read_text())
    found = {name: path.name for path in files for name in tensors_of(path)}
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == weights(model).nbytes
    for path in files:
        for name, entry in read(path):
            assert entry["dtype"] == "BF16"
            planned = {t.name: list(t.shape) for t in checkpoint.plan_tensors(8_000_000)}
            assert entry["shape"] == planned[name]


@pytest.mark.parametrize("wanted", [1_000_000, 20_000_000, 200_000_000, 10_000_000_000])
def test_the_size_is_about_what_was_asked_for(wanted: int) -> None:
    total = sum(tensor.elements * 2 for tensor in checkpoint.plan_tensors(wanted))
    assert 0.7 * wanted < total < 1.3 * wanted


def test_the_same_arguments_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    checkpoint.write_checkpoint(tmp_path / "again", 8_000_000)
    checkpoint.write_checkpoint(tmp_path / "other", 8_000_000, seed=1)
    for path in model.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    name = "model-00002-of-00004.safetensors"
    assert (tmp_path / "other" / name).read_bytes() != (model / name).read_bytes()


def test_weights_are_normal_with_the_sigma_of_initialisation(model: Path) -> None:
    name = "lm_head.weight"
    data = tensors_of(model / "model-00004-of-00004.safetensors")[name]
    values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    assert abs(float(values.std()) - 0.02) < 0.0005
    assert abs(float(values.mean())) < 0.0005


def test_rounding_is_to_nearest_even() -> None:
    # IEEE 754: 1 + 2^-8 lies halfway between 1 and 1 + 2^-7; ties go to the even significand.
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8], np.float32)
    assert checkpoint.round_to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80]


# --- updates ----------------------------------------------------------------------------------


def test_an_update_changes_about_one_element_in_a_hundred(model: Path, tmp_path: Path) -> None:
    before = weights(model)
    for update in (1, 2):
        stepped = training.write_step(model, tmp_path / str(update), update)
        after = weights(tmp_path / str(update))
        assert stepped.elements == after.size
        assert stepped.changed == np.count_nonzero(before != after)
        assert 0.005 < stepped.changed / stepped.elements < 0.015
        moved = before != after
        difference = np.abs(after[moved].astype(int) - before[moved].astype(int))
        assert np.median(difference) == 1
        before = after


def test_small_weights_change_more_often(model: Path, tmp_path: Path) -> None:
    training.write_step(model, tmp_path / "1", 1)
    before, after = weights(model), weights(tmp_path / "1")
    exponent = (before & 0x7F80) >> 7
    large, small = exponent >= 121, exponent <= 118  # above 2^-6; below 2^-8
    assert (before != after)[small].mean() > 4 * (before != after)[large].mean()


def test_everything_but_weights_stays(model: Path, tmp_path: Path) -> None:
    training.write_step(model, tmp_path / "1", 1)
    assert {p.name for p in model.iterdir()} == {p.name for p in (tmp_path / "1").iterdir()}
    for path in model.glob("*.json"):
        assert (tmp_path / "1" / path.name).read_bytes() == path.read_bytes()
    for path in model.glob("*.safetensors"):
        assert tensors_of(path).keys() == tensors_of(tmp_path / "1" / path.name).keys()


def test_zeros_infinities_and_other_types_are_left_alone(tmp_path: Path) -> None:
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x0001], "<u2")
    header = encode_header([Tensor("special", (6,))])
    (tmp_path / "a").mkdir()
    (tmp_path / "a/m.safetensors").write_bytes(header + special.tobytes())
    text = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    other = len(text).to_bytes(8, "little") + text + bytes(range(8))
    (tmp_path / "a/o.safetensors").write_bytes(other)
    training.write_step(tmp_path / "a", tmp_path / "b", 1)
    out = np.frombuffer(tensors_of(tmp_path / "b/m.safetensors")["special"], "<u2")
    assert out[2:5].tolist() == special[2:5].tolist()
    assert all((out[[0, 1, 5]] & 0x7F80) <= 0x3F80)
    assert (tmp_path / "b/o.safetensors").read_bytes() == other


def test_only_bf16_can_be_stepped(model: Path, tmp_path: Path) -> None:
    assert training.can_step(model)
    (tmp_path / "config.json").write_text("{}")
    assert not training.can_step(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        (44).to_bytes(8, "little") + b'{"x":{"dtype":"BF16","data_offsets":[0,99]}}',
        (17).to_bytes(8, "little") + b'{"x":{"dtype":1}}',
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(MalformedError, match=r"x\.safetensors"):
        read_spans(path)

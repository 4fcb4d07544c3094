"""Made checkpoints are what Hugging Face would have written, the same everywhere."""

import json
from pathlib import Path

import numpy as np
from blake3 import blake3
from safetensors import safe_open

from loadtest.checkpoints import MiB, write_checkpoint, write_step


def weights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_safetensors_reads_every_tensor_that_the_index_names(tmp_path: Path) -> None:
    total = write_checkpoint(tmp_path, 8 * MiB, weight_files=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {}
    for path in weights(tmp_path):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert file.get_slice(name).get_dtype() == "BF16"
                found[name] = path.name
    assert found == index["weight_map"]
    assert len(weights(tmp_path)) == 3
    assert 8 * MiB * 0.95 < index["metadata"]["total_size"] <= 8 * MiB
    assert total == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, MiB, seed=seed)
    one, same, other = (
        [path.read_bytes() for path in weights(tmp_path / name)] for name in ("a", "b", "c")
    )
    assert one == same
    assert one != other


def test_values_are_normal_with_sigma_0_02(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2 * MiB, weight_files=1)
    (path,) = weights(tmp_path)
    data = path.read_bytes()
    bits = np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], dtype="<u2")
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert abs(float(values.mean())) < 1e-4
    assert 0.0195 < float(values.std()) < 0.0205


def test_no_two_shards_are_equal(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 8 * MiB)
    size = 256 * 1024
    digests = [
        blake3(data[at : at + size]).digest()
        for data in (path.read_bytes() for path in weights(tmp_path))
        for at in range(0, len(data), size)
    ]
    assert len(set(digests)) == len(digests)


def test_a_step_changes_the_share_that_it_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "old", 4 * MiB)
    write_step(tmp_path / "old", tmp_path / "new", changed=0.01)
    changed = total = 0
    for old, new in zip(weights(tmp_path / "old"), weights(tmp_path / "new"), strict=True):
        a, b = (np.frombuffer(path.read_bytes()[8:], dtype="<u1") for path in (old, new))
        total += a.size // 2
        changed += int((a != b).sum())
    assert 0.009 < changed / total <= 0.0101

"""Made-up training runs change their weights as real ones do."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from loadtest.training import REGIMES, Training, from_bf16, orthogonalised, to_bf16, to_e4m3

SIZE = 24_000_000
SMALL = 2_000_000


def _changes(regime: str, steps: int = 1) -> tuple[float, float]:
    """The share of elements that changed, and of these the share that moved by one code."""
    training = Training(SIZE, REGIMES[regime])
    training.step()
    before = [codes.astype(np.int64) for *_, codes in training.arrays()]
    training.step(steps)
    after = [codes.astype(np.int64) for *_, codes in training.arrays()]
    total = sum(len(codes) for codes in before)
    moved = np.concatenate([np.abs(y - x) for x, y in zip(before, after, strict=True)])
    changed = int((moved != 0).sum())
    return changed / total, int((moved == 1).sum()) / changed


def test_fp32_masters_change_as_the_real_steps_do() -> None:
    # all-MiniLM-L6-v2 at learning rate 1e-6: 0.44 % an optimiser step, 90 % of them by one code.
    density, by_one = _changes("adam")
    assert 0.003 < density < 0.006
    assert 0.85 < by_one < 0.95


def test_muon_moves_matrices_by_an_orthogonal_one_of_adams_size() -> None:
    rng = np.random.default_rng(3)
    for shape in ((64, 96), (64, 160), (160, 64)):
        made = orthogonalised(rng.standard_normal(shape).astype(np.float32))
        values = np.linalg.svd(made, compute_uv=False)
        assert values.min() > 0.6  # as its author says: about 0.7 to 1.2
        assert values.max() < 1.3
    training = Training(SMALL, REGIMES["muon"])
    before = {t.name: t.masters.copy() for t in training.tensors}
    training.step()
    for tensor in training.tensors:
        moved = (tensor.masters - before[tensor.name]) / np.float32(1e-6)
        if "proj" in tensor.name:
            assert 0.15 < np.sqrt(np.mean(moved**2)) < 0.25


def test_runs_beside_each_other_share_their_noise() -> None:
    """A run beside another one is the run that it would have been alone."""
    for name, size in (("muon-bf16", SMALL), ("muon-fp8", SMALL // 2)):
        alone = Training(size, REGIMES[name])
        leader = Training(SMALL, REGIMES["muon"])
        beside = leader.beside(REGIMES[name])
        assert beside.safetensors() == alone.safetensors()
        for run in (alone, leader):
            run.step(2)
        assert beside.safetensors() == alone.safetensors()
        assert beside.safetensors() != leader.safetensors()
        with pytest.raises(ValueError, match="no steps"):
            leader.beside(REGIMES[name])


def test_bf16_weights_lose_what_rounds_away() -> None:
    density, by_one = _changes("adam-bf16")
    assert density < 0.0025
    assert by_one > 0.5


def test_fp8_codes_change_about_ten_times_less_often() -> None:
    density, _ = _changes("adam-fp8")
    assert density < 0.001


def test_with_masters_changes_add_up_over_steps() -> None:
    one, _ = _changes("adam")
    four, _ = _changes("adam", 4)
    assert 2 * one < four < 4 * one


def test_exponents_lie_as_in_real_models() -> None:
    """The lower half of the exponents holds few weights, and each step down about half as many."""
    codes = np.concatenate([c for _, d, s, c in Training(SIZE).arrays() if len(s) == 2])
    counts = np.bincount((codes >> 7) & 0xFF, minlength=256)
    common = int(counts.argmax())
    assert 119 <= common <= 123  # 2^-8 to 2^-4
    for k in range(2, 7):
        assert 0.4 < counts[common - k - 1] / counts[common - k] < 0.6


def test_equal_seeds_make_equal_runs() -> None:
    runs = [Training(2_000_000, seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        run.step(2)
    first, second, other = (run.safetensors() for run in runs)
    assert first == second
    assert first != other


@pytest.mark.parametrize("regime", ["adam", "adam-fp8"])
def test_safetensors_reads_what_is_written(tmp_path: Path, regime: str) -> None:
    training = Training(3_000_000, REGIMES[regime])
    size = training.write(tmp_path, files=3)
    assert 0.95 * 3_000_000 < size < 1.1 * 3_000_000
    names: set[str] = set()
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names |= set(file.keys())
    assert names == {name for name, *_ in training.arrays()}


def test_casts_round_to_nearest_even() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1, 5000).astype(np.float32)
    back = from_bf16(to_bf16(values))
    assert np.all(np.abs(back - values) <= np.abs(values) / 256)
    # FP8 e4m3 (OCP): every finite code by its definition, and always the nearest of them.
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    exponent, fraction = (codes >> 3) & 15, (codes & 7) / 8
    magnitude = np.where(
        exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0)
    )
    meaning = np.where(codes & 0x80, -magnitude, magnitude)
    assert np.array_equal(to_e4m3(meaning.astype(np.float32)), codes)
    spread = (values * 2.0 ** rng.integers(-9, 8, 5000)).astype(np.float32)
    nearest = np.abs(spread[:, None] - meaning[None, :]).min(axis=1)
    table = np.zeros(256)
    table[codes] = meaning
    assert np.allclose(np.abs(table[to_e4m3(spread)] - spread), nearest)

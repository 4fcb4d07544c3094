"""How much memory is left, as the kernel's files say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_adapter.vllm.memory import available_memory

GIB = 2**30


def system(root: Path, available: int | None, *, most: str = "", used: int = 0, cached: int = 0) -> Path:  # fmt: skip
    (root / "proc").mkdir()
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    if available is not None:
        text = f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total: 0\n"
        (root / "proc/meminfo").write_text(text)
    if most:
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    return root


@pytest.mark.parametrize(
    ("of_host", "most", "used", "cached", "left"),
    [
        (8 * GIB, "", 0, 0, 8 * GIB),
        (8 * GIB, "max", GIB, 0, 8 * GIB),
        (8 * GIB, str(4 * GIB), GIB, 0, 3 * GIB),
        (8 * GIB, str(4 * GIB), 3 * GIB, GIB, 2 * GIB),
        (GIB, str(4 * GIB), GIB, 0, GIB),
        (8 * GIB, str(GIB), 2 * GIB, 0, 0),
        (None, str(GIB), 0, 0, None),
    ],
)
def test_what_is_left_is_the_hosts_or_the_groups(
    tmp_path: Path, of_host: int | None, most: str, used: int, cached: int, left: int | None
) -> None:
    root = system(tmp_path, of_host, most=most, used=used, cached=cached)
    assert available_memory(root) == left


def test_groups_of_version_1_limit_as_well(tmp_path: Path) -> None:
    root = system(tmp_path, 8 * GIB)
    group = root / "sys/fs/cgroup/memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n")
    assert available_memory(root) == GIB + GIB // 2


def test_a_group_without_statistics_counts_no_cache(tmp_path: Path) -> None:
    root = system(tmp_path, GIB, most=str(GIB), used=GIB // 2)
    (root / "sys/fs/cgroup/memory.stat").unlink()
    assert available_memory(root) == GIB // 2


def test_this_system_tells() -> None:
    left = available_memory()
    assert left is not None
    assert left > 0

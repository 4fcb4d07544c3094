"""What a soak takes for a leak, and what not."""

import os
from collections import Counter
from pathlib import Path

import pytest

from loadtest.vitals import Bounds, Vitals, grown, growth_bytes, leftovers, vitals

MB = 1_000_000
BOUNDS = Bounds(slack=2, socket_slack=5, sockets=100, threads=20)


def held(deleted: tuple[str, ...] = (), threads: int = 10, **kinds: int) -> Vitals:
    return Vitals(Counter(kinds), deleted, threads, 0)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (held(socket=15), []),
        (held(socket=16), ["socket 10 -> 16"]),
        (held(socket=10, pipe=2, file=50, directory=50), []),
        (held(socket=1, pipe=3), ["pipe 0 -> 3"]),
        (Vitals(Counter({"same directory": 3}), (), 1, 0), ["same directory 0 -> 3"]),
        (held(socket=10, deleted=("/x (deleted)",)), ["deleted but open: /x (deleted)"]),
        (held(socket=10, threads=20), []),
        (held(socket=10, threads=21), ["threads 10 -> 21"]),
    ],
)
def test_growth_beyond_the_slack_counts(after: Vitals, found: list[str]) -> None:
    assert grown(held(socket=10), after, BOUNDS) == found


def test_sockets_have_a_bound_of_their_own() -> None:
    assert grown(held(socket=98), held(socket=100), BOUNDS) == []
    assert grown(held(socket=98), held(socket=101), BOUNDS) == ["socket 98 -> 101"]


def test_our_own_descriptors_have_kinds(tmp_path: Path) -> None:
    before = vitals(os.getpid())
    path = tmp_path / "gone"
    with path.open("wb") as file, (tmp_path / "here").open("wb"):
        path.unlink()
        again = os.open(tmp_path / "here", os.O_RDONLY)
        reader, writer = os.pipe()
        try:
            after = vitals(os.getpid())
        finally:
            os.close(again)
            os.close(reader)
            os.close(writer)
        assert file.fileno() > 0
    assert after.descriptors - before.descriptors == Counter(
        {"file": 1, "same file": 1, "deleted": 1, "pipe": 2}
    )
    assert after.deleted == (*before.deleted, f"{path} (deleted)")
    assert after.resident > MB


def test_a_leak_is_a_slope_and_a_peak_is_none() -> None:
    flat = [(float(t), 50 * MB) for t in range(60)]
    peak = [(t, size + (80 * MB if 20 <= t < 30 else 0)) for t, size in flat]
    leak = [(t, size + int(t) * MB) for t, size in flat]
    assert growth_bytes([]) == growth_bytes(flat[:1]) == growth_bytes(flat) == 0
    assert abs(growth_bytes(peak)) < MB
    assert growth_bytes(leak) == pytest.approx(59 * MB)


def test_what_serves_nobody_is_found(tmp_path: Path) -> None:
    for directory in ("versions/000003", "state/staging/000004", "state/tmp", "state/trash"):
        (tmp_path / directory).mkdir(parents=True)
    for name in ("000003.json", "000003.shards", "000004.json", "trust.json", "run.lock"):
        (tmp_path / "state" / name).touch()
    assert leftovers(tmp_path) == []
    litter = [
        ".current.1.0.tmp",
        "blobs/.x.1.2.tmp",
        "state/000002.json",
        "state/000002.shards",
        "state/staging/000001",
        "state/tmp/ab.1.1",
        "state/trash/2.1.1",
    ]
    for name in litter:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if "staging" in name else (tmp_path / name).touch()
    assert leftovers(tmp_path) == litter

"""Which spare becomes which file, and that nothing is overwritten that anybody can still read."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardcast.store import recycling
from shardcast.store.recycling import MIN_BYTES, REST_S, Spares, has_room, match, worthwhile
from shardcast.store.retention import collect
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from tests.unit.store.conftest import Sample

MIB = 1 << 20


def later() -> float:
    """A clock by which everything has rested."""
    return time.time() + 2 * REST_S


@pytest.fixture(params=["/dev/shm", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty directory in memory and one on a disk."""
    if request.param == "disk":
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(prefix="recycling-", dir=request.param))
    try:
        yield made
    finally:
        shutil.rmtree(made)


# --- the decision -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "spares", "matched"),
    [
        ({}, {}, {}),
        ({"a": MIB}, {}, {}),
        ({}, {"x": MIB}, {}),
        ({"a": 2 * MIB, "b": 3 * MIB}, {"x": 3 * MIB, "y": 2 * MIB}, {"a": "y", "b": "x"}),
        # equal sizes first, then the largest by the largest, grown or cut
        ({"a": 5 * MIB, "b": 2 * MIB}, {"x": 2 * MIB, "y": 3 * MIB}, {"a": "y", "b": "x"}),
        ({"a": 5 * MIB, "b": 2 * MIB}, {"x": 4 * MIB}, {"a": "x"}),
        ({"a": 2 * MIB}, {"x": 9 * MIB, "y": 3 * MIB}, {"a": "x"}),
        # small files are made anew
        ({"a": MIN_BYTES - 1, "b": MIN_BYTES}, {"x": MIB, "y": MIB}, {"b": "y"}),
    ],
)
def test_which_spare_becomes_which_file(
    wanted: dict[str, int], spares: dict[str, int], matched: dict[str, str]
) -> None:
    assert match(wanted, spares) == matched


@pytest.mark.parametrize(
    ("committed", "staged", "keep", "fits"),
    [(2, 0, 2, True), (1, 1, 2, True), (2, 1, 2, False), (3, 0, 2, False), (1, 0, 1, True)],
)
def test_spares_never_take_more_than_one_version_beyond_what_is_kept(
    committed: int, staged: int, keep: int, fits: bool
) -> None:
    assert has_room(committed=committed, staged=staged, keep=keep) is fits


# --- the act ----------------------------------------------------------------------------------


def a_spare(place: Path, size: int = MIB, clock: Callable[[], float] = later) -> Spares:
    """One version's only file, evicted."""
    version = place / "trash"
    version.mkdir()
    (version / "model").write_bytes(b"o" * size)
    spares = Spares(place / "spare", clock)
    spares.keep(version, ["model", "gone"])
    assert len(spares.names()) == 1
    assert not (version / "model").exists()
    return spares


def test_a_file_that_nobody_reads_is_used_again(place: Path) -> None:
    spares = a_spare(place)
    inode = os.stat(place / "spare" / spares.names()[0]).st_ino
    claimed = spares.claim(place / "staged", {"sub/model": MIB, "small": 10})
    assert list(claimed) == ["sub/model"]
    assert os.stat(place / "staged" / "sub" / "model").st_ino == inode
    assert spares.names() == []
    fd = os.open(place / "staged" / "sub" / "model", os.O_RDWR)  # the lease was given back
    os.close(fd)


@pytest.mark.parametrize(("wanted", "size"), [(MIB, MIB), (3 * MIB, 2 * MIB)])
def test_a_spare_is_cut_and_never_grown(place: Path, wanted: int, size: int) -> None:
    spares = a_spare(place, 2 * MIB)
    assert spares.claim(place / "staged", {"model": wanted})
    assert os.stat(place / "staged" / "model").st_size == size


def test_files_that_are_there_get_no_spare_and_all_others_are_dropped(place: Path) -> None:
    spares = a_spare(place)
    (place / "staged").mkdir()
    (place / "staged" / "model").write_bytes(b"n")
    assert spares.claim(place / "staged", {"model": MIB}) == {}
    assert (place / "staged" / "model").read_bytes() == b"n"
    assert spares.names() == []


def open_here(path: Path, stack: ExitStack) -> Callable[[], bytes]:
    file = stack.enter_context(path.open("rb"))
    return lambda: os.pread(file.fileno(), MIB, 0)


def mapped_and_closed(path: Path, stack: ExitStack) -> Callable[[], bytes]:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    stack.callback(mapped.close)
    return lambda: mapped[:]


def open_for_writing(path: Path, stack: ExitStack) -> Callable[[], bytes]:
    file = stack.enter_context(path.open("r+b"))
    return lambda: os.pread(file.fileno(), MIB, 0)


def mapped_by_another_process(path: Path, stack: ExitStack) -> Callable[[], bytes]:
    script = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as f: m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(flush=True)\n"
        "input()\n"
        "sys.stdout.buffer.write(m[:])\n"
    )
    child = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    )
    assert child.stdout is not None
    child.stdout.readline()
    return lambda: child.communicate(b"\n", timeout=20)[0]


def linked(path: Path, stack: ExitStack) -> Callable[[], bytes]:
    other = path.parent.parent / "other"
    os.link(path, other)
    return other.read_bytes


@pytest.mark.parametrize(
    "reading",
    [open_here, mapped_and_closed, open_for_writing, mapped_by_another_process, linked],
    ids=lambda reading: reading.__name__,
)
@pytest.mark.parametrize("since", ["before it was evicted", "after"])
def test_what_anybody_can_read_is_left_alone(
    place: Path, reading: Callable[[Path, ExitStack], Callable[[], bytes]], since: str
) -> None:
    with ExitStack() as stack:
        version = place / "trash"
        version.mkdir()
        (version / "model").write_bytes(b"o" * MIB)
        spares = Spares(place / "spare", later)
        if since == "after":
            spares.keep(version, ["model"])
            read = reading(place / "spare" / spares.names()[0], stack)
        else:
            read = reading(version / "model", stack)
            spares.keep(version, ["model"])
        assert spares.claim(place / "staged", {"model": MIB}) == {}
        assert not (place / "staged" / "model").exists()
        assert read() == b"o" * MIB


def test_an_open_that_found_the_old_name_has_a_second_to_end(place: Path) -> None:
    spares = a_spare(place, clock=lambda: time.time() + REST_S / 2)
    assert spares.claim(place / "staged", {"model": MIB}) == {}
    assert spares.names() == []


def test_a_clock_that_was_set_back_recycles_nothing(place: Path) -> None:
    spares = a_spare(place, clock=lambda: time.time() - 1000)
    assert spares.claim(place / "staged", {"model": MIB}) == {}


def test_links_and_small_files_are_no_spares(place: Path) -> None:
    version = place / "trash"
    version.mkdir()
    (version / "small").write_bytes(b"o" * (MIN_BYTES - 1))
    (version / "model").write_bytes(b"o" * MIB)
    (version / "link").symlink_to("model")
    os.link(version / "model", version / "hard")
    (version / "directory").mkdir()
    spares = Spares(place / "spare", later)
    spares.keep(version, ["small", "model", "link", "hard", "directory"])
    assert spares.names() == []


def test_only_the_last_version_that_was_evicted_leaves_spares(place: Path) -> None:
    spares = a_spare(place)
    first = spares.names()
    second = place / "second"
    second.mkdir()
    (second / "a").write_bytes(b"a" * MIB)
    (second / "b").write_bytes(b"b" * MIB)
    spares.keep(second, ["a", "b"])
    assert len(spares.names()) == 2
    assert not set(first) & set(spares.names())
    spares.drop()
    assert spares.names() == []


def test_a_lease_does_not_end_this_process_when_somebody_opens_the_file(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDWR)
    try:
        assert recycling.take_write_lease(fd)
        script = (
            "import os, sys\n"
            "try: os.open(sys.argv[1], os.O_NONBLOCK)\n"
            "except BlockingIOError: print('busy')\n"
        )
        done = subprocess.run(  # it breaks the lease: a signal comes
            [sys.executable, "-c", script, path],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        assert done.stdout.strip() == "busy"
    finally:
        os.close(fd)


def test_where_it_pays(tmp_path: Path) -> None:
    assert worthwhile(Path("/dev/shm"))
    assert not worthwhile(Path("/proc"))
    assert not worthwhile(tmp_path / "nowhere")


def test_nothing_is_overwritten_before_the_eviction_is_durable(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not bring a version back under its name with other bytes in it."""
    spares = a_spare(place)
    done: list[str] = []
    rename = os.rename

    def failing(path: Path) -> None:
        done.append(f"fsync {path.name}")
        raise OSError(5, "Input/output error")

    def renamed(source: Path, target: Path) -> None:
        done.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(recycling, "fsync_directory", failing)
    assert spares.claim(place / "staged", {"model": MIB}) == {}
    assert done == ["fsync spare"]
    assert spares.names() == []
    monkeypatch.setattr(recycling, "fsync_directory", lambda path: done.append("fsync"))
    version = place / "second"
    version.mkdir()
    (version / "model").write_bytes(b"o" * MIB)
    spares.keep(version, ["model"])
    del done[:]
    assert spares.claim(place / "staged", {"model": MIB})
    assert done == ["fsync", "rename to model"]


# --- a version's end --------------------------------------------------------------------------


def test_a_journal_is_gone_before_a_file_is_a_spare(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycling, "MIN_BYTES", 1)
    sample.fill(run)
    run.commit(1, Durability.NONE)
    seen: list[list[str]] = []
    keep = run.spares.keep

    def look_and_keep(directory: Path, paths: list[str]) -> None:
        seen.append(sorted(os.listdir(run.root / "state")))
        assert run.committed() == []
        keep(directory, paths)

    monkeypatch.setattr(run.spares, "keep", look_and_keep)
    assert run.evict(1, spare_within=1)
    assert len(seen) == 1
    assert not [name for name in seen[0] if name.endswith((".shards", ".json"))]
    assert run.spares.names()
    assert os.listdir(run.root / "state" / "trash") == []


def test_a_version_is_no_spare_where_nobody_asks_for_it(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycling, "MIN_BYTES", 1)
    sample.fill(run)
    run.commit(1, Durability.NONE)
    assert run.evict(1)
    assert run.spares.names() == []


def test_a_collection_drops_spares_unless_it_is_a_followers(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycling, "MIN_BYTES", 1)
    sample.fill(run)
    run.commit(1, Durability.NONE)
    collected = collect(run, [1], spare_within=1)
    assert collected.versions == (1,)
    assert run.spares.names()
    collect(run, [], spare_within=1)
    assert run.spares.names()
    collect(run, [])
    assert run.spares.names() == []

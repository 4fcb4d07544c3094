"""File operations and locks against the real system."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardcast.errors import BusyError, DiskError, DiskFullError
from shardcast.store import files
from shardcast.store.locks import FileLock, shared_lock


def test_atomic_write_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.atomic_write(path, b"one", mode=0o600)
    files.atomic_write(path, b"two", sync=False)
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["b.json"]


def test_a_failed_atomic_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.json"
    files.atomic_write(path, b"old")

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match="No space left"):
        files.atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["b.json"]


def test_errors_name_the_path_and_the_kind(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskError, match=r"reading failed.*nowhere"),
        files.disk_errors(tmp_path / "nowhere", "reading"),
    ):
        (tmp_path / "nowhere").read_bytes()
    assert isinstance(files.disk_error(OSError(errno.EDQUOT, "quota"), "x", "w"), DiskFullError)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    files.write_all(fd, memoryview(b"0123456789"), 2)
    buffer = memoryview(bytearray(20))
    assert files.read_into(fd, buffer, 0) == 12
    assert bytes(buffer[2:12]) == b"0123456789"
    os.close(fd)


def test_reflink_says_no_where_the_file_system_cannot(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    source = os.open(tmp_path / "a", os.O_RDONLY)
    target = os.open("/dev/null", os.O_RDWR)
    assert files.reflink(source, target) is False
    os.close(target)
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.reflink(source, target)
    os.close(source)


def test_space_is_checked_and_the_file_system_known(tmp_path: Path) -> None:
    files.require_space(tmp_path, 1, what="a test")
    with pytest.raises(DiskFullError, match="a test needs 1152921504606846976 bytes"):
        files.require_space(tmp_path, 1 << 60, what="a test")
    assert files.file_system_of(Path("/proc")) == "proc"
    found = subprocess.run(
        ["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True, check=True
    )
    assert files.file_system_of(Path("/dev/shm")) == found.stdout.strip()


def test_preallocate_reserves_blocks_where_asked(tmp_path: Path) -> None:
    for reserve in (False, True):
        path = tmp_path / str(reserve)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        files.preallocate(fd, 1 << 20, reserve=reserve)
        os.close(fd)
        assert path.stat().st_size == 1 << 20
        assert (path.stat().st_blocks * 512 >= 1 << 20) is reserve


def test_a_lock_is_exclusive_between_objects_and_processes(tmp_path: Path) -> None:
    path = tmp_path / "state" / "run.lock"
    with FileLock(path, what="run 'a'") as lock:
        assert lock.held
        with pytest.raises(BusyError, match=f"run 'a' is in use by process {os.getpid()}"):
            FileLock(path, what="run 'a'").acquire()
        with pytest.raises(BusyError, match="already locked by this object"):
            lock.acquire()
        script = (
            "import sys; from pathlib import Path; from shardcast.store.locks import FileLock\n"
        )
        script += "FileLock(Path(sys.argv[1]), what='x').acquire(wait_s=0.1)"
        ended = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
        )
        assert "BusyError" in ended.stderr
    lock.release()
    FileLock(path, what="run 'a'").acquire()


def test_a_shared_lock_needs_the_directory(tmp_path: Path) -> None:
    with shared_lock(tmp_path), shared_lock(tmp_path):
        pass
    with pytest.raises(DiskError), shared_lock(tmp_path / "gone"):
        pass

"""The observer believes digests that were written down before, and nothing else."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from loadtest.observer import MARKER, EvictedError, Observer, truth_of


def write(directory: Path, serial: int) -> Path:
    (directory / "sub").mkdir(parents=True)
    (directory / "weights").write_bytes(bytes([serial]) * 1000)
    (directory / "sub" / "empty").write_bytes(b"")
    (directory / MARKER).write_text(json.dumps({"serial": serial}))
    return directory


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    (tmp_path / "truth").mkdir()
    for serial in (1, 2):
        truth = truth_of(write(tmp_path / f"checkpoint{serial}", serial))
        (tmp_path / "truth" / f"{serial}.json").write_text(json.dumps(truth))
    return Observer({"w": tmp_path / "w"}, tmp_path / "truth", tmp_path / "flips")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = write(tmp_path / "w" / "versions" / "000007", 1)
    (tmp_path / "w" / "current").symlink_to("versions/000007")
    return directory


def told(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, Any]]:
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(e["event"], e.get("path")) for e in events if e["event"] != "seen"]


def test_what_is_right_is_only_seen(
    observer: Observer, version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer.look("w")
    observer.look("w")  # once with the lock, once without
    assert observer.reads == 2
    assert told(capsys) == []


@pytest.mark.parametrize("harm", ["bit", "missing", "more", "short", "mixed", "marker"])
def test_whatever_is_wrong_is_told(
    observer: Observer, version: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    match harm:
        case "bit":
            (version / "weights").write_bytes(bytes([1]) * 999 + b"\0")
        case "missing":
            (version / "sub" / "empty").unlink()
        case "more":
            (version / "more").touch()
        case "short":
            (version / "weights").write_bytes(bytes([1]) * 999)
        case "mixed":
            (version / "weights").write_bytes(bytes([2]) * 1000)
        case "marker":
            (version / MARKER).write_text("{}")
    observer.look("w")
    assert {event for event, _path in told(capsys)} == {"wrong"}


def test_what_was_damaged_on_purpose_is_told_apart(
    observer: Observer, version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (version / "weights").write_bytes(b"x")
    (version / "sub" / "empty").write_bytes(b"x")
    observer.flips.write_text(f"{version / 'weights'}\n")
    observer.look("w")
    assert sorted(told(capsys)) == [("flipped", "weights"), ("wrong", "sub/empty")]


def test_a_number_means_one_checkpoint(
    observer: Observer, version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer.look("w")
    other = write(tmp_path / "other" / "000007", 2)
    observer.read("other", other, locked=True)
    assert told(capsys) == [("wrong", "(another checkpoint)")]


def test_a_vanished_current_is_told_and_an_evicted_version_is_not(
    observer: Observer, version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer.look("w")
    with pytest.raises(EvictedError):
        observer.read("w", tmp_path / "w" / "versions" / "000006", locked=False)
    evicting = os.open(version, os.O_RDONLY)
    fcntl.flock(evicting, fcntl.LOCK_EX)
    with pytest.raises(EvictedError):
        observer.read("w", version, locked=True)
    os.close(evicting)
    (tmp_path / "w" / "current").unlink()
    observer.look("w")
    assert told(capsys) == [("absent", None)]

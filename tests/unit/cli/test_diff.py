"""`diff`: what it shows, as lines, as a chart and as events, and how it fails."""

import sys
from pathlib import Path

import pytest

from shardcast.cli import changes_view
from shardcast.cli.output import Output
from shardcast.comparison import compare_directories
from tests.unit.cli.conftest import Cli
from tests.unit.safetensors import safetensors, write

OLD = bytes(range(256)) * 400


def changed(*places: int) -> bytes:
    new = bytearray(OLD)
    for at in places:
        new[at] ^= 1
    return bytes(new)


def directories(tmp_path: Path, name: str = "layer.weight") -> tuple[Path, Path]:
    shape = [len(OLD) // 2]
    old = safetensors({name: ("BF16", shape, OLD), "gone": ("U8", [2], b"xx")})
    new = safetensors({name: ("BF16", shape, changed(4, 70, 9000)), "new": ("U8", [2], b"yy")})
    return (
        write(tmp_path / "old", {"model.safetensors": old, "a.txt": b"a"}),
        write(tmp_path / "new", {"model.safetensors": new, "b.txt": b"b"}),
    )


def test_diff_lists_tensors_and_totals(cli: Cli, tmp_path: Path) -> None:
    ran = cli("diff", *directories(tmp_path))
    assert ran.code == 0
    lines = [line.split() for line in ran.stdout.splitlines()]
    (line,) = [line for line in lines if line[:1] == ["layer.weight"]]
    assert line[1:5] == ["BF16", "changed", "3", "51200"]
    assert "2 tensors, 102 kB: 1 changed, 1 added, 1 removed" in ran.stdout
    assert "3 of 51,200 elements changed" in ran.stdout
    assert "removed: a.txt" in ran.stdout
    assert "in all; the delta has" in ran.stdout


def test_diff_gives_events(cli: Cli, tmp_path: Path) -> None:
    old, new = directories(tmp_path)
    ran = cli("diff", old, new, "--json")
    tensors = {event["tensor"]: event for event in ran.events if event["event"] == "tensor"}
    assert tensors["layer.weight"].items() >= {
        "dtype": "BF16", "change": "changed", "changed": 3, "compared": 51200, "codec": "changes",
    }.items()  # fmt: skip
    assert {name: event["change"] for name, event in tensors.items()} == {
        "layer.weight": "changed", "new": "added", "gone": "removed",
    }  # fmt: skip
    done = ran.event("compared")
    assert done.items() >= {
        "path": str(new), "base": str(old), "changed": 3, "removed_files": ["a.txt"], "tensors": 2,
    }.items()  # fmt: skip
    others = [event["path"] for event in ran.events if event["event"] == "other_bytes"]
    assert others == ["b.txt", "model.safetensors"]


def test_diff_draws_a_chart_on_a_terminal(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(changes_view, "is_terminal", lambda stream: stream is sys.stdout)
    old, new = directories(tmp_path, name="layer\x1b[31m.weight")
    changes = compare_directories(old, new).changes
    changes_view.show_changes(Output(), changes, every=False)
    shown = capsys.readouterr().out
    assert "█" in shown
    assert "layer\\x1b[31m.weight" in shown
    assert "\x1b[31m.w" not in shown


def test_diff_lists_the_costliest_unless_all_are_asked_for(cli: Cli, tmp_path: Path) -> None:
    tensors = {f"t{n:02}": ("U8", [4096], bytes([n]) * 4096) for n in range(50)}
    grown = {name: (d, s, data[:-n] + b"?" * n) for n, (name, (d, s, data)) in
             enumerate(tensors.items(), 1)}  # fmt: skip
    old = write(tmp_path / "old", {"m.safetensors": safetensors(tensors)})
    new = write(tmp_path / "new", {"m.safetensors": safetensors(grown)})
    ran = cli("diff", old, new)
    listed = [line for line in ran.stdout.splitlines() if line.startswith("t")]
    assert len(listed) == 30
    assert "and 20 more tensors" in ran.stdout
    everything = cli("diff", old, new, "--all").stdout
    assert all(f"\n{name} " in everything for name in tensors)


@pytest.mark.parametrize("at", [0, 1])
def test_a_path_that_is_no_directory_ends_with_2(cli: Cli, tmp_path: Path, at: int) -> None:
    paths = list(directories(tmp_path))
    paths[at] = tmp_path / "nothing"
    ran = cli("diff", *paths, "--json")
    assert ran.code == 2
    assert ran.event("error")["source"] == str(tmp_path / "nothing")


def test_what_is_left_out_of_a_publication_is_not_compared(cli: Cli, tmp_path: Path) -> None:
    old, new = directories(tmp_path)
    (new / "optimizer.pt").write_bytes(b"x" * 5000)
    assert "optimizer" not in cli("diff", old, new, "--all").stdout
    assert "optimizer" in cli("diff", old, new, "--include", "*.pt", "--all").stdout
    assert "layer.weight" not in cli("diff", old, new, "--exclude", "*.safetensors", "--all").stdout

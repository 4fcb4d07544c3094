"""Parts of the demonstration that need no tree."""

from pathlib import Path

import pytest

from shardcast.demo import processes
from shardcast.demo.equality import compare
from shardcast.demo.processes import DemoError, Event, Node, Processes, free_ports
from shardcast.demo.scenario import sent_bytes


def test_equality_is_of_names_and_bytes(tmp_path: Path) -> None:
    for name in ("source", "same", "longer", "other"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "a.json").write_text("{}")
        (tmp_path / name / "sub/b.txt").write_text("b")
    (tmp_path / "source/optimizer.pt").write_text("left out")
    (tmp_path / "longer/c.txt").write_text("c")
    (tmp_path / "other/sub/b.txt").write_text("B")
    names = ("same", "longer", "other")
    files, equal = compare(tmp_path / "source", {name: tmp_path / name for name in names})
    assert files == 2
    assert equal == {"same": True, "longer": False, "other": False}


def test_sent_bytes_are_summed_over_labels() -> None:
    text = (
        "# TYPE shardcast_sent_bytes counter\n"
        'shardcast_sent_bytes_total{source="disk"} 1000.0\n'
        'shardcast_sent_bytes_total{source="fill"} 2.5e+06\n'
        'shardcast_sent_bytes_created{source="fill"} 1.7e+09\n'
        "shardcast_received_bytes_total 77.0\n"
    )
    assert sent_bytes("http://x", lambda url: text) == 2_501_000


def test_a_relay_without_metrics_is_named() -> None:
    (port,) = free_ports(1)
    with pytest.raises(DemoError, match=str(port)):
        sent_bytes(f"http://127.0.0.1:{port}")


# --- processes, with a stand-in for the command line -------------------------------------------

STAND_IN = """
import json, signal, sys
kind = sys.argv[1]
print("not an event", flush=True)
print(json.dumps({"event": "up", "arguments": sys.argv[1:]}), flush=True)
if kind == "fail":
    sys.exit("it went wrong")
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(json.dumps({"event": "ignoring"}), flush=True)
if kind in ("stay", "stubborn"):
    sys.stdin.close()
    while True:
        signal.pause()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "stand_in" / "shardcast"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(processes, "STOP_WAIT_S", 0.5)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("stand_in")
def test_processes_tell_their_events_and_all_end(tmp_path: Path) -> None:
    seen: list[tuple[str, Event]] = []

    def on_event(node: Node, event: Event) -> None:
        seen.append((node.name, event))

    with Processes(tmp_path / "root", on_event) as running:
        stays = running.start("first", ["stay", tmp_path])
        stubborn = running.start("second", ["stubborn"])
        running.wait_event(stays, "up", 20)
        running.wait_event(stubborn, "ignoring", 20)
        done = running.run("third", ["end"], 20)
        assert done.process.returncode == 0
    assert [node.process.returncode for node in running.nodes] == [-15, -9, 0]
    assert ("first", {"event": "up", "arguments": ["stay", str(tmp_path)]}) in seen


@pytest.mark.usefixtures("stand_in")
def test_a_process_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    with Processes(tmp_path / "root", lambda node, event: None) as running:
        with pytest.raises(DemoError, match=r"(?s)worker ended with exit code 1.*it went wrong"):
            running.run("worker", ["fail"], 20)
        with pytest.raises(DemoError, match="relay ended with exit code 0"):
            running.wait_event(running.start("relay", ["end"]), "never", 20)


@pytest.mark.usefixtures("stand_in")
def test_waiting_is_bounded(tmp_path: Path) -> None:
    with Processes(tmp_path / "root", lambda node, event: None) as running:
        node = running.start("relay", ["stay"])
        with pytest.raises(DemoError, match="in vain for relay to say 'listening'"):
            running.wait_event(node, "listening", 0.3)


@pytest.mark.usefixtures("stand_in")
def test_the_user_s_settings_do_not_reach_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCAST_STORE", "elsewhere")
    monkeypatch.setenv("XDG_DATA_HOME", "elsewhere")
    with Processes(tmp_path / "root", lambda node, event: None) as running:
        node = running.start("relay", ["stay"])
        running.wait_event(node, "up", 20)
        environment = Path(f"/proc/{node.process.pid}/environ").read_bytes()
    assert b"PYTHONPATH=" in environment
    assert b"elsewhere" not in environment

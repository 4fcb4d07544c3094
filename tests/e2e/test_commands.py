"""The command line as a user meets it: processes, signals, streams."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from loadtest.processes import free_port
from loadtest.topology import shardcast
from tests.models import make_model, real_steps, step, write_model
from tests.tree import Tree, assert_same_files, small_checkpoint, tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TIMEOUT_S = 60.0


def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardcast", *map(str, arguments)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_both_ways_to_start_are_the_same_program() -> None:
    module = run("--help")
    script = subprocess.run(
        shardcast("--help"), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert module.returncode == 0
    assert module.stdout == script.stdout
    for command in ("publish", "relay", "pull", "follow", "demo", "verify"):
        assert command in module.stdout
    assert run("--version").stdout.startswith("shardcast ")


def test_no_command_and_unknown_options_are_usage_errors() -> None:
    assert run("publish").returncode == 2
    assert run("nonsense").returncode == 2
    unknown = run("relay", "--nonsense", "--json")
    assert unknown.returncode == 2
    assert json.loads(unknown.stdout)["code"] == "usage"
    assert "--nonsense" in unknown.stderr


def test_the_environment_s_token_never_shows(tmp_path: Path) -> None:
    ckpt = small_checkpoint(tmp_path / "ckpt", size=1 << 20)
    home = {name: str(tmp_path) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    ran = run(
        "publish", ckpt, "--to", "http://127.0.0.1:1", "--verbose", "--json",
        SHARDCAST_TOKEN="a-very-secret-token", **home,
    )  # fmt: skip
    assert ran.returncode == 13
    assert "very-secret" not in ran.stdout + ran.stderr
    assert [json.loads(line)["event"] for line in ran.stdout.splitlines()][-1] == "error"


def published_tree(made: Tree, tmp_path: Path) -> Path:
    ckpt = small_checkpoint(tmp_path / "ckpt", size=2 << 20)
    made.publish(ckpt)
    return ckpt


def test_a_relay_says_one_json_line_and_drains_on_sigterm(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        published_tree(made, tmp_path)
        origin = made.origin()
        assert origin.process.stop()
        assert origin.process.wait(timeout=TIMEOUT_S) == 0
        (event,) = origin.process.events()
        assert (event["event"], event["url"]) == ("listening", origin.url)


def test_an_address_in_use_is_a_usage_error(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        port = origin.url.rpartition(":")[2]
        ran = run("relay", "--store", tmp_path / "other", "--listen", f"127.0.0.1:{port}", "--json")
        assert ran.returncode == 2
        assert port in ran.stderr
        assert json.loads(ran.stdout)["code"] == "usage"


def test_publish_to_a_remote_origin_and_pull_from_it(tmp_path: Path) -> None:
    ckpt = small_checkpoint(tmp_path / "ckpt", size=2 << 20)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-token\n")
    with tree(tmp_path / "tree") as made:
        origin = made.origin("--publish-token-file", str(token), *made.trust)
        arguments: list[str | Path] = ["publish", ckpt, "--run", "policy", "--to", origin.url, "--json",
                     "--key", made.keys / "shardcast.key"]  # fmt: skip
        state = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("STATE", "CACHE")}
        ran = run(*arguments, "--token-file", token, **state)
        assert ran.returncode == 0, ran.stderr
        event = json.loads(ran.stdout.splitlines()[-1])
        assert (event["event"], event["version"], event["method"]) == ("published", 1, "upload")
        refused = run(*arguments, SHARDCAST_TOKEN="another-token-0123456789", **state)
        assert refused.returncode == 13
        made.pull(tmp_path / "out", sources=[origin.url])
        assert_same_files(ckpt, tmp_path / "out/current")
        held = run("hold", "policy", "--to", origin.url, "--token-file", token,
                   "--key", made.keys / "shardcast.key", "--json", **state)  # fmt: skip
        assert json.loads(held.stdout)["hold"] is True


def test_a_step_costs_the_uplink_and_the_worker_its_delta(tmp_path: Path) -> None:
    """Real steps where they lie beside the repository, else a model with as many changes."""
    steps = real_steps(tmp_path / "steps", 0, 2)
    model = make_model(elements=1_000_000)
    for number in range(0 if steps else 3):
        steps.append(tmp_path / "made" / str(number))
        write_model(steps[-1] / "model.safetensors", step(model, number) if number else model)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-token\n")
    with tree(tmp_path / "tree") as made:
        origin = made.origin("--publish-token-file", str(token), *made.trust)
        relay = made.relay("relay", parents=[origin.url])
        worker = made.follow("worker", sources=[relay.url])
        home = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("STATE", "CACHE")}
        for number, directory in enumerate(steps):
            ran = run("publish", directory, "--run", "policy", "--to", origin.url, "--json",
                      "--key", made.keys / "shardcast.key", "--token-file", token, **home)  # fmt: skip
            assert ran.returncode == 0, ran.stderr
            event = json.loads(ran.stdout.splitlines()[-1])
            ready = worker.wait_ready(number + 1, timeout=TIMEOUT_S)
            worker.wait_committed(number + 1, timeout=TIMEOUT_S)
            assert_same_files(directory, worker.current)
            if number:
                assert len(event["deltas"]) == 1
                assert event["bytes_uploaded"] < event["deltas"][0]["bytes"]
                assert event["bytes"] / 100 > ready["bytes_fetched"] > event["deltas"][0]["bytes"]


def test_follow_runs_its_hook_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        published_tree(made, tmp_path)
        origin = made.origin()
        said = tmp_path / "said"
        hook = f"echo $SHARDCAST_VERSION $SHARDCAST_PATH >> {said}; touch {said}.done"
        worker = made.follow("worker", "--on-update", hook, sources=[origin.url])
        worker.wait_committed(1, timeout=TIMEOUT_S)
        made.publish(tmp_path / "ckpt")
        worker.wait_committed(2, timeout=TIMEOUT_S)
        assert said.read_text().splitlines()[0] == f"1 {made.root / 'worker/versions/000001'}"
        assert worker.process.stop()
        assert worker.process.wait(timeout=TIMEOUT_S) == 0
        kinds = {event["event"] for event in worker.process.events()}
        assert {"ready", "committed"} <= kinds


def _depth(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/status", timeout=10) as answer:
        return int(json.load(answer)["depth"])


def test_follow_serves_its_neighbours(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        ckpt = published_tree(made, tmp_path)
        origin = made.origin()
        worker = made.follow("worker", "--serve", "127.0.0.1:0", sources=[origin.url])
        listening = worker.process.wait_event("listening", timeout=TIMEOUT_S)
        worker.wait_committed(1, timeout=TIMEOUT_S)
        neighbour = made.follow("neighbour", sources=[listening["url"]])
        neighbour.wait_committed(1, timeout=TIMEOUT_S)
        assert_same_files(ckpt, neighbour.current)
        (ckpt / "config.json").write_text("{ }")
        made.publish(ckpt)
        neighbour.wait_committed(2, timeout=TIMEOUT_S)
        assert_same_files(ckpt, neighbour.current)
        with urllib.request.urlopen(f"{listening['url']}/v1/status", timeout=10) as answer:
            status = json.load(answer)
            assert status["runs"]["policy"]["complete"] == 2
            assert (status["role"], status["depth"]) == ("worker", 1)  # one hop from the origin
            assert answer.headers["Shardcast-Depth"] == "1"
        assert origin.process.stop()
        deadline = time.monotonic() + TIMEOUT_S
        while _depth(listening["url"]) != 16:  # what it has now leads to no origin
            assert time.monotonic() < deadline
        checked = run("verify", tmp_path / "tree/worker")
        assert checked.returncode == 0, checked.stdout


def test_follow_cannot_serve_where_something_listens(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        published_tree(made, tmp_path)
        origin = made.origin()
        worker = made.follow("worker", "--serve", origin.url[7:], sources=[origin.url])
        assert worker.process.wait(timeout=TIMEOUT_S) == 2


def test_pull_ends_on_signals_and_keeps_what_it_had(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        published_tree(made, tmp_path)
        # Nobody listens there: it tries until it is told to stop.
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            pull = made.start_pull(
                f"pull-{number}", tmp_path / f"out-{number}",
                sources=[f"http://127.0.0.1:{free_port()}"],
            )  # fmt: skip
            pull.wait_event("source", timeout=TIMEOUT_S)
            os.kill(pull.pid, number)
            assert pull.wait(timeout=TIMEOUT_S) == code
            assert "Traceback" not in pull.stderr_tail()


def test_lines_go_where_they_belong_without_a_terminal(tmp_path: Path) -> None:
    ckpt = small_checkpoint(tmp_path / "ckpt", size=1 << 20)
    home = {name: str(tmp_path / "xdg") for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    ran = run("publish", ckpt, **home)
    assert ran.stdout.startswith("published default version 1")
    assert "\x1b" not in ran.stdout + ran.stderr
    assert "next" in ran.stderr


# --- demo -------------------------------------------------------------------------------------


def demo_leftovers(scratch: Path) -> list[str]:
    """Files in the scratch directory, and processes that were started from it."""
    left = [str(path) for path in scratch.iterdir()]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(scratch).encode() in command:
                left.append(f"process {process.name}")
    return left


def test_the_demo_proves_equality_and_cleans_up(tmp_path: Path) -> None:
    ran = run("demo", "--size", "20MB", "--updates", "1", "--dir", tmp_path, "--json")
    assert ran.returncode == 0, ran.stderr
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    result = events[-1]
    assert result["event"] == "demo"
    assert result["equal"] is True
    assert [version["version"] for version in result["versions"]] == [1, 2]
    for version in result["versions"]:
        assert set(version["ready_s"]) == {"worker-1", "worker-2", "worker-3"}
        assert set(version["bytes_sent"]) == {"origin", "relay-1", "relay-2", "relay-3"}
    first, second = result["versions"]
    assert first["bytes_sent"]["origin"] > first["bytes"] > 10_000_000
    assert (first["delta_bytes"], first["changed"]) == (None, None)
    assert set(first["bytes_delta"].values()) == {0}
    assert 0.005 < second["changed"] < 0.015
    # One changed element in a hundred, two bytes each: a byte for each of these, and documents.
    elements = second["bytes"] / 2
    for sent in (second["delta_bytes"], *second["bytes_fetched"].values()):
        assert sent < 1.2 * second["changed"] * elements + 20_000
    assert min(second["bytes_delta"].values()) > 0
    assert second["ratio"] == pytest.approx(
        second["bytes"] / max(second["bytes_fetched"].values()), abs=0.001
    )
    # Siblings split what comes from above, and rebuild the rest: no second copy leaves the origin.
    assert second["bytes_sent"]["origin"] < 2.2 * second["delta_bytes"]
    assert demo_leftovers(tmp_path) == []


def test_the_demo_takes_any_checkpoint_and_may_keep_its_files(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / "weights.bin").write_bytes(bytes(range(256)) * 4000)
    (ckpt / "optimizer.pt").write_bytes(b"left out")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ran = run("demo", ckpt, "--dir", scratch, "--keep-files")
    assert ran.returncode == 0, ran.stderr
    assert "no bf16 safetensors" in ran.stderr
    assert "equal: 1 file of 1 version, byte for byte, on all 3 workers" in ran.stdout
    (root,) = scratch.iterdir()
    assert (root / "worker-3/current/weights.bin").read_bytes() == bytes(range(256)) * 4000
    assert (root / "logs/relay-1.log").exists()


def on_a_terminal(*arguments: str | Path) -> tuple[int, str]:
    """Runs a command whose stderr is a terminal; returns its exit code and what it drew."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardcast", *map(str, arguments)],
            stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        drawn = b""
        try:
            while piece := terminal.read(65536):
                drawn += piece
        except OSError:  # EIO: the other side is closed (pty(7))
            pass
        return process.wait(timeout=TIMEOUT_S), drawn.decode("utf-8", "replace")


def test_on_a_terminal_the_demo_draws_the_tree(tmp_path: Path) -> None:
    code, drawn = on_a_terminal("demo", "--size", "20MB", "--updates", "0", "--dir", tmp_path)
    assert code == 0, drawn
    for text in ("relay-3", "worker-2", " ready ", "publishing version 1"):
        assert text in drawn
    assert demo_leftovers(tmp_path) == []


def test_on_a_terminal_publish_and_pull_draw_bars(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        ckpt = small_checkpoint(tmp_path / "ckpt", size=32 << 20)
        code, drawn = on_a_terminal(
            "publish", ckpt, "--run", "policy", "--store", made.store,
            "--key", made.keys / "shardcast.key",
        )  # fmt: skip
        assert code == 0, drawn
        assert "publish" in drawn
        assert "\x1b[" in drawn
        origin = made.origin()
        code, drawn = on_a_terminal(
            "pull", "policy", "--from", origin.url, "--out", tmp_path / "out", *made.trust
        )
        assert code == 0, drawn
        assert "policy version 1" in drawn


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "shardcast", "demo", "--size", "20MB", "--dir", str(tmp_path),
             "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "joined" and "relay-3" in line:
                break
        process.send_signal(number)
        _out, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130, errors
        assert demo_leftovers(tmp_path) == []


def test_the_demo_refuses_what_cannot_work(tmp_path: Path) -> None:
    assert run("demo", "--size", "1kB").returncode == 2
    assert run("demo", "--size", "lots").returncode == 2
    assert run("demo", "--dir", tmp_path / "none").returncode == 2
    assert run("demo", tmp_path / "none").returncode == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("demo", empty).returncode == 2

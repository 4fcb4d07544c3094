"""The update hook: what it is told, what it may do, how it ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from shardcast.cancel import Cancel
from shardcast.errors import EngineError
from shardcast.hooks import OUTPUT_BYTES, UpdateHook


def test_it_is_a_shell_command_with_variables_in_its_environment(cancel: Cancel) -> None:
    hook = UpdateHook('echo "$SHARDCAST_VERSION of $SHARDCAST_RUN" && echo "$HOME" >&2')
    output = hook.run({"SHARDCAST_VERSION": "7", "SHARDCAST_RUN": "policy"}, cancel)
    assert output == f"7 of policy\n{os.environ['HOME']}"


def test_variables_are_not_part_of_the_command(cancel: Cancel, tmp_path: Path) -> None:
    evil = f"$(touch {tmp_path}/evil); touch {tmp_path}/evil"
    UpdateHook('test "$SHARDCAST_PATH" = x || true').run({"SHARDCAST_PATH": evil}, cancel)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_names_the_status_and_the_end_of_the_output(cancel: Cancel) -> None:
    with pytest.raises(EngineError, match=r"exited with status 3: .*reload failed"):
        UpdateHook("echo reload failed; exit 3").run({}, cancel)


def test_a_signal_is_named(cancel: Cancel) -> None:
    with pytest.raises(EngineError, match=f"killed by signal {signal.SIGKILL:d}"):
        UpdateHook("kill -9 $$").run({}, cancel)


def test_a_program_that_does_not_exist(cancel: Cancel) -> None:
    with pytest.raises(EngineError, match="status 127"):
        UpdateHook("no-such-program-here").run({}, cancel)


def test_output_is_bounded_and_its_end_is_kept(cancel: Cancel) -> None:
    output = UpdateHook("head -c 3000000 /dev/zero | tr '\\0' x; echo end").run({}, cancel)
    assert len(output) <= OUTPUT_BYTES
    assert output.endswith("xend")


def test_stdin_is_empty(cancel: Cancel) -> None:
    assert UpdateHook("cat").run({}, cancel) == ""


def test_what_takes_too_long_is_ended_with_all_its_children(cancel: Cancel, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hook = UpdateHook(f"sleep 60 & echo $! > {pids}; echo $$ >> {pids}; wait", timeout_s=0.5)
    with pytest.raises(EngineError, match=r"more than 0\.5 s"):
        hook.run({}, cancel)
    for pid in pids.read_text().split():
        assert not _running(int(pid))


def test_what_ignores_sigterm_is_killed(cancel: Cancel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.hooks.GRACE_S", 0.2)
    hook = UpdateHook("trap '' TERM; while :; do sleep 0.05; done", timeout_s=0.3)
    with pytest.raises(EngineError, match="more than"):
        hook.run({}, cancel)


def test_a_child_left_in_the_background_does_not_keep_it_waiting(
    cancel: Cancel, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    assert UpdateHook(f"sleep 60 & echo $! > {pid}; echo done").run({}, cancel) == "done"
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_cancelling_ends_it(tmp_path: Path) -> None:
    cancel, started = Cancel(), tmp_path / "started"
    caught: list[EngineError] = []
    os.mkfifo(started)

    def run() -> None:
        try:
            UpdateHook(f"echo x > {started}; sleep 60", timeout_s=None).run({}, cancel)
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    started.read_text()
    cancel.cancel()
    thread.join(10)
    assert not thread.is_alive()
    assert "worker ends" in caught[0].message


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

"""Processes are awaited on events, billed, and ended, whatever they do."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest import measure
from loadtest.processes import Process, ProcessError, Processes

TIMEOUT_S = 20.0

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event": "listening"}', flush=True)
time.sleep(60)
"""
SCENARIO = """
import sys, time
from pathlib import Path
from loadtest.processes import Processes, scratch, terminate_as_exit

with terminate_as_exit(), scratch("scenario-", Path(sys.argv[1])) as work, Processes(work) as group:
    child = group.start([sys.executable, "-c", CHILD], name="child")
    child.wait_event("listening", timeout=20)
    print('{"event": "started", "pid": %d}' % child.pid, flush=True)
    time.sleep(60)
""".replace(
    "CHILD",
    repr("""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), exit(0)))
print('{"event": "listening"}', flush=True)
time.sleep(60)
"""),
)
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print('{"event": "started", "pid": %d}' % child.pid, flush=True)
time.sleep(60)
"""


def python(group: Processes, code: str, *arguments: str) -> Process:
    return group.start([sys.executable, "-c", code, *arguments], name="python")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_events_are_found_and_other_lines_are_kept(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        process = python(
            group, "print('plain'); print('[1]'); print('{\"event\": \"x\", \"n\": 2}')"
        )
        assert process.wait_event("x", timeout=TIMEOUT_S) == {"event": "x", "n": 2}
        process.check(timeout=TIMEOUT_S)
        assert process.lines == ["plain", "[1]"]


def test_the_end_of_a_process_ends_the_wait_and_shows_its_stderr(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        process = python(group, "raise SystemExit('the reason')")
        with pytest.raises(ProcessError, match="the reason"):
            process.wait_event("never", timeout=TIMEOUT_S)
        with pytest.raises(ProcessError, match="exit status 1"):
            process.check(timeout=TIMEOUT_S)


def test_silence_is_bounded(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        process = python(group, "import time; time.sleep(60)")
        with pytest.raises(ProcessError, match="said nothing for"):
            process.wait_event("never", timeout=0.05)


def test_everything_is_ended_also_after_a_failure(tmp_path: Path) -> None:
    group = Processes(tmp_path)
    pids = [python(group, "import time; time.sleep(60)").pid for _ in range(3)]
    with pytest.raises(ZeroDivisionError), group:
        raise ZeroDivisionError
    assert not any(running(pid) for pid in pids)
    assert group.stubborn == []


def test_who_ignores_sigterm_is_killed_and_named(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        process = python(group, STUBBORN)
        process.wait_event("listening", timeout=TIMEOUT_S)
        assert not process.stop(grace=0.1)
        assert not running(process.pid)


def test_a_kill_takes_the_children_along(tmp_path: Path) -> None:
    with Processes(tmp_path) as group:
        process = python(group, PARENT)
        child = process.wait_event("started", timeout=TIMEOUT_S)["pid"]
        assert measure.tree(process.pid) == [process.pid, child]
        process.kill()
        assert not running(process.pid)
        assert not running(child)


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGTERM],
        [signal.SIGTERM, signal.SIGTERM, signal.SIGTERM],
        [signal.SIGTERM, signal.SIGKILL],
        [signal.SIGKILL],
    ],
    ids=lambda numbers: "+".join(number.name for number in numbers),
)
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_scenario_leaves_nothing_behind_however_it_is_ended(
    tmp_path: Path, signals: list[signal.Signals], whole_group: bool
) -> None:
    """`timeout` signals the whole group, once or twice; an out-of-memory killer does not ask."""
    work = tmp_path / "work"
    work.mkdir()
    scenario = subprocess.Popen(
        [sys.executable, "-c", SCENARIO, str(work)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with scenario:
        assert scenario.stdout is not None
        child = json.loads(scenario.stdout.readline())["pid"]
        assert list(work.iterdir())
        child_handle = os.pidfd_open(child)
        for number in signals:
            (os.killpg if whole_group else os.kill)(scenario.pid, number)
        status = scenario.wait(TIMEOUT_S)
        assert status == (-9 if signal.SIGKILL in signals else 143)
    assert select.select([child_handle], [], [], TIMEOUT_S)[0], "the child outlived its scenario"
    os.close(child_handle)
    deadline = time.monotonic() + TIMEOUT_S
    while list(work.iterdir()):  # the guardian is at work
        assert time.monotonic() < deadline, list(work.iterdir())
        time.sleep(0.02)


def test_the_bill_counts_cpu_and_written_bytes(tmp_path: Path) -> None:
    code = """
import sys, time
open(sys.argv[1], "wb").write(bytes(3_000_000))
while time.process_time() < 0.2: pass
"""
    with Processes(tmp_path) as group:
        usage = python(group, code, str(tmp_path / "out")).check(timeout=TIMEOUT_S).usage
    assert 3_000_000 <= usage.written_bytes < 4_000_000  # coverage writes its own data too
    assert 0.2 <= usage.cpu_s < 2.0
    assert usage.wall_s >= 0.2


def test_peak_memory_is_the_high_water_mark(tmp_path: Path) -> None:
    code = 'a = bytearray(80_000_000); del a; print(\'{"event": "done"}\', flush=True); input()'
    with Processes(tmp_path) as group:
        process = group.start([sys.executable, "-c", code], name="python", stdin=True)
        process.wait_event("done", timeout=TIMEOUT_S)
        assert 80e6 < measure.tree_peak_resident_bytes(process.pid) < 120e6
        process.say("go")
        process.check(timeout=TIMEOUT_S)


def test_our_own_cpu_seconds_grow() -> None:
    before = measure.cpu_seconds(os.getpid())
    while measure.cpu_seconds(os.getpid()) < before + 0.02:
        sum(range(10_000))

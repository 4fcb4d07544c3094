"""Machines on a switch: what they carry is counted, and all is removed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.machines import Switch, command
from loadtest.processes import Processes

SERVE = """
import json, socket, sys
server = socket.create_server((sys.argv[1], 0))
print(json.dumps({"event": "listening", "port": server.getsockname()[1]}), flush=True)
client, _ = server.accept()
client.sendall(bytes(300_000))
client.close()
"""
TAKE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as taking:
    count = 0
    while data := taking.recv(1 << 16):
        count += len(data)
print(count)
"""


def spaces() -> set[str]:
    return {line.split()[0] for line in command("ip", "netns", "list").splitlines()}


def test_machines_reach_each_other_and_cables_count(tmp_path: Path) -> None:
    before = spaces()
    with Switch() as switch, Processes(tmp_path) as processes:
        one, two = switch.machine(80_000_000), switch.machine(80_000_000)
        assert len(spaces() - before) == 3
        serving = processes.start(
            one.argv(sys.executable, "-c", SERVE, one.address), name="serving"
        )
        port = serving.wait_event("listening", timeout=20)["port"]
        taking = processes.run(
            two.argv(sys.executable, "-c", TAKE, one.address, str(port)), name="taking", timeout=30
        )
        assert taking.lines == ["300000"]
        assert 300_000 < two.received_bytes < 330_000
        assert 300_000 < one.sent_bytes < 330_000
        assert two.sent_bytes < 30_000
    assert not spaces() - before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_switch_goes_however_its_program_is_ended(number: signal.Signals) -> None:
    before = spaces()
    program = f"""
import os
from loadtest.machines import Switch
from loadtest.processes import terminate_as_exit
with terminate_as_exit(), Switch() as switch:
    switch.machine(1_000_000)
    print("made", flush=True)
    os.kill(os.getpid(), {int(number)})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "made\n"
    assert done.returncode == (143 if number == signal.SIGTERM else -9)
    deadline = time.monotonic() + 30
    while spaces() - before:  # the guardian is at work
        assert time.monotonic() < deadline, spaces() - before
        time.sleep(0.02)


def test_a_failing_command_says_what_it_was() -> None:
    with pytest.raises(RuntimeError, match="ip netns del nobody-has-this"):
        command("ip", "netns", "del", "nobody-has-this")

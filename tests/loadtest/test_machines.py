"""Machines on a switch: what they carry is counted, and all is removed."""

import os
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


def spaces(pid: int) -> list[str]:
    """The namespaces that a process has made: others may be at work, too."""
    names = [line.split()[0] for line in command("ip", "netns", "list").splitlines()]
    return [name for name in names if name.startswith(f"sl{pid}n")]


def test_machines_reach_each_other_and_cables_count(tmp_path: Path) -> None:
    with Switch() as switch, Processes(tmp_path) as processes:
        one, two = switch.machine(80_000_000), switch.machine(80_000_000)
        assert len(spaces(os.getpid())) == 3
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
    assert spaces(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_switch_goes_however_its_program_is_ended(number: signal.Signals) -> None:
    program = f"""
import os
from loadtest.machines import Switch
from loadtest.processes import terminate_as_exit
with terminate_as_exit(), Switch() as switch:
    switch.machine(1_000_000)
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), {int(number)})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == (143 if number == signal.SIGTERM else -9)
    deadline = time.monotonic() + 30
    while spaces(int(done.stdout)):  # the guardian is at work
        assert time.monotonic() < deadline, spaces(int(done.stdout))
        time.sleep(0.02)


def test_a_failing_command_says_what_it_was() -> None:
    with pytest.raises(RuntimeError, match="ip netns del nobody-has-this"):
        command("ip", "netns", "del", "nobody-has-this")

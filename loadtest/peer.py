"""Runs the published SHARDCAST 0.3.2 on one file: origin, relays, clients, all on this machine.

It lives in a virtual environment of its own (its import name is ours too) and needs `wget`. Its
server binds every interface and cannot be told otherwise; ports are picked free ones.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loadtest.processes import Process, ProcessError, Processes, free_port, wait_for_port
from loadtest.scenario import UnavailableError, need

REQUIREMENT = "shardcast==0.3.2"
VENV = Path(__file__).resolve().parent / ".peer"

_INSTALL_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 30.0
_CLIENT_TIMEOUT_S = 300.0
_MAX_TRIES = 600
_RETRY_S = 0.5
_PROBE_BYTES = 1_000_000

# Its origin is a library: this holds it open and broadcasts when told to.
_ORIGIN = """
import shardcast, sys, time
shardcast.initialize(data_dir=sys.argv[1], port=int(sys.argv[2]))
sys.stdin.readline()
shardcast.broadcast(sys.argv[3])
time.sleep(3600)
"""


def ensure_installed(processes: Processes) -> Path:
    """Install the peer once and return its `bin` directory.

    Raises:
        UnavailableError: It cannot be installed, or `wget` is missing.
    """
    need("wget")
    if not (VENV / "bin" / "shardcast-middle").exists():
        shutil.rmtree(VENV, ignore_errors=True)
        try:
            for name, argv in (
                ("venv", [sys.executable, "-m", "venv", str(VENV)]),
                ("pip", [str(VENV / "bin" / "pip"), "install", "-q", REQUIREMENT]),
            ):
                processes.run(argv, name=name, timeout=_INSTALL_TIMEOUT_S)
        except ProcessError as error:
            raise UnavailableError(f"cannot install {REQUIREMENT}: {error}") from error
    return VENV / "bin"


def distribute(work: Path, file: Path, *, relays: int, clients: int, poll_s: float) -> float:
    """Return the seconds from `broadcast` to the last client's verified copy.

    Args:
        work: An empty directory for everything it writes.
        file: What is distributed.
        relays: How many relays stand between origin and clients.
        clients: How many clients download at once.
        poll_s: How often relays look for news (its own default is 30).
    """
    with Processes(work / "logs") as processes:
        program = ensure_installed(processes)
        origin, url = _start_origin(processes, program, work, file)
        servers = [
            _start_relay(processes, program, work, number, url, poll_s) for number in range(relays)
        ]
        start = time.monotonic()
        origin.say("go")
        with ThreadPoolExecutor(clients) as pool:
            jobs = [
                pool.submit(_fetch, processes, program, work / f"client{number}", servers)
                for number in range(clients)
            ]
            for job in jobs:
                job.result(timeout=_CLIENT_TIMEOUT_S)
        seconds = time.monotonic() - start
    for number in range(clients):
        if not filecmp.cmp(file, work / f"client{number}" / "out.bin", shallow=False):
            raise RuntimeError(f"the peer's client {number} holds other bytes than {file.name}")
    return seconds


def _start_origin(
    processes: Processes, program: Path, work: Path, file: Path
) -> tuple[Process, str]:
    data = _data_directory(work / "origin")
    port = free_port()
    process = processes.start(
        [program / "python", "-c", _ORIGIN, data, str(port), file],
        name="peer-origin", cwd=work, stdin=True,
    )  # fmt: skip
    wait_for_port(process, port, timeout=_START_TIMEOUT_S)
    return process, f"http://127.0.0.1:{port}"


def _data_directory(path: Path) -> Path:
    """Make a server's directory with the file that its clients probe bandwidth with."""
    path.mkdir()
    (path / "data1.bin").write_bytes(os.urandom(_PROBE_BYTES))
    return path


def _start_relay(
    processes: Processes, program: Path, work: Path, number: int, origin: str, poll_s: float
) -> str:
    data = _data_directory(work / f"relay{number}")
    port = free_port()
    process = processes.start(
        [
            program / "shardcast-middle", "--upstream", origin, "--data-dir", data,
            "--port", str(port), "--check-interval", f"{poll_s:g}",
        ],
        name=f"peer-relay{number}", cwd=work,
    )  # fmt: skip
    wait_for_port(process, port, timeout=_START_TIMEOUT_S)
    return f"http://127.0.0.1:{port}"


def _fetch(processes: Processes, program: Path, out: Path, servers: list[str]) -> None:
    """Run clients until one finds the version and verifies it: that is how it is used."""
    out.mkdir()
    argv = [
        str(program / "shardcast-client"), "--servers", ",".join(servers), "--version", "v1",
        "--output-dir", str(out), "--output-file", str(out / "out.bin"),
    ]  # fmt: skip
    deadline = time.monotonic() + _CLIENT_TIMEOUT_S
    for _ in range(_MAX_TRIES):
        client = processes.start(argv, name=out.name, cwd=out)
        if client.wait(timeout=max(1.0, deadline - time.monotonic())) == 0:
            return
        time.sleep(_RETRY_S)  # its client exits when the version is not there yet
    raise ProcessError(f"{out.name} did not find the version in {_MAX_TRIES} tries")

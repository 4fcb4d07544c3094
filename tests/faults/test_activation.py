"""Sockets that a service manager opened, and what it is told: systemd's two protocols by hand."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from configparser import ConfigParser
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.contract.wire_client import PATIENCE_S, Wire, http
from tests.faults.processes import Line, gone, line, options

pytestmark = [pytest.mark.e2e, pytest.mark.fault(21)]

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
LAUNCH = """
import os, sys
given = [int(number) for number in sys.argv[1].split(",")]
for place, number in enumerate(given, 3):
    if place != number:
        os.dup2(number, place)
    os.set_inheritable(place, True)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = str(len(given))
os.execv(sys.executable, [sys.executable, "-m", "shardcast", "relay", *sys.argv[2:]])
"""


@contextmanager
def listening(*families: socket.AddressFamily) -> Iterator[list[socket.socket]]:
    """Sockets as a .socket unit opens them, at numbers that are in nobody's way."""
    sockets: list[socket.socket] = []
    for family in families:
        sock = socket.socket(family)
        sock.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        sock.listen()
        high = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 100)
        sock.close()
        sockets.append(socket.socket(fileno=high))
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


@asynccontextmanager
async def activated(
    log: Path, sockets: Sequence[socket.socket], *arguments: str, notify: str = "", **how: bool
) -> AsyncIterator[Line]:
    numbers = ",".join(str(sock.fileno()) for sock in sockets)
    env = {"NOTIFY_SOCKET": notify} if notify else {}
    command = ("-c", LAUNCH, numbers)
    fds = [sock.fileno() for sock in sockets]
    async with line(log, *arguments, command=command, env=env, pass_fds=fds, **how) as relay:
        yield relay


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def test_passed_sockets_outlive_the_relay(tmp_path: Path) -> None:
    """A restart the slow way: who connects in between waits in the queue and is answered."""
    arguments = options(tmp_path / "o", listen="127.0.0.1:1")  # not what it listens on
    with listening(socket.AF_INET, socket.AF_INET) as sockets:
        urls = [url_of(sock) for sock in sockets]
        async with activated(tmp_path / "log.1", sockets, *arguments) as relay:
            assert relay.url == urls[0]
            for url in urls:
                assert (await http(url, "/healthz")).status == 200
            relay.signal(signal.SIGTERM)
            assert await asyncio.wait_for(relay.process.wait(), PATIENCE_S) == 0
        async with Wire(urls[1]) as early:  # nobody serves at this moment
            await early.ask("/healthz")
            async with activated(tmp_path / "log.2", sockets, *arguments):
                assert (await early.answer()).status == 200


async def test_passed_sockets_are_handed_over_in_place_and_the_manager_is_told(
    tmp_path: Path,
) -> None:
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(f"\0shardcast-test-{os.getpid()}")
    told.settimeout(PATIENCE_S)

    async def hears() -> str:
        return (await asyncio.to_thread(told.recv, 4096)).decode()

    with told, listening(socket.AF_INET) as sockets:
        name = f"@shardcast-test-{os.getpid()}"
        arguments = options(tmp_path / "o")
        async with activated(tmp_path / "log", sockets, *arguments, notify=name) as relay:
            assert await hears() == "READY=1"
            old = await relay.replace()
            assert {await hears(), await hears()} == {f"MAINPID={relay.pid}", "READY=1"}
            await gone(old)
            assert relay.url == url_of(sockets[0])
            assert (await http(relay.url, "/healthz")).status == 200
            relay.signal(signal.SIGTERM)
            assert await hears() == "STOPPING=1"
            await gone(relay.pid)


async def test_sockets_of_another_kind_are_refused(tmp_path: Path) -> None:
    packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    os.set_inheritable(packets.fileno(), True)
    with packets:
        async with activated(
            tmp_path / "log", [packets], *options(tmp_path / "o"), listens=False
        ) as relay:
            assert await asyncio.wait_for(relay.process.wait(), PATIENCE_S) == 2
    assert "is no listening TCP socket" in relay.said()


async def test_sockets_meant_for_another_process_are_left_alone(tmp_path: Path) -> None:
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    async with line(tmp_path / "log", *options(tmp_path / "o"), env=env) as relay:
        assert (await http(relay.url, "/healthz")).status == 200


def unit(name: str) -> ConfigParser:
    """A unit file; systemd lets a key come again, which these do only where it says so."""
    parser = ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((UNITS / name).read_text("utf-8"))
    return parser


def test_the_units_fit_together_and_the_program() -> None:
    from relay.config import Limits

    service, sock = unit("shardcast-relay.service"), unit("shardcast-relay.socket")
    assert sock["Socket"].getboolean("Accept") is False
    assert sock["Socket"]["ListenStream"] == "8470"
    run = service["Service"]
    assert run["Type"] == "notify"
    assert run["ExecStart"].split()[1] == "relay"
    assert "--listen" not in run["ExecStart"]
    assert run["ExecReload"].endswith("kill -USR2 $MAINPID")
    assert run["NotifyAccess"] == "main"
    # systemd must not kill a drain that goes as it should.
    assert float(run["TimeoutStopSec"]) > Limits().drain_s + 5


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name in ("shardcast-relay.service", "shardcast-relay.socket"):
        text = (UNITS / name).read_text("utf-8")
        # The program lies elsewhere on this machine.
        (tmp_path / name).write_text(text.replace("/usr/local/bin/shardcast", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    ours = [row for row in checked.stderr.splitlines() if "shardcast" in row]
    assert (checked.returncode, ours) == (0, [])

"""Telling the service manager how a relay stands (sd_notify(3)), where there is one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"


def main_pid(pid: int) -> str:
    """Return the line that says that another process is the service from now on."""
    return f"MAINPID={pid}"


def notify(*lines: str, environment: Mapping[str, str] | None = None) -> bool:
    """Send lines to the socket that NOTIFY_SOCKET names; return whether anybody was told."""
    name = (os.environ if environment is None else environment).get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    address = "\0" + name[1:] if name.startswith("@") else name
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        sock.settimeout(1.0)
        sock.sendto("\n".join(lines).encode("utf-8"), address)
        return True
    return False

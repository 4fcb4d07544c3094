"""Listening sockets: bound here, passed in by systemd, or taken over from the relay before.

A listening socket is a queue in the kernel. As long as some process holds it, no connection in
it is lost, so a relay that follows another one is given the sockets themselves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from relay.config import split_listen
from shardcast.errors import UsageError

BACKLOG: Final = 1024
_FIRST_PASSED: Final = 3
_LISTENING_STATE: Final = "0A"  # TCP_LISTEN in /proc/net/tcp

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Listening:
    """The sockets that a relay listens on.

    Attributes:
        sockets: Bound and listening, not blocking.
        url: What reaches the first of them from this machine.
        passed: Whether systemd gave them, so that they outlive this process.
    """

    sockets: tuple[socket.socket, ...]
    url: str
    passed: bool = False

    def close(self) -> None:
        """Close them here."""
        for sock in self.sockets:
            sock.close()


def listen(listen_on: str, offered: Sequence[socket.socket] = ()) -> Listening:
    """Listen on every address of ``HOST:PORT``; blocking, it may have to ask a name server.

    Args:
        listen_on: ``HOST:PORT``; port 0 is any free one, or that of an offered socket.
        offered: Sockets of the relay before: those of the same addresses are used as they are,
            the others are closed.

    Raises:
        UsageError: If no address can be had, or one is taken.
    """
    host, port = split_listen(listen_on)
    found = _addresses(host, port)
    spare = list(offered)
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    try:
        for family, kind, protocol, _name, address in found:
            if sockets and port == 0:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            same = next((s for s in spare if matches(s, family, (address[0], address[1]))), None)
            if same is not None:
                spare.remove(same)
                sockets.append(same)
                continue
            try:
                sockets.append(_bind(family, kind, protocol, address))
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
        if not sockets or (problem is not None and problem.errno == errno.EADDRINUSE):
            raise UsageError(f"--listen {listen_on}: {_explained(problem, port)}")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    finally:
        for sock in spare:
            sock.close()
    return Listening(tuple(sockets), url_of(host, sockets[0].getsockname()))


def matches(sock: socket.socket, family: int, address: Address) -> bool:
    """Say whether a socket listens on an address; port 0 is any port."""
    own = sock.getsockname()
    return sock.family == family and own[0] == address[0] and address[1] in (0, own[1])


def adopt(sockets: Sequence[socket.socket]) -> Listening:
    """Use sockets that systemd passed.

    Raises:
        UsageError: If one of them is no listening TCP socket.
    """
    for sock in sockets:
        kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if kind != socket.SOCK_STREAM or not listening or not internet:
            number = sock.fileno()
            for other in sockets:
                other.close()
            raise UsageError(
                f"descriptor {number} that the service manager passed is no listening TCP socket: "
                "give the .socket unit ListenStream=HOST:PORT and Accept=no"
            )
        sock.setblocking(False)
    first = sockets[0].getsockname()
    return Listening(tuple(sockets), url_of(first[0], first), passed=True)


def passed_sockets(environment: Mapping[str, str], pid: int) -> list[socket.socket]:
    """Return the sockets that the service manager opened for this process (sd_listen_fds(3)).

    Raises:
        UsageError: If what it passed are not sockets.
    """
    if environment.get("LISTEN_PID") != str(pid):
        return []
    try:
        count = int(environment.get("LISTEN_FDS", "0"))
    except ValueError:
        return []
    found = []
    for number in range(_FIRST_PASSED, _FIRST_PASSED + count):
        try:
            os.set_inheritable(number, False)
            found.append(socket.socket(fileno=number))
        except OSError as error:
            raise UsageError(
                f"descriptor {number} that the service manager passed is no socket: {error}"
            ) from error
    return found


def url_of(host: str, address: Any) -> str:
    """Return the URL that reaches a listening socket from this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a name, no bind
    return f"http://[{name}]:{address[1]}" if ":" in name else f"http://{name}:{address[1]}"


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--listen: host {host!r} is not known: {error}") from error
    return list(dict.fromkeys(found))


def _bind(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    """Bind an address and listen; ``::`` takes IPv4 as well."""
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no obstacle
        if family == socket.AF_INET6:
            dual = address[0] == "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


# --- who has the port ---------------------------------------------------------------------------


def _explained(problem: OSError | None, port: int) -> str:
    if problem is None or problem.errno != errno.EADDRINUSE:
        return str(problem)
    holder = holder_of(port)
    who = "another program" if holder is None else f"process {holder[0]} ({holder[1]})"
    return (
        f"port {port} is in use by {who}: end it or choose another port; a relay of this very "
        "store is replaced, without a gap, by --take-over"
    )


def holder_of(port: int, proc: Path = Path("/proc")) -> tuple[int, str] | None:
    """Return pid and name of a process that listens on a TCP port, as far as /proc tells us."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    if not wanted:
        return None
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # not ours to look into, or gone
            for link in (directory / "fd").iterdir():
                if os.readlink(link) in wanted:
                    return int(directory.name), (directory / "comm").read_text("utf-8").strip()
    return None


def _listening_inodes(port: int, proc: Path) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found

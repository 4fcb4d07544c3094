"""Just enough HTTP/1.1 for the load tests' own clients and servers (RFC 9112).

Plain sockets, because a library would hide when which bytes arrive.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

_HEAD_LIMIT_BYTES = 64 * 1024
_END = b"\r\n\r\n"


class WireError(Exception):
    """The other side did not speak the HTTP that was expected of it."""


@dataclass(frozen=True)
class Message:
    """The head of a request or response."""

    first_line: str
    headers: dict[str, str]

    @property
    def status(self) -> int:
        """The status code, if this is a response."""
        return int(self.first_line.split(" ", 2)[1])

    @property
    def length(self) -> int:
        """The declared length of the body; 0 when none is declared."""
        return int(self.headers.get("content-length", "0"))


def parse_head(data: bytes) -> tuple[Message, int] | None:
    """Parse the head at the start of `data`; None while it is incomplete.

    Returns:
        The head and the number of bytes it takes.

    Raises:
        WireError: It does not end within 64 KiB.
    """
    end = data.find(_END)
    if end < 0:
        if len(data) > _HEAD_LIMIT_BYTES:
            raise WireError("a message head exceeds 64 KiB")
        return None
    lines = data[:end].decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Message(lines[0], headers), end + len(_END)


def read_head(sock: socket.socket) -> tuple[Message, bytes]:
    """Read one message head from a socket.

    Returns:
        The head, and the first bytes of the body if they came along.

    Raises:
        WireError: The connection closed first, or the head is too long.
    """
    data = b""
    while (parsed := parse_head(data)) is None:
        chunk = sock.recv(_HEAD_LIMIT_BYTES)
        if not chunk:
            raise WireError(f"connection closed after {len(data)} bytes of a message head")
        data += chunk
    message, used = parsed
    return message, data[used:]


def request(target: str, host: str) -> bytes:
    """Return a GET request that keeps the connection open."""
    return (
        f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"
        "Connection: keep-alive\r\n\r\n"
    ).encode("ascii")

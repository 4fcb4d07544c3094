"""How much of a response lies in the kernel: little for most readers, plenty for a few fast ones.

A send buffer grows to megabytes. A thousand readers that take a kilobyte a second have them filled
all, and that is all the memory the kernel gives TCP (net.ipv4.tcp_mem): then every other connection
gets a fifth of its rate. So what is queued and not sent yet is bounded (TCP_NOTSENT_LOWAT). That
costs a fast reader's response an eighth more CPU, so a few that proved to be fast are exempt.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any, Final

from aiohttp import web

from shardcast.protocol.limits import KIB, MIB

QUEUED_BYTES: Final = 256 * KIB
"""A thousand times that is within the TCP memory of any machine."""
_ANY_BYTES: Final = 0x7FFFFFFF
_FAST_BYTES_PER_S: Final = 32 * MIB
_TELLING_BYTES: Final = MIB
"""What is less fits into buffers and says nothing about its reader."""
MOST_FAST: Final = 32
"""Each may have 4 MiB queued (net.ipv4.tcp_wmem)."""


def queue_at_most(sock: Any, count: int) -> None:
    """Bound what is queued on a connection and not sent yet."""
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):  # the client is gone: sending says so
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)


class FastLane:
    """Lets a few responses at a time queue as much as the kernel likes."""

    def __init__(self, most: int = MOST_FAST) -> None:
        self._free = most

    @contextlib.contextmanager
    def sending(self, request: web.BaseRequest, count: int) -> Iterator[None]:
        """Send ``count`` bytes in the block, on a connection that was fast the last time or not."""
        connection, transport = request.protocol, request.transport
        sock = None if transport is None else transport.get_extra_info("socket")
        exempt = self._free > 0 and bool(getattr(connection, "fast", False))
        if exempt:
            self._free -= 1
            queue_at_most(sock, _ANY_BYTES)
        begun = time.monotonic()
        try:
            yield
        finally:
            if exempt:
                self._free += 1
                queue_at_most(sock, QUEUED_BYTES)
        if count >= _TELLING_BYTES and hasattr(connection, "fast"):
            connection.fast = count / (time.monotonic() - begun + 1e-9) >= _FAST_BYTES_PER_S

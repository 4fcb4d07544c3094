"""Many clients that ask for a blob and then hardly read: what a relay must survive cheaply."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadtest.http_wire import request
from loadtest.rawclient import target_of

_SIP_BYTES = 1024
_RECEIVE_BUFFER_BYTES = 4096
# Per-client limits are by address: the readers come from this many loopback addresses.
_ADDRESSES = 250


@dataclass(frozen=True)
class Outcome:
    """How the readers fared.

    Attributes:
        served: How many received the first bytes of a 200.
        held: How many were still connected at the end.
    """

    served: int
    held: int


class _Reader:
    def __init__(self, number: int, url: str) -> None:
        parts = urlsplit(url)
        self.first = b""
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.sock.bind((f"127.0.1.{1 + number % _ADDRESSES}", 0))
        self.sock.settimeout(10.0)
        self.sock.connect((parts.hostname, parts.port))
        self.sock.sendall(request(target_of(url), parts.netloc))
        self.sock.setblocking(False)

    @property
    def served(self) -> bool:
        return self.first.startswith(b"HTTP/1.1 200")

    def sip(self) -> bool:
        """Read a little; False once the connection is over."""
        try:
            data = self.sock.recv(_SIP_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if len(self.first) < _SIP_BYTES:
            self.first += data
        return bool(data)


def hold(urls: Sequence[str], *, count: int, start_s: float, hold_s: float) -> Outcome:
    """Open `count` slow readers over `urls`, keep them for a while, close them.

    Args:
        urls: Blobs; reader n asks for number n modulo their count.
        count: How many connections.
        start_s: How long to wait at most until everyone has been answered.
        hold_s: How long to go on sipping (1 KiB, four times a second) after that.
    """
    readers: list[_Reader] = []
    lost: set[_Reader] = set()
    with contextlib.ExitStack() as cleanup, selectors.DefaultSelector() as selector:
        for number in range(count):
            reader = _Reader(number, urls[number % len(urls)])
            cleanup.callback(reader.sock.close)
            selector.register(reader.sock, selectors.EVENT_READ, reader)
            readers.append(reader)
        deadline = time.monotonic() + start_s
        while time.monotonic() < deadline and not all(r.first or r in lost for r in readers):
            for key, _events in selector.select(0.5):
                if not key.data.sip():
                    lost.add(key.data)
                    selector.unregister(key.fileobj)
        end = time.monotonic() + hold_s
        while time.monotonic() < end:
            lost.update(r for r in readers if r not in lost and not r.sip())
            time.sleep(0.25)  # the slowness is the point
    return Outcome(sum(r.served for r in readers), len(readers) - len(lost))

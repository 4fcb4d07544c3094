"""The cheapest HTTP reader Python can be: raw sockets into one reused buffer, nothing kept.

`python -m loadtest.rawclient URLS` reads every URL of a file (one a line, all of one server)
over N connections and prints one JSON line with bytes and seconds. The same reader drives every
server that is compared, so its own cost cancels.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.http_wire import WireError, read_head, request

_BUFFER_BYTES = 1 << 20
_TIMEOUT_S = 60.0


def connect(url: str, *, timeout: float = _TIMEOUT_S) -> socket.socket:
    """Open a connection to the server of `url`."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 80), timeout=timeout)


def target_of(url: str) -> str:
    """Return what stands in the request line for `url`."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def read_all(urls: Sequence[str]) -> int:
    """Read the URLs one after another over one connection; return the bytes of the bodies.

    Raises:
        WireError: An answer was not 200, or ended early.
    """
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    total = 0
    with connect(urls[0]) as sock:
        host = urlsplit(urls[0]).netloc
        for url in urls:
            sock.sendall(request(target_of(url), host))
            head, rest = read_head(sock)
            if head.status != 200:
                raise WireError(f"{url}: {head.first_line}")
            left = head.length - len(rest)
            while left:
                got = sock.recv_into(buffer, min(left, _BUFFER_BYTES))
                if not got:
                    raise WireError(f"{url}: connection closed {left} bytes early")
                left -= got
            total += head.length
    return total


def read_over(urls: Sequence[str], connections: int) -> int:
    """Read the URLs over several connections at once, each its share; return the bytes."""
    totals = [0] * connections
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            if share := urls[number::connections]:
                totals[number] = read_all(share)
        except (OSError, WireError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(totals)


def main() -> None:
    """Read what the command line names."""
    parser = argparse.ArgumentParser(description="read URLs and forget them")
    parser.add_argument("urls", type=Path)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--passes", type=int, default=1)
    options = parser.parse_args()
    urls = options.urls.read_text().split()
    start = time.monotonic()
    total = sum(read_over(urls, options.connections) for _ in range(options.passes))
    seconds = time.monotonic() - start
    print(json.dumps({"event": "read", "bytes": total, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()

"""A parent that serves an exported run and stops in the middle of one blob until told to go on.

It speaks just the part of docs/PROTOCOL.md that a relay needs of its parent (head with long
poll, blobs), over documents that `shardcast export` wrote.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from loadtest.documents import head_of

_MAX_WAIT_S = 25.0
_MAX_PAUSE_S = 120.0
_CHUNK_BYTES = 64 * 1024


class ScriptedParent:
    """Serves `exported` on a free loopback port; a context manager.

    Attributes:
        url: Its base URL.
        paused: Set once the victim's first bytes were sent.
        released: Set it to let the rest of the victim go.
        sent: Digest of each blob whose last byte was sent, in order.
        asked: How often the victim's pause was reached.
    """

    def __init__(self, exported: Path, run: str, *, victim: str, pause_at: int) -> None:
        """Prepare to stop after `pause_at` bytes of the blob with the digest `victim`."""
        self.root = exported / "v1" / run
        self.run = run
        self.victim = victim
        self.pause_at = pause_at
        self.paused = threading.Event()
        self.released = threading.Event()
        self.closing = threading.Event()
        self.asked = 0
        self.sent: list[str] = []
        self._news = threading.Condition()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        """Start to serve."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let every waiting answer go and stop serving."""
        self.closing.set()
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def note_sent(self, digest: str) -> None:
        """Remember that a blob was sent whole."""
        with self._news:
            self.sent.append(digest)
            self._news.notify_all()

    def wait_sent(self, digests: Collection[str], *, timeout: float) -> None:
        """Wait until each of `digests` was sent whole at least once.

        Raises:
            TimeoutError: Some were not within `timeout` seconds.
        """
        wanted = set(digests)
        with self._news:
            if not self._news.wait_for(lambda: wanted <= set(self.sent), timeout):
                left = len(wanted - set(self.sent))
                raise TimeoutError(f"{left} of {len(wanted)} blobs not sent in {timeout:g} s")

    def sequence(self) -> int:
        """Return the sequence of the exported head."""
        return int(head_of((self.root / "head").read_bytes())["sequence"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, parent: ScriptedParent) -> None:
        self.parent = parent
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def parent(self) -> ScriptedParent:
        assert isinstance(self.server, _Server)
        return self.server.parent

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        target = urlsplit(self.path)
        parts = target.path.strip("/").split("/")
        if parts == ["v1", self.parent.run, "head"]:
            self._wait_for_news(parse_qs(target.query))
            self._send(self.parent.root / "head", "public, max-age=1", body=body)
            return
        path = self.parent.root / "blobs" / parts[-1]
        if parts[:-1] == ["v1", self.parent.run, "blobs"] and path.is_file():
            self._send(path, "public, max-age=31536000, immutable, no-transform", body=body)
            return
        self.send_response(404)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _wait_for_news(self, query: dict[str, list[str]]) -> None:
        after = int(query.get("after", ["-1"])[0])
        wait = float(query.get("wait", ["0"])[0])
        if after >= self.parent.sequence():
            self.parent.closing.wait(min(wait, _MAX_WAIT_S))

    def _send(self, path: Path, cache_control: str, *, body: bool) -> None:
        data = path.read_bytes()
        digest = path.name.removesuffix(".bin")
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", cache_control)
        if digest != path.name:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"blake3-{digest}"')
        self.end_headers()
        if body:
            stop = self.parent.pause_at if digest == self.parent.victim else len(data)
            self._write(data[:stop])
            if stop < len(data):
                self.parent.asked += 1
                self.parent.paused.set()
                self.parent.released.wait(_MAX_PAUSE_S)
                self._write(data[stop:])
            self.parent.note_sent(digest)

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), _CHUNK_BYTES):
            self.wfile.write(data[start : start + _CHUNK_BYTES])
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its base names it
        """Say nothing."""

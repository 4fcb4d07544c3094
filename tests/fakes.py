"""Fakes that tests share: an HTTP server that sends exact bytes, a run in memory, a server for it.

Nothing here sleeps to synchronise: a pause ends when its event is set, and every wait is bounded.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final, Self

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast.keys import Ed25519Signer
from shardcast.protocol import succession
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import Signer, seal
from shardcast.protocol.head import Head, VersionRef, encode_head
from shardcast.protocol.layout import (
    FileEntry,
    Layout,
    encode_layout,
    encode_part,
    split_parts,
)
from shardcast.protocol.manifest import encode_manifest
from shardcast.protocol.wire import blob_etag, head_etag, parse_range

KIB: Final = 1024
WAIT_S: Final = 30.0
"""No fake waits longer than this for anything."""


# --- exact bytes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    target: str
    headers: Mapping[str, str]
    connection: int

    @property
    def digest(self) -> str | None:
        """The blob that it asks for."""
        match = re.search(r"/blobs/([0-9a-f]{64})\.bin\Z", self.target)
        return match[1] if match else None


@dataclass(frozen=True)
class Until:
    """Send nothing until the event is set (or the client has gone, or 30 s are over)."""

    event: threading.Event


class Close:
    """Close the connection in order (FIN)."""


class Reset:
    """Reset the connection (RST)."""


class Gone:
    """Wait until the client has closed or reset the connection."""


Action = bytes | memoryview | Until | Close | Reset | Gone
Handler = Callable[[Request], Iterable[Action]]


def response(
    status: int = 200,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    length: int | None = None,
) -> bytes:
    """The bytes of a response; `length` lies about the body's, -1 leaves it out."""
    lines = [f"HTTP/1.1 {status} Reason"]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


class ScriptedServer:
    """Answers each request with what its handler yields, byte for byte.

    Attributes:
        requests: All requests so far.
        connections: How many connections were accepted.
        port: The port it listens on.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        port: int = 0,
    ) -> None:
        self.handler = handler
        self.requests: list[Request] = []
        self.connections = 0
        self.changed = threading.Condition()
        self._tls = tls
        self._host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="scripted", daemon=True)

    @property
    def url(self) -> str:
        """Its base URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    @property
    def open_connections(self) -> int:
        """How many connections are being served."""
        return len(self._open)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition over what came holds; it is looked at after each request."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout=WAIT_S), "it never happened"

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection and thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._end_waits()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(WAIT_S)
        self.drop_connections()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _end_waits(self) -> None:
        """Wake handlers that wait for something."""

    def drop_connections(self) -> None:
        """End every connection now, as a killed process does."""
        with self.changed:
            open_now = list(self._open)
        for sock in open_now:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self.changed:
                self.connections += 1
                number = self.connections
                self._open.add(sock)
            thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        raw = sock
        with contextlib.suppress(OSError, ssl.SSLError):
            sock.settimeout(WAIT_S)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self.changed:
                    self._open.add(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (request := self._read(sock, number)) is not None:
                with self.changed:
                    self.requests.append(request)
                    self.changed.notify_all()
                if not all(self._act(sock, action) for action in self.handler(request)):
                    break
        with self.changed:
            self._open -= {sock, raw}
            self.changed.notify_all()
        with contextlib.suppress(OSError):
            sock.close()

    def _read(self, sock: socket.socket, number: int) -> Request | None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = sock.recv(64 * KIB)
            if not piece:
                return None
            data += piece
        first, *lines = data.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        return Request(method, target, headers, number)

    def _act(self, sock: socket.socket, action: Action) -> bool:
        match action:
            case Until(event):
                deadline = time.monotonic() + WAIT_S
                while not event.wait(0.01):
                    if self._closing.is_set() or time.monotonic() > deadline or _gone(sock):
                        return False
                return True
            case Gone():
                sock.settimeout(WAIT_S)
                with contextlib.suppress(OSError):
                    while sock.recv(1024):
                        pass
                return False
            case Close():
                return False
            case Reset():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            case _:
                sock.sendall(action)
                return True


def _gone(sock: socket.socket) -> bool:
    poll = select.poll()  # recv would wait for the socket's timeout first, MSG_DONTWAIT or not
    poll.register(sock, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        # Looked at first: a socket with a timeout waits for bytes, whatever the flags say.
        if not select.select([sock], [], [], 0)[0]:
            return False
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        return True


def drip(data: bytes, interval_s: float = 0.01) -> Iterator[bytes]:
    """`data`, a byte at a time: slower than any rate that a test sets as the minimum."""
    pause = threading.Event()
    for index in range(len(data)):
        yield data[index : index + 1]
        pause.wait(interval_s)


class Unaccepting:
    """A port whose connections are never accepted: its queue is full."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self._fillers: list[socket.socket] = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self._listener.getsockname())
            self._fillers.append(filler)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (*self._fillers, self._listener):
            sock.close()


# --- a run in memory --------------------------------------------------------------------------


def new_signer() -> Ed25519Signer:
    """A signer with a fresh key."""
    return Ed25519Signer(Ed25519PrivateKey.generate())


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass
class FakeRun:
    """A run in memory: what a publisher did, as heads and blobs.

    Attributes:
        name: The run.
        signers: Who signs heads.
        head: The newest head, None before the first.
        envelope: Its bytes.
        blobs: Every document and shard by digest.
        files: The files of each version.
    """

    name: str = "policy"
    signers: tuple[Signer, ...] = field(default_factory=lambda: (new_signer(),))
    head: Head | None = None
    envelope: bytes = b""
    blobs: dict[str, bytes] = field(default_factory=dict)
    files: dict[int, dict[str, bytes]] = field(default_factory=dict)
    expiry_ms: int = 3_600_000
    now_ms: Callable[[], int] = now_ms
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The raw public keys."""
        return tuple(signer.public_key for signer in self.signers)

    def publish(
        self, files: Mapping[str, bytes], *, step: int | None = None, shard_bytes: int = 256 * KIB
    ) -> VersionRef:
        """Add a version and announce it."""
        number = max(self.files, default=0) + 1
        ref = self.add_version(number, files, step=step, shard_bytes=shard_bytes)
        self.announce(succession.with_version(self.head, self._issue(), ref, keep=16))
        return ref

    def add_version(
        self,
        number: int,
        files: Mapping[str, bytes],
        *,
        step: int | None = None,
        shard_bytes: int = 256 * KIB,
    ) -> VersionRef:
        """Make a version's documents and shards, without a head that names them."""
        layout = Layout(
            run=self.name,
            version=number,
            step=step,
            lineage="lineage",
            created_at=self.now_ms(),
            shard_bytes=shard_bytes,
            metadata={},
            files=[FileEntry(path=path, bytes=len(data)) for path, data in files.items()],
        )
        shards = [
            files[extent.path][extent.offset : extent.offset + extent.length]
            for extent in layout.extents()
        ]
        digests = [self._keep(shard) for shard in shards]
        layout_digest = self._keep(encode_layout(layout))
        parts = [
            self._keep(encode_part(layout_digest, first, part))
            for first, part in split_parts(digests)
        ]
        manifest = self._keep(encode_manifest(layout_digest, parts))
        self.files[number] = dict(files)
        return VersionRef(
            version=number, step=step, manifest=manifest, bytes=layout.total_bytes, deltas=[]
        )

    def amend(self, **changes: object) -> None:
        """Announce the head again with other members."""
        head = succession.renewed(self.head, self._issue())
        self.announce(msgspec.structs.replace(head, **changes))

    def withdraw(self, number: int) -> None:
        """Withdraw a version; the newest other one becomes the version to be on."""
        assert self.head is not None
        withdrawn = sorted({*self.head.withdrawn, number})
        left = [r.version for r in self.head.versions if r.version not in withdrawn]
        self.amend(withdrawn=withdrawn, version=max(left, default=None))

    def announce(self, head: Head) -> None:
        """Sign a head and make it the newest."""
        with self.changed:
            self.head = head
            self.envelope = seal(encode_head(head), self.signers)
            self.changed.notify_all()

    def shard_digests(self, number: int) -> list[str]:
        """The digests of a version's shards in order."""
        layout, digests = self.files[number], []
        for data in layout.values():
            for offset in range(0, len(data), 256 * KIB):
                digests.append(digest_of(data[offset : offset + 256 * KIB]))
        return digests

    def _issue(self) -> succession.Issue:
        return succession.Issue(
            run=self.name, now_ms=self.now_ms(), keys=self.keys, expiry_ms=self.expiry_ms
        )

    def _keep(self, data: bytes) -> str:
        digest = digest_of(data)
        self.blobs[digest] = data
        return digest


class RunServer(ScriptedServer):
    """Serves runs as the protocol says, counts, and lets a test spoil single answers.

    Attributes:
        fault: Asked before each answer to a blob; what it returns is sent instead, unless None.
        head_fault: The same for heads.
        sent: Body bytes of blobs that were sent, by digest.
        static: Behave as a plain file server: no long poll, no ranges under our ETag.
        date_s: Its clock, sent with heads; None: it does not tell.
    """

    def __init__(self, *runs: FakeRun, static: bool = False, **kwargs: object) -> None:
        super().__init__(self._answer, **kwargs)  # type: ignore[arg-type]
        self.runs = {run.name: run for run in runs}
        self.static = static
        self.fault: Callable[[Request, bytes], Iterable[Action] | None] = lambda r, b: None
        self.head_fault: Callable[[Request], Iterable[Action] | None] = lambda r: None
        self.sent: Counter[str] = Counter()
        self.depth = 0
        self.date_s: float | None = None

    @property
    def blob_requests(self) -> list[str]:
        """The digests that were asked for, in order."""
        return [request.digest for request in self.requests if request.digest is not None]

    def _end_waits(self) -> None:
        for run in self.runs.values():
            with run.changed:
                run.changed.notify_all()

    def _answer(self, request: Request) -> Iterable[Action]:
        match = re.match(r"/v1/([^/]+)/(head|blobs/)", request.target)
        run = self.runs.get(match[1]) if match else None
        if run is None or match is None:
            return [response(404, headers={"Cache-Control": "no-store"})]
        if match[2] == "head":
            return self.head_fault(request) or self._head(run, request)
        return self._blob(run, request)

    def _head(self, run: FakeRun, request: Request) -> Iterable[Action]:
        match = re.search(r"\?after=(\d+)&wait=(\d+)\Z", request.target)
        with run.changed:
            if match and not self.static:
                after, wait_s = int(match[1]), int(match[2])
                run.changed.wait_for(
                    lambda: self._closing.is_set() or (run.head and run.head.sequence > after),
                    timeout=wait_s,
                )
            envelope = run.envelope
        if not envelope:
            return [response(404, headers={"Cache-Control": "no-store"})]
        headers = {"ETag": head_etag(digest_of(envelope)), "Shardcast-Depth": str(self.depth)}
        if self.date_s is not None:
            headers["Date"] = formatdate(self.date_s, usegmt=True)
        return [response(200, envelope, headers)]

    def _blob(self, run: FakeRun, request: Request) -> Iterable[Action]:
        data = run.blobs.get(request.digest or "")
        if data is None or request.digest is None:
            return [response(404, headers={"Cache-Control": "no-store"})]
        spoiled = self.fault(request, data)
        if spoiled is not None:
            return spoiled
        return self.good(request, data)

    def good(self, request: Request, data: bytes) -> list[Action]:
        """The honest answer."""
        assert request.digest is not None
        etag = '"static"' if self.static else blob_etag(request.digest)
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Shardcast-Source": "disk"}
        wanted = None
        if request.headers.get("if-range") in (None, etag):
            wanted = parse_range(request.headers.get("range"), len(data))
        if wanted is None:
            self.sent[request.digest] += len(data)
            return [response(200, data, headers)]
        self.sent[request.digest] += wanted.length
        headers["Content-Range"] = wanted.content_range
        return [response(206, data[wanted.start : wanted.stop], headers)]

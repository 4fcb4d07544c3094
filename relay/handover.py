"""A relay takes the place of another one on the same store, without a reader noticing.

The running relay (the predecessor) keeps a Unix socket in its store. The next one (the successor)
connects, is given the listening sockets, gets ready, and says so. Only then does the predecessor
stop accepting, and only when the successor accepts does it leave::

    successor                              predecessor
      take_over: who I am           ->
                                    <-       offer: sockets, depth      (it goes on serving)
      ... reads the store ...
      ready: which sockets I keep   ->
                                    <-       paused                     (nobody accepts; the kernel
      ... looks at the heads again ...                                   queues for a moment)
      accepting                     ->
                                             drains, then ends

If the connection ends before ``accepting``, the predecessor goes on as if nothing had been. If it
ends after ``ready`` at the successor's side, the predecessor has died and the successor goes on.
Messages are JSON objects, one a packet. docs/adr/0011 has the alternatives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from shardcast.errors import BusyError, ShardcastError
from shardcast.store.files import disk_error

log = logging.getLogger("relay.handover")

DOOR_NAME: Final = ".relay.sock"
FORMAT: Final = "shardcast.handover/1"
_AGAIN_S: Final = 1.0
"""Between two tries to accept, where the system refuses."""
ANSWER_S: Final = 15.0
"""Longest wait for an answer that takes no work."""
START_S: Final = 120.0
"""Longest time that a successor may take until it is ready: it looks at every run in the store."""
_PACKET_BYTES: Final = 64 * 1024
_MOST_SOCKETS: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")


class BrokenError(BusyError):
    """The other relay said something else than it should, or went away."""


# --- packets --------------------------------------------------------------------------------------


def encode(kind: str, **members: object) -> bytes:
    """Return one message."""
    return json.dumps({"format": FORMAT, "kind": kind, **members}).encode("utf-8")


def decode(data: bytes, *kinds: str) -> dict[str, Any]:
    """Return a message of one of ``kinds``.

    Raises:
        BrokenError: If it is something else.
        BusyError: If the other one refuses, and why.
    """
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if not isinstance(message, dict) or message.get("format") != FORMAT:
        raise BrokenError("the other relay does not speak shardcast.handover/1")
    if message.get("kind") == "refused":
        raise BusyError(f"the running relay does not give way: {message.get('message')}")
    if message.get("kind") not in kinds:
        raise BrokenError(f"the other relay says {message.get('kind')!r} instead of {kinds[0]!r}")
    return message


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Give a name for ``path`` that fits into a socket address, however deep the store lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


async def _receive(sock: socket.socket, seconds: float) -> bytes:
    """Return the next packet; empty when the other side has gone."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            return await loop.sock_recv(sock, _PACKET_BYTES)
    except TimeoutError:
        raise BrokenError(f"the other relay said nothing for {seconds:g} s") from None
    except OSError:
        return b""


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever waits for an answer notices
        sock.send(data)


# --- the successor --------------------------------------------------------------------------------


@dataclass
class Predecessor:
    """The relay whose place is taken.

    Attributes:
        pid: Its process.
        sockets: What it listens on.
        passed: Whether the service manager opened them.
        depth: How far it says that it is from the origin.
        path: The nodes in between.
    """

    pid: int
    sockets: list[socket.socket]
    passed: bool
    depth: int
    path: list[str]
    _sock: socket.socket

    async def ready(self, kept: Sequence[socket.socket]) -> None:
        """Say that this process can serve; return when the predecessor accepts no more.

        If it has died meanwhile, its place is free all the same.

        Raises:
            BusyError: If it does not give way.
            BrokenError: If it does not answer.
        """
        names = [str(sock.getsockname()) for sock in kept]
        _send(self._sock, encode("ready", kept=names))
        answer = await _receive(self._sock, ANSWER_S)
        if not answer:
            log.warning("process %d, whose place is taken, has died meanwhile", self.pid)
            return
        decode(answer, "paused")

    def accepting(self) -> None:
        """Say that this process accepts connections now."""
        _send(self._sock, encode("accepting"))

    def close(self) -> None:
        """End the conversation; before ``accepting`` that calls everything off."""
        self._sock.close()


async def find_predecessor(store: Path) -> Predecessor | None:
    """Ask the relay that serves ``store`` for its sockets; None if there is none.

    Raises:
        BusyError: If it does not give way.
        BrokenError: If it answers nonsense, or not at all.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        if not await _knock(sock, store / DOOR_NAME):
            sock.close()
            return None
        pid = _credentials(sock)[0]
        _send(sock, encode("take_over", pid=os.getpid()))
        data, sockets = await _take_sockets(sock, pid)
        try:
            offer = decode(data, "offer")
        except BaseException:
            for found in sockets:
                found.close()
            raise
        path = [str(node) for node in offer["path"]]
        return Predecessor(pid, sockets, bool(offer["passed"]), int(offer["depth"]), path, sock)
    except BaseException:
        sock.close()
        raise


async def _knock(sock: socket.socket, path: Path) -> bool:
    """Connect; False if nobody is there."""
    loop = asyncio.get_running_loop()
    try:
        with _short_path(path) as name:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_connect(sock, name)
    except TimeoutError:
        raise BrokenError(f"the running relay did not answer for {ANSWER_S:g} s") from None
    except OSError:
        return False
    return True


async def _take_sockets(sock: socket.socket, pid: int) -> tuple[bytes, list[socket.socket]]:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        async with asyncio.timeout(ANSWER_S):
            await readable.wait()
        data, numbers, _flags, _address = socket.recv_fds(sock, _PACKET_BYTES, _MOST_SOCKETS)
    except TimeoutError:
        raise BrokenError(
            f"the running relay, process {pid}, did not answer for {ANSWER_S:g} s: "
            "it is stopped or stuck, so continue it or end it"
        ) from None
    except OSError as error:
        raise BrokenError(f"the running relay does not answer: {error}") from error
    finally:
        loop.remove_reader(sock)
    sockets = []
    for number in numbers:
        os.set_inheritable(number, False)
        sockets.append(socket.socket(fileno=number))
    return data, sockets


def _credentials(sock: socket.socket) -> tuple[int, int]:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(data)
    return pid, uid


# --- the predecessor ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offer:
    """What a successor is given."""

    sockets: tuple[socket.socket, ...]
    passed: bool
    depth: int
    path: tuple[str, ...]


class Host(Protocol):
    """The running relay, as seen from its door."""

    def offer(self) -> Offer | str:
        """Return what to give away, or why nothing is given."""
        ...

    async def pause(self) -> None:
        """Accept no connection and follow no parent, until ``resume`` or the end."""
        ...

    async def resume(self) -> None:
        """Go on as before."""
        ...

    def leave(self, pid: int, kept: Sequence[str]) -> None:
        """Drain and end: process ``pid`` accepts now, on the sockets named ``kept``."""
        ...


class Door:
    """Where a successor knocks. Used on the event loop."""

    def __init__(self, store: Path, host: Host) -> None:
        self._path = store / DOOR_NAME
        self._host = host
        self._sock: socket.socket | None = None
        self._inode: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._talking: set[asyncio.Task[None]] = set()
        self._busy_with: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a successor can knock."""
        return self._sock is not None

    def open(self) -> None:
        """Listen for a successor.

        What a relay left there that was killed, or is leaving, is replaced. Without a door (the
        store cannot be written to) the relay serves as well, and cannot be replaced in place.
        """
        temporary = self._path.with_name(f"{DOOR_NAME}.{os.getpid()}.tmp")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _short_path(temporary) as name:
                temporary.unlink(missing_ok=True)
                sock.bind(name)
                os.chmod(name, 0o600)
                self._inode = os.stat(name).st_ino
            sock.listen(8)
            sock.setblocking(False)
            os.replace(temporary, self._path)
        except OSError as error:
            sock.close()
            log.warning("no take-over here: %s", disk_error(error, self._path, "opening"))
            return
        self._sock = sock
        self._task = asyncio.create_task(self._welcome(sock), name="handover")

    async def close(self, *, unlink: bool) -> None:
        """Close the door; whoever is talking is told so.

        Args:
            unlink: Remove it, unless it is another relay's already. A successor replaces it.
        """
        tasks = [*self._talking, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            with contextlib.suppress(OSError):
                if unlink and self._path.stat().st_ino == self._inode:
                    self._path.unlink()

    async def _welcome(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _address = await loop.sock_accept(door)
            except OSError as error:  # out of descriptors, say: whoever knocks waits
                log.warning("take-over: accepting failed: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            task = asyncio.create_task(self._talk(sock))
            self._talking.add(task)
            task.add_done_callback(self._talking.discard)

    async def _talk(self, sock: socket.socket) -> None:
        """Speak with one candidate, whatever comes of it."""
        pid, uid = _credentials(sock)
        try:
            if uid not in (0, os.geteuid()):
                raise BrokenError(f"user {uid} may not take the place of user {os.geteuid()}")
            decode(await _receive(sock, ANSWER_S), "take_over")
            if self._busy_with is not None:
                raise BusyError(f"process {self._busy_with} is taking its place already")
            self._busy_with = pid
            try:
                await self._give_way(sock, pid)
            finally:
                self._busy_with = None
        except asyncio.CancelledError:
            _send(sock, encode("refused", message="it is stopping"))
            raise
        except ShardcastError as error:
            _send(sock, encode("refused", message=error.message))
            log.error("process %d did not take over, this relay goes on: %s", pid, error)
        finally:
            sock.close()

    async def _give_way(self, sock: socket.socket, pid: int) -> None:
        offer = self._host.offer()
        if isinstance(offer, str):
            raise BusyError(offer)
        log.info("process %d is going to take over", pid)
        message = encode("offer", passed=offer.passed, depth=offer.depth, path=offer.path)
        with contextlib.suppress(OSError):
            socket.send_fds(sock, [message], [s.fileno() for s in offer.sockets])
        kept = decode(await self._heard(sock, START_S), "ready")["kept"]
        if isinstance(self._host.offer(), str):
            raise BusyError("it is stopping")
        await self._paused(sock)
        self._host.leave(pid, [str(name) for name in kept])

    async def _paused(self, sock: socket.socket) -> None:
        """Stand aside until the successor accepts; step back in if it never does."""
        await self._host.pause()
        try:
            _send(sock, encode("paused"))
            decode(await self._heard(sock, ANSWER_S), "accepting")
        except BaseException:
            await self._host.resume()
            raise

    async def _heard(self, sock: socket.socket, seconds: float) -> bytes:
        data = await _receive(sock, seconds)
        if not data:
            raise BrokenError("it ended before it was ready; its own messages say why")
        return data

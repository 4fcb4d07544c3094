"""Relays as processes that follow each other on one store, told apart by their process ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcast.keys import public_pem
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from tests.contract.made import signer
from tests.contract.wire_client import PATIENCE_S, Wire

Event = dict[str, Any]
RELAY = ("-m", "shardcast", "relay")
PAUSE_S = 0.01
"""Between two requests of one reader: a relay refuses a client that asks all too often."""


@dataclass
class Line:
    """A relay and its successors: they share standard output and the log.

    Attributes:
        process: The first of them, the only child of this process.
        log: What all of them logged.
        listening: Their events, as they began to listen.
    """

    process: asyncio.subprocess.Process
    log: Path
    listening: list[Event] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False

    @property
    def url(self) -> str:
        """Where the newest listens."""
        return str(self.listening[-1]["url"])

    @property
    def pid(self) -> int:
        """The newest."""
        return int(self.listening[-1]["pid"])

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rpartition(":")[2])

    async def read(self) -> None:
        """Take in what they print."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                self.listening.append(event)
                self._news.set()
        self._ended = True
        self._news.set()

    async def generation(self, number: int) -> Event:
        """Wait until the relay with that number, from 0, listens."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.listening) <= number:
                assert not self._ended, f"it ended before it listened: {self.said()}"
                self._news.clear()
                await self._news.wait()
        return self.listening[number]

    def said(self) -> str:
        """What they logged."""
        return self.log.read_text("utf-8", "replace")

    async def says(self, text: str) -> None:
        """Wait until one of them has logged that."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while text not in self.said():
            assert loop.time() < deadline, f"nobody said {text!r}: {self.said()}"
            await asyncio.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the newest."""
        os.kill(self.pid, number)

    async def replace(self) -> int:
        """Replace the newest in place; return the old one's process id once the new one listens."""
        old, number = self.pid, len(self.listening)
        self.signal(signal.SIGUSR2)
        await self.generation(number)
        return old


async def gone(pid: int, seconds: float = PATIENCE_S) -> None:
    """Wait until a process has ended, whoever started it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), seconds)
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    with contextlib.suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def options(store: Path, *parents: str, key: int = 1, listen: str = "127.0.0.1:0") -> list[str]:
    """The options of a relay; below parents it pins the key that tests sign with."""
    found = ["--store", str(store), "--listen", listen]
    for parent in parents:
        found += ["--parent", parent]
    if parents:
        pinned = store.with_suffix(".pub")
        pinned.write_bytes(public_pem(signer(key).public_key))
        found += ["--pubkey", str(pinned)]
    return found


@asynccontextmanager
async def line(
    log: Path,
    *arguments: str,
    command: Sequence[str] = RELAY,
    env: Mapping[str, str] | None = None,
    listens: bool = True,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[Line]:
    """Start a relay; at the end kill it, and whatever took its place, if they still run."""
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            pass_fds=pass_fds,
        )
    relay = Line(process, log)
    reading = asyncio.create_task(relay.read())
    try:
        if listens:
            await relay.generation(0)
        yield relay
    finally:
        mine = {process.pid, *(int(event["pid"]) for event in relay.listening)}
        for pid in mine | {child for one in mine for child in children(one)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await gone(pid)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        await asyncio.wait_for(reading, PATIENCE_S)


async def fails(*arguments: str, command: Sequence[str] = RELAY) -> tuple[int, str]:
    """Run a relay that must not start; return its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert b'"listening"' not in out
    assert process.returncode is not None
    return process.returncode, err.decode()


# --- readers ---------------------------------------------------------------------------------------


@dataclass
class Load:
    """Readers that never pause, and what became of every request.

    Attributes:
        answers: Requests that were answered in full, by kind.
        failures: What went wrong.
    """

    answers: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    connections: int = 0

    def answered(self, kind: str) -> None:
        """Count one."""
        self.answers[kind] = self.answers.get(kind, 0) + 1

    async def keep_alive(self, url: str, paths: Callable[[], tuple[str, str]]) -> None:
        """Ask again and again over one connection, as long as the server does not say ``close``.

        Args:
            url: The relay.
            paths: Returns a path to ask for, and the digest of what must come.
        """
        while True:
            async with Wire(url) as wire:
                self.connections += 1
                while await self.ask(wire, "kept alive", *paths()):
                    pass

    async def once(self, url: str, paths: Callable[[], tuple[str, str]]) -> None:
        """Ask again and again, each time over a connection of its own."""
        while True:
            try:
                async with Wire(url) as wire:
                    await self.ask(wire, "once", *paths())
            except OSError as error:
                self.failures.append(f"connecting: {error!r}")
                return

    async def ask(self, wire: Wire, kind: str, path: str, digest: str) -> bool:
        """Ask for one blob; return whether the connection may be used again."""
        await asyncio.sleep(PAUSE_S)
        try:
            await wire.ask(path)
            answer = await wire.answer()
        except (OSError, EOFError, TimeoutError) as error:
            self.failures.append(f"{kind} {path}: {error!r}")
            return False
        if answer.status != 200 or not answer.whole or digest_of(answer.body) != digest:
            said = answer.body[:200] if answer.status != 200 else len(answer.body)
            self.failures.append(f"{kind} {path}: {answer.status}, whole {answer.whole}: {said!r}")
        self.answered(kind)
        return "close" not in answer.headers.get("connection", [])

    async def long_poll(self, url: str, path: str) -> None:
        """Wait for newer heads, one after another."""
        after = 0
        while True:
            try:
                async with Wire(url) as wire:
                    await wire.ask(f"{path}?after={after}&wait=10")
                    answer = await wire.answer()
            except (OSError, EOFError, TimeoutError) as error:
                self.failures.append(f"long poll after {after}: {error!r}")
                return
            if answer.status != 200 or not answer.whole:
                self.failures.append(f"long poll after {after}: {answer.status}")
            sequence = sequence_of(answer.body)
            if sequence < after:
                self.failures.append(f"head {sequence} after head {after}")
            after = max(after, sequence)
            self.answered("long poll")


def sequence_of(envelope: bytes) -> int:
    """The sequence of a head."""
    return decode_head(open_unverified(envelope)[1]).sequence


@asynccontextmanager
async def running(*work: Any) -> AsyncIterator[None]:
    """Do things in the background while the block runs."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
        for task in tasks:
            if task.done() and task.exception() is not None:
                task.result()
    finally:
        # Again and again: wait_for loses a cancellation that comes together with a result (3.11).
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)

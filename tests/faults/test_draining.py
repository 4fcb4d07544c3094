"""A relay is told to stop, and whoever is there gets what he came for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.handover import DOOR_NAME, _short_path
from shardcast.protocol.digest import digest_of
from tests.contract.made import RUN, SHARD, make_head, make_version, noise
from tests.contract.relays import path_of, wait_ready
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.wire_client import PATIENCE_S, Wire, eventually, http
from tests.faults.processes import Line, gone, line, options, sequence_of

pytestmark = [pytest.mark.e2e, pytest.mark.fault(21)]

BIG = make_version(1, {"model": noise(8 * SHARD + 7)})
HEAD = f"/v1/{RUN}/head"


@asynccontextmanager
async def filled(tmp_path: Path, *more: str) -> AsyncIterator[tuple[Line, ScriptedParent]]:
    """A relay that has everything."""
    parent = ScriptedParent()
    parent.serve(make_head(BIG), BIG)
    async with (
        parent.running(),
        line(tmp_path / "log", *options(tmp_path / "r", parent.url), *more) as relay,
    ):
        await wait_ready(relay.url)
        yield relay, parent


async def closes(wire: Wire) -> bytes:
    """What comes until the relay ends the connection, which it must do in order."""
    return await asyncio.wait_for(wire.reader.read(), PATIENCE_S)


async def ended(relay: Line) -> int:
    """The exit status."""
    return await asyncio.wait_for(relay.process.wait(), PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("more", [(), ("--limit-rate", "1MiB")], ids=["", "limited"])
async def test_no_reader_sees_an_error_whatever_it_is_doing(
    tmp_path: Path, number: signal.Signals, more: tuple[str, ...]
) -> None:
    victim = make_version(2, {"model": noise(SHARD, 99)})
    pause = Pause(after=100_000)
    async with filled(tmp_path, *more) as (relay, parent), contextlib.AsyncExitStack() as wires:

        async def wire() -> Wire:
            return await wires.enter_async_context(Wire(relay.url))

        parent.script(victim.shards[0], pause)
        parent.serve(make_head(BIG, victim), BIG, victim)
        await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
        sequence = sequence_of((await http(relay.url, HEAD)).body)
        filling, fast, slow, poll, active, idle, silent, ready = [await wire() for _ in range(8)]
        await filling.ask(path_of(victim.shards[0]))
        await filling.head()
        await slow.ask(path_of(BIG.shards[1]))
        await slow.head()
        some = await slow.exactly(1)
        await poll.ask(f"{HEAD}?after={sequence}&wait=25")
        for one in (active, idle, ready):
            await one.ask("/healthz")
            assert (await one.answer()).status == 200
        await fast.ask(path_of(BIG.shards[2]))
        relay.signal(number)

        # The long poll is answered at once, with the head that there is.
        answer = await poll.answer()
        assert (answer.status, sequence_of(answer.body)) == (200, sequence)
        assert answer["connection"] == "close"
        # Connections that were used a moment ago are used again, once.
        await ready.ask("/readyz")
        answer = await ready.answer()
        assert (answer.status, answer["connection"]) == (503, "close")
        await active.ask(path_of(BIG.shards[0]))
        answer = await active.answer()
        assert (answer.status, digest_of(answer.body)) == (200, BIG.shards[0])
        assert answer["connection"] == "close"
        # Others are just closed, in order; nobody new is let in.
        assert await closes(idle) == await closes(silent) == b""
        with pytest.raises(ConnectionRefusedError):
            await http(relay.url, "/healthz")
        # Bodies come to their end: fast, slow, and while they are still being fetched.
        answer = await fast.answer()
        assert (answer.whole, digest_of(answer.body)) == (True, BIG.shards[2])
        assert relay.process.returncode is None
        while len(some) < SHARD:
            some += await slow.exactly(min(SHARD // 4, SHARD - len(some)))
        assert digest_of(some) == BIG.shards[1]
        pause.go.set()
        assert digest_of(await filling.exactly(SHARD)) == victim.shards[0]
        assert await ended(relay) == 0
    assert "did not end" not in relay.said()
    assert "Traceback" not in relay.said()


async def test_an_upload_is_taken_to_its_end(tmp_path: Path) -> None:
    from shardcast.keys import public_pem
    from tests.contract.made import signer

    token = tmp_path / "token"
    token.write_text("a-token-of-some-length\n")
    pinned = tmp_path / "key.pub"
    pinned.write_bytes(public_pem(signer(1).public_key))
    arguments = [*options(tmp_path / "o"), "--publish-token-file", str(token)]
    mine = {"Authorization": "Bearer a-token-of-some-length"}
    async with line(tmp_path / "log", *arguments, "--pubkey", str(pinned)) as relay:
        for document in BIG.documents:
            answer = await http(relay.url, path_of(document), "PUT", mine, BIG.blobs[document])
            assert answer.status == 201
        async with Wire(relay.url) as wire:
            body = BIG.blobs[BIG.shards[0]]
            fields = [f"{name}: {value}" for name, value in mine.items()]
            lines = [f"PUT {path_of(BIG.shards[0])} HTTP/1.1", "Host: test", *fields]
            head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
            await wire.send(head + body[:100_000])
            journal = tmp_path / "o" / RUN / "state" / "staging" / "000001"
            await eventually(journal.exists, what="the version is staged")
            relay.signal(signal.SIGTERM)
            await relay.says("draining")
            await wire.send(body[100_000:])
            answer = await wire.answer()
            assert (answer.status, answer["connection"]) == (201, "close")
        assert await ended(relay) == 0


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with filled(tmp_path) as (relay, parent):
        victim = make_version(2, {"model": noise(SHARD, 99)})
        pause = Pause(after=100_000)
        parent.script(victim.shards[0], pause)
        parent.serve(make_head(BIG, victim), BIG, victim)
        await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
        async with Wire(relay.url) as wire:
            await wire.ask(path_of(victim.shards[0]))
            await wire.head()
            relay.signal(signal.SIGTERM)
            await relay.says("draining")
            assert relay.process.returncode is None
            relay.signal(signal.SIGTERM)
            assert len(await wire.rest()) < SHARD  # cut off, never a whole blob
            assert await ended(relay) == 0
        pause.go.set()


async def test_told_to_stop_while_it_starts(tmp_path: Path) -> None:
    """At three moments: before it can say anything, waiting for a store, and for another relay."""
    store = tmp_path / "r"
    arguments = options(store, "http://127.0.0.1:9")
    async with line(tmp_path / "log.1", *arguments, listens=False) as relay:
        relay.process.send_signal(signal.SIGTERM)
        assert await ended(relay) in (-signal.SIGTERM, 143, 0)
    async with (
        line(tmp_path / "log.2", *arguments),
        line(tmp_path / "log.3", *arguments, listens=False) as second,
    ):
        await second.says("waiting until this may be changed")
        second.process.send_signal(signal.SIGTERM)
        assert await ended(second) == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        (store / DOOR_NAME).unlink(missing_ok=True)
        with _short_path(store / DOOR_NAME) as name:
            door.bind(name)
        door.listen()
        door.settimeout(PATIENCE_S)
        async with line(tmp_path / "log.4", *arguments, "--take-over", listens=False) as third:
            talk, _address = await asyncio.to_thread(door.accept)
            third.process.send_signal(signal.SIGTERM)
            assert await ended(third) == 0
            talk.close()


async def test_neighbours_of_a_worker_get_the_rest(tmp_path: Path) -> None:
    """`follow --serve`, told to stop while a neighbour reads slowly."""
    from tests.tree import small_checkpoint, tree

    with tree(tmp_path / "tree") as made:
        made.publish(small_checkpoint(tmp_path / "ckpt", size=64 << 20, files=1))
        origin = made.origin()
        serving = ("--serve", "127.0.0.1:0")
        worker = await asyncio.to_thread(made.follow, "w", *serving, sources=[origin.url])
        process = worker.process
        heard = await asyncio.to_thread(process.wait_event, "listening", timeout=PATIENCE_S)
        await asyncio.to_thread(worker.wait_committed, 1, timeout=PATIENCE_S)
        url = str(heard["url"])

        async def served() -> bool:
            return (await http(url, f"/v1/{made.run}/head")).status == 200

        await eventually(served, what="the worker serves")
        digest = await asyncio.to_thread(a_shard, worker.current)
        async with Wire(url) as wire:
            await wire.ask(f"/v1/{made.run}/blobs/{digest}.bin")
            _status, headers = await wire.head()
            length = int(headers["content-length"][0])
            got = await wire.exactly(1)
            os.kill(process.pid, signal.SIGTERM)
            await asyncio.to_thread(says, process.log, "draining")
            assert process.alive()
            got += await wire.exactly(length - 1)
            assert digest_of(got) == digest
        assert await asyncio.to_thread(process.wait, timeout=PATIENCE_S) == 0
        await gone(process.pid)


def a_shard(version: Path) -> str:
    """The digest of the largest file's first MiB: its shard size, at 64 MiB."""
    largest = max((p for p in version.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("rb") as file:
        return digest_of(file.read(1 << 20))


def says(log: Path, text: str) -> None:
    """Wait until a log has a text."""
    import time

    deadline = time.monotonic() + PATIENCE_S
    while text not in log.read_text("utf-8", "replace"):
        assert time.monotonic() < deadline, log.read_text("utf-8", "replace")
        time.sleep(0.01)

"""A relay that does not have its store to itself: it serves what is there, and writes nothing."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relay.handover import DOOR_NAME, _short_path, encode
from shardcast.protocol.digest import digest_of
from shardcast.store.locks import FileLock
from shardcast.store.roles import RELAY_LOCK
from tests.contract.made import RUN, SHARD, make_head, make_version, noise
from tests.contract.relays import config, limits, path_of, running, wait_head, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import PATIENCE_S, http

VERSION = make_version(1, {"model": noise(4 * SHARD + 5)})


@asynccontextmanager
async def predecessor(store: Path) -> AsyncIterator[socket.socket]:
    """A relay that gives its socket away and says nothing of the store."""
    loop = asyncio.get_running_loop()
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with _short_path(store / DOOR_NAME) as name:
        door.bind(name)
    door.listen()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()

    async def give_way() -> None:
        talk, _address = await loop.sock_accept(door)
        with talk:
            assert json.loads(await loop.sock_recv(talk, 65536))["kind"] == "take_over"
            offer = encode("offer", passed=False, depth=1, path=[])
            socket.send_fds(talk, [offer], [listening.fileno()])
            assert json.loads(await loop.sock_recv(talk, 65536))["kind"] == "ready"
            talk.send(encode("paused"))
            assert json.loads(await loop.sock_recv(talk, 65536))["kind"] == "accepting"

    task = asyncio.create_task(give_way())
    with door, listening:
        yield listening
        await asyncio.wait_for(task, PATIENCE_S)


async def test_what_another_process_may_be_writing_is_fetched_for_its_readers_alone(
    tmp_path: Path,
) -> None:
    parent, store = ScriptedParent(), tmp_path
    parent.serve(make_head(VERSION), VERSION)
    other = FileLock(store / RELAY_LOCK, what="the store")
    async with parent.running(), predecessor(store) as listening:
        other.acquire()
        settings = config(
            store, parent.url, take_over=True, limits=limits(take_over_wait_s=0.1, quiet_s=0.1)
        )
        async with running(settings) as url:
            assert url.rpartition(":")[2] == str(listening.getsockname()[1])
            assert (await http(url, "/healthz"))["shardcast-depth"] == "1"
            await wait_head(url)
            for _ in range(2):
                answer = await http(url, path_of(VERSION.shards[0]))
                assert (answer.status, digest_of(answer.body)) == (200, VERSION.shards[0])
            assert parent.count(VERSION.shards[0]) == 2
            state = store / RUN / "state"
            assert not (state / "staging").exists()
            assert not list(state.glob("*.shards"))
            assert not list((state / "tmp").iterdir())
            assert parent.count(VERSION.shards[1]) == 0  # nothing is prefetched
            # The other one lets go: everything as usual.
            other.release()
            await wait_ready(url)
            before = parent.count(VERSION.shards)
            for digest in VERSION.shards:
                assert digest_of((await http(url, path_of(digest))).body) == digest
            assert parent.count(VERSION.shards) == before

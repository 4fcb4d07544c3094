"""A relay is replaced under load: in place, by an upgrade, by force; and where that fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest.processes import free_port
from relay.handover import DOOR_NAME, _short_path, encode
from shardcast.config import NetConfig
from shardcast.protocol.digest import digest_of
from shardcast.store.stored import Durability
from shardcast.worker import Worker
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise, signer
from tests.contract.relays import path_of, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.wire_client import PATIENCE_S, Wire, eventually, http
from tests.faults.processes import (
    Load,
    fails,
    gone,
    line,
    options,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.fault(21)]

VERSIONS = [make_version(n, {"model": noise(12 * SHARD + n, n)}) for n in range(1, 4)]
VERSION = VERSIONS[0]
LAUNCHER = """
import sys
import shardcast
shardcast.__version__ = {version!r}
sys.argv[0] = "shardcast"
from shardcast.__main__ import main
main()
"""


def paths_of(version: MadeVersion) -> Iterator[tuple[str, str]]:
    """A path and the digest of what must come, for ever."""
    return ((path_of(digest), digest) for digest in itertools.cycle(version.shards))


@asynccontextmanager
async def parent(*versions: MadeVersion) -> AsyncIterator[ScriptedParent]:
    found = ScriptedParent()
    found.serve(make_head(*versions), *versions)
    async with found.running():
        yield found


@asynccontextmanager
async def pulling(url: str, out: Path, counted: list[str], wrong: list[str]) -> AsyncIterator[None]:
    """Pull the newest version into an empty directory, again and again; ends between two pulls."""
    stop = asyncio.Event()
    keys = [signer(1).public_key]
    patience = NetConfig(backoff_first_s=0.05, backoff_cap_s=0.3)

    async def pulls() -> None:
        for number in itertools.count():
            here = out / str(number)
            worker = Worker(
                here, RUN, [url], keys=keys, config=patience, durability=Durability.NONE
            )
            update = await asyncio.to_thread(worker.pull)
            made = VERSIONS[update.version - 1]
            if (Path(update.path) / "model").read_bytes() != made.files["model"]:
                wrong.append(f"version {update.version}")
            counted.append(str(update.version))
            if stop.is_set():
                return

    task = asyncio.create_task(pulls())
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE_S)


async def test_five_restarts_in_place_and_an_upgrade_under_load(tmp_path: Path) -> None:
    load, pulled, wrong = Load(), list[str](), list[str]()
    store = tmp_path / "r"
    async with (
        contextlib.AsyncExitStack() as later,
        parent(VERSIONS[0]) as origin,
        line(tmp_path / "log", *options(store, origin.url)) as relay,
    ):
        url, node = relay.url, (await http(relay.url, "/healthz"))["shardcast-node"]
        await wait_ready(url)
        paths = paths_of(VERSION)
        async with (
            running(
                load.keep_alive(url, lambda: next(paths)),
                load.keep_alive(url, lambda: next(paths)),
                load.once(url, lambda: next(paths)),
                load.long_poll(url, f"/v1/{RUN}/head"),
            ),
            pulling(url, tmp_path / "out", pulled, wrong),
        ):
            olds = []
            for number in range(5):
                before = sum(load.answers.values())
                olds.append(await relay.replace())
                if number in (1, 3):  # there is something to fetch while it happens
                    made = VERSIONS[: number // 2 + 2]
                    origin.serve(make_head(*made), *made)
                await eventually(
                    lambda before=before: sum(load.answers.values()) > before + 20,
                    what="readers go on",
                )
            # An upgrade: another command takes over, on the address that it has.
            arguments = options(store, origin.url, listen=f"127.0.0.1:{relay.port}")
            upgrade = line(tmp_path / "log.upgrade", *arguments, "--take-over", "--keep", "2")
            olds.append(relay.pid)
            newer = await later.enter_async_context(upgrade)
            for old in olds:
                await gone(old)
            seen, before = len(pulled), sum(load.answers.values())
            await eventually(lambda: len(pulled) > seen + 1, what="workers go on")
            await eventually(lambda: sum(load.answers.values()) > before + 50, what="so do readers")
            await wait_ready(url)
            assert (await http(url, "/healthz"))["shardcast-node"] == node
            assert newer.url == url
        assert await asyncio.wait_for(relay.process.wait(), PATIENCE_S) == 0
    assert (load.failures, wrong) == ([], [])
    assert len({event["pid"] for event in relay.listening}) == 6
    assert set(load.answers) == {"kept alive", "once", "long poll"}
    assert min(load.answers.values()) >= 5, load.answers
    assert set(pulled) == {"1", "2", "3"}
    assert "Traceback" not in relay.said() + newer.said()


async def test_a_fill_under_way_is_finished_and_not_asked_for_again(tmp_path: Path) -> None:
    store, victim = tmp_path / "r", VERSION.shards[3]
    pause = Pause(after=SHARD // 2)
    async with parent(VERSION) as origin:
        origin.script(victim, pause)
        demand = options(store, origin.url)
        async with line(tmp_path / "log", *demand, "--prefetch", "demand") as relay:
            url = relay.url
            await wait_head(url)
            async with Wire(url) as reader:
                await reader.ask(path_of(victim))
                await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
                await reader.head()
                got = await reader.exactly(1000)
                old = await relay.replace()
                late = asyncio.create_task(http(url, path_of(victim)))
                # What lies elsewhere waits for nobody: documents and the head.
                assert (await http(url, f"/v1/{RUN}/head")).status == 200
                assert (await http(url, path_of(VERSION.layout))).status == 200
                pause.go.set()
                got += await reader.exactly(SHARD - 1000)
                assert digest_of(got) == victim
            answer = await asyncio.wait_for(late, PATIENCE_S)
            assert (answer.status, digest_of(answer.body)) == (200, victim)
            await gone(old)
            for digest in VERSION.shards:
                answer = await http(url, path_of(digest))
                assert (answer.status, digest_of(answer.body)) == (200, digest)
            assert [origin.count(digest) for digest in VERSION.shards] == [1] * len(VERSION.shards)


async def test_prefetching_goes_on_where_the_relay_before_stopped(tmp_path: Path) -> None:
    store, victim = tmp_path / "r", VERSION.shards[-2]
    pause = Pause(after=1000)
    async with parent(VERSION) as origin:
        origin.script(victim, pause)
        async with line(tmp_path / "log", *options(store, origin.url)) as relay:
            await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
            old = await relay.replace()
            await gone(old)  # nobody waits for the fill: it is left to the successor
            await wait_ready(relay.url)
            answer = await http(relay.url, path_of(victim))
            assert digest_of(answer.body) == victim
            again = sum(origin.count(digest) - 1 for digest in VERSION.shards)
            assert 1 <= again <= 8  # what was on its way, no more
            assert origin.count(VERSION.documents) == len(VERSION.documents)


async def test_a_successor_that_does_not_start_changes_nothing(tmp_path: Path) -> None:
    store, load = tmp_path / "r", Load()
    launcher = tmp_path / "launch.py"
    launcher.write_text(LAUNCHER.format(version="1.0.0"))
    paths = paths_of(VERSION)
    async with (
        parent(VERSION) as origin,
        line(
            tmp_path / "log", "relay", *options(store, origin.url), command=[str(launcher)]
        ) as relay,
    ):
        url = relay.url
        await wait_ready(url)
        async with running(load.keep_alive(url, lambda: next(paths))):
            # The new program crashes.
            launcher.write_text("raise SystemExit(3)")
            relay.signal(signal.SIGUSR2)
            await relay.says("(exit status 3) before it took over: this relay goes on")
            # It crashes when it has been given the sockets.
            broken = "import os, relay.origin, relay.following\n"
            broken += "relay.following.ParentFeed.prepare = lambda self: os._exit(7)\n"
            launcher.write_text(broken + LAUNCHER.format(version="2.0.0"))
            relay.signal(signal.SIGUSR2)
            await relay.says("it ended before it was ready")
            await relay.says("(exit status 7) before it took over")
            # Its options are wrong, its port is another program's.
            assert (await fails(*options(store), "--take-over", "--keep", "none"))[0] == 2
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                address = f"127.0.0.1:{taken.getsockname()[1]}"
                code, said = await fails(*options(store, origin.url, listen=address), "--take-over")
            assert code == 2
            assert f"in use by process {os.getpid()}" in said
            await relay.says("did not take over, this relay goes on")
            # And then it is right.
            launcher.write_text(LAUNCHER.format(version="2.0.0"))
            old = await relay.replace()
            await gone(old)
        status = json.loads((await http(url, "/v1/status")).body)
        assert status["software"] == "shardcast/2.0.0"
    assert load.failures == []
    assert load.answers["kept alive"] > 0
    assert len(relay.listening) == 2


async def test_a_successor_that_dies_at_the_last_moment_is_forgotten(tmp_path: Path) -> None:
    store = tmp_path / "r"
    async with (
        parent(VERSION) as origin,
        line(tmp_path / "log", *options(store, origin.url)) as relay,
    ):
        await wait_ready(relay.url)
        for last in ("offer", "paused"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
                door.settimeout(PATIENCE_S)
                with _short_path(store / DOOR_NAME) as name:
                    await asyncio.to_thread(door.connect, name)
                door.send(encode("take_over", pid=os.getpid()))
                data, fds, _flags, _who = await asyncio.to_thread(socket.recv_fds, door, 65536, 8)
                assert json.loads(data)["kind"] == "offer"
                if last == "paused":
                    door.send(encode("ready", kept=[]))
                    assert json.loads(await asyncio.to_thread(door.recv, 65536))["kind"] == last
                for fd in fds:
                    os.close(fd)
            answer = await http(relay.url, path_of(VERSION.shards[0]))
            assert digest_of(answer.body) == VERSION.shards[0]
        made = VERSIONS[:2]
        origin.serve(make_head(*made), *made)  # it follows its parent again, too
        answer = await http(relay.url, path_of(VERSIONS[1].shards[0]))
        assert digest_of(answer.body) == VERSIONS[1].shards[0]
        assert len(relay.listening) == 1


async def test_only_one_successor_at_a_time(tmp_path: Path) -> None:
    async with line(tmp_path / "log", *options(tmp_path / "o")) as relay:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(PATIENCE_S)
            with _short_path(tmp_path / "o" / DOOR_NAME) as name:
                await asyncio.to_thread(door.connect, name)
            door.send(encode("take_over", pid=1))
            _data, fds, _flags, _who = await asyncio.to_thread(socket.recv_fds, door, 65536, 8)
            for fd in fds:
                os.close(fd)
            code, said = await fails(*options(tmp_path / "o"), "--take-over")
            assert code == 2
            assert "is taking its place already" in said
        assert (await http(relay.url, "/healthz")).status == 200


async def test_two_relays_never_write_to_one_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relay import life
    from relay.app import serve
    from shardcast.errors import BusyError
    from tests.contract.relays import config

    monkeypatch.setattr(life, "LOCK_WAIT_S", 0.1)
    async with (
        parent(VERSION) as origin,
        line(tmp_path / "log", *options(tmp_path / "r", origin.url)) as relay,
    ):
        with pytest.raises(BusyError, match=f"process {relay.pid}.*--take-over"):
            await serve(config(tmp_path / "r", origin.url), ready=lambda url: None)


@pytest.mark.fault(3)
async def test_killed_and_started_again_workers_get_everything_by_themselves(
    tmp_path: Path,
) -> None:
    pulled, wrong = list[str](), list[str]()
    store, port = tmp_path / "r", free_port()
    async with parent(VERSION) as origin, contextlib.AsyncExitStack() as last:
        arguments = options(store, origin.url, listen=f"127.0.0.1:{port}")
        pauses = [Pause(after=SHARD // 3) for _ in range(3)]
        for pause, victim in zip(pauses, VERSION.shards[3::3], strict=False):
            origin.script(victim, pause)
        async with contextlib.AsyncExitStack() as workers:
            for number, pause in enumerate(pauses):
                async with line(tmp_path / "log", *arguments) as relay:
                    if number == 0:
                        url = f"http://127.0.0.1:{port}"
                        work = pulling(url, tmp_path / "out", pulled, wrong)
                        await workers.enter_async_context(work)
                    await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
                    relay.signal(signal.SIGKILL)
                    await gone(relay.pid)
                pause.go.set()
            await last.enter_async_context(line(tmp_path / "log", *arguments))
            await eventually(lambda: len(pulled) >= 2, what="workers pull")
    assert wrong == []


async def test_an_upload_goes_on_at_the_successor(tmp_path: Path) -> None:
    """The publisher is a process of ours; its origin is replaced while shards arrive."""
    from tests.tree import small_checkpoint, tree

    token = tmp_path / "token"
    token.write_text("a-token-of-some-length\n")
    with tree(tmp_path / "tree") as made:
        checkpoint = small_checkpoint(tmp_path / "ckpt", size=48 << 20)
        pinned = ["--pubkey", str(made.keys / "shardcast.pub")]
        arguments = [*options(tmp_path / "o"), "--publish-token-file", str(token), *pinned]
        async with line(tmp_path / "log", *arguments) as relay:
            from loadtest.topology import shardcast

            publisher = made.processes.start(
                shardcast(
                    "publish", checkpoint, "--run", RUN, "--to", relay.url,
                    "--token-file", token, "--key", made.keys / "shardcast.key", "--json",
                ),
                name="publish",
            )  # fmt: skip
            staged = tmp_path / "o" / RUN / "state" / "000001.shards"
            await eventually(staged.exists, what="the first shard has come")
            olds = [await relay.replace() for _ in range(2)]
            await asyncio.to_thread(publisher.check, timeout=PATIENCE_S)
            for old in olds:
                await gone(old)
            await asyncio.to_thread(
                made.pull, tmp_path / "out", sources=[relay.url], timeout=PATIENCE_S
            )
            from tests.tree import assert_same_files

            assert_same_files(checkpoint, (tmp_path / "out" / "current").resolve())


async def test_both_addresses_of_a_host_are_handed_over(tmp_path: Path) -> None:
    hosts = sorted({str(info[4][0]) for info in socket.getaddrinfo("localhost", 80)})
    arguments = options(tmp_path / "o", listen=f"localhost:{free_port()}")
    async with line(tmp_path / "log", *arguments) as relay:

        async def answers() -> list[int]:
            urls = [f"http://[{h}]" if ":" in h else f"http://{h}" for h in hosts]
            return [(await http(f"{url}:{relay.port}", "/healthz")).status for url in urls]

        assert await answers() == [200] * len(hosts)
        before = sockets_of(relay.pid)
        old = await relay.replace()
        await gone(old)
        assert sockets_of(relay.pid) == before  # the very same, not new ones
        assert len(before) == len(hosts)
        assert await answers() == [200] * len(hosts)


def sockets_of(pid: int) -> set[str]:
    """The listening TCP sockets that a process holds, as the kernel numbers them."""
    listening = set()
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(fd))
    return found & listening

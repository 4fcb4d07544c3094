"""Our publishing client against our origin, over loopback HTTP."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relay.app import RelayConfig, serve
from shardcast import keys
from shardcast.errors import ModifiedError, NetworkError, RefusedError, UnknownKeyError, UsageError
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol import succession, trust
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions, SilentObserver
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.uploader import amend_remote, publish_remote
from tests.tree import contents_of

KIB = 1024
TOKEN = "a-long-enough-secret-token"


class Origin:
    """A relay without parents, in a thread of this process."""

    def __init__(self, root: Path, token_file: Path, key: bytes) -> None:
        self.root = root
        self._config = RelayConfig(
            store=root, listen="127.0.0.1:0", publish_token_file=token_file, pubkeys=(key,)
        )
        self._urls: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self.url = self._urls.get(timeout=20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(self._config, ready=self._urls.put, stop=self._stop)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def head(self) -> Head | None:
        data = RunStore(self.root / "run", "run").read_head()
        return None if data is None else decode_head(open_unverified(data)[1])


class Trainer:
    """What publishes: a key, a checkpoint, and what it remembers."""

    def __init__(self, root: Path, key: Path | None = None) -> None:
        self.checkpoint = root / "ckpt"
        self.checkpoint.mkdir(parents=True)
        self.key = key or keys.generate(root / "key")[0]
        self.signer = keys.load_signer(self.key)
        self.memory = Store(root / "memory").run("run", create=True)
        self.now = int(time.time() * 1000) - 3_600_000
        self.token = TOKEN
        self.sent: list[int] = []
        for number in range(3):
            path = self.checkpoint / f"model-{number}.safetensors"
            path.write_bytes(os.urandom(600 * KIB))
        (self.checkpoint / "config.json").write_text("{}")
        (self.checkpoint / "empty").write_bytes(b"")

    def clock(self) -> int:
        self.now += 1
        return self.now

    def client(self, url: str) -> OriginClient:
        return OriginClient(url, "run", self.token)

    def publish(self, url: str, factory: Callable[[], OriginClient] | None = None) -> int:
        """Publish and return how many bytes of shards went over the wire."""
        done = publish_remote(
            PublishOptions(source=self.checkpoint, step=5),
            self.memory,
            factory or (lambda: self.client(url)),
            [self.signer],
            self.clock,
        )
        return done.uploaded_bytes


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "trainer")


@pytest.fixture
def origin(tmp_path: Path, trainer: Trainer) -> Iterator[Origin]:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    server = Origin(tmp_path / "origin", token_file, trainer.signer.public_key)
    yield server
    server.stop()


def test_the_origin_holds_the_directory_byte_for_byte_and_only_once(
    origin: Origin, trainer: Trainer
) -> None:
    assert trainer.publish(origin.url) == 3 * 600 * KIB + 2
    head = origin.head()
    assert head is not None
    assert (head.version, head.versions[0].step) == (1, 5)
    assert contents_of(origin.root / "run" / "versions" / "000001") == contents_of(
        trainer.checkpoint
    )
    total = sum(p.stat().st_blocks * 512 for p in (origin.root / "run").rglob("*") if p.is_file())
    assert total < 1.2 * 3 * 600 * KIB


@pytest.mark.parametrize("number", [1, 2])
def test_a_local_publisher_spares_the_number_of_a_head_that_was_lost_with_the_power(
    origin: Origin, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = RunStore(origin.root / "run", "run")
    paths = run.root / "head.json", run.root / "state" / "trust.json"
    kept: dict[Path, bytes | None] = {}
    write_head = RunStore.write_head

    def keep(self: RunStore, envelope: bytes) -> None:
        kept.update({path: path.read_bytes() if path.exists() else None for path in paths})
        write_head(self, envelope)

    reader = trust.fresh("run", [trainer.signer.public_key])
    monkeypatch.setattr(RunStore, "write_head", keep)
    for _ in range(number):
        trainer.publish(origin.url)
        reader = trust.accept(reader, run.read_head() or b"", trainer.clock()).state
    monkeypatch.undo()
    origin.stop()
    for path, data in kept.items():  # the rename was not synced
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    (trainer.checkpoint / "config.json").write_text("changed")
    options = PublishOptions(source=trainer.checkpoint)
    done = publish_directory(options, run, [trainer.signer], trainer.clock)
    assert done.ref.version == number + 1
    trust.accept(reader, run.read_head() or b"", trainer.clock())


def test_only_what_the_origin_lacks_is_sent(origin: Origin, trainer: Trainer) -> None:
    trainer.publish(origin.url)
    with open(trainer.checkpoint / "model-1.safetensors", "r+b") as file:
        file.seek(256 * KIB)
        file.write(os.urandom(10))
    assert trainer.publish(origin.url) == 256 * KIB
    assert trainer.publish(origin.url) == 0
    head = origin.head()
    assert head is not None
    assert [ref.version for ref in head.versions] == [3, 2, 1]
    assert contents_of(origin.root / "run" / "versions" / "000003") == contents_of(
        trainer.checkpoint
    )


class DyingClient(OriginClient):
    """Stops working after a few shards, as a trainer that is killed."""

    left = 2

    def put_blob(self, digest: str, body: Body) -> None:
        if body.path is not None:
            DyingClient.left -= 1
            if DyingClient.left < 0:
                raise NetworkError("cut off", source=self.url)
        super().put_blob(digest, body)


def test_an_upload_that_was_cut_off_goes_on_where_it_stopped(
    origin: Origin, trainer: Trainer
) -> None:
    DyingClient.left = 2
    with pytest.raises(NetworkError, match="cut off"):
        trainer.publish(origin.url, lambda: DyingClient(origin.url, "run", TOKEN))
    assert origin.head() is None
    sent = trainer.publish(origin.url)
    assert 3 * 600 * KIB + 2 - 2 * 256 * KIB <= sent < 3 * 600 * KIB
    assert contents_of(origin.root / "run" / "versions" / "000001") == contents_of(
        trainer.checkpoint
    )


def test_an_upload_goes_on_after_the_origin_was_restarted(
    tmp_path: Path, origin: Origin, trainer: Trainer
) -> None:
    DyingClient.left = 3
    with pytest.raises(NetworkError):
        trainer.publish(origin.url, lambda: DyingClient(origin.url, "run", TOKEN))
    origin.stop()
    again = Origin(origin.root, tmp_path / "token", trainer.signer.public_key)
    try:
        assert trainer.publish(again.url) < 3 * 600 * KIB
        published = again.root / "run" / "versions" / "000001"
        assert contents_of(published) == contents_of(trainer.checkpoint)
    finally:
        again.stop()


def test_a_wrong_token_is_refused_and_never_shown(origin: Origin, trainer: Trainer) -> None:
    trainer.token = "not-the-secret"
    with pytest.raises(RefusedError, match="401") as caught:
        trainer.publish(origin.url)
    assert "not-the-secret" not in str(caught.value)
    assert origin.head() is None


def test_the_token_never_travels_in_clear_text_to_another_machine() -> None:
    for url in ("http://192.0.2.1:8470", "http://origin.example"):
        with pytest.raises(UsageError, match="clear text"):
            OriginClient(url, "run", TOKEN)
    for url in (
        "ftp://x",
        "http://",
        "http://user:pw@127.0.0.1",
        "http://[::1",
        "http://127.0.0.1?q",
    ):
        with pytest.raises(UsageError):
            OriginClient(url, "run", TOKEN)
    for url in ("http://localhost:1", "http://[::1]:1", "https://origin.example/base/"):
        OriginClient(url, "run", TOKEN).close()


def test_another_publisher_that_was_faster_is_named(
    tmp_path: Path, origin: Origin, trainer: Trainer
) -> None:
    rival = Trainer(tmp_path / "rival", trainer.key)
    rival.now += 1000

    class Slow(OriginClient):
        def put_head(self, envelope: bytes, previous: bytes | None) -> None:
            if not rival.sent:
                rival.sent.append(rival.publish(origin.url))
            super().put_head(envelope, previous)

    with pytest.raises(RefusedError, match="another publisher changed run 'run' meanwhile"):
        trainer.publish(origin.url, lambda: Slow(origin.url, "run", TOKEN))
    trainer.now += 10_000
    trainer.publish(origin.url)
    head = origin.head()
    assert head is not None
    assert head.version == 2


def test_another_key_is_refused_before_anything_is_sent(
    tmp_path: Path, origin: Origin, trainer: Trainer
) -> None:
    trainer.publish(origin.url)
    stranger = Trainer(tmp_path / "stranger")
    with pytest.raises(UnknownKeyError):
        stranger.publish(origin.url)


def test_a_file_that_changes_while_it_is_uploaded_stops_the_publication(
    origin: Origin, trainer: Trainer
) -> None:
    class Watch(SilentObserver):
        def uploading(self, total: int) -> None:
            with open(trainer.checkpoint / "model-2.safetensors", "r+b") as file:
                file.write(b"changed")

    with pytest.raises(ModifiedError, match="model-2"):
        publish_remote(
            PublishOptions(source=trainer.checkpoint),
            trainer.memory,
            lambda: trainer.client(origin.url),
            [trainer.signer],
            trainer.clock,
            Watch(),
        )
    assert origin.head() is None


def test_withdraw_and_hold_at_a_remote_origin(origin: Origin, trainer: Trainer) -> None:
    for _ in range(2):
        trainer.publish(origin.url)
    client = trainer.client(origin.url)
    amend_remote(
        trainer.memory,
        client,
        [trainer.signer],
        trainer.clock,
        lambda h, i: succession.with_withdrawn(h, i, 2),
    )
    amend_remote(
        trainer.memory,
        client,
        [trainer.signer],
        trainer.clock,
        lambda h, i: succession.with_hold(h, i, hold=True),
    )
    client.close()
    head = origin.head()
    assert head is not None
    assert (head.version, head.withdrawn, head.hold) == (1, [2], True)


def test_an_origin_that_is_not_there_is_a_network_error(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.origin_client.ATTEMPTS", 2)
    with pytest.raises(NetworkError, match="failed 2 times"):
        trainer.publish("http://127.0.0.1:9")


def test_a_blob_with_another_digest_is_refused(origin: Origin, trainer: Trainer) -> None:
    client = trainer.client(origin.url)
    with pytest.raises(RefusedError, match=r"409|422|400"):
        client.put_blob(digest_of(b"x"), Body(1, b"x"))
    assert client.missing([digest_of(b"x")]) == [digest_of(b"x")]
    client.close()

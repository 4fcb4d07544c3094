"""Publishing to an origin whose disk is full: refused with a reason, nothing visible, then resumed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcast.errors import ShardcastError
from shardcast.protocol import wire
from tests.contract.test_remote_publishing import KIB, TOKEN, Origin, Trainer
from tests.faults.machine import fill_up, small_tmpfs
from tests.tree import contents_of

MIB = 1 << 20


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "trainer")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", 5 * MIB) as mounted:
        yield mounted


@pytest.fixture
def origin(tmp_path: Path, disk: Path, trainer: Trainer) -> Iterator[Origin]:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    server = Origin(disk / "s", token_file, trainer.signer.public_key)
    yield server
    server.stop()


@pytest.mark.fault(15)
@pytest.mark.parametrize("left", [0, 64 * KIB, 900 * KIB], ids=["nothing", "documents", "a part"])
def test_an_origin_without_room_refuses_and_keeps_what_it_has(
    disk: Path, origin: Origin, trainer: Trainer, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "parse_retry_after", lambda *_: 0.01)  # the pause is not the point
    trainer.publish(origin.url)
    first = contents_of(trainer.checkpoint)
    for path in trainer.checkpoint.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[::-1])
    ballast = fill_up(disk)
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - left)
    with pytest.raises(ShardcastError, match=r"507|No space left|are free") as raised:
        trainer.publish(origin.url)
    assert origin.url in str(raised.value)
    head = origin.head()
    assert head is not None
    assert head.version == 1
    versions = origin.root / "run" / "versions"
    assert [p.name for p in versions.iterdir()] == ["000001"]
    assert contents_of(versions / "000001") == first
    ballast.unlink()
    trainer.publish(origin.url)
    head = origin.head()
    assert head is not None
    assert contents_of(versions / f"{head.version:06d}") == contents_of(trainer.checkpoint)

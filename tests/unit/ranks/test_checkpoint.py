"""A version on disk is opened, leased and verified; whatever is wrong with it has a name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardcast.errors import (
    BusyError,
    IntegrityError,
    MalformedError,
    MixAndMatchError,
    NotFoundError,
    ShardcastError,
)
from shardcast.store.locks import try_lock
from shardcast.store.run import RunStore
from tests.models import make_model, write_model
from tests.unit.ranks.versions import publish
from trainer_adapter.booting import find_version, version_at
from trainer_adapter.checkpoint import CONFIG, Checkpoint, StoppedError
from trainer_adapter.documents import read_json
from trainer_adapter.specs import layer_order
from trainer_adapter.vllm.ranks import Target


def opened(target: Target) -> Checkpoint:
    return Checkpoint(
        Path(target.path), run=target.run, version=target.version, digest=target.digest
    )


def make_pipe(path: Path) -> None:
    """Put a pipe in a file's place, into which nobody ever writes."""
    path.unlink()
    os.mkfifo(path)


def test_a_good_version_is_verified_and_described(tmp_path: Path) -> None:
    target = publish(tmp_path, 1)
    hashed: list[int] = []
    with opened(target) as checkpoint:
        checkpoint.verify(hashed.append, threads=2)
        assert checkpoint.verified
        assert sum(hashed) == checkpoint.bytes
        assert list(checkpoint.specs) == ["layer.0", "layer.1"]
        spec = checkpoint.specs["layer.1"]
        assert (spec.dtype, spec.shape, spec.length) == ("bfloat16", (150_000,), 300_000)
        assert checkpoint.json(CONFIG) == {"seed": 1}
        assert checkpoint.json("generation_config.json") is None
        assert checkpoint.changed() is None


def test_layers_come_in_their_order() -> None:
    names = ["b.10.w", "b.2.w", "b.2.a", "a.w", "c"]
    assert sorted(names, key=layer_order) == ["a.w", "b.2.a", "b.2.w", "b.10.w", "c"]


def test_a_lease_keeps_the_version_until_it_is_closed(tmp_path: Path) -> None:
    target, _ = publish(tmp_path, 1), publish(tmp_path, 2)
    run = RunStore(tmp_path / "out", "policy")
    with opened(target):
        assert not run.evict(target.version)
    assert run.evict(target.version)
    with pytest.raises(NotFoundError, match="evicted"):
        opened(target)


def test_a_version_that_is_being_evicted_is_not_opened(tmp_path: Path) -> None:
    target = publish(tmp_path, 1)
    fd = os.open(target.path, os.O_RDONLY)
    try:
        assert try_lock(fd, exclusive=True)
        with pytest.raises(BusyError, match="evicted"):
            opened(target)
    finally:
        os.close(fd)


def test_one_bit_is_found_and_named(tmp_path: Path) -> None:
    target = publish(tmp_path, 1)
    path = Path(target.path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with opened(target) as checkpoint:
        with pytest.raises(IntegrityError, match=r"model\.safetensors, shard \d+ .*repairs that"):
            checkpoint.verify()
        assert not checkpoint.verified


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda path: path.unlink(), NotFoundError),
        (lambda path: os.truncate(path, 10), IntegrityError),
        (lambda path: (path.unlink(), path.symlink_to("/dev/null")), ShardcastError),
        (make_pipe, IntegrityError),
        (lambda path: (path.unlink(), path.mkdir()), IntegrityError),
    ],
)
def test_files_that_are_not_there_as_published(
    tmp_path: Path, spoil: object, kind: type[ShardcastError]
) -> None:
    target = publish(tmp_path, 1)
    spoil(Path(target.path) / "model.safetensors")  # type: ignore[operator]
    with opened(target) as checkpoint, pytest.raises(kind):
        checkpoint.verify()


def test_a_change_after_verifying_is_seen_by_identity(tmp_path: Path) -> None:
    target = publish(tmp_path, 1)
    path = Path(target.path) / "model.safetensors"
    with opened(target) as checkpoint:
        checkpoint.verify()
        os.utime(path, ns=(1, 1))
        assert checkpoint.changed() == "model.safetensors was changed or replaced"
        checkpoint.verify()
        path.rename(path.with_name("away"))
        assert "is gone" in str(checkpoint.changed())


def test_what_is_not_verified_has_no_tensors_and_is_not_unchanged(tmp_path: Path) -> None:
    """None at all would be a model without weights, which loads without an error."""
    target = publish(tmp_path, 1)
    path = Path(target.path) / "model.safetensors"
    good = path.read_bytes()
    said = f"version {target.version} is not verified"
    with opened(target) as checkpoint:
        assert checkpoint.changed() == said
        checkpoint.verify()
        path.write_bytes(bytes(len(good)))
        for _ in range(2):  # the second time there is nothing open that could be verified
            with pytest.raises(IntegrityError, match="is not what was published"):
                checkpoint.verify_again()
            assert checkpoint.changed() == said
            for use in (lambda: next(checkpoint.tensors()), checkpoint.nonfinite):
                with pytest.raises(IntegrityError, match="not verified"):
                    use()
        path.write_bytes(good)
        checkpoint.verify_again()
        assert checkpoint.changed() is None
        assert list(checkpoint.specs) == ["layer.0", "layer.1"]
    assert checkpoint.changed() == said
    with pytest.raises(IntegrityError, match="not verified"):
        next(checkpoint.tensors())


def test_verifying_is_given_up_when_it_is_told_to(tmp_path: Path) -> None:
    with opened(publish(tmp_path, 1)) as checkpoint, pytest.raises(StoppedError):
        checkpoint.verify(stopping=lambda: True)


@pytest.mark.parametrize(
    ("files", "weights", "said"),
    [
        ({"readme.txt": b"x"}, False, "no .safetensors"),
        ({"model.safetensors": b"x" * 100}, False, "no safetensors file"),
        ({"model.safetensors.index.json": b"{}"}, True, "no weight_map"),
        ({"model.safetensors.index.json": b"[]"}, True, "no JSON object"),
        ({"model.safetensors.index.json": b"{"}, True, "is no JSON"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'},
            True,
            "does not have",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, files: dict[str, bytes], weights: bool, said: str
) -> None:
    target = publish(tmp_path, 1, files=files, weights=weights)
    with opened(target) as checkpoint, pytest.raises(MalformedError, match=said):
        checkpoint.verify()


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    more = tmp_path / "more.safetensors"
    write_model(more, make_model(5, 10, 1))
    index = json.dumps({"weight_map": {"layer.0": "more.safetensors"}}).encode()
    files = {"more.safetensors": more.read_bytes(), "model.safetensors.index.json": index}
    with opened(publish(tmp_path, 1, files=files)) as checkpoint:
        checkpoint.verify()
        assert [spec.file for spec in checkpoint.specs.values()] == ["more.safetensors"]


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    more = tmp_path / "more.safetensors"
    write_model(more, make_model(5, 10, 1))
    target = publish(tmp_path, 1, files={"more.safetensors": more.read_bytes()})
    with opened(target) as checkpoint, pytest.raises(MalformedError, match=r"both have layer\.0"):
        checkpoint.verify()


def test_documents_of_something_else_are_refused(tmp_path: Path) -> None:
    one, two = publish(tmp_path, 1), publish(tmp_path, 2)
    path = Path(one.path)
    with pytest.raises(MixAndMatchError):
        Checkpoint(path, run="policy", version=one.version, digest=two.digest)
    with pytest.raises(MixAndMatchError):
        Checkpoint(path, run="other", version=one.version, digest=one.digest)
    with pytest.raises(NotFoundError, match="manifest"):
        Checkpoint(path, run="policy", version=one.version, digest="0" * 64)
    blob = tmp_path / "out" / "blobs" / f"{one.digest}.bin"
    blob.write_bytes(b"{}")
    with pytest.raises(IntegrityError, match="damaged"):
        opened(one)


def test_documents_that_are_pipes_are_not_waited_for(tmp_path: Path) -> None:
    target = publish(tmp_path, 1)
    for path, read in (
        (tmp_path / "out" / "blobs" / f"{target.digest}.bin", lambda: opened(target)),
        (tmp_path / "out" / "state" / "000001.json", lambda: version_at(Path(target.path))),
        (Path(target.path) / CONFIG, lambda: read_json(Path(target.path) / CONFIG)),
    ):
        make_pipe(path)
        with pytest.raises(IntegrityError, match="no regular file"):
            read()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="beside OUT/blobs"):
        Checkpoint(tmp_path, run="policy", version=1, digest="0" * 64)


def test_what_current_names_is_found_and_so_is_a_manifest(tmp_path: Path) -> None:
    one, two = publish(tmp_path, 1), publish(tmp_path, 2)
    current = tmp_path / "out" / "current"
    assert version_at(current).manifest == two.digest
    assert version_at(Path(one.path)).number == one.version
    assert find_version(current, one.digest).directory == Path(one.path)
    with pytest.raises(NotFoundError, match="no version with manifest"):
        find_version(current, "0" * 64)
    with pytest.raises(NotFoundError, match="give OUT/current"):
        version_at(tmp_path)
    (tmp_path / "out" / "state" / f"{two.version:06d}.json").unlink()
    with pytest.raises(NotFoundError, match="nothing says"):
        version_at(current)

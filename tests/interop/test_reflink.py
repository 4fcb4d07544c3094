"""Publishing on a file system with reflinks (XFS in a loop-mounted image): no second copy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcast import keys
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.store import Store

pytestmark = pytest.mark.interop
MIB = 1024 * 1024


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("needs root and mkfs.xfs (Debian: xfsprogs)")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 * MIB)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True, timeout=60)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mount)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a loop image here: {mounted.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True, timeout=60)


def used(path: Path) -> int:
    os.sync()
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def test_a_clone_takes_no_space_and_does_not_follow_its_source(xfs: Path) -> None:
    checkpoint = xfs / "ckpt"
    checkpoint.mkdir()
    weights = os.urandom(64 * MIB)
    (checkpoint / "model.safetensors").write_bytes(weights)
    (checkpoint / "empty").write_bytes(b"")
    signer = keys.load_signer(keys.generate(xfs / "keys")[0])
    run = Store(xfs / "store").run("default", create=True)
    before = used(xfs)

    done = publish_directory(PublishOptions(source=checkpoint), run, [signer], lambda: 10**12)

    assert done.method == "clone"
    assert used(xfs) - before < 8 * MIB
    with open(checkpoint / "model.safetensors", "r+b") as file:
        file.write(bytes(MIB))
    assert done.path is not None
    assert (done.path / "model.safetensors").read_bytes() == weights
    stored = run.stored(1)
    assert stored is not None
    assert all(stored.confirm(shard) for shard in range(stored.version.layout.shard_count))
    run.close()

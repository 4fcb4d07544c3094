"""What the kernel's build promises: other threads run beside it, and a missing compiler is named."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shardcast.codec import kernel
from shardcast.codec.elements import ElementType

ROOT = Path(__file__).resolve().parents[3]
KIND = ElementType.BFLOAT16
COUNT = 4 << 20
NAMES = ("encode_changes", "decode_changes", "count_changes", "split_planes", "merge_planes")


def _calls() -> dict[str, Callable[[], object]]:
    """The kernel's functions, each with work for milliseconds."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, COUNT, np.uint16)
    new = old.copy()
    new[rng.random(COUNT) < 0.01] ^= 1
    pieces = [(old.tobytes(), 0, new.tobytes(), 0, COUNT)]
    changes = kernel.encode_changes(KIND, pieces, COUNT)
    assert changes is not None
    planes = [bytearray(COUNT), bytearray(COUNT)]
    into: list[tuple[bytes | None, int, bytearray, int, int]] = [
        (old.tobytes(), 0, bytearray(2 * COUNT), 0, COUNT)
    ]
    return {
        "encode_changes": lambda: kernel.encode_changes(KIND, pieces, COUNT),
        "decode_changes": lambda: kernel.decode_changes(KIND, into, changes),
        "count_changes": lambda: kernel.count_changes(KIND, pieces),
        "split_planes": lambda: kernel.split_planes(KIND, pieces, planes),
        "merge_planes": lambda: kernel.merge_planes(KIND, into, [memoryview(p) for p in planes]),
    }


@pytest.fixture
def only_who_lets_go() -> Iterator[None]:
    """No thread is made to let go of the interpreter's lock: only a call that waits, or gives it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("only_who_lets_go")
@pytest.mark.parametrize("name", NAMES)
def test_other_threads_run_while_the_kernel_works(name: str) -> None:
    assert seen_from_outside(_calls()[name], tries=400)


@pytest.mark.usefixtures("only_who_lets_go")
def test_what_does_not_let_go_is_not_seen() -> None:
    numbers = range(300_000)
    assert not seen_from_outside(lambda: sum(numbers), tries=5)


def seen_from_outside(call: Callable[[], object], *, tries: int) -> bool:
    """Whether another thread ran while a call did; a busy machine may need many tries for that."""
    seen: list[bool] = []
    stop = threading.Event()
    inside = False

    def watch() -> None:
        while not stop.wait(0.0005):
            seen.append(inside)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(tries):
            inside = True
            call()
            inside = False
            if any(seen):
                break
    finally:
        stop.set()
        watcher.join()
    return any(seen)


def test_without_a_compiler_the_build_says_what_to_install(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "setup.py", tmp_path / "setup.py")
    source = tmp_path / "shardcast/codec/_kernel.c"
    source.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "shardcast/codec/_kernel.c", source)
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CC": "no-such-compiler"},
        timeout=50,
    )
    assert built.returncode != 0
    assert "shardcast/codec/_kernel.c was not compiled" in built.stderr
    assert "apt-get install gcc libc6-dev python3" in built.stderr

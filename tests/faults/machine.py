"""Faults of a machine: signals, file systems, bits on disk, networks. All undone, whatever happens."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_TIMEOUT_S = 30
_numbers = itertools.count()


def command(*argv: str | Path) -> str:
    """Run a program of the system to its successful end; return what it printed."""
    done = subprocess.run(
        [str(part) for part in argv],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, argv))}: {done.stderr.strip()}"
    return done.stdout


# --- processes ------------------------------------------------------------------------------


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) while the block runs: it keeps its connections and says nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --- file systems ---------------------------------------------------------------------------


@contextmanager
def small_tmpfs(where: Path, size: int, *, inodes: int | None = None) -> Iterator[Path]:
    """Mount an empty file system of ``size`` bytes at ``where`` while the block runs."""
    where.mkdir(parents=True, exist_ok=True)
    options = f"size={size},mode=0755" + (f",nr_inodes={inodes}" if inodes is not None else "")
    command("mount", "-t", "tmpfs", "-o", options, "shardcast-test", where)
    try:
        yield where
    finally:
        try:
            command("umount", where)
        except AssertionError:
            command("umount", "-l", where)  # goes when its last file is closed ...
            raise  # ... and the test says that somebody kept one open


@contextmanager
def read_only(mount: Path) -> Iterator[None]:
    """Remount a file system of its own read-only while the block runs.

    The kernel refuses while a file is open for writing there; ``full`` blocks may be nested.
    """
    command("mount", "-o", "remount,ro", mount)
    try:
        yield
    finally:
        command("mount", "-o", "remount,rw", mount)


def fill_up(mount: Path) -> Path:
    """Take all space that is free in a small file system; return the file that holds it."""
    ballast = mount / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    return ballast


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place, as a disk does: size and times stay as they were."""
    before = os.stat(path)
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def zero_tail(path: Path, count: int) -> None:
    """Make the last bytes of a file zero, as a power cut does to blocks that were not synced."""
    before = os.stat(path)
    with path.open("r+b") as file:
        file.seek(-min(count, before.st_size), os.SEEK_END)
        file.write(bytes(min(count, before.st_size)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut_tail(path: Path, count: int) -> None:
    """Take the last bytes of a file away."""
    os.truncate(path, max(os.stat(path).st_size - count, 0))


# --- networks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Namespace:
    """A machine of its own on a cable of its own to this one.

    Attributes:
        name: Of the namespace.
        here: Our address on the cable.
        there: Its address.
        device: Our end of the cable.
    """

    name: str
    here: str
    there: str
    device: str

    def argv(self, *argv: str | Path) -> list[str]:
        """The command line that runs a program there."""
        return ["ip", "netns", "exec", self.name, *(str(part) for part in argv)]

    def limit(self, rate: str) -> None:
        """Let both directions carry no more than, say, ``8mbit`` (`tc tbf`)."""
        shape = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "200ms"]
        command("tc", "qdisc", "replace", "dev", self.device, *shape)
        command("ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "up0", *shape)

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Lose every packet to us while the block runs, silently: no reset, no unreachable."""
        # A blackhole route answers the machine's own connect with an error; a neighbour that
        # nobody is loses packets as a broken link does.
        with (
            self._to_nowhere("-n", self.name, self.here, "up0"),
            self._to_nowhere("-n", "", self.there, self.device),
        ):
            yield

    @contextmanager
    def _to_nowhere(self, option: str, name: str, address: str, device: str) -> Iterator[None]:
        ip = ["ip", option, name] if name else ["ip"]
        nobody = "02:00:00:00:00:01"
        command(
            *ip, "neigh", "replace", address, "lladdr", nobody, "dev", device, "nud", "permanent"
        )
        try:
            yield
        finally:
            command(*ip, "neigh", "del", address, "dev", device)

    @contextmanager
    def blackholed(self) -> Iterator[None]:
        """Drop the namespace's route to us while the block runs: it is told so at once."""
        command("ip", "-n", self.name, "route", "add", "blackhole", f"{self.here}/32")
        try:
            yield
        finally:
            command("ip", "-n", self.name, "route", "del", "blackhole", f"{self.here}/32")

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Pull the cable while the block runs."""
        command("ip", "link", "set", self.device, "down")
        try:
            yield
        finally:
            command("ip", "link", "set", self.device, "up")


class Networks:
    """Makes namespaces and removes them; a context manager. Needs root."""

    def __init__(self) -> None:
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def namespace(self) -> Namespace:
        """Make a namespace and the cable to it."""
        number = next(_numbers)
        label = f"sc{os.getpid()}x{number}"
        # A /30 of its own in 10.128.0.0/9, by process and number: tests may run side by side.
        base = ((os.getpid() * 64 + number) % (1 << 21)) * 4
        here, there = _address(base + 1), _address(base + 2)
        space = Namespace(name=label, here=here, there=there, device=label[:15])
        command("ip", "netns", "add", space.name)
        self._cleanup.callback(command, "ip", "netns", "del", space.name)
        command(
            "ip", "link", "add", space.device, "type", "veth", "peer", "up0", "netns", space.name
        )
        self._cleanup.callback(_remove_link, space.device)
        command("ip", "addr", "add", f"{here}/30", "dev", space.device)
        command("ip", "link", "set", space.device, "up")
        command("ip", "-n", space.name, "addr", "add", f"{there}/30", "dev", "up0")
        command("ip", "-n", space.name, "link", "set", "up0", "up")
        command("ip", "-n", space.name, "link", "set", "lo", "up")
        return space


def _remove_link(device: str) -> None:
    subprocess.run(["ip", "link", "del", device], capture_output=True, check=False, timeout=30)


def _address(host: int) -> str:
    return f"10.{128 + (host >> 16)}.{host >> 8 & 255}.{host & 255}"

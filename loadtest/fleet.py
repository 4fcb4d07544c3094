r"""The soak's processes: six relays, twelve workers, the links and small disks between them.

```
origin -- mid0 == mid1 (siblings)          link: origin to mid0
            |  \   |  \
          leaf0  leaf1  leaf2               leaf0 --keep 2, leaf1 --quota on a small disk,
            |      |      |                 leaf2 --limit-rate behind a link
          workers: follow, some --serve, some slow, one on a small disk, one late
```
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from loadtest.links import Link, Links
from loadtest.processes import Process, Processes, free_port
from loadtest.scenario import UnavailableError
from loadtest.topology import shardcast

RUN: Final = "policy"
ORIGIN: Final = "origin"
LATE: Final = "w07"
RESTLESS: Final = "w08"
"""The worker that is restarted all the time."""

_START_S: Final = 60.0
_STOP_S: Final = 45.0
"""A relay drains for up to 30 s."""
_CLOCK_DIRECTORY: Final = Path(__file__).resolve().parent / "clock"
_SLOW_BYTES_PER_S: Final = 2_000_000


@dataclass
class Member:
    """A process that should always live, whatever is done to it.

    Attributes:
        name: What everyone calls it.
        argv: How it is started, each time.
        home: Its store's run directory or its OUT.
        relay: Whether it is a relay.
        serves: Whether it listens.
        env: Its environment.
        clock: The file that shifts its clock.
        process: The one that runs, or ran last.
        wanted: Whether it should live now.
        starts: How often it was started.
        exits: What it ended with where nobody had asked it to, and when.
    """

    name: str
    argv: list[str]
    home: Path
    relay: bool
    serves: bool
    env: Mapping[str, str]
    clock: Path
    process: Process | None = None
    wanted: bool = False
    starts: int = 0
    exits: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """The process id of the one that runs."""
        assert self.process is not None
        return self.process.pid

    def set_clock(self, seconds: float) -> None:
        """Make its wall clock wrong by so much."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("<d", seconds))


class SmallDisk:
    """A tmpfs of a few megabytes that can be filled; unmounted at the end."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size

    def mount(self) -> None:
        """Make it.

        Raises:
            UnavailableError: This user may not mount.
        """
        self.path.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.path)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise UnavailableError(f"small disks need root: {done.stderr.strip()}")

    def fill(self) -> None:
        """Take every free byte."""
        with (self.path / ".filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Give them back."""
        (self.path / ".filler").unlink(missing_ok=True)

    def unmount(self) -> None:
        """Remove it, even if someone still has a file open on it."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)


class Fleet:
    """All of them; a context manager that ends what it started.

    Attributes:
        members: By name, in order of starting.
        links: By name.
        disks: By name.
    """

    def __init__(self, root: Path, *, size: int) -> None:
        """Prepare a fleet below `root` for versions of about `size` bytes."""
        self.root = root
        self.members: dict[str, Member] = {}
        self.links: dict[str, Link] = {}
        self.disks: dict[str, SmallDisk] = {}
        self._size = size
        self._network = Links()
        self._cleanup = contextlib.ExitStack()
        self._env = {
            **os.environ,
            # glibc would keep what a thread frees, up to 32 MB in each thread's arena: then resident
            # memory would say how many threads have decoded a version, and not what leaks.
            "MALLOC_MMAP_THRESHOLD_": str(2**20),
            "PYTHONPATH": os.pathsep.join(
                [str(_CLOCK_DIRECTORY), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            **{name: str(root / "xdg" / name) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME",
                                                           "XDG_STATE_HOME", "XDG_CACHE_HOME")},
        }  # fmt: skip
        self.processes = Processes(root / "logs", env=self._env)
        self.keys = root / "keys"
        self.store = root / "origin"

    def __enter__(self) -> Self:
        """Make keys, small disks and links; start nothing yet."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.processes)
            stack.enter_context(self._network)
            for number in (0, 1, 2):
                self.processes.run(
                    shardcast("keygen", "--out", self.keys / str(number)),
                    name="keygen",
                    timeout=_START_S,
                )
            # A relay's quota is the newest versions; a worker needs keep + 1, and documents.
            for name, versions in (("leaf1-disk", 5), ("w05-disk", 5)):
                disk = self.disks[name] = SmallDisk(self.root / name, versions * self._size)
                disk.mount()
                stack.callback(disk.unmount)
            self._design()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wake what was stopped, then end everything."""
        for member in self.members.values():
            self.resume(member)
        self._cleanup.close()

    # --- design -----------------------------------------------------------------------------

    def _design(self) -> None:
        url = {
            name: f"http://127.0.0.1:{free_port()}"
            for name in ("origin", "mid0", "mid1", "leaf0", "leaf1", "leaf2", "w00", "w01")
        }

        def link(name: str, upstream: str, rate: int | None = None) -> str:
            self.links[name] = self._network.add(url[upstream], rate=rate)
            return self.links[name].url

        link_mid0 = link("origin-mid0", "origin")
        link_leaf2 = link("mid1-leaf2", "mid1")
        slow0 = link("leaf0-w04", "leaf0", _SLOW_BYTES_PER_S)
        slow2 = link("leaf2-w10", "leaf2", _SLOW_BYTES_PER_S)
        disk = self.disks["leaf1-disk"].path
        relay = self._relay
        relay("origin", url, self.store, parents=())
        relay("mid0", url, self.root / "mid0", parents=[link_mid0], siblings=["mid1"])
        relay("mid1", url, self.root / "mid1", parents=[url["origin"]], siblings=["mid0"])
        mids = [url["mid0"], url["mid1"]]
        relay("leaf0", url, self.root / "leaf0", "--keep", "2", parents=mids)
        relay("leaf1", url, disk, "--quota", str(2 * self._size + (1 << 20)), parents=mids[::-1])
        relay("leaf2", url, self.root / "leaf2", "--limit-rate", "20MB", parents=[link_leaf2])
        leaf = [url[f"leaf{n}"] for n in range(3)]
        worker = self._worker
        worker("w00", "--serve", url["w00"].removeprefix("http://"), sources=[leaf[0], leaf[1]])
        worker("w01", "--serve", url["w01"].removeprefix("http://"), sources=[leaf[1]])
        worker("w02", sources=[url["w00"], leaf[0]])
        worker("w03", "--durability", "sync", sources=[url["w01"], url["w00"]])
        worker("w04", sources=[slow0])
        worker("w05", sources=[leaf[0], leaf[2]], out=self.disks["w05-disk"].path / "out")
        worker("w06", sources=[leaf[1], url["mid0"]])
        worker("w06-twin", sources=[leaf[2], url["mid0"]], out=self.root / "w06")
        worker(LATE, sources=leaf)
        worker(RESTLESS, sources=[leaf[0], leaf[2]])
        worker("w09", "--keep", "1", sources=mids)
        worker("w10", sources=[slow2])
        hook = f"echo $SHARDCAST_VERSION >> {self.root / 'hook'}"
        worker("w11", "--on-update", hook, sources=leaf)

    def _relay(
        self,
        name: str,
        url: Mapping[str, str],
        store: Path,
        *options: str,
        parents: Sequence[str],
        siblings: Sequence[str] = (),
    ) -> None:
        links = [part for parent in parents for part in ("--parent", parent)]
        links += [part for sibling in siblings for part in ("--sibling", url[sibling])]
        trust = ["--run", RUN, "--pubkey", str(self.public_key)] if parents else []
        argv = shardcast(
            "relay", "--store", store, "--listen", url[name].removeprefix("http://"),
            *links, *trust, *options,
        )  # fmt: skip
        self._add(name, argv, store / RUN, relay=True, serves=True)

    def _worker(
        self, name: str, *options: str, sources: Sequence[str], out: Path | None = None
    ) -> None:
        links = [part for source in sources for part in ("--from", source)]
        durability = () if "--durability" in options else ("--durability", "none")
        out = out or self.root / name
        argv = shardcast(
            "follow", RUN, *links, "--out", out, "--pubkey", self.public_key, "--json",
            *durability, *options,
        )  # fmt: skip
        self._add(name, argv, out, relay=False, serves="--serve" in options)

    def _add(self, name: str, argv: list[str], home: Path, *, relay: bool, serves: bool) -> None:
        clock = self.root / "clocks" / name
        clock.parent.mkdir(exist_ok=True)
        clock.write_bytes(struct.pack("<d", 0.0))
        env = {**self._env, "LOADTEST_CLOCK": str(clock)}
        self.members[name] = Member(name, argv, home, relay, serves, env, clock)

    @property
    def public_key(self) -> Path:
        """The key that everyone pins: the first one; later ones come by rotation."""
        return self.keys / "0" / "shardcast.pub"

    def workers(self) -> list[Member]:
        """Return the workers: twelve directories, and a second process on one of them."""
        return [member for member in self.members.values() if not member.relay]

    def relays(self) -> list[Member]:
        """Return the relays, the origin first."""
        return [member for member in self.members.values() if member.relay]

    # --- acts -------------------------------------------------------------------------------

    def start(self, member: Member, *options: str) -> None:
        """Start a member, again or for the first time, with further options."""
        argv = [*member.argv, *options]
        member.process = self.processes.start(argv, name=member.name, env=member.env)
        member.wanted = True
        member.starts += 1

    def await_start(self, member: Member) -> None:
        """Wait until a member that listens does.

        Raises:
            ProcessError: It does not.
        """
        if member.serves and member.process is not None:
            member.process.wait_event("listening", timeout=_START_S)

    def kill(self, member: Member) -> None:
        """End a member as a crash would."""
        member.wanted = False
        assert member.process is not None
        self.resume(member)
        member.process.kill()

    def terminate(self, member: Member) -> int:
        """Ask a member to end and wait for it; return its exit status.

        Raises:
            ProcessError: It does not end.
        """
        member.wanted = False
        assert member.process is not None
        self.resume(member)
        member.process.terminate()
        return member.process.wait(timeout=_STOP_S)

    def stall(self, member: Member) -> None:
        """Stop a member where it stands."""
        assert member.process is not None
        member.process.send(stop=True)

    def resume(self, member: Member) -> None:
        """Let a stopped member go on; harmless for one that runs, or is gone."""
        if member.process is not None:
            member.process.send(stop=False)

    def died(self) -> list[Member]:
        """Return the members that ended although nobody had asked them to."""
        return [
            member
            for member in self.members.values()
            if member.wanted and member.process is not None and not member.process.alive()
        ]

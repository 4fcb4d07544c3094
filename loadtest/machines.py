"""Machines of a network of its own: namespaces on one switch, each with a cable of a certain rate.

The switch is a bridge in a namespace too, so nothing of this machine's own network is touched. A cable
carries `rate` bits a second in each direction (`tc tbf`: a token bucket with a queue in front of it, no
added delay and no loss). Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtest.processes import tell_guardian
from loadtest.scenario import UnavailableError, need

_TIMEOUT_S = 30
_QUEUE_MS = 100
_LEAST_BURST = 64 * 1024
"""A segment as large as the kernel hands to a device, so that it need not cut them in software."""

_numbers = itertools.count()


def command(*argv: str | Path) -> str:
    """Run a program of the system to its successful end; return what it printed.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(
        [str(part) for part in argv],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Machine:
    """A namespace on the switch.

    Attributes:
        name: Of the namespace.
        address: Where it listens.
        switch: The switch's namespace.
        port: The switch's end of its cable.
        rate: Bits a second, each way.
    """

    name: str
    address: str
    switch: str
    port: str
    rate: int

    def argv(self, *argv: str | Path) -> list[str]:
        """The command line that runs a program there."""
        return ["ip", "netns", "exec", self.name, *(str(part) for part in argv)]

    @property
    def sent_bytes(self) -> int:
        """What its cable has carried from it, headers of every packet included."""
        return _carried(self.name, "up0")

    @property
    def received_bytes(self) -> int:
        """What its cable has carried to it."""
        return _carried(self.switch, self.port)

    def get(self, url: str) -> str:
        """Fetch a URL from there."""
        return command(*self.argv("curl", "-sSf", "--max-time", "10", url))


def _carried(space: str, device: str) -> int:
    found = json.loads(command("tc", "-n", space, "-s", "-j", "qdisc", "show", "dev", device))
    return int(next(entry["bytes"] for entry in found if entry["kind"] == "tbf"))


class Switch:
    """Makes machines and removes them; a context manager."""

    def __init__(self) -> None:
        """Make nothing yet."""
        self._cleanup = ExitStack()
        number = next(_numbers)
        self._label = f"sl{os.getpid()}n{number}"
        self._net = f"10.{64 + os.getpid() % 64}.{number % 256}"
        self._machines = 0

    def __enter__(self) -> Self:
        """Make the switch.

        Raises:
            UnavailableError: Not here: no root, or no tools.
        """
        for program in ("ip", "tc", "curl"):
            need(program)
        if os.geteuid():
            raise UnavailableError("namespaces need root")
        try:
            self._namespace(self._label)
            command("ip", "-n", self._label, "link", "add", "br0", "type", "bridge")
            command("ip", "-n", self._label, "link", "set", "br0", "up")
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove everything; processes in it must have ended."""
        self._cleanup.close()

    def machine(self, rate: int) -> Machine:
        """Add a machine whose cable carries `rate` bits a second each way."""
        self._machines += 1
        number = self._machines
        name, port = f"{self._label}m{number}", f"p{number}"
        made = Machine(name, f"{self._net}.{number}", self._label, port, rate)
        self._namespace(name)
        command(
            "ip", "-n", self._label, "link", "add", port, "type", "veth",
            "peer", "up0", "netns", name,
        )  # fmt: skip
        command("ip", "-n", self._label, "link", "set", port, "master", "br0", "up")
        command("ip", "-n", name, "addr", "add", f"{made.address}/24", "dev", "up0")
        command("ip", "-n", name, "link", "set", "up0", "up")
        command("ip", "-n", name, "link", "set", "lo", "up")
        burst = max(_LEAST_BURST, rate // 8 // 100)
        shape = ["rate", f"{rate}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
        for space, device in ((self._label, port), (name, "up0")):
            command("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        return made

    def _namespace(self, name: str) -> None:
        tell_guardian("namespace", name)
        command("ip", "netns", "add", name)
        self._cleanup.callback(self._remove, name)

    @staticmethod
    def _remove(name: str) -> None:
        command("ip", "netns", "del", name)
        tell_guardian("unnamed", name)

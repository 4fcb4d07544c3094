"""A chain of machines, each on a cable of its own: origin -> relay -> ... -> worker."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.machines import Machine, Switch
from loadtest.topology import Relay, Tree, Worker

_LOOK_S = 0.05


@dataclass(frozen=True)
class Hop:
    """A relay (or the origin) and the machine that it runs on."""

    relay: Relay
    machine: Machine

    def complete(self, run: str) -> int | None:
        """Return the newest version that it has whole."""
        status = json.loads(self.machine.get(f"{self.relay.url}/v1/status"))
        found = status["runs"].get(run, {}).get("complete")
        return None if found is None else int(found)

    def wait_complete(self, run: str, version: int, *, timeout: float) -> None:
        """Wait until it has a version whole.

        Raises:
            TimeoutError: It had not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.complete(run) != version:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.relay.url}: not version {version} in {timeout:g} s")
            self.relay.process.watch_exit(_LOOK_S)


@dataclass(frozen=True)
class Chain:
    """Everything that runs, from the origin to the worker.

    Attributes:
        hops: The origin first.
        worker: At the end.
        machine: The worker's.
    """

    hops: Sequence[Hop]
    worker: Worker
    machine: Machine

    def settle(self, run: str, version: int, *, timeout: float) -> None:
        """Wait until every relay has a version whole, so that no cable is busy with it any more."""
        for hop in self.hops[1:]:
            hop.wait_complete(run, version, timeout=timeout)


def start_chain(
    tree: Tree,
    switch: Switch,
    rates: Sequence[int],
    *relay_options: str,
    out: Path | None = None,
) -> Chain:
    """Start an origin, relays and a worker, each with a cable of so many bits a second.

    Args:
        tree: Something has been published there.
        switch: What the cables end in.
        rates: One for the origin, for each relay, and for the worker, in this order.
        relay_options: For each relay.
        out: The worker's directory; default: in the tree.
    """
    machines = [switch.machine(rate) for rate in rates]
    hops = [Hop(tree.origin(on=machines[0]), machines[0])]
    for number, machine in enumerate(machines[1:-1], 1):
        parents = [hops[-1].relay.url]
        relay = tree.relay(f"relay-{number}", *relay_options, parents=parents, on=machine)
        hops.append(Hop(relay, machine))
    worker = tree.follow("worker", sources=[hops[-1].relay.url], on=machines[-1], out=out)
    return Chain(hops, worker, machines[-1])

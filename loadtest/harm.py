"""Performs the acts of a chaos plan on a fleet, and undoes each when its time is over."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.chaos import Act, Kind
from loadtest.fleet import Fleet, Member
from loadtest.processes import Process, ProcessError

_STOP_S = 45.0  # a relay drains for up to 30 s
_FINE_EXITS = {0, 143}


@dataclass(order=True)
class _Later:
    at: float
    order: int
    do: Callable[[], None] = field(compare=False)


class Harm:
    """Acts when it is time; used from one thread.

    Attributes:
        done: How many acts of each kind were performed.
        dirty: Exits after SIGTERM that were not clean.
        flipped: Paths of files with a flipped bit, under the names they had then.
    """

    def __init__(self, fleet: Fleet, flips: Path, tell: Callable[[str], None]) -> None:
        self.done: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.dirty: list[str] = []
        self._fleet = fleet
        self._flips = flips
        self._tell = tell
        self._order = itertools.count()
        self._later: list[_Later] = []
        self._ending: list[tuple[Member, Process, float, float]] = []
        self._latest = "nothing yet"
        flips.touch()

    def schedule(self, acts: Sequence[Act]) -> None:
        """Take a plan."""
        for act in acts:
            self.at(act.at, lambda act=act: self._perform(act))  # type: ignore[misc]

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do something at a time of the soak."""
        heapq.heappush(self._later, _Later(when, next(self._order), do))

    def tick(self, now: float) -> float:
        """Do what is due; return the seconds until the next thing is."""
        while self._later and self._later[0].at <= now:
            heapq.heappop(self._later).do()
        self._reap(now)
        return self._later[0].at - now if self._later else 1.0

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do or undo."""
        return not self._later and not self._ending

    # --- acts -------------------------------------------------------------------------------

    def _perform(self, act: Act) -> None:
        if not self._possible(act):
            self._tell(f"(not possible now) {act}")
            return
        self._tell(str(act))
        self.done[act.kind] += 1
        end = act.at + act.seconds
        match act.kind:
            case Kind.KILL | Kind.FLIP_DOWN:
                member = self._fleet.members[act.target]
                self._fleet.kill(member)
                if act.kind is Kind.FLIP_DOWN:
                    self._flip(member, act, down=True)
                self.at(end, lambda: self.start(member))
            case Kind.RESTART:
                self.restart(self._fleet.members[act.target], act.at, act.seconds)
            case Kind.STALL:
                member = self._fleet.members[act.target]
                self._fleet.stall(member)
                self.at(end, lambda: self._fleet.resume(member))
            case Kind.FLIP:
                self._flip(self._fleet.members[act.target], act, down=False)
            case Kind.FILL:
                disk = self._fleet.disks[act.target]
                disk.fill()
                self.at(end, disk.free)
            case Kind.CLOCK:
                member = self._fleet.members[act.target]
                member.set_clock(act.amount)
                self.at(end, lambda: member.set_clock(0.0))
            case Kind.FREEZE | Kind.CUT:
                link = self._fleet.links[act.target]
                link.freeze() if act.kind is Kind.FREEZE else link.cut()
                self.at(end, link.mend)

    def _possible(self, act: Act) -> bool:
        if act.target not in self._fleet.members:
            return True
        member = self._fleet.members[act.target]
        return member.wanted and member.process is not None and member.process.alive()

    def start(self, member: Member) -> None:
        """Start a member, if it is not running."""
        if not member.wanted:
            self._tell(f"        {member.name} starts")
            self._fleet.start(member)

    def restart(self, member: Member, now: float, pause: float) -> None:
        """Ask a member to end; it is started again once it has."""
        assert member.process is not None
        member.wanted = False
        self._fleet.resume(member)
        member.process.terminate()
        self._ending.append((member, member.process, now + _STOP_S, pause))

    def _reap(self, now: float) -> None:
        for entry in list(self._ending):
            member, process, deadline, pause = entry
            if process.alive() and now < deadline:
                continue
            self._ending.remove(entry)
            try:
                status = process.wait(timeout=0.0)
            except ProcessError as error:
                self.dirty.append(f"{member.name} did not end: {error}")
                process.kill()
                status = 0
            if status not in _FINE_EXITS:
                self.dirty.append(process.describe(f"ended with {status} after SIGTERM"))
            self.at(now + pause, lambda member=member: self.start(member))  # type: ignore[misc]

    # --- bits -------------------------------------------------------------------------------

    def _flip(self, member: Member, act: Act, *, down: bool) -> None:
        """Flip one bit of a file of a version: committed, or (while it is down) staged too.

        Half of the flips leave the file's times as they were, as a failing disk would.
        """
        roots = [member.home / "versions"]
        if down:
            roots.append(member.home / "state" / "staging")
        files = [
            path
            for root in roots
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.stat().st_size and path.suffix == ".safetensors"
        ]
        if not files:
            return
        path = files[int(act.draw * len(files))]
        offset = int(act.draw * 7919 * path.stat().st_size) % path.stat().st_size
        silent = int(act.draw * 1000) % 2 == 0
        same = [other for other in files if other.samefile(path)]  # linked versions suffer too
        with self._flips.open("a") as out:
            out.writelines(f"{other}\n" for other in same if "staging" not in other.parts)
        flip_bit(path, offset, silent=silent)
        self._tell(f"        bit of {path} at {offset}{', times kept' if silent else ''}")

    # --- the end ----------------------------------------------------------------------------

    def settle(self, clock: Callable[[], float]) -> None:
        """Undo everything that is still to be undone, now, and see everyone running.

        Raises:
            ProcessError: Someone does not start.
        """
        for member in self._fleet.members.values():
            self._fleet.resume(member)
            member.set_clock(0.0)
        for disk in self._fleet.disks.values():
            disk.free()
        for link in self._fleet.links.values():
            link.mend()
        while not self.idle:
            self.tick(clock() if self._ending else float("inf"))
            time.sleep(0.02)
        for member in self._fleet.members.values():
            self.start(member)
        for member in self._fleet.members.values():
            self._fleet.await_start(member)


def flip_bit(path: Path, offset: int, *, silent: bool) -> None:
    """Flip the lowest bit of one byte; `silent` leaves the file's modification time as it was."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    if silent:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

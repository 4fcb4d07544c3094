"""Performs the acts of a chaos plan on a fleet, and undoes each when its time is over."""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.chaos import Act, Kind
from loadtest.fleet import ORIGIN, Fleet, Member
from loadtest.processes import Process, ProcessError

_STOP_S = 45.0  # a relay drains for up to 30 s
_FINE_EXITS = {0, 143}
_EARLY_EXITS = {*_FINE_EXITS, -signal.SIGTERM, 130}
"""Of a process that was asked to end before it had said a word: it may not have listened yet."""


@dataclass(order=True)
class _Later:
    at: float
    order: int
    do: Callable[[], None] = field(compare=False)


@dataclass(frozen=True)
class _Ending:
    """A process that is about to end; `pause`: after that, how long until it is started again."""

    member: Member
    process: Process
    deadline: float
    pause: float | None


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
        self._ending: list[_Ending] = []
        self._latest = "nothing yet"
        flips.touch()

    def schedule(self, acts: Sequence[Act]) -> None:
        """Take a plan."""
        for act in acts:
            self.at(act.at, functools.partial(self._perform, act))

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
            case Kind.KILL | Kind.DAMAGE:
                member = self._fleet.members[act.target]
                self._fleet.kill(member)
                if act.kind is Kind.DAMAGE:
                    self._damage_down(member, act)
                self.at(end, lambda: self.start(member))
            case Kind.RESTART:
                self.restart(self._fleet.members[act.target], act.at, act.seconds)
            case Kind.REPLACE:
                self._replace(self._fleet.members[act.target], act.at)
            case Kind.STALL:
                member = self._fleet.members[act.target]
                self._fleet.stall(member)
                self.at(end, lambda: self._fleet.resume(member))
            case Kind.FLIP:
                self._flip(self._fleet.members[act.target], act)
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
            self._fleet.start(member, *(["--take-over"] if self._predecessor(member) else []))

    def restart(self, member: Member, now: float, pause: float) -> None:
        """Ask a member to end; it is started again once it has."""
        assert member.process is not None
        member.wanted = False
        self._fleet.resume(member)
        member.process.terminate()
        self._ending.append(_Ending(member, member.process, now + _STOP_S, pause))

    def _replace(self, member: Member, now: float) -> None:
        """Start a second process that takes a relay's place; the first one ends by itself."""
        assert member.process is not None
        self._ending.append(_Ending(member, member.process, now + _STOP_S, None))
        self._fleet.start(member, "--take-over")

    def fall_back(self, member: Member) -> bool:
        """Return to the relay that was to be replaced, if that still serves; say whether it does."""
        entry = self._predecessor(member)
        if entry is None:
            return False
        self._ending.remove(entry)
        member.process = entry.process
        return True

    def _predecessor(self, member: Member) -> _Ending | None:
        for entry in self._ending:
            if entry.member is member and entry.pause is None and entry.process.alive():
                return entry
        return None

    def _reap(self, now: float) -> None:
        for entry in list(self._ending):
            member, process = entry.member, entry.process
            if process.alive() and now < entry.deadline:
                continue
            self._ending.remove(entry)
            try:
                status = process.wait(timeout=0.0)
            except ProcessError as error:
                self.dirty.append(f"{member.name} did not end: {error}")
                process.kill()
                status = 0
            if status not in (_FINE_EXITS if process.events() else _EARLY_EXITS):
                self.dirty.append(process.describe(f"ended with {status} when it was asked to"))
            if entry.pause is not None:
                again = functools.partial(self.start, member)
                self.at(now + entry.pause, again)

    # --- bits -------------------------------------------------------------------------------

    def _flip(self, member: Member, act: Act) -> None:
        """Flip one bit of a committed version's file under the running process."""
        files = _weights(member.home / "versions")
        if files:
            self._damage(files[int(act.draw * len(files))], act, files, Damage.BIT)

    def _damage_down(self, member: Member, act: Act) -> None:
        """Damage any file of a run's directory while nobody has it open.

        Not what only a person may replace: remembered trust, and an origin's own head.
        """
        spared = {"trust.json", "head.json"} if member.name == ORIGIN else {"trust.json"}
        home = member.home
        weights = [*_weights(home / "versions"), *_weights(home / "state" / "staging")]
        documents = [
            path
            for pattern in ("head.json", "blobs/*.bin", "state/*.json", "state/*.shards")
            for path in sorted(home.glob(pattern))
            if path.name not in spared and path.stat().st_size
        ]
        files = documents if documents and int(act.draw * 1e6) % 3 == 0 else weights
        if files:
            kind = list(Damage)[int(act.draw * 1e4) % len(Damage)]
            self._damage(files[int(act.draw * len(files))], act, files, kind)

    def _damage(self, path: Path, act: Act, files: Sequence[Path], kind: Damage) -> None:
        same = [other for other in files if other.samefile(path)]  # linked versions suffer too
        final = [other for other in same if "versions" in other.parts]
        with self._flips.open("a") as out:
            out.writelines(f"{other}\n" for other in final)
        silent = int(act.draw * 1000) % 2 == 0
        damage(path, kind, act.draw, silent=silent)
        self._tell(f"        {kind} of {path}{', times kept' if silent else ''}")

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


class Damage(enum.StrEnum):
    """What a disk does to a file: flips a bit, loses the end, or leaves zeros there."""

    BIT = "bit"
    CUT = "cut"
    ZERO = "zero"


def damage(path: Path, kind: Damage, draw: float, *, silent: bool) -> None:
    """Damage a file from a place that `draw` chooses; `silent` leaves its times as they were."""
    before = path.stat()
    offset = int(draw * 7919 * before.st_size) % before.st_size
    with path.open("r+b") as file:
        file.seek(offset)
        if kind is Damage.BIT:
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        elif kind is Damage.CUT:
            file.truncate(offset)
        else:
            file.write(bytes(before.st_size - offset))
    if silent:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _weights(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*.safetensors")) if path.stat().st_size]

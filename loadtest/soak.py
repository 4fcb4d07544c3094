"""Everything at once, for as long as you like: `python -m loadtest.soak [--seconds N] [--seed S]`.

A publisher, six relays and twelve workers are killed, stopped, restarted, cut off, given wrong
clocks, full disks and flipped bits, by a plan that the seed decides beforehand. Then everyone is left
alone, and must be well: on the newest version, with every byte right, and holding no more than
before. Nothing is measured in seconds, so a busy machine only makes it slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from loadtest.chaos import Act, Kind, Lesson, Step, lessons, plan
from loadtest.fleet import LATE, RESTLESS, Fleet, Member
from loadtest.harm import Harm
from loadtest.processes import Event, Process, ProcessError, scratch, terminate_as_exit
from loadtest.scenario import MB, Check, Report, Settings, UnavailableError, as_json
from loadtest.trainer import Trainer, wait_until
from loadtest.vitals import Bounds, Vitals, grown, growth_bytes, leftovers, resident_bytes, vitals

NAME: Final = "soak"
SECONDS: Final = 120.0
SIZE: Final = 6 * MB
SEED: Final = 1

RESULTS: Final = Path(__file__).resolve().parent / "results"

_WARM_S: Final = 90.0
_CONVERGE_S: Final = 150.0
"""Retries are at most 30 s apart, and stalls are given up after 30 s; a busy machine adds to that."""
_REST_S: Final = 60.0
_TIDY_S: Final = 90.0
_SAMPLE_S: Final = 2.0
_GROWING_UP_S: Final = 20.0
"""A process that was just started fetches what it lacks, and gains its buffers and arenas."""
_RESTLESS_GAP_S: Final = 6.0
_QUIET_VERSIONS: Final = 3

BOUNDS: Final = Bounds(slack=2, socket_slack=16, sockets=128, threads=64)
"""Between two moments of rest: files and the like come one a version if they leak, and three versions
lie between. Sockets: pools keep up to two idle connections to each of up to six neighbours, for up
to 75 s; a relay was seen with 70, and one leaked a version and neighbour is past 128 in two minutes.
Threads: a relay's pools grow to 16 for disks and twice 16 for fills, and a few beside them."""
GROWTH_MB: Final = 24.0
"""Memory that a process may gain over the second half of a soak: the allocator keeps arenas of the
most threads and buffers (1 MiB each) it ever had at once. A leak of one version each, 6 MB every
5 s, is 100 MB in a soak of 3 minutes."""

_TRACES: Final = re.compile(
    r"Traceback \(most recent call last\)|was never (?:retrieved|awaited)|ResourceWarning"
    r"|Exception ignored|Unclosed |broke; it is started again"
)


class Soak:
    """One soak from start to verdict."""

    def __init__(self, root: Path, *, seconds: float, seed: int, size: int, loud: bool) -> None:
        self.root = root
        self.seconds = seconds
        self.seed = seed
        self.size = size
        self.loud = loud
        self.timeline: list[str] = []
        self.failures: list[str] = []
        self.samples: dict[str, list[tuple[float, int]]] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._acts: list[Act] = []
        self._lessons: list[Lesson] = []

    def clock(self) -> float:
        """Return the seconds since the soak began."""
        return time.monotonic() - self._began

    def tell(self, text: str) -> None:
        """Note something in the timeline."""
        line = f"[{self.clock():7.2f}] {text}"
        with self._lock:
            self.timeline.append(line)
            if self.loud:
                print(line, file=sys.stderr, flush=True)

    def fail(self, text: str) -> None:
        """Note a failure, beside what happened around it."""
        self.failures.append(text)
        self.tell(f"FAILURE: {text}")

    # --- phases -----------------------------------------------------------------------------

    def run(self) -> list[Check]:
        """Soak, and return the verdict.

        Raises:
            UnavailableError: This machine or user cannot.
            ProcessError: Not even the start went well.
        """
        with Fleet(self.root, size=self.size) as fleet:
            trainer = Trainer(fleet, size=self.size, tell=self.tell)
            harm = Harm(fleet, self.root / "flips", self.tell)
            observer = self._observer(fleet, trainer)
            try:
                self._warm(fleet, trainer)
                self._chaos(fleet, trainer, harm)
                return self._quiet(fleet, trainer, harm, observer)
            finally:
                trainer.end()
                self._keep_logs(fleet)

    def _observer(self, fleet: Fleet, trainer: Trainer) -> Process:
        config = {
            "workers": {member.name: str(member.home) for member in fleet.workers()},
            "stores": {member.name: str(member.home) for member in fleet.relays()},
            "truth": str(trainer.truth),
            "flips": str(self.root / "flips"),
        }
        path = self.root / "observer.json"
        path.write_text(json.dumps(config))
        argv = [sys.executable, "-m", "loadtest.observer", str(path)]
        return fleet.processes.start(argv, name="observer", stdin=True)

    def _warm(self, fleet: Fleet, trainer: Trainer) -> None:
        trainer.publish()
        for member in fleet.members.values():
            if member.name != LATE:
                fleet.start(member)
        for member in fleet.members.values():
            if member.wanted:
                fleet.await_start(member)
        workers = [member for member in fleet.workers() if member.wanted]
        if not wait_until(lambda: not self._behind(workers, trainer.published[-1]), _WARM_S):
            behind = self._behind(workers, trainer.published[-1])
            raise ProcessError(f"no first version before any chaos: {', '.join(behind)}")
        self.tell("everyone is up, and on the first version")

    def _chaos(self, fleet: Fleet, trainer: Trainer, harm: Harm) -> None:
        start = self.clock()
        end = start + self.seconds
        everyone = [name for name in fleet.members if name not in (LATE, RESTLESS)]
        targets: dict[Kind, Sequence[str]] = {
            **dict.fromkeys(Kind, everyone),
            Kind.REPLACE: [member.name for member in fleet.relays()],
            Kind.FILL: list(fleet.disks),
            Kind.FREEZE: list(fleet.links),
            Kind.CUT: list(fleet.links),
        }
        self._acts = plan(self.seed, targets, start=start, end=end)
        self._lessons = lessons(self.seed, start=start, end=end)
        harm.schedule(self._acts)
        harm.at(start + 0.4 * self.seconds, lambda: harm.start(fleet.members[LATE]))
        restless = fleet.members[RESTLESS]

        def again() -> None:
            if self.clock() < end:
                if restless.wanted:
                    harm.restart(restless, self.clock(), 0.0)
                harm.at(self.clock() + _RESTLESS_GAP_S, again)

        harm.at(start + _RESTLESS_GAP_S, again)
        trainer.begin(self._lessons, self.clock)
        sampled = 0.0
        while (now := self.clock()) < end:
            pause = harm.tick(now)
            self._revive(fleet, harm)
            if now - sampled >= _SAMPLE_S:
                sampled = now
                self._sample(fleet)
            time.sleep(min(max(pause, 0.01), 0.2, max(0.0, end - self.clock())))

    def _revive(self, fleet: Fleet, harm: Harm) -> None:
        for member in fleet.died():
            assert member.process is not None
            status = member.process.wait(timeout=1.0)
            member.exits.append(f"exit {status} at {self.clock():.1f}")
            self.fail(member.process.describe(f"{member.name} ended by itself ({status})"))
            if not harm.fall_back(member):
                fleet.start(member)

    def _sample(self, fleet: Fleet) -> None:
        now = self.clock()
        for member in fleet.members.values():
            if member.wanted and member.process is not None:
                key = f"{member.name}#{member.starts}"
                with contextlib.suppress(OSError):
                    size = resident_bytes(member.pid)
                    self.samples.setdefault(key, []).append((now, size))

    # --- quiet ------------------------------------------------------------------------------

    def _quiet(self, fleet: Fleet, trainer: Trainer, harm: Harm, observer: Process) -> list[Check]:
        self.tell("chaos ends")
        trainer.end()
        harm.settle(self.clock)
        self.failures += trainer.failures + harm.dirty
        behind = self._converge(fleet, harm, trainer.publish())
        # Who was started last has its buffers and arenas once it has been through each kind.
        behind = self._quiet_versions(fleet, trainer, harm) or behind
        first = self._rest(fleet)
        behind = self._quiet_versions(fleet, trainer, harm) or behind
        # Relays keep what was asked for within a minute, clients their idle connections.
        wait_until(lambda: not self._litter(fleet), _TIDY_S, every=1.0)
        second = self._rest(fleet)
        self._revive(fleet, harm)
        self.tell("at rest")
        holding = [
            f"{name}: {what}"
            for name, after in second.items()
            for what in grown(first.get(name, after), after, BOUNDS)
        ]
        # An eviction may be under way just now: what is litter stays.
        wait_until(lambda: not self._litter(fleet), _TIDY_S, every=1.0)
        litter = self._litter(fleet)
        seen = self._verdict_of(observer)
        traces = self._traces(fleet)
        memory = self._memory(first, second)
        exits = [f"{m.name}: {text}" for m in fleet.members.values() for text in m.exits]
        for what, found in (
            ("behind", behind), ("holds more", holding), ("leftover", litter),
            ("traceback", traces), ("wrong", [json.dumps(event) for event in seen["wrong"]]),
            ("flipped at the end", [json.dumps(event) for event in seen["flipped"]]),
        ):  # fmt: skip
            for text in found:
                self.tell(f"{what}: {text}")
        return [
            Check("workers_behind", float(len(behind)), 0.0, "workers"),
            Check("wrong_bytes", float(len(seen["wrong"])), 0.0, "files"),
            Check("reads_by_the_observer", float(seen["reads"]), 100.0, "reads", at_least=True),
            Check("held_more_at_rest", float(len(holding)), 0.0, "kinds"),
            Check("files_left_behind", float(len(litter)), 0.0, "files"),
            Check("tracebacks", float(len(traces)), 0.0, "logs"),
            Check("deaths", float(len(exits)), 0.0, "processes"),
            Check("commands_or_ends_gone_wrong", float(len(trainer.failures + harm.dirty)), 0.0,
                  "failures"),
            Check("memory_grown", memory, GROWTH_MB, "MB"),
            Check("acts", float(sum(harm.done.values())), 1.0, "acts", at_least=True),
        ]  # fmt: skip

    def _quiet_versions(self, fleet: Fleet, trainer: Trainer, harm: Harm) -> list[str]:
        """Publish one version of each kind; return who did not reach one."""
        behind: list[str] = []
        for step in (Step.FRESH, Step.SHARED, Step.LINK)[:_QUIET_VERSIONS]:
            behind = self._converge(fleet, harm, trainer.publish(step)) or behind
        return behind

    def _converge(self, fleet: Fleet, harm: Harm, newest: int) -> list[str]:
        workers = fleet.workers()

        def done() -> bool:
            self._revive(fleet, harm)
            return not self._behind(workers, newest)

        wait_until(done, _CONVERGE_S)
        behind = self._behind(workers, newest)
        self.tell(f"version {newest} is with {len(workers) - len(behind)} of {len(workers)}")
        return [f"{name}, newest {newest}" for name in behind]

    def _behind(self, workers: Sequence[Member], newest: int) -> list[str]:
        found = []
        for member in workers:
            try:
                current = int(os.path.basename(os.readlink(member.home / "current")))
            except OSError:
                current = 0
            if current != newest:
                found.append(f"{member.name} on {current}")
        return found

    def _rest(self, fleet: Fleet) -> dict[str, Vitals]:
        """Return everyone's vitals once they did not change for a while."""
        last: dict[str, Vitals] = {}
        deadline = time.monotonic() + _REST_S
        same = 0
        while same < 3 and time.monotonic() < deadline:
            now = {}
            for member in fleet.members.values():
                with contextlib.suppress(OSError):
                    now[member.name] = vitals(member.pid)
            unchanged = {n: (v.descriptors, v.threads) for n, v in now.items()} == {
                n: (v.descriptors, v.threads) for n, v in last.items()
            }
            same = same + 1 if unchanged else 0
            last = now
            time.sleep(1.0)
        self._sample(fleet)
        return last

    @staticmethod
    def _litter(fleet: Fleet) -> list[str]:
        return [
            f"{member.name}: {path}"
            for member in fleet.members.values()
            for path in leftovers(member.home)
        ]

    def _verdict_of(self, observer: Process) -> dict[str, Any]:
        """Let the observer read everything once more, and return what it saw."""
        before = len(observer.events())
        observer.say("all")
        done: Event = observer.wait_event("all", timeout=_CONVERGE_S)
        events = observer.events()
        late = events[before:]
        wrong = [e for e in events if e["event"] in ("wrong", "absent")]
        return {
            "wrong": wrong,
            "flipped": [e for e in late if e["event"] == "flipped"],
            "reads": done["reads"],
        }

    def _traces(self, fleet: Fleet) -> list[str]:
        found = []
        for log in sorted(fleet.processes.logs.glob("*.stderr")):
            text = log.read_text("utf-8", "replace")
            match = _TRACES.search(text)
            if match:
                found.append(f"{log.name}: {text[match.start() : match.start() + 3000]}")
        return found

    def _memory(self, first: dict[str, Vitals], second: dict[str, Vitals]) -> float:
        """Return the most megabytes that a process gained, by samples and between two rests."""
        half = self.clock() - self.seconds / 2
        worst = 0.0
        for key, samples in self.samples.items():
            born = samples[0][0] + _GROWING_UP_S
            late = [sample for sample in samples if sample[0] >= max(half, born)]
            if len(late) >= 5:
                gained = growth_bytes(late) / MB
                if gained > GROWTH_MB:
                    self.tell(f"memory: {key} gained {gained:.1f} MB: {late[0]} to {late[-1]}")
                worst = max(worst, gained)
        for name, after in second.items():
            if name in first:
                gained = (after.resident - first[name].resident) / MB
                if gained > GROWTH_MB:
                    self.tell(f"memory: {name} gained {gained:.1f} MB between two rests")
                worst = max(worst, gained)
        return worst

    def _keep_logs(self, fleet: Fleet) -> None:
        target = RESULTS / NAME
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(fleet.processes.logs, target / "logs")
        text = "\n".join([*(str(act) for act in self._acts), *(str(x) for x in self._lessons)])
        (target / "plan.txt").write_text(text + "\n")
        (target / "timeline.txt").write_text("\n".join(self.timeline) + "\n")
        for process in fleet.processes.started:
            if process.name not in fleet.members:
                continue
            name = f"{process.log.stem}.events"
            lines = [json.dumps(event) for event in process.events()]
            (target / "logs" / name).write_text("\n".join(lines) + "\n")


def measure(settings: Settings, *, seconds: float, seed: int, loud: bool) -> tuple[Report, Soak]:
    """Soak once."""
    soak = Soak(settings.fresh("soak"), seconds=seconds, seed=seed, size=settings.bytes, loud=loud)
    checks = soak.run()
    resident = {
        f"{key}_mb": [round(size / MB, 1) for _at, size in samples]
        for key, samples in soak.samples.items()
    }
    conditions = {"seed": seed, "chaos_seconds": seconds, "failures": soak.failures[:20]}
    return Report(checks, resident, conditions), soak


def main() -> None:
    """Soak from the command line: one JSON line on stdout, exit 1 if a check fails."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of chaos; then quiet")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of a version")
    parser.add_argument("--work", type=Path, help="where to write; default: /dev/shm")
    parser.add_argument("--loud", action="store_true", help="the timeline as it happens")
    options = parser.parse_args()
    shared = Path("/dev/shm")
    parent = options.work or (shared if shared.is_dir() else None)
    start = time.monotonic()
    with terminate_as_exit(), scratch("soak-", parent) as work:
        settings = Settings(work, options.size, 1, quick=options.seconds <= SECONDS)
        try:
            report, soak = measure(
                settings, seconds=options.seconds, seed=options.seed, loud=options.loud
            )
        except (UnavailableError, ProcessError) as error:
            print(json.dumps({"scenario": NAME, "passed": False, "unavailable": str(error)}))
            print(f"logs, plan and timeline: {RESULTS / NAME}", file=sys.stderr)
            raise SystemExit(3) from error
        document = as_json(NAME, report, settings, time.monotonic() - start)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{NAME}.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document), flush=True)
    if not document["passed"]:
        print("\n".join(soak.timeline), file=sys.stderr)
        print(f"logs, plan and timeline: {RESULTS / NAME}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

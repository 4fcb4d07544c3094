"""The soak's trainer: makes checkpoints, writes down what they are, publishes them by the real CLI."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from loadtest.chaos import Lesson, Step
from loadtest.checkpoints import write_checkpoint
from loadtest.fleet import RUN, Fleet
from loadtest.observer import MARKER, truth_of
from loadtest.processes import Process, ProcessError
from loadtest.topology import shardcast

_COMMAND_S: Final = 120.0
_KEPT_CHECKPOINTS: Final = 3


class Trainer:
    """Publishes; remembers which serial became which version.

    Attributes:
        truth: Where the digests of each checkpoint are written before it is published.
        published: Version numbers, in order.
        failures: Commands that failed although nobody had killed them.
    """

    def __init__(self, fleet: Fleet, *, size: int, tell: Callable[[str], None]) -> None:
        self.truth = fleet.root / "truth"
        self.truth.mkdir()
        self.published: list[int] = []
        self.withdrawn: set[int] = set()
        self.failures: list[str] = []
        self._fleet = fleet
        self._size = size
        self._tell = tell
        self._serial = 0
        self._key = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the script -------------------------------------------------------------------------

    def begin(self, script: Sequence[Lesson], clock: Callable[[], float]) -> None:
        """Perform a script in a thread of its own; `clock` counts seconds of the soak."""
        self._thread = threading.Thread(
            target=self._perform, args=(script, clock), name="trainer", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Let the step that runs end, and skip the rest."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_COMMAND_S)

    def _perform(self, script: Sequence[Lesson], clock: Callable[[], float]) -> None:
        for lesson in script:
            if self._stop.wait(max(0.0, lesson.at - clock())):
                return
            self._tell(f"publisher: {lesson.step.value}")
            try:
                self._do(lesson)
            except ProcessError as error:
                self.failures.append(f"publisher {lesson.step.value}: {error}")
                self._tell(f"publisher: {lesson.step.value} FAILED: {error}")

    def _do(self, lesson: Lesson) -> None:
        if lesson.step is Step.HOLD:
            self._command("hold")
            self._stop.wait(lesson.seconds)
            self._command("hold", "--off")
        elif lesson.step is Step.WITHDRAW:
            self._withdraw()
        elif lesson.step in (Step.KILLED, Step.STREAM_KILLED):
            self._killed(lesson)
        else:
            self.publish(lesson.step)

    # --- steps ------------------------------------------------------------------------------

    def publish(self, step: Step = Step.FRESH) -> int:
        """Publish another version to its end; return its number.

        Raises:
            ProcessError: The command failed.
        """
        checkpoint = self._checkpoint(shared=step is Step.SHARED)
        options = ["--link"] if step is Step.LINK else []
        if step is Step.ROTATE:
            self._keygen(self._key + 1)
            options += ["--rotate-to", str(self._private(self._key + 1))]
        argv = self._argv(step, checkpoint, options)
        process = self._fleet.processes.run(argv, name="publish", timeout=_COMMAND_S)
        if step is Step.ROTATE:
            self._key += 1
        return self._note(process)

    def _argv(self, step: Step, checkpoint: Path, options: Sequence[str] = ()) -> list[str]:
        fleet = self._fleet
        if step is Step.STREAMED:
            return [
                sys.executable, "-m", "loadtest.streaming", str(checkpoint), "--run", RUN,
                "--store", str(fleet.store), "--key", str(self._private(self._key)),
            ]  # fmt: skip
        return shardcast(
            "publish", checkpoint, "--run", RUN, "--store", fleet.store, "--step",
            str(self._serial), "--durability", "none",
            "--key", self._private(self._key), "--json", *options,
        )  # fmt: skip

    def _note(self, process: Process) -> int:
        version = int(process.wait_event("published", timeout=_COMMAND_S)["version"])
        self.published.append(version)
        self._tell(f"publisher: version {version} is checkpoint {self._serial}")
        return version

    def _killed(self, lesson: Lesson) -> None:
        step = Step.STREAMED if lesson.step is Step.STREAM_KILLED else Step.FRESH
        process = self._fleet.processes.start(
            self._argv(step, self._checkpoint(shared=False)), name="publish-killed"
        )
        process.watch_exit(lesson.seconds)
        process.kill()
        if process.events("published"):
            self._note(process)

    def _withdraw(self) -> None:
        left = [n for n in self.published[-3:] if n not in self.withdrawn]
        if len(left) >= 2:
            self._command("withdraw", str(left[-1]))
            self.withdrawn.add(left[-1])

    def _command(self, command: str, *options: str) -> None:
        argv = shardcast(
            command, RUN, *options, "--store", self._fleet.store,
            "--key", self._private(self._key), "--json",
        )  # fmt: skip
        self._fleet.processes.run(argv, name=command, timeout=_COMMAND_S)

    def _private(self, key: int) -> Path:
        return self._fleet.keys / str(key) / "shardcast.key"

    def _keygen(self, key: int) -> None:
        if not self._private(key).exists():
            directory = self._private(key).parent
            self._fleet.processes.run(
                shardcast("keygen", "--out", directory), name="keygen", timeout=_COMMAND_S
            )

    # --- checkpoints ------------------------------------------------------------------------

    def _checkpoint(self, *, shared: bool) -> Path:
        """Make the next checkpoint and write down what it is."""
        self._serial += 1
        base = self._fleet.root / "checkpoints"
        directory = base / str(self._serial)
        write_checkpoint(directory, self._size, weight_files=3, seed=self._serial)
        older = base / str(self._serial - 1)
        if shared and older.exists():
            for path in sorted(older.glob("*.safetensors"))[1:]:
                shutil.copyfile(path, directory / path.name)
        (directory / MARKER).write_text(json.dumps({"serial": self._serial}) + "\n")
        (directory / "empty.txt").write_bytes(b"")
        text = json.dumps(truth_of(directory))
        temporary = self.truth / f".{self._serial}"
        temporary.write_text(text)
        temporary.rename(self.truth / f"{self._serial}.json")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(base / str(self._serial - _KEPT_CHECKPOINTS))
        return directory


def wait_until(condition: Callable[[], bool], seconds: float, *, every: float = 0.1) -> bool:
    """Look again and again until something is so; False if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True

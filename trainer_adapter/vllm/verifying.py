"""Staging in a rank: a version is verified in a thread while the rank goes on serving."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from msgspec.structs import replace

from shardcast.engine.driver import reason_of
from shardcast.errors import EngineRefusedError, ShardcastError
from trainer_adapter.checkpoint import Checkpoint, StoppedError
from trainer_adapter.vllm.ranks import Progress, RankFailure, Target

log = logging.getLogger("vllm.shardcast")

CHECK_SECONDS: Final = 30.0
"""How long a load waits for a check that nobody wants any more: it looks at the model."""


class Ready(Protocol):
    """A version that is ready to be loaded."""

    def load(self) -> None:
        """Load all of it, whatever state an earlier load has left the model in.

        Raises:
            Exception: At any point.
        """
        ...

    def close(self) -> None:
        """Give back what was prepared for it; returns at once."""
        ...


class Prepare(Protocol):
    """Says whether the model could load a version, and gets ready for it."""

    def __call__(self, checkpoint: Checkpoint, stopping: Callable[[], bool]) -> Ready:
        """Called in the thread, after the bytes were verified.

        Raises:
            EngineRefusedError: If it could not; names the tensor.
            StoppedError: If ``stopping`` said so. It is to be asked at every step of the work: whoever
                waits for it sees by that, too, that it gets on.
        """
        ...


Open = Callable[[Target], Checkpoint]


def open_target(target: Target) -> Checkpoint:
    """Open what a target names (``Checkpoint``)."""
    from pathlib import Path

    return Checkpoint(
        Path(target.path), run=target.run, version=target.version, digest=target.digest
    )


class Verifier:
    """What one rank stages: one version at a time. Called from the rank's main thread only."""

    def __init__(self, prepare: Prepare, *, threads: int = 1, opener: Open = open_target) -> None:
        """Stage nothing yet.

        Args:
            prepare: Says whether the model could load it, and gets ready.
            threads: How many threads hash.
            opener: Opens a version.
        """
        self._prepare = prepare
        self._threads = threads
        self._opener = opener
        self._job: _Job | None = None
        self._checking = threading.Lock()

    def begin(self, target: Target) -> None:
        """Begin to stage a version; what was staged before is given up, unless it is the same.

        What is being read under another path is given up as well: that one may be what hangs.
        """
        job = self._job
        if job is not None and job.target.identity == target.identity:
            if job.target.path == target.path and self.progress() is not None:
                return
            if self.staged() is not None:
                return
        self.drop()
        self._job = _Job(target, self._prepare, self._threads, self._opener, self._checking)
        self._job.start()

    def wait(self) -> None:
        """Wait until the thread has ended, however long that takes."""
        if self._job is not None:
            self._job.join()

    def drop(self) -> None:
        """Give up what is staged or being staged.

        Its thread is not waited for, because the engine generates nothing meanwhile, and a disk that
        does not answer would be waited for, too. It looks every megabyte whether it is still wanted,
        and closes what it holds.
        """
        if self._job is not None:
            self._job.give_up()
            self._job = None

    def quiet(self) -> bool:
        """Wait until no thread looks at the model; say whether that came to be."""
        quiet = self._checking.acquire(timeout=CHECK_SECONDS)
        if quiet:
            self._checking.release()
        return quiet

    def staged(self) -> Target | None:
        """Return what is verified, held and unchanged on the disk; what was changed is given up."""
        job = self._job
        if job is None or job.running or job.checkpoint is None:
            return None
        reason = job.checkpoint.changed()
        if reason is None:
            return job.target
        log.warning("version %d: %s since it was staged", job.target.version, reason)
        self.drop()
        return None

    def take(self) -> tuple[Target, Checkpoint, Ready]:
        """Hand over what is staged; the caller closes both.

        Raises:
            EngineRefusedError: If nothing is.
        """
        job = self._job
        if job is None or job.running or job.checkpoint is None or job.ready is None:
            raise EngineRefusedError("no version is staged", phase="load", reason="unavailable")
        self._job = None
        return job.target, job.checkpoint, job.ready

    def progress(self) -> Progress | None:
        """Return how far it is, while it is at it."""
        job = self._job
        if job is None or not job.running:
            return None
        return Progress(digest=job.target.digest, done=job.done, bytes=job.bytes, steps=job.steps)

    def failure(self) -> RankFailure | None:
        """Return how the last staging ended, if it failed."""
        job = self._job
        if job is None or job.running or job.error is None:
            return None
        return RankFailure(
            digest=job.target.digest,
            version=job.target.version,
            code=code_of(job.error),
            message=str(job.error) or type(job.error).__name__,
        )


class _Job:
    """Stages one version. Its attributes are the thread's until ``running`` is false."""

    def __init__(
        self,
        target: Target,
        prepare: Prepare,
        threads: int,
        opener: Open,
        checking: threading.Lock,
    ) -> None:
        self.target = target
        self.done = 0
        self.bytes = 0
        self.steps = 0
        self.checkpoint: Checkpoint | None = None
        self.ready: Ready | None = None
        self.error: Exception | None = None
        self._prepare = prepare
        self._threads = threads
        self._opener = opener
        self._checking = checking
        self._counting = threading.Lock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._handing_over = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="shardcast-stage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def _run(self) -> None:
        checkpoint = ready = None
        try:
            checkpoint = self._opener(self.target)
            self.bytes = checkpoint.bytes
            step = checkpoint.version.layout.step  # the publisher's, whatever a request says
            self.target = replace(self.target, step=step)
            checkpoint.verify(self._count, threads=self._threads, stopping=self._stopping)
            self._look(checkpoint)
            with self._checking:
                if not self._stop.is_set():
                    ready = self._prepare(checkpoint, self._stopping)
        except Exception as error:
            if not isinstance(error, (ShardcastError, StoppedError)):
                log.exception("staging version %d", self.target.version)
            self.error = error
        with self._handing_over:
            wanted = self.error is None and not self._stop.is_set()
            self.checkpoint, self.ready = (checkpoint, ready) if wanted else (None, None)
            self._ended.set()
        if not wanted:
            _close(checkpoint, ready)

    def _look(self, checkpoint: Checkpoint) -> None:
        """Look for NaN and infinities: they do not stop it, and are told (``residue``)."""
        self.bytes += checkpoint.floats
        found = checkpoint.nonfinite(self._count, threads=self._threads, stopping=self._stopping)
        if found:
            log.warning("version %d: %s", self.target.version, found)
        self.target = replace(self.target, nonfinite=found)

    def give_up(self) -> None:
        self._stop.set()
        with self._handing_over:
            checkpoint, self.checkpoint = self.checkpoint, None
            ready, self.ready = self.ready, None
        _close(checkpoint, ready)

    def _stopping(self) -> bool:
        """Say whether to give up. Whatever asks has got on by a step: it asks once for each."""
        with self._counting:
            self.steps += 1
        return self._stop.is_set()

    def _count(self, count: int) -> None:
        with self._counting:
            self.done += count


def _close(*things: Checkpoint | Ready | None) -> None:
    for thing in things:
        if thing is not None:
            thing.close()


def code_of(error: BaseException) -> str:
    """Return the code (``shardcast.engine.forms.ErrorCode``) under which an error is reported."""
    if isinstance(error, EngineRefusedError):
        return error.reason
    if isinstance(error, StoppedError):
        return "superseded"
    return reason_of(error) if isinstance(error, ShardcastError) else "failed"

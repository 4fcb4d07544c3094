"""Publishes a checkpoint as a trainer does that writes it while it gathers weights: slowly.

`python -m loadtest.streaming CKPT --run RUN --store DIR --key FILE [--seconds S] [--no-stream]`: the publisher
itself, with an observer that holds hashing up so that a version takes S seconds. Killed anywhere, it
leaves an open version that the next publication gives up.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Final

from loadtest.processes import terminate_as_exit
from shardcast.keys import load_signers
from shardcast.publisher import publish_directory
from shardcast.publishing import Published, PublishOptions, SilentObserver
from shardcast.sources import Selection
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.store.stored import Durability
from shardcast.streaming import Pace

SECONDS: Final = 1.5


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Slowly(SilentObserver):
    """Lets no more bytes be hashed than a trainer would have gathered by then."""

    def __init__(self, seconds: float) -> None:
        """Let a version take so long."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._done = self._total = 0

    def selected(self, selection: Selection) -> None:
        """It begins."""
        self._began, self._total = time.monotonic(), max(selection.total_bytes, 1)

    def hashed(self, count: int) -> None:
        """Wait until these bytes would have been there."""
        with self._lock:
            self._done += count
            due = self._began + self._seconds * self._done / self._total
        time.sleep(max(due - time.monotonic(), 0.0))


def publish(
    run: RunStore, checkpoint: Path, key: Path, seconds: float, *, stream: bool = True
) -> Published:
    """Publish a checkpoint within about so many seconds."""
    options = PublishOptions(
        source=checkpoint, durability=Durability.NONE, stream=Pace() if stream else None
    )
    signers = load_signers(key, now_ms())
    return publish_directory(options, run, signers, now_ms, Slowly(seconds))


def main() -> None:
    """Publish from the command line; print the event that `shardcast publish` prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    options = parser.parse_args()
    with terminate_as_exit():
        run = Store(options.store).run(options.run, create=True)
        done = publish(run, options.checkpoint, options.key, options.seconds, stream=options.stream)
    event = {"event": "published", "version": done.ref.version, "streamed": done.streamed}
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()

"""What a worker tells, kept."""

from __future__ import annotations

import threading

from shardcast.events import EventKind, WorkerEvent


class Log:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.changed = threading.Condition()

    def on_event(self, event: WorkerEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def kinds(self) -> list[EventKind]:
        """What was told, without how far it is."""
        return [event.kind for event in self.events if event.kind is not EventKind.PROGRESS]

    def of(self, kind: EventKind) -> list[WorkerEvent]:
        """The events of one kind."""
        return [event for event in self.events if event.kind is kind]

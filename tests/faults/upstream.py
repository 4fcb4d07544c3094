"""A scripted upstream: a few frozen actions say what an answer is, byte for byte.

``Upstream`` serves runs as ``tests.fakes.RunServer`` does; ``play`` puts scripts in the place of
single answers. It serves a worker as well as a relay, and counts what it sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcast.protocol.wire import blob_etag, parse_range
from tests.fakes import (
    KIB,
    Action,
    Close,
    FakeRun,
    Gone,
    Request,
    Reset,
    RunServer,
    Until,
)

_PIECE = 16 * KIB


@dataclass(frozen=True)
class Asked:
    """One request for a blob, as a script sees it.

    Attributes:
        request: The request.
        data: The blob's right bytes.
        start: Where the part that it wants begins, 0 without a Range.
        ranged: Whether it has a Range.
        end: Set when the fault is over.
    """

    request: Request
    data: bytes
    start: int
    ranged: bool
    end: threading.Event

    @property
    def etag(self) -> str:
        """The blob's own ETag."""
        assert self.request.digest is not None
        return blob_etag(self.request.digest)


class Act:
    """One step of an answer.

    Attributes:
        endless: It ends only because the client leaves; its bytes are not counted, since the
            kernel takes megabytes that the client never reads.
    """

    endless = False

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        """Return what is done on the wire."""
        raise NotImplementedError


@dataclass(frozen=True)
class Head(Act):
    """Status line and headers.

    Attributes:
        status: None means 206 where a part was asked for, else 200.
        headers: Replace the honest ones; a value of None leaves a header out. Values may say
            ``{start}``, ``{last}``, ``{total}`` and ``{etag}``.
        length: Content-Length; "rest": what is left from the start of the wanted part;
            None: without one.
    """

    status: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    length: int | str | None = "rest"

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        total = len(asked.data)
        status = self.status or (206 if asked.ranged else 200)
        lines: dict[str, str | None] = {}
        if self.length is not None:
            length = total - asked.start if self.length == "rest" else self.length
            lines["Content-Length"] = str(length)
        if status in (200, 206):
            lines["ETag"] = "{etag}"
        if status == 206:
            lines["Content-Range"] = "bytes {start}-{last}/{total}"
        lines.update(self.headers)
        values = {
            "start": asked.start,
            "last": total - 1,
            "total": total,
            "etag": asked.etag,
            "next": asked.start + 1,
        }
        text = [f"HTTP/1.1 {status} Scripted"]
        text += [f"{n}: {v.format(**values)}" for n, v in lines.items() if v is not None]
        yield ("\r\n".join(text) + "\r\n\r\n").encode("latin-1")


@dataclass(frozen=True)
class Body(Act):
    """The blob's right bytes ``[first, stop)``; from the start of the wanted part by default.

    Attributes:
        first: Offset in the blob, None: where the wanted part begins.
        stop: Offset in the blob, negative: from its end, None: its end.
    """

    first: int | None = None
    stop: int | None = None

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        first = asked.start if self.first is None else self.first
        yield asked.data[first : self.stop]


@dataclass(frozen=True)
class Flipped(Act):
    """The right bytes of the wanted part with one bit flipped, at an offset in the blob."""

    at: int

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        data = bytearray(asked.data)
        data[self.at] ^= 1
        yield bytes(data[asked.start :])


@dataclass(frozen=True)
class Raw(Act):
    """Just these bytes."""

    data: bytes

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield self.data


@dataclass(frozen=True)
class Made(Act):
    """Bytes made of the request: another blob, a page of just the right length."""

    make: Callable[[Asked], bytes]

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield self.make(asked)


@dataclass(frozen=True)
class Endless(Act):
    """Bytes until the client leaves."""

    endless = True

    def bytes_of(self, asked: Asked) -> Iterator[Action]:
        while True:
            yield b"\xaa" * _PIECE


@dataclass(frozen=True)
class Drip(Act):
    """The wanted part (or ``data``), a byte at a time, until the client leaves or the fault ends."""

    pause_s: float = 1.0
    data: bytes | None = None

    def bytes_of(self, asked: Asked) -> Iterator[Action]:
        data = asked.data[asked.start :] if self.data is None else self.data
        for index in range(len(data)):
            yield data[index : index + 1]
            if asked.end.wait(self.pause_s):
                yield data[index + 1 :]
                return


@dataclass(frozen=True)
class Hold(Act):
    """Send nothing until the fault ends (``Upstream.release``) or the client leaves."""

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield Until(asked.end)


@dataclass(frozen=True)
class Stall(Act):
    """Say nothing more; hold the connection until the client leaves."""

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield Gone()


@dataclass(frozen=True)
class Shut(Act):
    """Close in order (FIN)."""

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield Close()


@dataclass(frozen=True)
class Abort(Act):
    """Reset the connection (RST)."""

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield Reset()


Script = Sequence[Act]


@dataclass(frozen=True)
class Play:
    """When a script is the answer.

    Attributes:
        script: The answer.
        on: Which digests; None: every blob of the run that the fault is for.
        first: From the how-manieth matching request on.
        times: For how many of them; None: until the fault ends.
        ranged: Only requests with (True) or without (False) a Range.
    """

    script: Script
    on: frozenset[str] | None = None
    first: int = 0
    times: int | None = 1
    ranged: bool | None = None


@dataclass
class Sent:
    """One answer to a request for a blob.

    Attributes:
        run: Of which run.
        digest: Of which blob.
        connection: Over which connection.
        scripted: Whether a script answered.
        body: Body bytes that were sent (to 16 KiB exactly where the client left).
        endless: It never ends by itself.
        left: The client left, or the script closed the connection.
    """

    run: str
    digest: str
    connection: int
    scripted: bool
    body: int = 0
    endless: bool = False
    left: bool = False


class Upstream(RunServer):
    """A server of runs with scripts; counts body bytes by answer.

    Attributes:
        answers: One entry for each answer to a request for a blob, in order.
        hit: Set when a script has begun to answer.
        end: Set when the fault is over.
    """

    def __init__(self, *runs: FakeRun, **options: Any) -> None:
        super().__init__(*runs, **options)
        self.answers: list[Sent] = []
        self.hit = threading.Event()
        self.end = threading.Event()
        self._plays: list[Play] = []
        self._matched: list[int] = []
        self._only: str | None = None

    def play(self, *plays: Play, run: str | None = None) -> None:
        """Let scripts answer, the first that matches; for one run only if it is named."""
        with self.changed:
            self._plays += plays
            self._matched += [0] * len(plays)
            self._only = run

    def heal(self) -> None:
        """End the fault: what is held goes on, later answers are honest."""
        self.end.set()
        with self.changed:
            self._plays.clear()
            self._matched.clear()

    def sent_for(self, run: FakeRun) -> int:
        """Body bytes of a run's blobs that were sent."""
        return sum(answer.body for answer in self.answers if answer.run == run.name)

    @property
    def failures(self) -> int:
        """Answers that scripts gave: each at most a connection that failed."""
        return sum(answer.scripted for answer in self.answers)

    def _end_waits(self) -> None:
        self.end.set()
        super()._end_waits()

    def _blob(self, run: FakeRun, request: Request) -> Iterable[Action]:
        data = run.blobs.get(request.digest or "")
        play = self._choose(run, request)
        if play is None or data is None:
            return self._counted([(super()._blob(run, request), True)], run.name, request)
        wanted = parse_range(request.headers.get("range"), len(data))
        start = 0 if wanted is None else wanted.start
        asked = Asked(request, data, start, wanted is not None, self.end)
        self.hit.set()
        steps = [(act.bytes_of(asked), not act.endless) for act in play.script]
        return self._counted(steps, run.name, request, scripted=True)

    def _choose(self, run: FakeRun, request: Request) -> Play | None:
        with self.changed:
            if self._only is not None and run.name != self._only:
                return None
            chosen: Play | None = None
            for index, play in enumerate(self._plays):
                if play.on is not None and request.digest not in play.on:
                    continue
                if play.ranged is not None and play.ranged != ("range" in request.headers):
                    continue
                number = self._matched[index]
                self._matched[index] += 1
                due = number >= play.first and (
                    play.times is None or number < play.first + play.times
                )
                chosen = play if chosen is None and due else chosen
            return chosen

    def _counted(
        self,
        steps: Iterable[tuple[Iterable[Action], bool]],
        run: str,
        request: Request,
        *,
        scripted: bool = False,
    ) -> Iterator[Action]:
        assert request.digest is not None
        answer = Sent(run, request.digest, request.connection, scripted)
        with self.changed:
            self.answers.append(answer)
        in_head = True
        try:
            for actions, counts in steps:
                answer.endless |= not counts
                for action in actions:
                    if not isinstance(action, bytes | memoryview):
                        yield action
                        continue
                    data = bytes(action)
                    if in_head:
                        head, mark, data = data.partition(b"\r\n\r\n")
                        in_head = not mark
                        yield head + mark
                    for position in range(0, len(data), _PIECE):
                        piece = data[position : position + _PIECE]
                        yield piece
                        answer.body += len(piece) * counts
        except GeneratorExit:
            answer.left = True
            raise


# --- scripts that many cases share ------------------------------------------------------------


def cut_after(count: int, by: type[Act] = Shut) -> Script:
    """The honest head, then only so many bytes of the wanted part (negative: all but so many)."""
    return (Head(), Part(count), by())


@dataclass(frozen=True)
class Part(Act):
    count: int

    def bytes_of(self, asked: Asked) -> Iterable[Action]:
        yield asked.data[asked.start :][: self.count]


def status(code: int, body: bytes = b"", **headers: str) -> Script:
    """Any status with a body."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return (Head(code, given, len(body)), Raw(body))

"""What one upstream can do to one transfer: a row a case, met by a worker and by a relay."""

from __future__ import annotations

import gzip
import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.faults.cases import DOCUMENT, Case, relay_survives, worker_survives
from tests.faults.criteria import SHARD
from tests.faults.upstream import (
    Abort,
    Asked,
    Body,
    Drip,
    Endless,
    Flipped,
    Head,
    Hold,
    Made,
    Part,
    Play,
    Raw,
    Shut,
    Stall,
    cut_after,
    status,
)
from tests.faults.world import BRISK, PATIENT

HALF: Final = SHARD // 2
PAGE: Final = b"<html><body><h1>502 Bad Gateway</h1></body></html>\n"
FINAL: Final = replace(PATIENT, give_up_after_s=0.5)
"""Loses patience soon: for faults that last until a follower gave up."""


def once(*script: object) -> tuple[Play, ...]:
    return (Play(script),)  # type: ignore[arg-type]


def resumed(*answer: object) -> tuple[Play, ...]:
    """The first answer is cut at the half; the request for the rest is answered like this."""
    return (
        Play(cut_after(HALF), ranged=False),
        Play(answer, ranged=True),  # type: ignore[arg-type]
    )


def page_of_right_length(asked: Asked) -> bytes:
    return PAGE + b" " * (len(asked.data) - len(PAGE))


def first_half_flipped(asked: Asked) -> bytes:
    return bytes([asked.data[0] ^ 1]) + asked.data[1:HALF]


def zipped(asked: Asked) -> bytes:
    return gzip.compress(asked.data, mtime=0)[: len(asked.data)]


def another_shard(asked: Asked) -> bytes:
    return bytes(reversed(asked.data))


CUT: Final = [
    *(
        Case(f"cut-after-{k}", once(*cut_after(k)), f"closed the connection after {k} of {SHARD}")
        for k in (0, 1, HALF, SHARD - 1)
    ),
    *(
        Case(f"reset-after-{k}", once(*cut_after(k, Abort)), "reset while|closed the", again=k)
        for k in (0, 1, HALF, SHARD - 1)
    ),
    Case(
        "cut-again-and-again",
        tuple(Play(cut_after(50_000), first=n) for n in range(5)),
        "closed the connection after 50000",
    ),
    Case("cut-in-the-head", once(Raw(b"HTTP/1.1 200 OK\r\nContent-Le"), Shut()), "within the head"),
    # A connection that was used before may have been idle for too long: another one is asked without
    # a word. So more often than there can be such connections.
    Case("cut-before-an-answer", (Play((Shut(),), times=12),), "before an answer"),
    Case("document-cut", once(*cut_after(20)), "after 20 of", on=DOCUMENT),
]

CHUNKED: Final = Head(length=None, headers={"Transfer-Encoding": "chunked"})
FRAMING: Final = [
    Case(
        "chunks-without-an-end",
        once(CHUNKED, Raw(b"20000\r\n"), Body(0, 0x20000), Raw(b"\r\n"), Shut()),
        "without a Content-Length",
        again=SHARD,
    ),
    Case(
        "chunk-that-ends-early",
        once(CHUNKED, Raw(b"40000\r\n"), Body(0, HALF), Shut()),
        "without a Content-Length",
        again=SHARD,
    ),
    Case(
        "chunks-that-end",
        once(CHUNKED, Raw(b"20000\r\n"), Body(0, HALF), Raw(b"\r\n0\r\n\r\n")),
        "without a Content-Length",
        again=HALF + 64,
    ),
    Case(
        "no-length-at-all",
        once(Head(length=None), Body(0, HALF), Shut()),
        "without a Content-Length",
        again=HALF,
    ),
    Case(
        "document-without-a-length",
        once(Head(length=None), Body(0, 50), Shut()),
        "without a Content-Length",
        again=50,
        on=DOCUMENT,
    ),
]

FLIPPED: Final = [
    *(
        Case(f"bit-flipped-at-{at}", once(Head(), Flipped(at)), "digest", SHARD, banned=True)
        for at in (0, HALF, SHARD - 1)
    ),
    Case(
        "bit-flipped-and-a-pause",
        once(Head(), Made(first_half_flipped), Hold(), Body(HALF)),
        "digest",
        again=SHARD,
        banned=True,
        held=True,
    ),
    Case("document-flipped", once(Head(), Flipped(9)), "digest", 1000, DOCUMENT, banned=True),
]

TOTAL: Final = str(SHARD)
RANGES: Final = [
    Case("range-ignored", resumed(Head(200, length=SHARD), Body(0)), "closed", again=HALF),
    Case(
        "part-of-another-start",
        resumed(Head(headers={"Content-Range": "bytes {next}-{last}/{total}"}), Body()),
        "instead of bytes",
        again=SHARD,
    ),
    Case(
        "part-from-the-start",
        resumed(Head(length=SHARD, headers={"Content-Range": "bytes 0-{last}/{total}"}), Body(0)),
        "instead of bytes",
        again=HALF + SHARD,
    ),
    Case(
        "part-with-another-end",
        resumed(
            Head(length=100, headers={"Content-Range": f"bytes {HALF}-{HALF + 99}/{TOTAL}"}),
            Body(HALF, HALF + 100),
        ),
        "instead of bytes",
        again=HALF + 100,
    ),
    Case(
        "part-without-a-range",
        resumed(Head(headers={"Content-Range": None}), Body()),
        "Content-Range None",
        again=SHARD,
    ),
    Case(
        "part-of-unknown-total",
        resumed(Head(headers={"Content-Range": "bytes {start}-{last}/*"}), Body()),
        "a part with Content-Range",
        again=SHARD,
    ),
    Case(
        "part-of-another-total",
        resumed(Head(headers={"Content-Range": "bytes {start}-{last}/999999"}), Body()),
        "instead of bytes|a part with Content-Range",
        again=SHARD,
    ),
    Case(
        "multipart",
        resumed(
            Head(
                length=9 + HALF,
                headers={
                    "Content-Type": "multipart/byteranges; boundary=x",
                    "Content-Range": None,
                },
            ),
            Raw(b"--x\r\n\r\n..."[:9]),
            Body(),
        ),
        "Content-Range None",
        again=SHARD + 9,
    ),
    Case(
        "part-longer-than-it-says",
        resumed(Head(length=HALF + 5), Body(), Raw(b"12345")),
        "bytes as",
        again=SHARD + 5,
    ),
    Case(
        "part-with-bytes-of-the-start",
        # Whoever has a wrong beginning from an earlier answer must not blame this one.
        resumed(Head(), Body(0, HALF)),
        "digest .* stitched from several answers",
        again=SHARD,
    ),
    Case(
        "part-that-nobody-asked-for",
        once(
            Head(206, {"Content-Range": "bytes 0-{last}/{total}"}, SHARD),
            Body(),
        ),
        "although the whole was asked for",
        again=SHARD,
    ),
]

ETAGS: Final = [
    *(
        Case(
            f"{name}-etag-of-a-part",
            resumed(Head(headers={"ETag": etag}), Body()),
            "a part with ETag|with ETag",
            again=SHARD,
        )
        for name, etag in (
            ("another", '"v2"'),
            ("weak", "W/{etag}"),
            ("no", None),
            ("another-blobs", '"blake3-' + "0" * 64 + '"'),
        )
    ),
    Case(
        "another-blobs-etag-of-the-whole",
        once(Head(headers={"ETag": '"blake3-' + "0" * 64 + '"'}), Body()),
        "with ETag",
        again=SHARD,
    ),
]

UNSATISFIABLE: Final = [
    Case(
        "416-within-the-file",
        resumed(*status(416, Content_Range=f"bytes */{SHARD}")),
        "answers 416",
        again=HALF,
    ),
    Case("416-to-the-whole", once(*status(416, Content_Range="bytes */{total}")), "answers 416"),
    Case("closed-behind-the-last-byte", once(Head(), Body(), Shut()), None),
]

PAGES: Final = [
    Case(
        "page-of-another-length",
        once(*status(200, PAGE, Content_Type="text/html")),
        f"{len(PAGE)} bytes instead of {SHARD}",
        again=len(PAGE),
    ),
    Case(
        "page-of-the-right-length",
        once(Head(headers={"Content-Type": "text/html"}), Made(page_of_right_length)),
        "digest",
        again=SHARD,
        banned=True,
    ),
    Case(
        "page-for-a-document",
        once(*status(200, PAGE, Content_Type="text/html")),
        "digest",
        again=len(PAGE),
        on=DOCUMENT,
        banned=True,
    ),
    Case(
        "gzip-added",
        once(Head(length=len(gzip.compress(bytes(SHARD))), headers={"Content-Encoding": "gzip"})),
        "Content-Encoding",
    ),
    Case(
        "gzip-said-of-plain-bytes",
        once(Head(headers={"Content-Encoding": "gzip"}), Body()),
        "Content-Encoding",
        again=SHARD,
    ),
    Case(
        "gzip-added-and-not-said",
        once(Head(), Made(zipped)),
        "digest",
        again=SHARD,
        banned=True,
    ),
    Case("redirect", once(*status(302, Location="http://other.example/")), "redirects"),
]

STATUSES: Final = [
    *(
        Case(f"{code}-three-times", tuple(Play(status(code), first=n) for n in range(3)), says)
        for code, says in ((404, None), (500, "answers 500"), (502, "answers 502"))
    ),
    *(
        Case(
            f"{code}-with-{name}",
            tuple(Play(status(code, b"{}", Retry_After=when), first=n) for n in range(3)),
            None,
            again=6,
        )
        for code in (503, 429)
        for name, when in (
            ("seconds", "1"),
            ("a-date", "Wed, 21 Oct 2099 07:28:00 GMT"),
            ("a-past-date", "Wed, 21 Oct 2015 07:28:00 GMT"),
            ("nonsense", "soon"),
        )
    ),
    *(
        Case(
            f"{code}-for-long",
            (Play(status(code, Retry_After="86400"), times=None),),
            f"answers {code}",
            lasts=True,
            config=FINAL,
        )
        for code in (404, 429, 500, 503)
    ),
]

DRIPPED: Final = b"HTTP/1.1 200 OK\r\nX-Pad: " + b"x" * 1000
SLOW: Final = [
    Case("a-byte-a-second", once(Head(), Drip(1.0)), "bytes/s|nothing came", SHARD, config=BRISK),
    # A byte that a busy machine sends late must not look like silence.
    Case(
        "a-drip-of-bytes",
        once(Head(), Drip(0.02)),
        "less than",
        SHARD,
        config=replace(BRISK, read_timeout_s=10.0),
    ),
    Case("a-drip-in-the-head", once(Drip(0.05, DRIPPED)), "answer", config=BRISK),
    *(
        Case(f"stall-at-{k}", once(Head(), Part(k), Stall()), "nothing came", config=BRISK)
        for k in (0, 1, HALF, SHARD - 1)
    ),
    Case("stall-before-the-head", once(Stall()), "nothing came|no answer", config=BRISK),
    Case("held-for-a-while", once(Head(), Part(HALF), Hold(), Body(HALF)), None, held=True),
]

LIES: Final = [
    Case("another-shard", once(Head(), Made(another_shard)), "digest", SHARD, banned=True),
    Case("endless-length", once(Head(length=10**15), Endless()), "bytes instead of"),
    Case("endless-document", once(Head(length=10**15), Endless()), "limit", on=DOCUMENT),
    Case("endless-head", once(Raw(b"HTTP/1.1 200 OK\r\nX: "), Endless()), "head of the answer"),
    Case("more-than-it-says", once(Head(), Body(), Raw(b"and more")), None, again=SHARD),
    Case("no-http", once(Raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), Shut()), "not HTTP"),
    Case(
        "two-lengths",
        once(Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n")),
        "two different",
    ),
]

_ROWS: Final = (
    (1, CUT), (2, FRAMING), (5, FLIPPED), (6, RANGES), (7, ETAGS), (8, UNSATISFIABLE), (9, PAGES),
    (10, STATUSES[:1]), (11, STATUSES[1:]), (12, SLOW), (18, LIES),
)  # fmt: skip


ROWS: Final = [
    pytest.param(case, marks=pytest.mark.fault(number), id=case.name)
    for number, cases in _ROWS
    for case in cases
]


@pytest.mark.parametrize("case", ROWS)
async def test_a_worker_survives(tmp_path: Path, case: Case) -> None:
    await worker_survives(case, tmp_path)


@pytest.mark.parametrize("case", ROWS)
async def test_a_relay_with_ten_readers_survives(
    tmp_path: Path, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="relay")
    await relay_survives(case, tmp_path, lambda: [r.getMessage() for r in caplog.records])

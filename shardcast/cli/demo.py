"""``shardcast demo``."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.changes_view import ratio
from shardcast.cli.demo_view import LineView, LiveView
from shardcast.cli.output import Output, table
from shardcast.cli.units import count, duration, parse_size, size
from shardcast.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from shardcast.demo.scenario import Audience, Plan, VersionResult


def demo(
    out: Output,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CKPT]",
            help="A checkpoint directory. Without one, a bf16 model is made.",
            show_default=False,
        ),
    ] = None,
    made_size: Annotated[
        str, typer.Option("--size", metavar="BYTES", help="Size of the model that is made.")
    ] = "200MB",
    updates: Annotated[
        int,
        typer.Option(
            "--updates", metavar="N", min=0, max=20, help="Optimiser steps after the first version."
        ),
    ] = 3,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where to put temporary files. Default: the system's.",
            show_default=False,
        ),
    ] = None,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Leave all files and logs behind.")
    ] = False,
) -> None:
    """Run a whole tree on this machine: an origin, three relays, three workers.

    Publishes a checkpoint, then a few optimiser steps of it, which travel as deltas. Shows how they
    spread, compares every worker's files with the source, and prints what it measured.
    """
    from shardcast.demo.scenario import Plan

    if directory is not None and not directory.is_dir():
        raise UsageError(f"--dir {directory} is no directory", source=str(directory))
    bytes_wanted = parse_size(made_size, "--size")
    if not 1_000_000 <= bytes_wanted <= 100_000_000_000:
        raise UsageError(f"--size {made_size}: from 1MB to 100GB")
    if checkpoint is not None:
        updates = _possible_updates(out, checkpoint, updates)
    began = time.monotonic()
    with _ended_as_interrupt(), _scratch(directory, keep=keep_files, out=out) as root:
        plan = Plan(root=root, source=checkpoint, size_bytes=bytes_wanted, updates=updates)
        results = _watched(out, plan)
    report(out, results, time.monotonic() - began)


def _possible_updates(out: Output, checkpoint: Path, updates: int) -> int:
    from shardcast.demo.training import can_step

    if updates and not can_step(checkpoint):
        out.notice(f"{checkpoint} has no bf16 safetensors to train on: one version is published")
        return 0
    return updates


def _watched(out: Output, plan: Plan) -> list[VersionResult]:
    from shardcast.demo.scenario import Scenario

    if not out.terminal:
        lines: Audience = LineView(out)
        return Scenario(plan, lines).run()

    from rich.console import Console
    from rich.live import Live

    view = LiveView()
    with Live(
        get_renderable=view.render,
        console=Console(stderr=True),
        refresh_per_second=8,
        transient=True,
    ):
        return Scenario(plan, view).run()


@contextlib.contextmanager
def _scratch(directory: Path | None, *, keep: bool, out: Output) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="shardcast-demo-", dir=directory))
    try:
        yield root
    finally:
        if keep:
            out.notice(f"files and logs are in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _ended_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the demonstration as Ctrl-C does, so that it cleans up."""
    signals = (signal.SIGTERM, signal.SIGHUP)

    def interrupt(_signal: int, _frame: object) -> None:
        for one in signals:  # a second one must not stop the cleaning up
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


# --- the report -------------------------------------------------------------------------------


def report(out: Output, results: list[VersionResult], seconds: float) -> None:
    """Print what was measured.

    Raises:
        IntegrityError: If a worker's directory does not equal the source.
    """
    equal = all(all(result.equal.values()) and result.equal for result in results)
    conditions = _conditions()
    out.event(
        "demo",
        equal=equal,
        seconds=round(seconds, 3),
        conditions=conditions,
        versions=[_members(result) for result in results],
    )
    out.result()
    out.result(table(_HEADERS, [_row(result) for result in results]))
    out.result()
    sizes = " or ".join(sorted({size(result.bytes) for result in results}))
    for line in (
        f"each version: {sizes} in {count(results[0].files, 'file')}, from the second on as a delta",
        "changed    weights whose bits differ from the version before: one AdamW-like step at",
        "           learning rate 1e-6 on fp32 masters, made up; other training changes more or less",
        "publish    start of the command to the head: hash, copy, make the delta; without sync",
        "wire       bytes that the worker which took most fetched, documents included",
        "ratio      the version's bytes by these",
        "origin     bytes of blobs that the origin sent to both relays below it",
        "worker-N   from the announcement until it holds every shard, verified",
        "           (version 1: also until everyone has found the new run; the first three write new",
        "           files, later ones overwrite those of evicted versions)",
        f"conditions {conditions}, loopback, 8 processes",
    ):
        out.result(line)
    out.result()
    files = sum(result.files for result in results)
    if not equal:
        differing = sorted({n for r in results for n, same in r.equal.items() if not same})
        raise IntegrityError(f"not equal to the source: {', '.join(differing)}")
    out.result(
        f"equal: {count(files, 'file')} of {count(len(results), 'version')}, byte for byte, on "
        f"all 3 workers; {duration(seconds)} in all"
    )


_HEADERS = (
    "ver",
    "changed",
    "publish",
    "wire",
    "ratio",
    "origin",
    "worker-1",
    "worker-2",
    "worker-3",
    "equal",
)


def _row(result: VersionResult) -> tuple[object, ...]:
    ready = [result.ready_s.get(f"worker-{n}") for n in (1, 2, 3)]
    return (
        result.version,
        None if result.changed is None else f"{100 * result.changed:.2f} %",
        duration(result.publish_s),
        size(result.wire_bytes),
        ratio(result.ratio),
        size(result.sent.get("origin", 0)),
        *(None if seconds is None else duration(seconds) for seconds in ready),
        all(result.equal.values()),
    )


def _members(result: VersionResult) -> dict[str, object]:
    return {
        "version": result.version,
        "bytes": result.bytes,
        "changed": result.changed,
        "publish_s": result.publish_s,
        "ready_s": result.ready_s,
        "delta_bytes": result.delta_bytes,
        "bytes_fetched": result.fetched,
        "bytes_delta": result.by_delta,
        "ratio": None if result.ratio is None else round(result.ratio, 3),
        "bytes_sent": result.sent,
        "files": result.files,
        "equal": result.equal,
    }


def _conditions() -> str:
    cores = len(os.sched_getaffinity(0))
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{count(cores, 'core')}, {platform.machine()}, {platform.system()}, Python {python}"

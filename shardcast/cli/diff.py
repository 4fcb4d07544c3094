"""``shardcast diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcast.cli.output import Output
from shardcast.cli.progress import Counter, meters
from shardcast.cli.units import count, size


def diff(
    out: Output,
    base: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint directory: the base.")],
    target: Annotated[Path, typer.Argument(metavar="B", help="What became of it.")],
    every: Annotated[
        bool,
        typer.Option("--all", help="List every tensor. Default: those that cost most."),
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="GLOB",
            help="Compare files that publish leaves out by default. May be repeated.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave files out. May be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare two checkpoint directories: per tensor what changed, and what its delta would cost.

    Nothing is published or written. Costs are what frames take of blobs; a head and a few hundred
    bytes of documents come on top.
    """
    from shardcast.cli.changes_view import ratio, show_changes
    from shardcast.comparison import compare_directories

    with meters(out) as shown:
        counter = Counter(shown, f"diff {target}")
        found = compare_directories(
            base,
            target,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            begin=counter.begin,
            progress=counter.add,
        )
        counter.finish()
    changes = found.changes
    show_changes(out, changes, every=every)
    if found.removed:
        out.result(f"removed: {', '.join(found.removed)}")
    out.result(
        f"{size(found.bytes)} in all; the delta has {size(changes.wire_bytes)}, "
        f"{ratio(found.ratio)} fewer"
    )
    tensors = [row for row in changes.tensors if row.change != "removed"]
    out.event(
        "compared",
        path=str(target.absolute()),
        base=str(base.absolute()),
        bytes=found.bytes,
        base_bytes=found.base_bytes,
        wire_bytes=changes.wire_bytes,
        framing_bytes=changes.framing,
        ratio=found.ratio,
        tensors=len(tensors),
        elements=sum(row.elements for row in tensors),
        compared=sum(row.compared for row in tensors),
        changed=sum(row.changed for row in tensors),
        removed_files=list(found.removed),
    )
    out.detail(f"compared in {counter.seconds:.1f} s, {count(len(tensors), 'tensor')}")

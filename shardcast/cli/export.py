"""``shardcast export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.options import DESTINATION, RunArgument, StoreOption, open_store
from shardcast.cli.output import Output
from shardcast.cli.progress import Counter, meters
from shardcast.cli.units import count, size

if TYPE_CHECKING:
    from shardcast.export import ExportPlan


def export(
    out: Output,
    run: RunArgument,
    directory: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to write v1/RUN/head and v1/RUN/blobs/.",
            rich_help_panel=DESTINATION,
        ),
    ],
    store: StoreOption = None,
) -> None:
    """Write a run as plain files, for a static web server or a bucket.

    What is there already is kept, what the head no longer reaches is removed. Blobs come before
    the head, so sync them in that order too.
    """
    from shardcast.export import export_run

    opened = open_store(store)
    with meters(out) as shown:
        counter = Counter(shown, f"export {run}", run=run)

        def begin(plan: ExportPlan) -> None:
            counter.begin(plan.copy_bytes)

        done = export_run(opened.run(run), directory, begin=begin, progress=counter.add)
        counter.finish()
    newest = done.head.newest()
    out.version_event(
        "exported",
        run=run,
        version=done.head.version,
        step=None if newest is None else newest.step,
        manifest=None if newest is None else newest.manifest,
        path=str(done.directory.absolute()),
        blobs_written=done.written,
        bytes_written=done.written_bytes,
        blobs_kept=done.kept,
        blobs_removed=done.removed,
    )
    out.result(
        f"exported {run} ({count(len(done.head.versions), 'version')}) to {done.directory}: "
        f"{count(done.written, 'blob')} written ({size(done.written_bytes)}), "
        f"{done.kept} kept, {done.removed} removed"
    )
    out.notice(f"next: serve {directory} with any web server, then pull with --from its URL")

"""``shardcast gc``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.options import StoreOption, open_store
from shardcast.cli.output import Output
from shardcast.cli.units import count, size

if TYPE_CHECKING:
    from shardcast.store.retention import Collected
    from shardcast.store.run import RunStore


def gc(
    out: Output,
    store: StoreOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Remove from a store what no head reaches: old versions, documents, leftovers of crashes.

    A version that someone reads stays, and so does what is being uploaded. A run that is being
    published into this store is refused.
    """
    opened = open_store(store)
    freed = 0
    for name in opened.runs():
        run = opened.run(name)
        collected = _collect(run, dry_run=dry_run)
        if collected is None:
            out.notice(f"{name}: no head, left alone")
            continue
        freed += collected.bytes
        _show(out, name, collected, dry_run=dry_run)
    would = "would free" if dry_run else "freed"
    out.event("collected", path=str(opened.root.absolute()), bytes=freed, dry_run=dry_run)
    out.result(f"{would} {size(freed)} in {opened.root}")


def _collect(run: RunStore, *, dry_run: bool) -> Collected | None:
    from shardcast.store.retention import collect, unreachable_versions

    if run.read_head() is None:
        return None
    with run.lock("publish", what=f"publishing to run {run.run!r}"):
        return collect(run, unreachable_versions(run), dry_run=dry_run)


def _show(out: Output, name: str, collected: Collected, *, dry_run: bool) -> None:
    out.event(
        "evicted",
        run=name,
        versions=list(collected.versions),
        busy=list(collected.busy),
        blobs=collected.blobs,
        bytes=collected.bytes,
        uploading=collected.uploading,
        dry_run=dry_run,
    )
    numbers = ", ".join(map(str, collected.versions)) or "none"
    text = f"{name}: versions {numbers}; {count(collected.blobs, 'document')}"
    if collected.busy:
        text += f"; kept, because someone reads them: {', '.join(map(str, collected.busy))}"
    if collected.uploading:
        text += "; documents were left alone, because some are being uploaded: run gc again later"
    out.result(f"{text}; {size(collected.bytes)}")

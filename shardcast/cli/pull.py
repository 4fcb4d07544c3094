"""``shardcast pull``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardcast.cli.guard import EXIT_TERMINATED
from shardcast.cli.options import (
    DurabilityChoice,
    FirstUseOption,
    FromOption,
    PubkeyOption,
    RunArgument,
    load_pubkeys,
)
from shardcast.cli.output import Output
from shardcast.cli.progress import meters
from shardcast.cli.pull_options import (
    AcceptExpiredOption,
    DeadlineOption,
    DurabilityOption,
    KeepOption,
    OutOption,
    require_out,
)
from shardcast.cli.running import TerminatedError, run_until_terminated
from shardcast.cli.units import parse_time
from shardcast.cli.worker_view import WorkerView
from shardcast.errors import UsageError


def pull(
    out: Output,
    run: RunArgument,
    source: FromOption,
    directory: OutOption,
    version: Annotated[
        int | None,
        typer.Option(
            "--version",
            metavar="N",
            min=1,
            help="This version. Default: the newest.",
            show_default=False,
        ),
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(
            "--manifest",
            metavar="DIGEST",
            help="The version with this manifest digest, whatever the head says.",
            show_default=False,
        ),
    ] = None,
    pubkey: PubkeyOption = None,
    trust_on_first_use: FirstUseOption = False,
    accept_expired: AcceptExpiredOption = False,
    deadline: DeadlineOption = None,
    keep: KeepOption = 2,
    durability: DurabilityOption = DurabilityChoice.SYNC,
) -> None:
    """Get a version of a run, once: fetched, verified, committed.

    What is on this disk already is not fetched again; an interrupted pull goes on where it was.
    """
    from shardcast.store.stored import Durability
    from shardcast.worker import Worker

    if version is not None and manifest is not None:
        raise UsageError("give either --version or --manifest, not both")
    require_out(directory)
    with meters(out) as shown:
        view = WorkerView(out, shown)
        worker = Worker(
            directory,
            run,
            source,
            keys=load_pubkeys(pubkey),
            first_use=trust_on_first_use,
            accept_expired=accept_expired,
            durability=Durability(durability.value),
            keep=keep,
            observer=view,
            deadline_s=None if deadline is None else parse_time(deadline, "--deadline"),
        )
        try:
            update = run_until_terminated(worker.apull(version=version, manifest=manifest))
        except TerminatedError:
            out.warning("terminated; what was verified is kept for the next pull")
            sys.exit(EXIT_TERMINATED)
    if update.version in view.committed:
        return
    out.version_event(
        "committed",
        run=run,
        version=update.version,
        step=update.step,
        manifest=update.manifest,
        path=str(update.path),
        bytes_fetched=update.bytes_fetched,
    )
    step = "" if update.step is None else f" (step {update.step})"
    out.result(f"{run} version {update.version}{step} was here already: {update.path}")

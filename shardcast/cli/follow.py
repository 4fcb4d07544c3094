"""``shardcast follow``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.options import (
    DISK,
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
    DurabilityOption,
    KeepOption,
    OnUpdateOption,
    OutOption,
    require_out,
)
from shardcast.cli.running import TerminatedError, run_until_terminated
from shardcast.cli.worker_view import WorkerView

if TYPE_CHECKING:
    from shardcast.worker import Worker


def follow(
    out: Output,
    run: RunArgument,
    source: FromOption,
    directory: OutOption,
    pubkey: PubkeyOption = None,
    trust_on_first_use: FirstUseOption = False,
    accept_expired: AcceptExpiredOption = False,
    keep: KeepOption = 2,
    durability: DurabilityOption = DurabilityChoice.SYNC,
    on_update: OnUpdateOption = None,
    recycle: Annotated[
        bool,
        typer.Option(
            "--recycle/--no-recycle",
            help=(
                "Overwrite files of evicted versions that nothing has open or mapped. --no-recycle "
                "where another program sends them with sendfile."
            ),
            rich_help_panel=DISK,
        ),
    ] = True,
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="HOST:PORT",
            help="Serve committed versions to neighbours from here.",
            show_default=False,
            rich_help_panel="Then",
        ),
    ] = None,
) -> None:
    """Keep a directory at the newest version of a run, until it is stopped.

    The newest wins: a version that is overtaken while it is fetched is dropped for it.
    """
    from shardcast.hooks import UpdateHook
    from shardcast.store.stored import Durability
    from shardcast.worker import Worker

    require_out(directory)
    with meters(out) as shown:
        worker = Worker(
            directory,
            run,
            source,
            keys=load_pubkeys(pubkey),
            first_use=trust_on_first_use,
            accept_expired=accept_expired,
            durability=Durability(durability.value),
            keep=keep,
            on_update=None if on_update is None else UpdateHook(on_update),
            recycle=recycle,
            observer=WorkerView(out, shown),
        )
        try:
            run_until_terminated(_follow(out, worker, directory, run, serve))
        except TerminatedError:
            out.notice("terminated")


async def _follow(
    out: Output, worker: Worker, directory: Path, run: str, listen: str | None
) -> None:
    async def updates() -> None:
        async for _update in worker.follow():
            pass  # the view tells

    if listen is None:
        await updates()
        return
    import asyncio

    from shardcast.cli.logs import configure_logging
    from shardcast.cli.serving import serve_out

    configure_logging(out)

    def ready(url: str) -> None:
        out.emit("listening", url=url)

    async with asyncio.TaskGroup() as group:
        group.create_task(updates())
        group.create_task(
            serve_out(
                directory, run, listen, ready, depth=lambda: worker.depth, repair=worker.repair
            )
        )

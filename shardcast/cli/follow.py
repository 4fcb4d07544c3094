"""``shardcast follow``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardcast.cli.engines import (
    ActivateChoice,
    ActivateOption,
    CheckCanaryOption,
    EngineOption,
    EngineOptions,
    EngineTokenFileOption,
    EngineUrlOption,
    LeaseOption,
    LoraOption,
    MaxLagOption,
    MaxSwappingOption,
    MetricsOption,
    Minding,
    Relay,
    RequestsChoice,
    RequestsOption,
    make_agent,
    readable_keys,
)
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
from shardcast.errors import UsageError

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
    engine: EngineOption = None,
    engine_url: EngineUrlOption = None,
    engine_token_file: EngineTokenFileOption = None,
    activate: ActivateOption = ActivateChoice.AUTO,
    max_swapping: MaxSwappingOption = 1,
    max_lag: MaxLagOption = None,
    requests: RequestsOption = RequestsChoice.RECOMPUTE,
    lease: LeaseOption = "60s",
    lora: LoraOption = None,
    check_canary: CheckCanaryOption = False,
    metrics: MetricsOption = None,
) -> None:
    """Keep a directory at the newest version of a run, until it is stopped.

    The newest wins: a version that is overtaken while it is fetched is dropped for it. With
    --engine running inference engines are moved to each version, too (docs/ENGINES.md).
    """
    from shardcast.hooks import UpdateHook
    from shardcast.store.stored import Durability
    from shardcast.worker import Worker

    require_out(directory)
    if engine is None and (engine_url or engine_token_file or lora or check_canary or metrics):
        raise UsageError("options about engines go with --engine vllm or --engine sglang")
    with meters(out) as shown:
        view = Relay(WorkerView(out, shown))
        agent = None
        if engine is not None:
            options = EngineOptions(
                kind=engine,
                urls=tuple(engine_url or ()),
                token_file=engine_token_file,
                activate=activate,
                max_swapping=max_swapping,
                max_lag=max_lag,
                requests=requests,
                lease=lease,
                lora=lora,
                check_canary=check_canary,
            )
            agent = make_agent(options, directory, run, view)
            for url in readable_keys(options):
                out.warning(f"{url} is sent its key in clear: use https, or an engine on this host")
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
            observer=view,
        )
        try:
            minding = None if agent is None else Minding(out, agent, view, metrics)
            run_until_terminated(_follow(out, worker, directory, run, serve, minding))
        except TerminatedError:
            out.notice("terminated")


async def _follow(
    out: Output,
    worker: Worker,
    directory: Path,
    run: str,
    listen: str | None,
    minding: Minding | None,
) -> None:
    async def updates() -> None:
        async for update in worker.follow(current=minding is not None):  # the view tells
            if minding is not None:
                minding.update(update)

    async def work() -> None:
        if listen is None:
            await updates()
        else:
            await _serve(out, worker, directory, run, listen, updates)

    if minding is None:
        await work()
    else:
        await minding.run(worker, work)


async def _serve(
    out: Output,
    worker: Worker,
    directory: Path,
    run: str,
    listen: str,
    updates: Callable[[], Coroutine[Any, Any, None]],
) -> None:
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

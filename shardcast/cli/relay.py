"""``shardcast relay``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Final

import typer

from shardcast.cli.options import (
    DISK,
    SOURCES,
    FirstUseOption,
    PubkeyOption,
    StoreOption,
    load_pubkeys,
)
from shardcast.cli.output import Output
from shardcast.cli.units import parse_size, parse_time
from shardcast.cli.xdg import default_store

SERVING: Final = "Serving"
CLIENTS: Final = "Clients"
_BURST_S: Final = 16


class PrefetchChoice(enum.StrEnum):
    """What a relay with parents fetches before anyone asks."""

    ALL = "all"
    DELTAS = "deltas"
    DEMAND = "demand"


def relay(
    out: Output,
    store: StoreOption = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Where to listen; port 0 picks a free one, [::] is every address.",
            rich_help_panel=SERVING,
        ),
    ] = "127.0.0.1:8470",
    limit_rate: Annotated[
        str | None,
        typer.Option(
            "--limit-rate",
            metavar="BYTES",
            help="Most bytes a second to send in all, such as 100MB; clients share it.",
            show_default=False,
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    limit_rate_client: Annotated[
        str | None,
        typer.Option(
            "--limit-rate-client",
            metavar="BYTES",
            help="Most bytes a second to send to one client.",
            show_default=False,
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    limit_requests_client: Annotated[
        float,
        typer.Option(
            "--limit-requests-client",
            metavar="N",
            help="Most requests a second of one client in the long run, and 16 times that at once.",
            rich_help_panel=CLIENTS,
        ),
    ] = 500.0,
    max_connections: Annotated[
        int,
        typer.Option(
            "--max-connections",
            metavar="N",
            help="Most connections in all. Fewer where file descriptors are few.",
            rich_help_panel=CLIENTS,
        ),
    ] = 4096,
    max_connections_client: Annotated[
        int,
        typer.Option(
            "--max-connections-client",
            metavar="N",
            help="Most connections, requests and waiting requests of one client.",
            rich_help_panel=CLIENTS,
        ),
    ] = 2048,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-proxy",
            metavar="ADDRESS",
            help="A proxy (or network) whose X-Forwarded-For names the client. May be repeated.",
            show_default=False,
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Take the place of the relay that serves this store, without a gap, whatever role "
            "the store had (origin or relay); or just start.",
            rich_help_panel=SERVING,
        ),
    ] = False,
    publish_token_file: Annotated[
        Path | None,
        typer.Option(
            "--publish-token-file",
            metavar="FILE",
            help="Accept publications that bring this token (first line). For origins.",
            show_default=False,
            rich_help_panel=SERVING,
        ),
    ] = None,
    parent: Annotated[
        list[str] | None,
        typer.Option(
            "--parent",
            metavar="URL",
            help="A relay or origin to fetch from. May be repeated; none: an origin.",
            show_default=False,
            rich_help_panel=SOURCES,
        ),
    ] = None,
    sibling: Annotated[
        list[str] | None,
        typer.Option(
            "--sibling",
            metavar="URL",
            help="A relay of the same level, to share the parents' load. May be repeated.",
            show_default=False,
            rich_help_panel=SOURCES,
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Relay only this run. May be repeated; none: all that the parents have.",
            show_default=False,
            rich_help_panel=SOURCES,
        ),
    ] = None,
    prefetch: Annotated[
        PrefetchChoice,
        typer.Option(
            "--prefetch",
            help="What to fetch before anyone asks.",
            rich_help_panel=SOURCES,
        ),
    ] = PrefetchChoice.ALL,
    materialize: Annotated[
        bool,
        typer.Option(
            "--materialize",
            help="Rebuild full versions from deltas and what is here, instead of fetching them.",
            rich_help_panel=SOURCES,
        ),
    ] = False,
    pubkey: PubkeyOption = None,
    trust_on_first_use: FirstUseOption = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="K",
            min=1,
            help="Keep the newest K versions. Default: as many as the head lists.",
            show_default=False,
            rich_help_panel=DISK,
        ),
    ] = None,
    keep_for: Annotated[
        str | None,
        typer.Option(
            "--keep-for",
            metavar="TIME",
            help="Keep older versions this long, such as 2h or 7d.",
            show_default=False,
            rich_help_panel=DISK,
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(
            "--quota",
            metavar="BYTES",
            help="Most bytes of versions on disk, such as 200GB. The newest always stays.",
            show_default=False,
            rich_help_panel=DISK,
        ),
    ] = None,
    scrub_rate: Annotated[
        str,
        typer.Option(
            "--scrub-rate",
            metavar="BYTES",
            help="Bytes a second to read again from the disk in search of flipped bits; 0: none.",
            rich_help_panel=DISK,
        ),
    ] = "16MB",
) -> None:
    """Serve runs over HTTP: an origin without --parent, else a relay below its parents.

    Prints one JSON line when it listens. SIGTERM lets running downloads finish, a second one ends
    it at once; SIGUSR2 replaces it by the same command, as installed now, without a gap.
    """
    import asyncio
    import os

    from relay.app import serve
    from relay.config import Limits, Prefetch, RelayConfig
    from shardcast.cli.logs import configure_logging

    configure_logging(out)

    config = RelayConfig(
        store=store if store is not None else default_store(),
        listen=listen,
        parents=tuple(parent or ()),
        siblings=tuple(sibling or ()),
        runs=tuple(run or ()),
        pubkeys=load_pubkeys(pubkey),
        first_use=trust_on_first_use,
        take_over=take_over,
        publish_token_file=publish_token_file,
        keep=keep,
        keep_for_s=None if keep_for is None else parse_time(keep_for, "--keep-for"),
        quota_bytes=_size(quota, "--quota"),
        scrub_rate_bytes_per_s=parse_size(scrub_rate, "--scrub-rate"),
        limit_rate_bytes_per_s=_size(limit_rate, "--limit-rate"),
        limit_rate_client_bytes_per_s=_size(limit_rate_client, "--limit-rate-client"),
        trusted_proxies=tuple(trust_proxy or ()),
        limits=Limits(
            max_connections=max_connections,
            max_connections_per_client=max_connections_client,
            max_requests=max_connections,
            max_requests_per_client=max_connections_client,
            max_waits=max_connections,
            max_waits_per_client=max_connections_client,
            requests_per_s_per_client=limit_requests_client,
            request_burst_per_client=max(1, round(_BURST_S * limit_requests_client)),
        ),
        prefetch=Prefetch(prefetch.value),
        materialize=materialize,
    )
    asyncio.run(serve(config, ready=lambda url: out.emit("listening", url=url, pid=os.getpid())))


def _size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)

"""The ``shardcast`` command: which commands there are. Everything heavy is imported by them."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from shardcast.cli import (
    demo,
    export,
    follow,
    gc,
    hold,
    inspect,
    keygen,
    publish,
    pull,
    relay,
    status,
    verify,
    withdraw,
)
from shardcast.cli.command import register

FIRST: Final = "Try it"
PUBLISHING: Final = "Publishing"
SERVING: Final = "Serving"
PULLING: Final = "Pulling"
LOOKING: Final = "Looking and tidying"

app = typer.Typer(
    name="shardcast",
    help="A CDN for model weights: publish once, relay through a tree, pull verified shards.",
    epilog=(
        "Every option may also come from the environment (SHARDCAST_STORE, or for one command "
        "SHARDCAST_RELAY_STORE) or from a TOML file (--config). Sizes are written 500MB, 200GB or "
        "16GiB, times 90s, 30m, 2h or 7d."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from shardcast import __version__

        print(f"shardcast {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """A CDN for model weights: publish once, relay through a tree, pull verified shards."""


register(app, "demo", demo.demo, panel=FIRST)
register(app, "keygen", keygen.keygen, panel=PUBLISHING)
register(app, "publish", publish.publish, panel=PUBLISHING)
register(app, "withdraw", withdraw.withdraw, panel=PUBLISHING)
register(app, "hold", hold.hold, panel=PUBLISHING)
register(app, "relay", relay.relay, panel=SERVING)
register(app, "export", export.export, panel=SERVING)
register(app, "pull", pull.pull, panel=PULLING)
register(app, "follow", follow.follow, panel=PULLING)
register(app, "status", status.status, panel=LOOKING)
register(app, "inspect", inspect.inspect, panel=LOOKING)
register(app, "verify", verify.verify, panel=LOOKING)
register(app, "gc", gc.gc, panel=LOOKING)


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="shardcast")


if __name__ == "__main__":
    main()

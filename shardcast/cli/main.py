"""The ``shardcast`` command: which commands there are. Only the one that is asked for is imported."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from shardcast.cli.commands import CommandGroup

FIRST: Final = "Try it"
PUBLISHING: Final = "Publishing"
SERVING: Final = "Serving"
PULLING: Final = "Pulling"
LOOKING: Final = "Looking and tidying"

COMMANDS: Final = {
    "demo": FIRST,
    "keygen": PUBLISHING,
    "publish": PUBLISHING,
    "withdraw": PUBLISHING,
    "hold": PUBLISHING,
    "relay": SERVING,
    "export": SERVING,
    "pull": PULLING,
    "follow": PULLING,
    "status": LOOKING,
    "inspect": LOOKING,
    "diff": LOOKING,
    "verify": LOOKING,
    "gc": LOOKING,
}
"""The panel of the help by command; ``shardcast.cli.{name}.{name}`` is the command's function."""


class Commands(CommandGroup):
    """The commands of ``shardcast``."""

    panels = COMMANDS


app = typer.Typer(
    name="shardcast",
    help="A CDN for model weights: publish once, relay through a tree, pull verified shards.",
    epilog=(
        "Every option may also come from the environment (SHARDCAST_STORE, or for one command "
        "SHARDCAST_RELAY_STORE) or from a TOML file (--config). Sizes are written 500MB, 200GB or "
        "16GiB, times 90s, 30m, 2h or 7d."
    ),
    cls=Commands,
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


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="shardcast")


if __name__ == "__main__":
    main()

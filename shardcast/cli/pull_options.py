"""What ``pull`` and ``follow`` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcast.cli.options import DISK, TRUST, DurabilityChoice
from shardcast.errors import UsageError

OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The worker's directory, on a local disk. DIR/current names the newest version.",
        show_default=False,
        rich_help_panel=DISK,
    ),
]
KeepOption = Annotated[
    int,
    typer.Option(
        "--keep",
        metavar="K",
        min=1,
        help="Keep the newest K versions. The disk must hold K + 1.",
        rich_help_panel=DISK,
    ),
]
DurabilityOption = Annotated[
    DurabilityChoice,
    typer.Option(
        "--durability",
        help="sync: on stable storage before it is committed. none: for RAM and scratch disks.",
        rich_help_panel=DISK,
    ),
]
AcceptExpiredOption = Annotated[
    bool,
    typer.Option(
        "--accept-expired",
        help="Take a version although its head has expired.",
        rich_help_panel=TRUST,
    ),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option(
        "--deadline",
        metavar="TIME",
        help="Give up after this long, such as 90s or 10m. What came is kept for the next pull.",
        show_default=False,
    ),
]
OnUpdateOption = Annotated[
    str | None,
    typer.Option(
        "--on-update",
        metavar="CMD",
        help=(
            "Run this shell command after each commit, with SHARDCAST_VERSION, SHARDCAST_STEP and "
            "SHARDCAST_PATH in its environment."
        ),
        show_default=False,
        rich_help_panel="Then",
    ),
]


def require_out(directory: Path) -> None:
    """Check that a worker's directory is not a publisher's or a relay's: it removes old versions.

    Raises:
        UsageError: If it is a store, or a run in one.
    """
    from shardcast.store.store import Store, is_run_directory

    if not is_run_directory(directory) and Store(directory).runs():
        raise UsageError(f"{directory} is a store: choose another --out", source=str(directory))
    state = directory / "state"
    published = (state / "publish.lock").exists() and not (state / "run.lock").exists()
    if published or (is_run_directory(directory) and (directory.parent / ".node-id").exists()):
        raise UsageError(
            f"{directory} is a run in a store: choose another --out", source=str(directory)
        )

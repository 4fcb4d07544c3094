"""``shardcast withdraw``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.amend import amend_head
from shardcast.cli.options import KeyOption, RunArgument, StoreOption, TokenFileOption, ToOption
from shardcast.cli.output import Output

if TYPE_CHECKING:
    from shardcast.protocol.head import Head
    from shardcast.protocol.succession import Issue


def withdraw(
    out: Output,
    run: RunArgument,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", min=1, help="The version nobody should run.")
    ],
    store: StoreOption = None,
    to: ToOption = None,
    token_file: TokenFileOption = None,
    key: KeyOption = None,
) -> None:
    """Withdraw a version: it is pulled no more, and followers on it move to the newest left."""
    from shardcast.protocol.succession import with_withdrawn

    def change(head: Head, issue: Issue) -> Head:
        return with_withdrawn(head, issue, version)

    head = amend_head(out, run, change, store=store, to=to, token_file=token_file, key=key)
    out.event("withdrawn", run=run, version=version, newest=head.version)
    if head.version is None:
        out.result(f"withdrew {run} version {version}; no version is left to move to")
    else:
        out.result(f"withdrew {run} version {version}; the newest is now {head.version}")

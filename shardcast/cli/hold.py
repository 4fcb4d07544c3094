"""``shardcast hold``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.amend import amend_head
from shardcast.cli.options import KeyOption, RunArgument, StoreOption, TokenFileOption, ToOption
from shardcast.cli.output import Output

if TYPE_CHECKING:
    from shardcast.protocol.head import Head
    from shardcast.protocol.succession import Issue


def hold(
    out: Output,
    run: RunArgument,
    off: Annotated[bool, typer.Option("--off", help="Let activations go on.")] = False,
    store: StoreOption = None,
    to: ToOption = None,
    token_file: TokenFileOption = None,
    key: KeyOption = None,
) -> None:
    """Pause activations of a run everywhere; downloads go on."""
    from shardcast.protocol.succession import with_hold

    def change(head: Head, issue: Issue) -> Head:
        return with_hold(head, issue, hold=not off)

    head = amend_head(out, run, change, store=store, to=to, token_file=token_file, key=key)
    out.event("hold", run=run, version=head.version, hold=head.hold)
    state = "held: followers fetch, but do not activate" if head.hold else "no longer held"
    out.result(f"{run} is {state}")

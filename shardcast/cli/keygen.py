"""``shardcast keygen``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardcast.cli.output import Output


def keygen(
    out: Output,
    directory: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to write the two files.")
    ] = Path(),
) -> None:
    """Make a publisher's key pair: shardcast.key (private) and shardcast.pub (public).

    Files that are there already are never overwritten.
    """
    from shardcast import keys
    from shardcast.protocol.envelope import encode_key, key_id

    private_path, public_path = keys.generate(directory)
    public = keys.load_public_key(public_path)
    out.event(
        "generated",
        path=str(private_path),
        public_path=str(public_path),
        public_key=encode_key(public),
        keyid=key_id(public),
    )
    out.result(f"private key  {private_path}  (mode 600; who has it can publish: keep it secret)")
    out.result(f"public key   {public_path}  (give it to relays and workers: --pubkey)")
    out.result(f"key id       {key_id(public)}")

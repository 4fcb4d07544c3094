"""What ``withdraw`` and ``hold`` share: changing a run's head, here or at a remote origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardcast.cli.options import load_signers, load_token, open_store
from shardcast.cli.output import Output, unix_ms
from shardcast.cli.xdg import remote_memory
from shardcast.errors import UsageError

if TYPE_CHECKING:
    from shardcast.protocol.head import Head
    from shardcast.protocol.succession import Issue


def amend_head(
    out: Output,
    run: str,
    change: Callable[[Head, Issue], Head],
    *,
    store: Path | None,
    to: str | None,
    token_file: Path | None,
    key: Path | None,
) -> Head:
    """Replace the run's head by a changed and newly signed one; return it.

    Raises:
        UsageError: If options contradict each other, or the key cannot be loaded.
        NotFoundError: If there is no such run.
        TrustError: If the run belongs to another key.
        NetworkError: If the remote origin cannot be reached, or refuses.
    """
    from shardcast.publishing import SilentObserver

    class Told(SilentObserver):
        def waiting(self, message: str) -> None:
            out.notice(message)

    if to is not None and store is not None:
        raise UsageError("give either --store or --to, not both")
    if to is None:
        from shardcast.announcing import amend

        opened = open_store(store).run(run)
        return amend(opened, load_signers(key, unix_ms()), unix_ms, change, Told())

    from shardcast.origin_client import OriginClient
    from shardcast.protocol.documents import check_run
    from shardcast.store.run import RunStore
    from shardcast.uploader import amend_remote

    memory = RunStore(remote_memory(to, check_run(run)), run)
    client = OriginClient(to, run, load_token(token_file))
    try:
        signers = load_signers(key, unix_ms())
        return amend_remote(memory, client, signers, unix_ms, change, Told())
    finally:
        client.close()

"""Bytes pass a relay before the blob is whole.

A scripted parent serves a real version and stops in the middle of one shard. Below it stand a
relay and, below that, another: a reader at the second (the third tier) must hold the bytes from
before the pause while the parent is still paused, and a verified version once it goes on.
"""

from __future__ import annotations

import contextlib
import time
from urllib.parse import urlsplit

from loadtest.checkpoints import write_checkpoint
from loadtest.documents import blob_url, head_of, reach, wait_head
from loadtest.http_wire import WireError, read_head, request
from loadtest.rawclient import connect, target_of
from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.scripted_parent import ScriptedParent
from loadtest.topology import Tree, last

# A relay holds back at most 64 KiB (the tail) and what it buffers per hop; 90 % of 2 MiB
# leaves 200 KiB for that.
SHARE_BEFORE_PAUSE = 0.9

_SILENCE_S = 5.0


def read_until(url: str, wanted: int) -> tuple[bytes, float]:
    """Read a blob until `wanted` bytes of it are here; return them and the milliseconds it took.

    Gives up, returning what came, when nothing arrives for five seconds.
    """
    start = time.monotonic()
    data = b""
    with contextlib.suppress(TimeoutError, WireError), connect(url, timeout=_SILENCE_S) as sock:
        sock.sendall(request(target_of(url), urlsplit(url).netloc))
        head, data = read_head(sock)
        if head.status != 200:
            raise WireError(head.first_line)
        while len(data) < wanted and (chunk := sock.recv(wanted)):
            data += chunk
    return data, (time.monotonic() - start) * 1000


def measure(settings: Settings) -> Report:
    """Show that bytes before a parent's pause reach the third tier during it."""
    checkpoint = settings.fresh("checkpoint")
    write_checkpoint(checkpoint, settings.bytes, weight_files=2)
    with Tree(settings.fresh("tree")) as tree:
        version = tree.publish(checkpoint).version
        exported = tree.export(settings.fresh("exported"))
        root = exported / "v1" / tree.run
        found = reach(
            head_of((root / "head").read_bytes()),
            lambda digest: (root / "blobs" / f"{digest}.bin").read_bytes(),
        )
        sizes = {d: (root / "blobs" / f"{d}.bin").stat().st_size for d in found.shards}
        victim = max(found.shards, key=lambda digest: sizes[digest])
        pause_at = sizes[victim] // 2
        with ScriptedParent(exported, tree.run, victim=victim, pause_at=pause_at) as parent:
            second = tree.relay("second", parents=[parent.url])
            third = tree.relay("third", parents=[second.url])
            wait_head(third.url, tree.run, version=version)
            wanted = int(pause_at * SHARE_BEFORE_PAUSE)
            early, took = read_until(blob_url(third.url, tree.run, victim), wanted)
            still_paused = parent.paused.is_set() and not parent.released.is_set()
            parent.released.set()
            out = settings.work / "pulled"
            pulled = tree.pull(out, sources=[third.url])
            committed = last(pulled, "committed")["version"] == version
            asked = parent.asked
        whole = (root / "blobs" / f"{victim}.bin").read_bytes()
    correct = still_paused and whole.startswith(early) and len(early) < len(whole) and committed
    return Report(
        checks=[
            Check("share_before_pause", len(early) / pause_at if correct else 0.0,
                  SHARE_BEFORE_PAUSE, "ratio", at_least=True),
            Check("upstream_reads_of_paused_blob", asked, 1, "requests"),
        ],
        samples={"early_bytes": [len(early)], "early_ms": [took]},
        conditions={"shard_bytes": sizes[victim], "pause_at": pause_at, "tiers": 3},
    )  # fmt: skip


if __name__ == "__main__":
    main(measure, name="cut_through", full=Size(256 * MB, 1), quick=Size(256 * MB, 1))

"""Remote publications that were not announced, as far as is known: their layouts (``state/pending.json``).

Publishing the same files again goes on with the same layout, so that what arrived counts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardcast.errors import MalformedError
from shardcast.protocol import succession
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import Head
from shardcast.protocol.layout import Layout, decode_layout, encode_layout
from shardcast.publishing import PublishObserver, PublishOptions, plan_layout
from shardcast.sources import Selection
from shardcast.store.files import atomic_write
from shardcast.store.run import RunStore


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A publication that was not announced: which files it was about, and its layout."""

    fingerprint: str
    layout: str


def layout_for(
    options: PublishOptions,
    memory: RunStore,
    selection: Selection,
    head: Head | None,
    previous: Layout | None,
    now_ms: int,
) -> Layout:
    """Return the layout of an unfinished publication of the same files, else a new one, remembered.

    The unfinished one may have been announced, and read, all the same: its answer was lost, or its head
    was lost with the origin's power. So other files never get its number.

    Args:
        options: What to publish.
        memory: What this machine remembers of the origin and run.
        selection: The files.
        head: The origin's head.
        previous: The layout of the newest version there.
        now_ms: Unix milliseconds.

    Raises:
        DiskError: If the system refuses.
    """
    state = memory.read_trust()
    seen = () if state is None else (*state.manifests, *state.layouts)
    number = succession.next_version(head, seen)
    left = _left(memory)
    if left is not None and left[1].version >= number:
        fingerprint, layout = left
        again = plan_layout(options, selection, memory.run, layout.version, previous, now_ms)
        if _fingerprint(again, options, selection) == fingerprint:
            return layout
        number = layout.version + 1
    layout = plan_layout(options, selection, memory.run, number, previous, now_ms)
    data = encode_layout(layout)
    digest = digest_of(data)
    memory.write_blob(digest, data)
    entry = Pending(fingerprint=_fingerprint(layout, options, selection), layout=digest)
    atomic_write(_path(memory), msgspec.json.encode(entry))
    return layout


def forget(memory: RunStore, watch: PublishObserver) -> None:
    """Forget what was announced; trouble there is said: what stays is of no other publication."""
    path = _path(memory)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        watch.noticed(f"announced, but {path} stays: {error.strerror or error}")


def _path(memory: RunStore) -> Path:
    return memory.root / "state" / "pending.json"


def _left(memory: RunStore) -> tuple[str, Layout] | None:
    """Return fingerprint and layout of what is unfinished."""
    try:
        pending = msgspec.json.decode(_path(memory).read_bytes(), type=Pending)
        return pending.fingerprint, decode_layout(memory.read_blob(pending.layout) or b"")
    except (OSError, msgspec.MsgspecError, MalformedError):
        return None


def _fingerprint(layout: Layout, options: PublishOptions, selection: Selection) -> str:
    same_moment = msgspec.structs.replace(layout, created_at=0, lineage=options.lineage or "")
    stamps = [(str(f.location), f.stamp.mtime_ns, f.stamp.inode) for f in selection.files]
    return digest_of(msgspec.json.encode((same_moment, stamps)))

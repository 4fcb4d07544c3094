"""Publishes a checkpoint part by part, as a trainer that writes while it gathers weights would.

`python -m loadtest.streaming CKPT --run RUN --store DIR --key FILE`: the version is opened, its shards
are written and listed in four parts with pauses between them, then it is closed. The command line
has no such publisher, so this one stands on the store and the protocol themselves. Killed anywhere,
it leaves an open version that the next publication supersedes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from loadtest.processes import terminate_as_exit
from shardcast.announcing import announce, issue_for, last_head, publishing
from shardcast.keys import Ed25519Signer, load_signers
from shardcast.protocol import succession
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import Head, OpenRef
from shardcast.protocol.layout import Layout, decode_part, encode_layout, encode_part
from shardcast.protocol.limits import LIVE_EXPIRY_MS
from shardcast.protocol.manifest import Version, assemble_open, encode_manifest
from shardcast.publishing import PublishOptions, SilentObserver, plan_layout, reference
from shardcast.sources import Selection, select_files
from shardcast.store.retention import collect, unreachable_versions
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.store.stored import Durability, StoredVersion

_PARTS: Final = 4
_PAUSE_S: Final = 0.3
_KEEP: Final = 4


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Stream:
    """One open version; used with the run's publish lock held."""

    def __init__(
        self, run: RunStore, signers: Sequence[Ed25519Signer], head: Head | None, layout: Layout
    ) -> None:
        self.layout = layout
        self._run = run
        self._signers = signers
        self._head = head
        self._layout_digest = digest_of(encode_layout(layout))
        self._parts: list[str] = []
        run.write_blob(self._layout_digest, encode_layout(layout))
        self._stored: StoredVersion = run.stage(self._version())
        self._announce_open()

    def add(self, shards: range, selection: Selection) -> None:
        """Write some shards, then list them."""
        digests = []
        for shard in shards:
            extent = self.layout.extent(shard)
            with selection.files[extent.file].location.open("rb") as source:
                source.seek(extent.offset)
                data = source.read(extent.length)
            fd = self._stored.open_file(extent.file, writable=True)
            try:
                os.pwrite(fd, data, extent.offset)
            finally:
                os.close(fd)
            self._stored.record(shard, xxhash.xxh3_128_digest(data))
            digests.append(digest_of(data))
        part = encode_part(self._layout_digest, shards.start, digests)
        self._run.write_blob(digest_of(part), part)
        self._parts.append(digest_of(part))
        self._stored.update(self._version())
        self._run.save_state(self._stored.version)
        self._announce_open()

    def close(self) -> Version:
        """Commit the version and announce that it is complete."""
        data = encode_manifest(self._layout_digest, self._parts)
        self._run.write_blob(digest_of(data), data)
        version = Version(
            layout=self.layout,
            layout_digest=self._layout_digest,
            digests=self._stored.version.digests,
            manifest=digest_of(data),
            documents=(digest_of(data), self._layout_digest, *self._parts),
        )
        self._stored.update(version)
        self._run.save_state(version)
        self._run.commit(version.number, Durability.NONE)
        issue = issue_for(self._run.run, self._signers, now_ms(), LIVE_EXPIRY_MS)
        head = succession.with_version(self._head, issue, reference(version), keep=_KEEP)
        announce(self._run, head, self._signers, issue)
        return version

    def _ref(self) -> OpenRef:
        return OpenRef(
            version=self.layout.version,
            step=self.layout.step,
            layout=self._layout_digest,
            parts=list(self._parts),
            deltas=[],
        )

    def _version(self) -> Version:
        parts = [decode_part(self._run.read_blob(digest) or b"") for digest in self._parts]
        return assemble_open(self._ref(), self._run.run, self.layout, parts)

    def _announce_open(self) -> None:
        issue = issue_for(self._run.run, self._signers, now_ms(), LIVE_EXPIRY_MS)
        renewed = succession.renewed(self._head, issue)
        self._head = msgspec.structs.replace(renewed, open=self._ref())
        announce(self._run, self._head, self._signers, issue)


def stream(run: RunStore, checkpoint: Path, signers: Sequence[Ed25519Signer]) -> Version:
    """Publish a checkpoint part by part."""
    with publishing(run, SilentObserver()):
        head = last_head(run, signers, now_ms())
        state = run.read_trust()
        seen = () if state is None else (*state.manifests, *state.layouts)
        number = succession.next_version(head, seen)
        while number in {*run.committed(), *run.staged()}:
            if not run.evict(number):
                number += 1
        options = PublishOptions(source=checkpoint)
        selection = select_files(checkpoint)
        layout = plan_layout(options, selection, run.run, number, None, now_ms())
        open_version = Stream(run, signers, head, layout)
        count = layout.shard_count
        for part in range(_PARTS):
            time.sleep(_PAUSE_S)
            shards = range(count * part // _PARTS, count * (part + 1) // _PARTS)
            if shards:
                open_version.add(shards, selection)
        version = open_version.close()
        collect(run, unreachable_versions(run))
        return version


def main() -> None:
    """Publish from the command line; print the event that `shardcast publish` prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    options = parser.parse_args()
    with terminate_as_exit():
        run = Store(options.store).run(options.run, create=True)
        version = stream(run, options.checkpoint, load_signers(options.key, now_ms()))
    print(json.dumps({"event": "published", "version": version.number}), flush=True)


if __name__ == "__main__":
    main()

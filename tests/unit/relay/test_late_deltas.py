"""Deltas of a version that was announced before: known until a head lists them, and no longer."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from relay.runs import RelayRun
from relay.uploads import Uploads
from shardcast.protocol.delta import encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import DeltaRef
from shardcast.store.run import RunStore
from tests.unit.protocol.facts import A, B, C, head, ref
from tests.unit.protocol.test_delta import part_of


def listed(*parts: str) -> Any:
    delta = DeltaRef(base=B, base_version=1, parts=list(parts), bytes=9)
    return head(version=2, versions=[ref(2, A, deltas=[delta])])


async def test_a_late_delta_is_forgotten_once_it_is_announced(tmp_path: Path) -> None:
    run = SimpleNamespace(name="demo", store=RunStore(tmp_path, "demo"), head=None)
    uploads = Uploads(cast(RelayRun, run), 2, itertools.count().__next__)
    parts = [part_of(0, (1, 4)), part_of(1, (1, 5))]
    digests = [digest_of(encode_delta_part(part)) for part in parts]
    for digest, part in zip(digests, parts, strict=True):
        await uploads.register(digest, part)
    assert uploads.blob(C) is not None
    uploads.announced(listed(digests[0]))
    assert uploads.knows(digests[1])  # the other one is on its way
    uploads.announced(listed(*digests))
    assert (uploads.knows(digests[0]), uploads.blob(C)) == (False, None)
    await uploads.close()

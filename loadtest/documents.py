"""Reads a run from outside: from a head to every blob it reaches, with JSON and base64 only.

An independent reading of docs/PROTOCOL.md, so that tests and load tests do not trust the
product's own decoder. It checks nothing: whoever needs trust uses the product.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Fetch = Callable[[str], bytes]

_DIGEST_BYTES = 32
_TIMEOUT_S = 30.0
_PATIENCE_S = 60.0
_RETRY_S = 0.05


@dataclass(frozen=True)
class Reach:
    """What a head reaches.

    Attributes:
        documents: Digests of layouts, parts, manifests and delta parts.
        shards: Digests of the newest version's shards, in order, each once.
        deltas: Digests of its delta blobs.
    """

    documents: tuple[str, ...]
    shards: tuple[str, ...]
    deltas: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        """Iterate over every digest: documents, shards, deltas."""
        yield from (*self.documents, *self.shards, *self.deltas)


def head_of(envelope: bytes) -> dict[str, Any]:
    """Return the head inside a DSSE envelope."""
    payload: dict[str, Any] = json.loads(base64.b64decode(json.loads(envelope)["payload"]))
    return payload


def reach(head: dict[str, Any], fetch: Fetch) -> Reach:
    """Return the digests that the newest version of `head` reaches.

    Args:
        head: What `head_of` returned; it must have a version.
        fetch: Returns a document blob by its digest.
    """
    version = next(v for v in head["versions"] if v["version"] == head["version"])
    manifest = json.loads(fetch(version["manifest"]))
    documents = [version["manifest"], manifest["layout"], *manifest["parts"]]
    shards: list[str] = []
    for part in manifest["parts"]:
        packed = base64.b64decode(json.loads(fetch(part))["digests"])
        shards.extend(
            packed[at : at + _DIGEST_BYTES].hex() for at in range(0, len(packed), _DIGEST_BYTES)
        )
    deltas: list[str] = []
    for delta in version["deltas"]:
        documents.extend(delta["parts"])
        for part in delta["parts"]:
            deltas.extend(blob["digest"] for blob in json.loads(fetch(part))["blobs"])
    return Reach(_once(documents), _once(shards), _once(deltas))


def _once(digests: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(digests))


def head_url(base: str, run: str) -> str:
    """Return the URL of a run's head."""
    return f"{base.rstrip('/')}/v1/{run}/head"


def blob_url(base: str, run: str, digest: str) -> str:
    """Return the URL of a blob."""
    return f"{base.rstrip('/')}/v1/{run}/blobs/{digest}.bin"


def get(url: str) -> bytes:
    """Return the body of a successful GET."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read()
        return body


def wait_head(base: str, run: str, *, version: int | None = None) -> dict[str, Any]:
    """Return the head served at `base` once it has a version (or that version), by long poll.

    Raises:
        TimeoutError: It had none within a minute.
    """
    deadline = time.monotonic() + _PATIENCE_S
    after = 0
    while time.monotonic() < deadline:
        try:
            head = head_of(get(f"{head_url(base, run)}?after={after}&wait=5"))
        except urllib.error.HTTPError as error:
            error.close()  # 404 while the server does not know the run yet: nothing to wait on
            time.sleep(_RETRY_S)
            continue
        if head["version"] is not None and version in (None, head["version"]):
            return head
        after = int(head["sequence"])
    raise TimeoutError(f"{base} had no head with version {version} within {_PATIENCE_S:g} s")


def survey(base: str, run: str) -> Reach:
    """Return what the head served at `base` reaches, as soon as there is one."""
    head = wait_head(base, run)
    return reach(head, lambda digest: get(blob_url(base, run, digest)))

"""The head: the one small, signed, mutable document of a run."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import ClockError, MalformedError
from shardcast.protocol.documents import (
    Count,
    Digest,
    Document,
    Positive,
    RunName,
    Step,
    check_run,
    decode,
    encode,
)
from shardcast.protocol.envelope import decode_key
from shardcast.protocol.limits import (
    MAX_DELTAS,
    MAX_DOCUMENT_PARTS,
    MAX_FUTURE_MS,
    MAX_HEAD_BYTES,
    MAX_KEYS,
    MAX_VERSIONS,
    MAX_WITHDRAWN,
)

HEAD_FORMAT: Final = "shardcast.head/1"

Parts = Annotated[list[Digest], msgspec.Meta(max_length=MAX_DOCUMENT_PARTS)]


class DeltaRef(Document, frozen=True, kw_only=True):
    """A way to a version from ``base`` (a manifest digest; None: a compressed full copy).

    ``bytes`` is what somebody fetches who holds all of the base: delta blobs, delta parts, and the
    shards that no frame rebuilds and the base has not.
    """

    base: Digest | None
    base_version: Positive | None
    parts: Parts
    bytes: Count


class OpenDeltaRef(Document, frozen=True, kw_only=True):
    """A delta of an open version: its parts so far; the size is not known yet."""

    base: Digest | None
    base_version: Positive | None
    parts: Parts


class VersionRef(Document, frozen=True, kw_only=True):
    """A complete version: ``manifest`` is its identity, ``bytes`` the size of its files."""

    version: Positive
    step: Step
    manifest: Digest
    bytes: Count
    deltas: Annotated[list[DeltaRef], msgspec.Meta(max_length=MAX_DELTAS)]


class OpenRef(Document, frozen=True, kw_only=True):
    """The version that is being published: parts are added, in any order, until it closes."""

    version: Positive
    step: Step
    layout: Digest
    parts: Parts
    deltas: Annotated[list[OpenDeltaRef], msgspec.Meta(max_length=MAX_DELTAS)]


class Head(Document, frozen=True, kw_only=True):
    """Which versions of a run exist. Times are Unix milliseconds."""

    format: Literal["shardcast.head/1"] = HEAD_FORMAT
    run: RunName
    sequence: Positive
    issued_at: Count
    expires_at: Count
    keys: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    version: Positive | None
    versions: Annotated[list[VersionRef], msgspec.Meta(max_length=MAX_VERSIONS)]
    open: OpenRef | None
    withdrawn: Annotated[list[Positive], msgspec.Meta(max_length=MAX_WITHDRAWN)]
    hold: bool

    def check(self) -> None:
        """Check what ties the members together.

        Raises:
            MalformedError: Naming what does not fit.
        """
        check_run(self.run)
        self.raw_keys()
        if self.expires_at < self.issued_at:
            raise MalformedError("expires_at is before issued_at")
        numbers = [ref.version for ref in self.versions]
        if any(newer <= older for newer, older in pairwise(numbers)):
            raise MalformedError("versions are not newest first")
        if len({ref.manifest for ref in self.versions}) != len(numbers):
            raise MalformedError("two versions have one manifest")
        if self.version is not None and self.version not in numbers:
            raise MalformedError(f"version {self.version} is not among the versions")
        if self.version is not None and self.version in self.withdrawn:
            raise MalformedError(f"version {self.version} is withdrawn")
        if self.open is not None and numbers and self.open.version <= numbers[0]:
            raise MalformedError(f"open version {self.open.version} is not above {numbers[0]}")
        manifests = {ref.version: ref.manifest for ref in self.versions}
        for ref in self.versions:
            _check_bases(ref.version, ref.deltas, manifests)
        if self.open is not None:
            _check_bases(self.open.version, self.open.deltas, manifests)

    def raw_keys(self) -> frozenset[bytes]:
        """Return the keys that may sign heads, as raw 32-byte public keys.

        Raises:
            MalformedError: If one is not a usable key in base64, or occurs twice.
        """
        keys = [decode_key(key) for key in self.keys]
        if len(set(keys)) != len(keys):
            raise MalformedError("a key is listed twice")
        return frozenset(keys)

    def ref(self, version: int) -> VersionRef | None:
        """Return the entry of a retained version, or None."""
        return next((ref for ref in self.versions if ref.version == version), None)

    def newest(self) -> VersionRef | None:
        """Return the entry that ``version`` names, or None before the first version."""
        return None if self.version is None else self.ref(self.version)


def _check_bases(
    version: int, deltas: list[DeltaRef] | list[OpenDeltaRef], manifests: dict[int, str]
) -> None:
    for delta in deltas:
        if (delta.base is None) != (delta.base_version is None):
            raise MalformedError(f"delta of version {version}: base and base_version disagree")
        if delta.base_version is not None and delta.base_version >= version:
            raise MalformedError(f"delta of version {version} has base {delta.base_version}")
        if delta.base_version in manifests and manifests[delta.base_version] != delta.base:
            raise MalformedError(
                f"delta of version {version}: base {delta.base} is not version "
                f"{delta.base_version}, which is {manifests[delta.base_version]}"
            )
    bases = [delta.base for delta in deltas]
    if len(set(bases)) != len(bases):
        raise MalformedError(f"version {version} has two deltas of one base")


def encode_head(head: Head) -> bytes:
    """Return the payload bytes of a head.

    Raises:
        MalformedError: If readers would refuse it.
    """
    return encode(head, limit=MAX_HEAD_BYTES)


def decode_head(payload: bytes) -> Head:
    """Decode and check a head's payload.

    Raises:
        MalformedError: If it is not a head, or contradicts itself.
        LimitError: If it is over its limit.
    """
    return decode(payload, Head, limit=MAX_HEAD_BYTES, what="head")


def next_sequence(previous: int | None, now_ms: int) -> int:
    """Return the sequence of the next head: it grows, and follows the clock.

    Raises:
        ClockError: If the previous sequence is more than a day ahead of the clock.
    """
    if previous is None:
        return max(1, now_ms)
    if previous > now_ms + MAX_FUTURE_MS:
        raise ClockError(
            f"the last head's sequence {previous} is more than a day ahead of this clock {now_ms}"
        )
    return max(previous + 1, now_ms)

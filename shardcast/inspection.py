"""What a source says about a run: its head, checked as far as keys are known, and its documents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from shardcast.cancel import Cancel
from shardcast.config import NetConfig
from shardcast.delta_inspection import InspectedDelta, inspect_deltas
from shardcast.errors import NotFoundError, ShardcastError, SourceStatusError, about
from shardcast.fetch import BlobSource, MemorySink, Transfer
from shardcast.protocol import trust
from shardcast.protocol.envelope import Envelope, open_unverified
from shardcast.protocol.head import Head, VersionRef, decode_head
from shardcast.protocol.layout import Layout, decode_layout, decode_part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.protocol.manifest import Version, assemble, bound_parts, decode_manifest
from shardcast.upstream import HeadAnswer, Upstream, open_session


@dataclass(frozen=True, slots=True)
class Inspected:
    """A run as one source has it.

    Attributes:
        url: The source.
        depth: Its distance from the origin.
        node: Its node id, or None.
        envelope: The head's envelope.
        head: The head.
        verified: Whether a key that the caller trusts signed it.
        expired_ms: How long ago it expired; 0 if it did not.
        versions: The retained versions, newest first.
        opened: The layout of the version being published, or None.
        deltas: The deltas that lead to the version looked at.
    """

    url: str
    depth: int
    node: str | None
    envelope: Envelope
    head: Head
    verified: bool
    expired_ms: int
    versions: tuple[InspectedVersion, ...]
    opened: Layout | None
    deltas: tuple[InspectedDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class InspectedVersion:
    """A version: its entry in the head, its documents, or why they could not be had."""

    ref: VersionRef
    version: Version | None
    problem: str | None


def inspect_run(
    url: str,
    run: str,
    keys: Iterable[bytes],
    now_ms: int,
    config: NetConfig | None = None,
    *,
    number: int | None = None,
) -> Inspected:
    """Ask one source for a run's head and documents; nothing is remembered.

    Args:
        url: The source.
        run: The run.
        keys: Raw public keys to trust; none: the head is only checked against its own keys.
        now_ms: This machine's clock, Unix milliseconds.
        config: Bounds of the network.
        number: The version whose deltas to look at; None: the newest.

    Raises:
        NotFoundError: If the source has no such run.
        NetworkError: If it cannot be reached.
        TrustError: If keys were given and none of them signed, or the head is of another run.
        MalformedError: If the head is not one.
    """
    net = config or NetConfig()
    answer = asyncio.run(_head(url, run, net))
    pinned = frozenset(keys)
    state = trust.begin(run, pinned=pinned, first_use=not pinned)
    with about(url):
        accepted = trust.accept(state, answer.envelope, now_ms)
        envelope, payload = open_unverified(answer.envelope)
        head = decode_head(payload)
    source = BlobSource(url, net)
    try:
        versions = tuple(_version(source, run, ref) for ref in head.versions)
        looked_at = head.version if number is None else number
        deltas: tuple[InspectedDelta, ...] = ()
        for one in versions:
            if one.ref.version == looked_at and one.version is not None:
                deltas = inspect_deltas(source, run, one.ref, one.version)
        opened = None
        if head.open is not None:
            with contextlib.suppress(ShardcastError):
                opened = decode_layout(_document(source, run, head.open.layout))
    finally:
        source.close()
    return Inspected(
        url=answer.url,
        depth=answer.depth,
        node=answer.node,
        envelope=envelope,
        head=head,
        verified=bool(pinned),
        expired_ms=accepted.expired_ms,
        versions=versions,
        opened=opened,
        deltas=deltas,
    )


async def _head(url: str, run: str, config: NetConfig) -> HeadAnswer:
    async with open_session(config) as session:
        try:
            return await Upstream(url, session, config).head(run)
        except SourceStatusError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise NotFoundError(f"run {run!r} is not known there", source=url) from error
            raise


def _version(source: BlobSource, run: str, ref: VersionRef) -> InspectedVersion:
    try:
        manifest = decode_manifest(_document(source, run, ref.manifest))
        layout = decode_layout(_document(source, run, manifest.layout))
        bound_parts(layout, manifest.parts)
        parts = [decode_part(_document(source, run, part)) for part in manifest.parts]
        return InspectedVersion(ref, assemble(ref, run, manifest, layout, parts), None)
    except ShardcastError as error:
        return InspectedVersion(ref, None, str(error))


def _document(source: BlobSource, run: str, digest: str) -> bytes:
    sink = MemorySink()
    source.fetch(Transfer(run, digest, None, sink, limit=MAX_DOCUMENT_BYTES), Cancel())
    return bytes(sink.data)

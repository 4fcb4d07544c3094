"""``shardcast inspect``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.changes_view import ratio
from shardcast.cli.options import PubkeyOption, RunArgument, load_pubkeys
from shardcast.cli.output import Output, table, unix_ms
from shardcast.cli.units import count, duration, size

if TYPE_CHECKING:
    from shardcast.delta_inspection import InspectedDelta
    from shardcast.inspection import Inspected, InspectedVersion


def inspect(
    out: Output,
    run: RunArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL", help="The relay, origin or static server.", show_default=False
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option(
            "--version",
            metavar="N",
            min=1,
            help="List the files and deltas of this version. Default: the newest.",
            show_default=False,
        ),
    ] = None,
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors",
            help="What its smallest delta changes, by tensor. Reads the delta and a copy of the base.",
        ),
    ] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="List every tensor. Default: those that cost most."),
    ] = False,
    pubkey: PubkeyOption = None,
) -> None:
    """Show what a source has of a run: head, signatures, expiry, versions, files, shards, deltas.

    Nothing is kept. Without --pubkey the head is shown as unverified: a relay could have made it.
    """
    from shardcast.inspection import inspect_run

    found = inspect_run(source, run, load_pubkeys(pubkey), unix_ms(), number=version)
    out.event("inspected", **_members(found))
    for line in _lines(found):
        out.result(line)
    chosen = found.head.version if version is None else version
    for one in found.versions:
        if one.ref.version == chosen:
            for line in (*_files(one), *_deltas(found, one.ref.bytes)):
                out.result(line)
            if tensors:
                _show_tensors(out, found, one, every=every)
            return
    if version is not None:
        from shardcast.errors import NotFoundError

        raise NotFoundError(f"run {run!r} does not retain version {version}", source=source)


def _show_tensors(out: Output, found: Inspected, one: InspectedVersion, *, every: bool) -> None:
    from shardcast.cli.changes_view import show_changes
    from shardcast.cli.progress import Counter, meters
    from shardcast.delta_inspection import cheapest, inspect_tensors

    here = {v.ref.manifest: v.version for v in found.versions if v.version is not None}
    delta = cheapest(found.deltas, list(here))
    base = here[delta.ref.base or ""]
    assert one.version is not None
    with meters(out) as shown:
        counter = Counter(shown, f"inspect version {one.ref.version}")
        changes = inspect_tensors(
            found.url,
            found.head.run,
            one.version,
            base,
            delta,
            begin=counter.begin,
            progress=counter.add,
        )
        counter.finish()
    out.result()
    out.result(f"delta from version {base.number}")
    show_changes(out, changes, every=every)


def _deltas(found: Inspected, total: int) -> list[str]:
    if not found.deltas:
        return []
    rows = [
        (
            "none" if delta.ref.base is None else delta.ref.base_version,
            size(delta.ref.bytes),
            ratio(total / delta.ref.bytes if delta.ref.bytes else None),
            delta.problem or ", ".join(delta.codecs) or None,
            delta.shards,
            delta.blobs,
            delta.frames,
        )
        for delta in found.deltas
    ]
    titles = ("delta from", "bytes", "ratio", "codec", "shards rebuilt", "blobs", "frames")
    return ["", table(titles, rows)]


def _delta_members(delta: InspectedDelta) -> dict[str, object]:
    return {
        "base": delta.ref.base,
        "base_version": delta.ref.base_version,
        "bytes": delta.ref.bytes,
        "blob_bytes": delta.blob_bytes,
        "codecs": list(delta.codecs),
        "shards": delta.shards,
        "blobs": delta.blobs,
        "frames": delta.frames,
        "problem": delta.problem,
    }


def _when(unix: int) -> str:
    return datetime.fromtimestamp(unix / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _lines(found: Inspected) -> list[str]:
    from shardcast.protocol.envelope import decode_base64, key_id

    head = found.head
    trusted = "signature verified" if found.verified else "unverified: no --pubkey was given"
    node = f", node {found.node[:8]}" if found.node else ""
    ids = {key_id(decode_base64(key, what="key")): key for key in head.keys}
    signed = [signature.keyid for signature in found.envelope.signatures]
    left = (head.expires_at - head.issued_at) / 1000
    expiry = f"{_when(head.expires_at)} ({duration(left)} after it was issued)"
    if found.expired_ms:
        expiry += f", EXPIRED {duration(found.expired_ms / 1000)} ago"
    lines = [
        f"run        {head.run} at {found.url} (depth {found.depth}{node})",
        f"head       sequence {head.sequence}, {trusted}",
        f"issued     {_when(head.issued_at)}",
        f"expires    {expiry}",
        f"newest     {'none' if head.version is None else f'version {head.version}'}",
    ]
    for keyid in ids | dict.fromkeys(signed, ""):
        marks = [
            *(["may sign"] if keyid in ids else ["not listed"]),
            *(["signed this head"] if keyid in signed else []),
        ]
        lines.append(f"key        {keyid} ({', '.join(marks)})")
    if head.hold:
        lines.append("hold       yes: no activations for now")
    if head.withdrawn:
        lines.append(f"withdrawn  {', '.join(map(str, head.withdrawn))}")
    if head.open is not None:
        what = "" if found.opened is None else f", {size(found.opened.total_bytes)}"
        lines.append(f"open       version {head.open.version}{what}, {len(head.open.parts)} parts")
    rows = [_row(one) for one in found.versions]
    titles = (
        "version", "step", "bytes", "files", "shards", "shard size", "deltas", "smallest", "ratio",
        "manifest",
    )  # fmt: skip
    return [*lines, "", table(titles, rows)] if rows else lines


def _row(one: InspectedVersion) -> tuple[object, ...]:
    ref, version = one.ref, one.version
    layout = None if version is None else version.layout
    least = min((d.bytes for d in ref.deltas if d.base is not None), default=None)
    return (
        ref.version,
        ref.step,
        size(ref.bytes),
        None if layout is None else len(layout.files),
        None if layout is None else layout.shard_count,
        None if layout is None else size(layout.shard_bytes),
        len(ref.deltas),
        None if least is None else size(least),
        None if least is None else ratio(ref.bytes / max(least, 1)),
        ref.manifest[:16],
    )


def _files(one: InspectedVersion) -> list[str]:
    lines = ["", f"version {one.ref.version}, manifest {one.ref.manifest}"]
    if one.version is None:
        return [*lines, f"  its documents are not to be had: {one.problem}"]
    layout = one.version.layout
    lines.append(f"lineage {layout.lineage}, created {_when(layout.created_at)}")
    lines += [f"metadata {key} = {value}" for key, value in layout.metadata.items()]
    rows = [
        (entry.path, size(entry.bytes), len(layout.file_shards(index)))
        for index, entry in enumerate(layout.files)
    ]
    rows.append((count(len(rows), "file"), size(layout.total_bytes), layout.shard_count))
    return [*lines, table(("file", "bytes", "shards"), rows)]


def _members(found: Inspected) -> dict[str, object]:
    import msgspec

    head = msgspec.to_builtins(found.head)
    return {
        "run": found.head.run,
        "version": found.head.version,
        "source": found.url,
        "depth": found.depth,
        "node": found.node,
        "verified": found.verified,
        "expired": found.expired_ms > 0,
        "signed_by": [signature.keyid for signature in found.envelope.signatures],
        "head": head,
        "layouts": {
            str(one.ref.version): msgspec.to_builtins(one.version.layout)
            for one in found.versions
            if one.version is not None
        },
        "deltas": [_delta_members(delta) for delta in found.deltas],
        "problems": {
            str(one.ref.version): one.problem for one in found.versions if one.version is None
        },
    }

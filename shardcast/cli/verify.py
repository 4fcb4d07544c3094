"""``shardcast verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcast.cli.options import PubkeyOption, load_pubkeys
from shardcast.cli.output import Output
from shardcast.cli.progress import Counter, meters
from shardcast.cli.units import count, size
from shardcast.errors import IntegrityError

if TYPE_CHECKING:
    from shardcast.verify import Damage, Report


def verify(
    out: Output,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A store, a worker's OUT, or a version in one.")
    ],
    pubkey: PubkeyOption = None,
) -> None:
    """Hash every byte again and compare it with the signed digests.

    Names each damaged file, shard and byte range, and exits 11 if there is one; so are, in an
    origin's store, delta blobs that the head names and that are gone. Changes nothing. Without
    --pubkey the keys are trusted that the directory remembers.
    """
    from shardcast.verify import verify_directory

    keys = load_pubkeys(pubkey)
    with meters(out) as shown:
        counter = Counter(shown, f"verify {directory}")
        report = verify_directory(directory, keys, begin=counter.begin, progress=counter.add)
        counter.finish()
    _show(out, directory, report)
    if report.damage:
        files = {(one.run, one.version, one.path) for one in report.damage}
        raise IntegrityError(
            f"{count(len(report.damage), 'damaged range')} in {count(len(files), 'file')} "
            f"of {directory}",
            source=str(directory),
        )


def _show(out: Output, directory: Path, report: Report) -> None:
    for damage in report.damage:
        out.event(
            "damaged",
            run=damage.run,
            version=damage.version,
            path=damage.path,
            shard=damage.shard,
            start=damage.start,
            stop=damage.stop,
            reason=damage.reason,
        )
        out.result(_line(damage))
    for run, version in report.unsigned:
        out.warning(
            f"version {version} of run {run!r} is whole, but no head that was accepted here "
            "names it: its digests are not signed"
        )
    for run, version in report.absent:
        out.warning(f"version {version} of run {run!r}, the newest by its head, is not here")
    for run, delta in report.lacking:
        out.warning(
            f"run {run!r}: {delta} is not whole here: {count(len(delta.blobs), 'blob')} of it will be "
            "fetched when somebody asks"
        )
    for path in report.unknown:
        out.warning(f"{path} belongs to no version")
    members = {
        "versions": [{"run": run, "version": number} for run, number in report.versions],
        "bytes": report.bytes,
        "shards": report.shards,
        "documents": report.documents,
        "damaged": len(report.damage),
        "absent": [{"run": run, "version": number} for run, number in report.absent],
        "lacking": [
            {"run": run, "version": one.version, "base_version": one.base, "blobs": len(one.blobs)}
            for run, one in report.lacking
        ],
        "path": str(directory.absolute()),
    }
    out.event("verified", **members)
    summary = (
        f"{count(len(report.versions), 'version')} of {count(len(report.runs), 'run')}, "
        f"{size(report.bytes)} in {count(report.shards, 'shard')} and "
        f"{count(report.documents, 'document')}"
    )
    out.result(f"{'checked' if report.damage else 'all good'}: {summary}")


def _line(damage: Damage) -> str:
    where = f"run {damage.run}"
    if damage.version is not None:
        where += f" version {damage.version}"
    text = f"damaged: {where}: {damage.path}"
    if damage.shard is not None:
        text += f", shard {damage.shard}"
    if damage.stop > damage.start:
        text += f", bytes {damage.start}-{damage.stop - 1}"
    return f"{text}: {damage.reason}"

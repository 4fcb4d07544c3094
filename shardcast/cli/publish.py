"""``shardcast publish``."""

from __future__ import annotations

import collections
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shardcast.cli.options import (
    DESTINATION,
    DISK,
    TRUST,
    DurabilityChoice,
    KeyOption,
    StoreOption,
    TokenFileOption,
    ToOption,
    key_file,
    load_token,
)
from shardcast.cli.output import Output, is_terminal, unix_ms
from shardcast.cli.progress import Counter, Meters, meters
from shardcast.cli.units import count, duration, parse_time, rate, size
from shardcast.cli.xdg import default_store, remote_cache, remote_memory
from shardcast.errors import UsageError

if TYPE_CHECKING:
    from shardcast.deltas import Delta
    from shardcast.keys import Ed25519Signer
    from shardcast.publishing import Published, PublishOptions
    from shardcast.sources import Selection
    from shardcast.store.run import RunStore

WHAT: Final = "What"
DELTAS: Final = "Deltas"
DEFAULT_RUN: Final = "default"


def publish(
    out: Output,
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="The checkpoint directory.", show_default=False)
    ],
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="The run's name.", rich_help_panel=WHAT)
    ] = DEFAULT_RUN,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            min=0,
            help="The trainer's step, kept beside the version number.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="GLOB",
            help="Publish these although optimizer state and pickles are left out by default.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave these out.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata",
            metavar="KEY=VALUE",
            help="Text that travels with the version. May be repeated.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    lineage: Annotated[
        str | None,
        typer.Option(
            "--lineage",
            metavar="TEXT",
            help="A new name when training restarts from an older step.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    refuse_nonfinite: Annotated[
        bool,
        typer.Option(
            "--refuse-nonfinite",
            help="Publish nothing if a tensor holds NaN or an infinity.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    canary: Annotated[
        Path | None,
        typer.Option(
            "--canary",
            metavar="FILE",
            help="Prompts and log-probabilities that engines are checked with: JSON, see "
            "docs/ENGINES.md.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    delta: Annotated[
        bool,
        typer.Option(
            "--delta/--no-delta",
            help="Announce what changed since the version before, where that lies here.",
            rich_help_panel=DELTAS,
        ),
    ] = True,
    delta_bases: Annotated[
        str | None,
        typer.Option(
            "--delta-bases",
            metavar="N,N...",
            help="Also what changed since so many versions ago (2,4,8), for workers that are "
            "behind; right after the announcement.",
            show_default=False,
            rich_help_panel=DELTAS,
        ),
    ] = None,
    compress: Annotated[
        bool,
        typer.Option(
            "--compress",
            help="Also a compressed copy, for workers that hold nothing; right after the "
            "announcement.",
            rich_help_panel=DELTAS,
        ),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="DIR",
            help="With --to: keep the last version here, to make the next delta from. Default: in "
            "the XDG cache directory.",
            show_default=False,
            rich_help_panel=DELTAS,
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream/--no-stream",
            help="Announce what is ready while the rest is hashed or sent, if that takes longer "
            "than a moment.",
            rich_help_panel=DESTINATION,
        ),
    ] = True,
    store: StoreOption = None,
    link: Annotated[
        bool,
        typer.Option(
            "--link",
            help="Hard-link the files instead of copying, here or (with --to) in the cache. For "
            "directories written once.",
            rich_help_panel=DISK,
        ),
    ] = False,
    keep: Annotated[
        int,
        typer.Option(
            "--keep", metavar="K", min=1, max=64, help="Versions to retain.", rich_help_panel=DISK
        ),
    ] = 4,
    durability: Annotated[
        DurabilityChoice,
        typer.Option(
            "--durability",
            help="sync: files are on stable storage before they are announced.",
            rich_help_panel=DISK,
        ),
    ] = DurabilityChoice.SYNC,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Make the store an origin's, although a relay below parents has used it.",
            rich_help_panel=DISK,
        ),
    ] = False,
    to: ToOption = None,
    token_file: TokenFileOption = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="With --to: give up after this long, such as 10m. What arrived is not sent again.",
            show_default=False,
            rich_help_panel=DESTINATION,
        ),
    ] = None,
    key: KeyOption = None,
    rotate_to: Annotated[
        Path | None,
        typer.Option(
            "--rotate-to",
            metavar="FILE",
            help="Hand the run over to this private key; both sign for 30 days.",
            show_default=False,
            rich_help_panel=TRUST,
        ),
    ] = None,
) -> None:
    """Publish a checkpoint directory as the next version of a run.

    Without options: run `default`, store and key in the XDG directories, made where missing.
    """
    from shardcast.protocol.documents import check_run
    from shardcast.publisher import publish_directory, require_apart
    from shardcast.publishing import PublishOptions
    from shardcast.store.run import RunStore
    from shardcast.store.stored import Durability
    from shardcast.streaming import Pace

    if to is not None and store is not None:
        raise UsageError("give either --store or --to, not both")
    if cache is not None and to is None:
        raise UsageError("--cache is for a remote origin: it goes with --to")
    if to is None and deadline is not None:
        raise UsageError("--deadline is for a remote origin: it goes with --to")
    if to is not None and take_over:
        raise UsageError("--take-over is for a local store: it cannot go with --to")
    options = PublishOptions(
        source=checkpoint,
        step=step,
        link=link,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        lineage=lineage,
        metadata=parse_metadata(metadata or []) | _canary(canary),
        keep=keep,
        durability=Durability(durability.value),
        delta=delta,
        delta_bases=parse_distances(delta_bases or ""),
        compress=compress,
        take_over=take_over,
        refuse_nonfinite=refuse_nonfinite,
        stream=Pace() if stream else None,
    )
    _require_checkpoint(options)
    if to is None:
        require_apart(checkpoint, store or default_store())
    token = load_token(token_file) if to is not None else ""
    signers = _signers(out, key, rotate_to)
    with meters(out) as shown:
        watch = Watch(out, shown, run, checkpoint)
        if to is None:
            from shardcast.store.store import Store

            stored_run = Store(store or default_store()).run(run, create=True)
            published = publish_directory(options, stored_run, signers, unix_ms, watch)
        else:
            known = check_run(run)
            here = remote_cache(to, known) if cache is None else cache / known
            require_apart(checkpoint, here)
            limit_s = None if deadline is None else parse_time(deadline, "--deadline")
            published = _publish_remote(
                options, RunStore(here, run), to, token, signers, watch, limit_s
            )
        watch.finish()
    _show(out, published, watch)
    where = "" if store is None else f" --store {shlex.quote(str(store))}"
    _show_next(out, published, where=where, url=to, public=_public_file(rotate_to or key))


def parse_metadata(items: list[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` options as a mapping.

    Raises:
        UsageError: If one has no ``=``, or a key occurs twice.
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UsageError(f"--metadata {item!r} is not KEY=VALUE")
        if name in found:
            raise UsageError(f"--metadata {name!r} is given twice")
        found[name] = value
    return found


def _canary(path: Path | None) -> dict[str, str]:
    """Return a canary file as metadata.

    Raises:
        UsageError: If it cannot be read.
        MalformedError: If it is no canary.
    """
    from shardcast.canary import METADATA_KEY, read_canary, write_canary
    from shardcast.errors import about

    if path is None:
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read --canary: {error.strerror}", source=str(path)) from error
    with about(str(path)):
        return {METADATA_KEY: write_canary(read_canary(data))}


def parse_distances(text: str) -> tuple[int, ...]:
    """Return ``2,4,8`` as numbers.

    Raises:
        UsageError: If it is something else.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(name.isdecimal() and name.isascii() and len(name) < 4 for name in names):
        raise UsageError(f"--delta-bases {text!r} is not a list of numbers like 2,4,8")
    return tuple(int(name) for name in names)


def _require_checkpoint(options: PublishOptions) -> None:
    """Complain about a bad directory before a key or a store is made."""
    from shardcast.sources import select_files

    source = options.source
    if (source / "head.json").is_file() and (source / "versions").is_dir():
        raise UsageError(
            f"{source} is a worker's directory or a run in a store, no checkpoint: publish "
            f"{source / 'current'} or one of its versions",
            source=str(source),
        )
    select_files(options.source, include=options.include, exclude=options.exclude)


def _signers(out: Output, key: Path | None, rotate_to: Path | None) -> tuple[Ed25519Signer, ...]:
    from shardcast import keys
    from shardcast.protocol.envelope import key_id

    file = key_file(key)
    if key is None and not file.exists():
        private, public = keys.generate(file.parent)
        ident = key_id(keys.load_public_key(public))[:16]
        out.notice(f"made a signing key {private} (mode 600, key id {ident}): keep it secret")
        out.notice(f"its public half is {public}: give that to relays and workers")
    if rotate_to is None:
        return keys.load_signers(file, unix_ms())
    old = keys.load_signers(file, unix_ms())
    new = keys.load_signer(rotate_to)
    if new.public_key in {signer.public_key for signer in old}:
        raise UsageError(f"--rotate-to {rotate_to} is the key that signs already")
    keys.record_rotation(rotate_to, file, unix_ms())
    out.notice(
        f"the run moves to key {key_id(new.public_key)[:16]}: publish with --key {rotate_to} from "
        f"now on, and keep {file} for 30 days, because both sign"
    )
    return (new, *old)


def _publish_remote(
    options: PublishOptions,
    cache: RunStore,
    url: str,
    token: str,
    signers: tuple[Ed25519Signer, ...],
    watch: Watch,
    limit_s: float | None,
) -> Published:
    from shardcast.origin_client import Deadline, OriginClient
    from shardcast.store.run import RunStore
    from shardcast.uploader import publish_remote

    memory = RunStore(remote_memory(url, cache.run), cache.run)

    deadline = None if limit_s is None else Deadline.after(limit_s)

    def client() -> OriginClient:
        return OriginClient(url, cache.run, token, deadline)

    return publish_remote(options, memory, client, signers, unix_ms, watch, cache)


class Watch:
    """Shows hashing, then uploading, as it goes; ``seconds`` is how long all of it took."""

    def __init__(self, out: Output, shown: Meters, run: str, checkpoint: Path) -> None:
        """Show it in ``shown``; notices go to ``out``."""
        self._out = out
        self._started = time.monotonic()
        self.seconds = 0.0
        self._hashing = Counter(shown, f"publish {checkpoint}", run=run)
        self._uploading = Counter(shown, f"upload {run}", run=run)

    def selected(self, selection: Selection) -> None:
        """The files are known."""
        self._hashing.begin(selection.total_bytes)

    def hashed(self, count: int) -> None:
        """``count`` more bytes were hashed."""
        self._hashing.add(count)

    def uploading(self, total: int) -> None:
        """The origin lacks ``total`` bytes."""
        self._hashing.finish()
        self._uploading.begin(total)

    def uploaded(self, count: int) -> None:
        """``count`` more bytes were uploaded."""
        self._uploading.add(count)

    def waiting(self, message: str) -> None:
        """Another publisher is at work."""
        self._out.notice(message)

    def noticed(self, message: str) -> None:
        """Something that people should know."""
        self._out.notice(message)

    def finish(self) -> None:
        """It is over."""
        self.seconds = time.monotonic() - self._started
        self._hashing.finish()
        self._uploading.finish()


def _show(out: Output, published: Published, watch: Watch) -> None:
    ref = published.ref
    left_out = collections.Counter[str]()
    left_bytes = collections.Counter[str]()
    for file in published.selection.left_out:
        left_out[file.reason] += 1
        left_bytes[file.reason] += file.bytes
    out.version_event(
        "published",
        run=published.run,
        version=ref.version,
        step=ref.step,
        manifest=ref.manifest,
        path=None if published.path is None else str(published.path.absolute()),
        bytes=ref.bytes,
        bytes_uploaded=published.uploaded_bytes,
        method=published.method,
        seconds=round(watch.seconds, 3),
        streamed=published.streamed,
        left_out=[
            {"reason": reason, "files": number, "bytes": left_bytes[reason]}
            for reason, number in left_out.items()
        ],
        deltas=[
            {
                "base": delta.ref.base,
                "base_version": delta.ref.base_version,
                "bytes": delta.travels,
                "bytes_needed": delta.ref.bytes,
                "ratio": round(delta.ratio, 2),
                "shards": {"rebuilt": delta.rebuilt, "same": delta.same, "plain": delta.plain},
            }
            for delta in published.deltas
        ],
    )
    step = "" if ref.step is None else f" (step {ref.step})"
    files = count(len(published.selection.files), "file")
    out.result(f"published {published.run} version {ref.version}{step}: {size(ref.bytes)}, {files}")
    out.result(f"  manifest  {ref.manifest}")
    if published.path is not None:
        out.result(f"  in        {published.path}")
    verb = {"link": "linked", "clone": "cloned", "copy": "copied", "upload": "uploaded"}
    done = verb.get(published.method, published.method)
    if published.method == "upload":
        done += f" {size(published.uploaded_bytes)}"
    out.result(
        f"  {done} and hashed in {duration(watch.seconds)} ({rate(ref.bytes, watch.seconds)})"
    )
    for delta in published.deltas:
        _show_delta(out, delta)
    for reason, number in sorted(left_out.items()):
        names = [one.path for one in published.selection.left_out if one.reason == reason]
        more = ", ..." if number > 3 else ""
        out.result(
            f"  left out  {count(number, 'file')}, {size(left_bytes[reason])}: {reason} "
            f"({', '.join(names[:3])}{more})"
        )


def _show_delta(out: Output, delta: Delta) -> None:
    of = "a copy" if delta.ref.base is None else f"from version {delta.ref.base_version}"
    name = "copy" if delta.ref.base is None else "delta"
    left = f", and {count(delta.plain, 'shard')} as they are" if delta.plain else ""
    same = f", {delta.same} of them unchanged" if delta.same else ""
    shards = count(delta.rebuilt + delta.same + delta.plain, "shard")
    out.result(
        f"  {name:<8}  {of}: {size(delta.ref.bytes)} for {shards}{same}{left} (1/{delta.ratio:.3g})"
    )


def _public_file(key: Path | None) -> str:
    file = key_file(key)
    public = file.with_suffix(".pub")
    return str(public) if public.exists() else "shardcast.pub"


def _show_next(
    out: Output, published: Published, *, where: str, url: str | None, public: str
) -> None:
    """Say what to type next: to people, and once a run."""
    if published.ref.version > 1 and not is_terminal(sys.stdout):
        return
    out.notice("next")
    if url is None:
        out.notice(f"  serve it  shardcast relay{where} --listen 0.0.0.0:8470")
    source = url or "http://THIS-HOST:8470"
    out.notice(
        f"  pull it   shardcast pull {published.run} --from {source} --out DIR "
        f"--pubkey {shlex.quote(public)}"
    )

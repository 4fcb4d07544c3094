"""Which files of a checkpoint directory are published, and which are left out and why."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardcast.errors import LimitError, ModifiedError, UsageError
from shardcast.protocol.limits import MAX_FILES
from shardcast.protocol.paths import check_tree
from shardcast.store.files import disk_errors

_TRAINING_STATE: Final = (
    "optimizer*",
    "*/optimizer*",
    "scheduler*",
    "*/scheduler*",
    "rng_state*",
    "*/rng_state*",
    "random_states_*",
    "*/random_states_*",
    "scaler.pt",
    "*/scaler.pt",
    "*optim_states*",
    "training_args.bin",
)
"""Names that transformers, accelerate, DeepSpeed and FSDP give to optimizer and RNG state."""

_HOUSEKEEPING: Final = (
    ".git/*",
    ".cache/*",
    "*/.cache/*",
    "__pycache__/*",
    "*/__pycache__/*",
    ".ipynb_checkpoints/*",
    "*.tmp",
    "*.incomplete",
    "*.lock",
    ".DS_Store",
    "*/.DS_Store",
)

_PRIVATE: Final = ("*.key", "*.key.rotation", "*.pem", "id_rsa", "id_ed25519", ".env", ".netrc")
"""Names of files that hold secrets: `shardcast keygen` writes into the working directory."""

_PICKLE_SUFFIXES: Final = frozenset({".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"})
_TORCH_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when a file changes: size in bytes, mtime in nanoseconds, device, inode."""

    bytes: int
    mtime_ns: int
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to publish: its path in the version, where its bytes are, what it looked like."""

    path: str
    location: Path
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not published."""

    path: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What a directory holds, sorted by path."""

    files: tuple[SourceFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def total_bytes(self) -> int:
        """The size of all files to publish."""
        return sum(file.stamp.bytes for file in self.files)


def select_files(
    root: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Selection:
    """List a checkpoint directory.

    Symbolic links are followed, to files and to directories. Globs are matched against the whole
    relative path and against the last component; ``exclude`` wins over ``include``, which wins
    over what is left out by default (optimizer, scheduler and RNG state, pickles, caches, private
    keys). An excluded directory is not looked into.

    Raises:
        UsageError: If there is no directory, a link is broken or loops, or nothing is left.
        UnsafePathError: If a path to publish cannot be written on every platform.
        LimitError: If there are too many files.
        DiskError: If something cannot be read.
    """
    with disk_errors(root, "listing"):
        return _select(root, include, exclude)


def _select(root: Path, include: Sequence[str], exclude: Sequence[str]) -> Selection:
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise UsageError(f"checkpoint {root} {what}", source=str(root))
    files: list[SourceFile] = []
    left_out: list[LeftOut] = []
    for path, location in _walk(root, "", (), exclude):
        reason = _reason_by_name(path, include, exclude)
        if reason is not None and not location.is_file():  # a broken link may be left out
            left_out.append(LeftOut(path, 0, reason))
            continue
        info = _stat(location)
        reason = reason or _reason(path, location, info, include)
        if reason is not None:
            left_out.append(LeftOut(path, info.st_size, reason))
            continue
        stamp = Stamp(info.st_size, info.st_mtime_ns, info.st_dev, info.st_ino)
        files.append(SourceFile(path, location, stamp))
        if len(files) > MAX_FILES:
            raise LimitError(f"checkpoint has more than {MAX_FILES} files", source=str(root))
    if not files:
        detail = f" ({len(left_out)} left out: {left_out[0].reason})" if left_out else ""
        raise UsageError(f"checkpoint {root} holds no file to publish{detail}", source=str(root))
    files.sort(key=lambda file: file.path)
    left_out.sort(key=lambda file: file.path)
    check_tree(file.path for file in files)
    return Selection(tuple(files), tuple(left_out))


def _walk(
    directory: Path, prefix: str, above: tuple[tuple[int, int], ...], exclude: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    with disk_errors(directory, "listing"):
        info = directory.stat()
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    identity = (info.st_dev, info.st_ino)
    if identity in above:
        raise UsageError(f"symbolic links form a loop at {directory}", source=str(directory))
    for entry in entries:
        path = f"{prefix}{entry.name}"
        location = Path(entry.path)
        if entry.is_dir() and not _matches(path, exclude):
            yield from _walk(location, path + "/", (*above, identity), exclude)
        else:
            yield path, location


def _stat(location: Path) -> os.stat_result:
    if location.is_symlink() and not location.exists():
        raise UsageError(
            f"symbolic link {location} points to {os.readlink(location)}, which is not there",
            source=str(location),
        )
    with disk_errors(location, "reading"):
        return location.stat()


def _reason_by_name(path: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    if _matches(path, exclude):
        return "excluded"
    if _matches(path, include):
        return None
    if _matches(path, _TRAINING_STATE):
        return "optimizer, scheduler or RNG state"
    if _matches(path, _HOUSEKEEPING):
        return "cache or temporary file"
    if _matches(path, _PRIVATE):
        return "may hold a secret"
    return None


def _reason(path: str, location: Path, info: os.stat_result, include: Sequence[str]) -> str | None:
    if not stat.S_ISREG(info.st_mode):
        return "not a regular file"
    if _matches(path, include):
        return None
    return "pickle" if _is_pickle(location) else None


def _matches(path: str, globs: Sequence[str]) -> bool:
    name = path.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(path, g) or fnmatch.fnmatchcase(name, g) for g in globs)


def _is_pickle(location: Path) -> bool:
    if location.suffix in _PICKLE_SUFFIXES:
        return True
    if location.suffix != ".bin":
        return False
    with disk_errors(location, "reading"), open(location, "rb") as file:
        start = file.read(4)
    return start == _TORCH_ZIP or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")


def require_unchanged(before: Selection, after: Selection, root: Path) -> None:
    """Check that nothing happened to a directory between two listings.

    Raises:
        ModifiedError: Naming the first file that came, went or changed.
    """
    old = {file.path: file for file in before.files}
    new = {file.path: file for file in after.files}
    for path in sorted(old.keys() | new.keys()):
        if path not in new:
            change = "was removed"
        elif path not in old:
            change = "appeared"
        elif old[path].stamp != new[path].stamp:
            change = "was modified"
        else:
            continue
        raise ModifiedError(
            f"checkpoint file {path} {change} while it was published; no version was announced",
            source=str(root / path),
        )

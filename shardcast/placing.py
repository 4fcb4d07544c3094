"""How a checkpoint's files get into staging: hard links, clones, or room for copies."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardcast.errors import (
    ModifiedError,
    UsageError,
)
from shardcast.publishing import PublishOptions
from shardcast.sources import Selection
from shardcast.store.files import (
    MEMORY_FILE_SYSTEMS,
    disk_error,
    disk_errors,
    file_system_of,
    preallocate,
    reflink,
    require_space,
)


def place_files(options: PublishOptions, selection: Selection, directory: Path) -> str:
    """Link, clone or preallocate every file; return how."""
    if options.link:
        for file in selection.files:
            _link(file.location, directory / file.path)
        return "link"
    if _clone_all(selection, directory):
        return "clone"
    with disk_errors(directory, "making the directory"):
        directory.mkdir(parents=True, exist_ok=True)
        reserve = file_system_of(directory) not in MEMORY_FILE_SYSTEMS
    require_space(directory, selection.total_bytes, what=f"publishing {options.source}")
    for file in selection.files:
        path = directory / file.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                preallocate(fd, file.stamp.bytes, reserve=reserve)
            finally:
                os.close(fd)
        except OSError as error:
            raise disk_error(error, path, "writing") from error
    return "copy"


def _link(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise UsageError(
                f"--link: {source} cannot be hard-linked into {target.parent} "
                f"({error.strerror}); publish without --link, or put --store on the same "
                "file system",
                source=str(source),
            ) from error
        raise disk_error(error, target, "linking") from error


def _clone_all(selection: Selection, directory: Path) -> bool:
    """Clone every file (FICLONE); False where one cannot be: copy all then."""
    for file in selection.files:
        path = directory / file.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            source = os.open(file.location, os.O_RDONLY | os.O_CLOEXEC)
            try:
                target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                try:
                    cloned = file.stamp.bytes == 0 or reflink(source, target)
                    size = os.fstat(target).st_size
                finally:
                    os.close(target)
            finally:
                os.close(source)
        except OSError as error:
            raise disk_error(error, path, "cloning") from error
        if not cloned:
            return False
        if size != file.stamp.bytes:
            raise ModifiedError(
                f"checkpoint file {file.path} was modified while it was published; "
                "nothing was announced",
                source=str(file.location),
            )
    return any(file.stamp.bytes for file in selection.files)

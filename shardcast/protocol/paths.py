"""Which file paths a layout may name: portable, and never outside its directory."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Final

from shardcast.errors import UnsafePathError
from shardcast.protocol.limits import MAX_NAME_BYTES, MAX_PATH_BYTES

_RESERVED: Final = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{device}{n}" for device in ("com", "lpt") for n in "0123456789¹²³"]
)
"""Device names of Windows, with any extension (Microsoft, "Naming Files, Paths, Namespaces")."""

_FORBIDDEN: Final = frozenset('\\:*?"<>|')


def check_path(path: str) -> str:
    r"""Return ``path`` if it is a safe relative POSIX path of a regular file.

    Refused: empty, absolute, ``.`` and ``..`` components, backslash, NUL and other control
    characters, characters and device names that Windows reserves, names ending in a dot or
    space, names that are not in Unicode NFC, lone surrogates, names over 255 bytes.

    Raises:
        UnsafePathError: Naming the path and the reason.
    """
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnsafePathError(f"path is not valid Unicode: {path!r}") from error
    if not path:
        raise UnsafePathError("path is empty")
    if len(encoded) > MAX_PATH_BYTES:
        raise UnsafePathError(f"path is longer than {MAX_PATH_BYTES} bytes: {path[:80]!r}...")
    if unicodedata.normalize("NFC", path) != path:
        raise UnsafePathError(f"path is not in Unicode NFC: {path!r}")
    for name in path.split("/"):
        _check_name(name, path)
    return path


def _check_name(name: str, path: str) -> None:
    reason: str | None = None
    if name in ("", ".", ".."):
        reason = f"component {name!r}"
    elif len(name.encode("utf-8")) > MAX_NAME_BYTES:
        reason = f"a name longer than {MAX_NAME_BYTES} bytes"
    elif any(unicodedata.category(char) in ("Cc", "Cf") for char in name):
        reason = "a control character"
    elif not _FORBIDDEN.isdisjoint(name):
        reason = "a character that is not portable"
    elif name[-1] in ". ":
        reason = "a name that ends in a dot or space"
    elif name.split(".", 1)[0].rstrip(" ").casefold() in _RESERVED:
        reason = "a reserved device name"
    if reason is not None:
        raise UnsafePathError(f"path has {reason}: {path!r}")


def check_tree(paths: Iterable[str]) -> None:
    """Check every path, and that all of them can live in one directory tree.

    Raises:
        UnsafePathError: If a path is unsafe, occurs twice, differs from another only in case
            (in any directory of it), or is both a file and a directory.
    """
    spelling: dict[str, str] = {}
    files: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        names = check_path(path).split("/")
        for end in range(1, len(names) + 1):
            prefix = "/".join(names[:end])
            known = spelling.setdefault(_fold(prefix), prefix)
            if known != prefix:
                raise UnsafePathError(f"paths differ only in case: {known!r} and {prefix!r}")
            if end < len(names):
                directories.add(prefix)
        if path in files:
            raise UnsafePathError(f"path occurs twice: {path!r}")
        files.add(path)
    clash = files & directories
    if clash:
        raise UnsafePathError(f"path is both a file and a directory: {min(clash)!r}")


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", text.casefold())

"""Which file paths a layout may name: portable, and never outside its directory."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from shardcast.errors import UnsafePathError
from shardcast.protocol.limits import MAX_NAME_BYTES, MAX_PATH_BYTES

_RESERVED: Final = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{device}{n}" for device in ("com", "lpt") for n in "0123456789¹²³"]
)
"""Device names of Windows, with any extension (Microsoft, "Naming Files, Paths, Namespaces")."""

_FORBIDDEN: Final = frozenset('\\:*?"<>|')

_REFUSED_CATEGORIES: Final = frozenset(["Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"])
"""Control, format, unassigned (nobody knows how they fold), private use (which Cygwin and SMB
map to what Windows forbids), surrogates, line and paragraph separators."""

_INVISIBLE: Final = frozenset(
    map(
        chr,
        (
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F),
            *(0x3164, 0xFFA0, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)),
        ),
    )
)
"""Unicode's Default_Ignorable_Code_Point outside those categories: case-insensitive ext4 and
f2fs drop them when they compare names."""


def check_path(path: str) -> str:
    r"""Return ``path`` if it is a safe relative POSIX path of a regular file.

    Refused: empty, absolute, ``.`` and ``..`` components, backslash, NUL and other control,
    invisible, private and unassigned characters, characters and device names that Windows
    reserves, names ending in a dot or space, names that are not in Unicode NFC, lone
    surrogates, names over 255 bytes, paths over 1024.

    Raises:
        UnsafePathError: Naming the path and the reason.
    """
    if len(path) > MAX_PATH_BYTES or _size(path) > MAX_PATH_BYTES:
        raise UnsafePathError(f"path is longer than {MAX_PATH_BYTES} bytes: {path[:80]!r}...")
    for name in path.split("/"):
        reason = _unsafe(name)
        if reason is not None:
            raise UnsafePathError(f"path has {reason}: {path!r}")
    return path


def _unsafe(name: str) -> str | None:
    """Say what is wrong with one name, in time that grows with its length."""
    if name in ("", ".", ".."):
        return f"component {name!r}"
    if _size(name) > MAX_NAME_BYTES:
        return f"a name longer than {MAX_NAME_BYTES} bytes"
    if not (name.isascii() and name.isprintable()):
        if any(unicodedata.category(char) in _REFUSED_CATEGORIES for char in name):
            return "a control, private or unassigned character"
        if not _INVISIBLE.isdisjoint(name):
            return "an invisible character"
        if not unicodedata.is_normalized("NFC", name):
            return "a name that is not in Unicode NFC"
    if not _FORBIDDEN.isdisjoint(name):
        return "a character that is not portable"
    if name[-1] in ". ":
        return "a name that ends in a dot or space"
    if name.split(".", 1)[0].rstrip(" ").casefold() in _RESERVED:
        return "a reserved device name"
    return None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_tree(paths: Iterable[str]) -> None:
    """Check every path, and that all of them can live in one directory tree.

    Folded and sorted by component (NUL sorts first and is in no name), paths that share a directory in any spelling stand
    together, and a file stands before what claims it as its directory; so neighbours show every
    conflict, in n log n and without a node for each directory.

    Raises:
        UnsafePathError: If a path is unsafe, occurs twice, differs from another only in case
            (in any directory of it), or is both a file and a directory.
    """
    folded = sorted(("\0".join(map(_fold, check_path(path).split("/"))), path) for path in paths)
    for (_, earlier), (_, later) in pairwise(folded):
        _check_neighbours(earlier, later)


def _check_neighbours(earlier: str, later: str) -> None:
    if earlier == later:
        raise UnsafePathError(f"path occurs twice: {earlier!r}")
    for one, other in zip(earlier.split("/"), later.split("/"), strict=False):
        if one == other:
            continue
        if _fold(one) == _fold(other):
            raise UnsafePathError(f"paths differ only in case: {earlier!r} and {later!r}")
        return
    raise UnsafePathError(f"path is both a file and a directory: {min(earlier, later, key=len)!r}")


def _fold(name: str) -> str:
    """Return the form in which names are equal that some file system holds for equal.

    Canonical caseless matching (Unicode 3.13, D145); the two i that only Turkish tells apart
    count as one more, since tables that map single characters make them one.
    """
    if name.isascii():
        return name.lower()
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
    return text.replace("i\u0307", "i").replace("\u0131", "i")

"""Which paths a layout may name. Traps from Unicode, Windows and case-insensitive file systems."""

import sys
import unicodedata

import pytest

from shardcast.errors import UnsafePathError
from shardcast.protocol.paths import check_path, check_tree


@pytest.mark.parametrize(
    "path",
    [
        "config.json",
        "model-00001-of-00002.safetensors",
        "a/b/c",
        ".gitattributes",
        "...a",
        "a..b",
        "-rf",
        "~",
        "$HOME",
        "a b",
        " a",
        "größe.txt",
        "日本/語.txt",
        "😀",
        "console",
        "com",
        "com10",
        "lpt",
        "nulls/x",
        "x" * 255,
        "ä" * 127,
        "/".join(["x" * 255] * 4),
    ],
)
def test_what_is_safe(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "component ''"),
        ("/", "component ''"),
        ("/etc/passwd", "component ''"),
        ("a//b", "component ''"),
        ("a/", "component ''"),
        (".", r"component '\.'"),
        ("./a", r"component '\.'"),
        ("..", r"component '\.\.'"),
        ("../a", r"component '\.\.'"),
        ("a/../../b", r"component '\.\.'"),
        ("a/..", r"component '\.\.'"),
        ("..\\a", "not portable"),
        ("a\\b", "not portable"),
        ("C:", "not portable"),
        ("C:/a", "not portable"),
        ("file:stream", "not portable"),
        ("a*", "not portable"),
        ("a?", "not portable"),
        ('a"', "not portable"),
        ("a<b>c|", "not portable"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("a\x1b[2J", "control"),
        ("a\x7f", "control"),
        ("a\x85", "control"),
        ("a\u202etxt.exe", "control"),
        ("a\u200d", "control"),
        ("a\ufeff", "control"),
        ("a\u00ad", "control"),
        ("a\u2028b", "control"),
        ("a\uf03ab", "private"),
        ("a\u0378", "unassigned"),
        ("a\uffff", "unassigned"),
        ("a\ud800", "control"),
        ("a\ufe0f", "invisible"),
        ("a\u034f", "invisible"),
        ("a\u3164", "invisible"),
        ("a\U000e0100", "invisible"),
        ("u\u0308", "NFC"),
        ("\u212a", "NFC"),  # Kelvin sign, canonically the letter K
        ("\u2126", "NFC"),  # Ohm sign
        ("\u0340", "NFC"),
        ("a.", "ends in a dot"),
        ("a ", "ends in a dot or space"),
        ("a./b", "ends in a dot"),
        ("a /b", "ends in a dot or space"),
        ("....", "ends in a dot"),
        ("con", "reserved"),
        ("CON", "reserved"),
        ("Nul.txt", "reserved"),
        ("aux.tar.gz", "reserved"),
        ("a/prn", "reserved"),
        ("com1", "reserved"),
        ("COM¹", "reserved"),
        ("lpt³.safetensors", "reserved"),
        ("con .txt", "reserved"),
        ("conin$", "reserved"),
        ("x" * 256, "longer than 255"),
        ("ä" * 128, "longer than 255"),
        ("a/" * 513, "longer than 1024"),
        ("ä/" * 400, "longer than 1024"),
        ("x" * 10_000_000, "longer than 1024"),
    ],
)
def test_what_is_not_safe(path: str, reason: str) -> None:
    with pytest.raises(UnsafePathError, match=reason) as caught:
        check_path(path)
    assert len(str(caught.value)) < 10_000
    with pytest.raises(UnsafePathError):
        check_tree(["a/b", path])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "A"),
        ("README.md", "Readme.MD"),
        ("dir/a", "DIR/b"),
        ("dir/a", "Dir/sub/c"),
        ("x/dir/a", "x/DIR"),
        ("straße", "STRASSE"),
        ("ß", "ss"),
        ("ẞ", "ß"),
        ("İ", "i\u0307"),
        ("İ", "i"),
        ("\u0131", "I"),
        ("\u017f", "S"),
        ("ﬀ", "ff"),
        ("Å", "å"),
        ("\u03c3", "ς"),
        ("Σ", "ς"),
        ("ǅ", "ǆ"),
        ("\u1e9b\u0323", "\u1e69"),
        ("ᾳ", "\u03b1\u03b9"),
        ("\u13a0", "\uab70"),
        ("µ", "μ"),
        ("é", "É"),
    ],
)
def test_case_folding_traps(one: str, other: str) -> None:
    for pair in ([one, other], [other, one]):
        with pytest.raises(UnsafePathError, match="differ only in case"):
            check_tree(pair)
        with pytest.raises(UnsafePathError, match="differ only in case"):
            check_tree([f"p/{pair[0]}/x", "p/zzz", "0", f"p/{pair[1]}/y"])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a", "a"], "occurs twice: 'a'"),
        (["a/b", "c", "a/b"], "occurs twice: 'a/b'"),
        (["a", "a/b"], "both a file and a directory: 'a'"),
        (["a/b", "a"], "both a file and a directory: 'a'"),
        (["a/b/c/d", "a/b-c", "a/b.c", "a/b"], "both a file and a directory: 'a/b'"),
        (["a", "A/b"], "differ only in case"),
    ],
)
def test_paths_that_cannot_live_together(paths: list[str], message: str) -> None:
    with pytest.raises(UnsafePathError, match=message):
        check_tree(paths)


def test_paths_that_can() -> None:
    check_tree([])
    check_tree(["a", "b/a", "b/b/a", "b/b-a", "b/b.a", "ab", "a b", "ba", "a.b", "a-b/c"])
    check_tree(["é", "e", "è", "ij", "ĳ", "o\u0338x", "k", "日", "本"])


def test_cost_grows_with_the_input_only() -> None:
    """Many paths, and paths of hundreds of directories (no timing: the test's own limit)."""
    check_tree(f"d{i % 1000:03}/model-{i:07}" for i in range(300_000))
    deep = "/".join(["ab"] * 339)
    check_tree(f"{deep}/{i:05}" for i in range(4000))


def test_no_character_folds_into_a_separator() -> None:
    for code in range(0x80, sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.category(char) != "Cs":
            for form in (char.casefold(), unicodedata.normalize("NFD", char)):
                assert "/" not in form
                assert "\0" not in form

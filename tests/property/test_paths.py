"""Trees against a real directory: what is accepted stays inside and does not collide."""

import os
import tempfile
import unicodedata
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.errors import UnsafePathError
from shardcast.protocol.paths import check_tree

nasty = st.sampled_from(
    [
        *("", ".", "..", "...", "a", "A", "b", "a.", "a ", "con", "Con.txt", "ß", "ss", "SS", "é"),
        *("e\u0301", "É", "İ", "i", "I", "\u0131", "\u212a", "k", "K", "\\", "..\\..", "C:"),
        *("a\0b", "~", "\u202e", "x" * 255, "x" * 256, "a\ufe0f", "\n", "-", "a-b", "a!b"),
    ]
)
names = nasty | st.text("aAbB.-!", min_size=1, max_size=3) | st.text(max_size=4)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
trees = st.lists(paths, min_size=1, max_size=6)


def is_accepted(tree: list[str]) -> bool:
    try:
        check_tree(tree)
    except UnsafePathError:
        return False
    return True


@given(tree=trees)
@settings(max_examples=500)
def test_an_accepted_tree_can_be_written_and_stays_inside(tree: list[str]) -> None:
    if not is_accepted(tree):
        return
    with tempfile.TemporaryDirectory() as temporary:
        outside = Path(temporary)
        root = outside / "root"
        root.mkdir()
        for number, path in enumerate(tree):
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            assert Path(os.path.realpath(target)).is_relative_to(os.path.realpath(root))
            with target.open("x") as file:  # fails if anything is there already
                file.write(str(number))
        assert [entry.name for entry in outside.iterdir()] == ["root"]
        found = {
            str((Path(top) / name).relative_to(root)): (Path(top) / name).read_text()
            for top, _, files in os.walk(root)
            for name in files
        }
        assert found == {path: str(number) for number, path in enumerate(tree)}


def fold(name: str) -> str:
    return unicodedata.normalize("NFD", name).casefold()


@given(tree=trees)
@settings(max_examples=500)
def test_against_a_case_insensitive_model(tree: list[str]) -> None:
    """A dictionary of dictionaries that, like APFS, keeps the first spelling of a name."""
    if not is_accepted(tree):
        return
    root: dict[str, tuple[str, object]] = {}
    for path in tree:
        *directories, name = path.split("/")
        here = root
        for directory in directories:
            spelling, inside = here.setdefault(fold(directory), (directory, {}))
            assert spelling == directory
            assert isinstance(inside, dict)
            here = inside
        assert fold(name) not in here
        here[fold(name)] = (name, None)


@given(tree=trees, order=st.randoms(use_true_random=False))
def test_order_does_not_matter(tree: list[str], order: object) -> None:
    shuffled = list(tree)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert is_accepted(tree) == is_accepted(shuffled)


plain = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=3).map("/".join)


@given(tree=st.lists(plain, max_size=8))
@settings(max_examples=300)
def test_plain_trees_are_refused_only_for_a_reason(tree: list[str]) -> None:
    directories = {path[:at] for path in tree for at, char in enumerate(path) if char == "/"}
    assert is_accepted(tree) == (len(set(tree)) == len(tree) and not directories & set(tree))

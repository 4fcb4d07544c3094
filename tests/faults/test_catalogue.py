"""Every fault of the catalogue has a test, and every marker names one of its faults."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.catalogue import FAULTS


def marks_of(thing: object) -> Iterable[Any]:
    marks = getattr(thing, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]


def numbers_in(module: object) -> Iterator[int]:
    """The numbers of all markers ``fault``: of a module, its tests, and their parameters."""
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    for mark in (mark for thing in (module, *tests) for mark in marks_of(thing)):
        values = mark.args[1] if mark.name == "parametrize" and len(mark.args) > 1 else ()
        sets = values if isinstance(values, (list, tuple)) else ()
        for found in (mark, *(m for value in sets for m in getattr(value, "marks", ()))):
            if found.name == "fault":
                yield from found.args


def test_each_fault_has_a_test_and_each_marker_a_fault() -> None:
    here = Path(__file__).parent
    covered = {
        number
        for path in here.glob("test_*.py")
        for number in numbers_in(importlib.import_module(f"tests.faults.{path.stem}"))
    }
    assert sorted(covered) == sorted(FAULTS) == list(range(1, 26))

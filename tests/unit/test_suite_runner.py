"""`python -m tests`: parts beside each other, and a second try for what failed, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.__main__ import FAILED, MOST_AGAIN, NOTHING_TO_RUN, PASSED, parts, run, together
from tests.engine.__main__ import parts as engine_parts

ONCE = """
from pathlib import Path

def test_once() -> None:
    mark = Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    assert not first, "the machine was busy"

def test_fine() -> None:
    pass
"""
NEVER = "def test_never() -> None:\n    assert not 'broken'\n"
FINE = "def test_fine() -> None:\n    pass\n"


@pytest.fixture(autouse=True)
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of another suite."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    return tmp_path


def ran(
    suite: Path, capfd: pytest.CaptureFixture[str], *options: str, **tests: str
) -> tuple[int, str]:
    """Run tests, each file a part of its own; return the status and what was said."""
    for name, text in tests.items():
        (suite / f"test_{name}.py").write_text(text)
    status = run([[f"test_{name}.py"] for name in tests], options)
    return status, capfd.readouterr().out


def test_what_passes_alone_is_named_and_its_first_failure_is_shown(
    suite: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, said = ran(suite, capfd, fine=FINE, once=ONCE)
    assert status == PASSED
    assert said.count("the machine was busy") >= 1
    assert "1 failed, 1 passed" in said
    (line,) = (line for line in said.splitlines() if line.startswith("passed only alone"))
    assert line.endswith(": test_once.py::test_once")
    assert said.index("the machine was busy") < said.index(line)


def test_what_fails_again_fails_the_suite(suite: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = ran(suite, capfd, once=ONCE, never=NEVER)
    assert status == FAILED
    assert "failed again: test_never.py::test_never\n" in said
    assert "passed only alone" in said


def test_many_failures_are_not_tried_again(suite: Path, capfd: pytest.CaptureFixture[str]) -> None:
    many = "".join(f"def test_{n}() -> None:\n    assert False\n" for n in range(MOST_AGAIN + 1))
    status, said = ran(suite, capfd, fine=FINE, many=many)
    assert status == FAILED
    assert f"more than {MOST_AGAIN}: not tried again" in said
    assert "once more" not in said


def test_a_part_that_cannot_be_collected_fails_the_suite(
    suite: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, said = ran(suite, capfd, fine=FINE, broken="import nothing_of_that_name\n")
    assert status not in (PASSED, FAILED, NOTHING_TO_RUN)
    assert "once more" not in said


def test_options_choose_tests_of_any_part(suite: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = ran(suite, capfd, "-k", "fine", fine=FINE, other=FINE, never=NEVER)
    assert (status, said.count("1 passed")) == (PASSED, 2)
    assert "once more" not in said


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([PASSED, PASSED], PASSED),
        ([PASSED, FAILED], FAILED),
        ([FAILED, 2, PASSED], 2),
        ([PASSED, -9], -9),
        ([PASSED, NOTHING_TO_RUN], PASSED),
        ([NOTHING_TO_RUN, NOTHING_TO_RUN], NOTHING_TO_RUN),
    ],
)
def test_one_status_for_all(statuses: list[int], status: int) -> None:
    assert together(statuses) == status


def test_the_parts_are_the_whole_suite_once(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    dealt = [name for part in parts() for name in part]
    found = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")]
    apart = [name for name in found if name.startswith(("tests/engine/", "tests/engine_sglang/"))]
    assert apart
    assert sorted([*dealt, *apart]) == sorted(found)
    assert "tests/unit/test_suite_runner.py" in dealt


def test_the_parts_of_the_engine_s_tests_are_all_of_them_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    dealt = [name for part in engine_parts() for name in part]
    found = [str(path.relative_to(root)) for path in (root / "tests/engine").glob("test_*.py")]
    assert sorted(dealt) == sorted(found)

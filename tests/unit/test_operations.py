"""What docs/OPERATIONS.md quotes exists: metrics, log lines, events, codes, status, exit codes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.metrics import Metrics
from shardcast import errors
from shardcast.engine.metrics import EngineMetrics
from shardcast.events import EventKind

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
SPANS = sorted({" ".join(span.split()) for span in re.findall(r"`([^`]+)`", TEXT)})


def quoted(kind: str) -> list[str]:
    found = [span.removeprefix(f"{kind} ") for span in SPANS if span.startswith(f"{kind} ")]
    return [span for span in found if span.strip("… ")]


def sources() -> Iterator[ast.AST]:
    for package in ("relay", "shardcast"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ast.parse(path.read_text(encoding="utf-8"))


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string of a program, with a blank for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d)?[sdrf]", " ", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values
            )


PROGRAMS = [set(strings(tree)) for tree in sources()]
STRINGS = [" ".join(text.split()) for program in PROGRAMS for text in program]


def codes() -> dict[str, int]:
    kinds = [errors.ShardcastError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind.exit_code for kind in kinds}


def in_one_string(fragment: str) -> bool:
    pieces = [piece.strip() for piece in fragment.split("…") if piece.strip()]
    pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
    return any(pattern.search(text) for text in STRINGS)


@pytest.mark.parametrize("fragment", quoted("log"))
def test_a_quoted_log_line_is_in_the_source(fragment: str) -> None:
    assert in_one_string(fragment)


@pytest.mark.parametrize("name", [s for s in SPANS if re.fullmatch(r"shardcast_[a-z_]+", s)])
def test_a_quoted_metric_exists(name: str) -> None:
    known = set()
    registries = (Metrics().registry, EngineMetrics("policy").registry)
    for metric in (metric for registry in registries for metric in registry.collect()):
        known |= (
            {metric.name, f"{metric.name}_total"} if metric.type == "counter" else {metric.name}
        )
    assert name in known


@pytest.mark.parametrize("name", quoted("event"))
def test_a_quoted_event_exists(name: str) -> None:
    assert name in set(EventKind)


@pytest.mark.parametrize("name", quoted("code"))
def test_a_quoted_code_exists(name: str) -> None:
    answers = {text for text in STRINGS if re.fullmatch("[a-z_]+", text)}
    assert name in codes() or name in answers


@pytest.mark.parametrize("name", quoted("status"))
def test_a_quoted_member_of_the_status_exists(name: str) -> None:
    assert any(name in program for program in PROGRAMS)


def test_exit_codes_are_those_of_the_errors() -> None:
    table = re.findall(r"^\| (\d+) \| [^|]*\| (.*) \|$", TEXT, re.MULTILINE)
    assert {int(number) for number, _ in table} == set(codes().values()) - {1}
    for number, cells in table:
        for code in re.findall(r"`code ([a-z_]+)`", cells):
            assert codes()[code] == int(number), code


def test_what_is_quoted_is_quoted_in_a_known_way() -> None:
    assert len(quoted("log")) > 20
    assert len(quoted("event")) > 8
    assert len(quoted("code")) > 20

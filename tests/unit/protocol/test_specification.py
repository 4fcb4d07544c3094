"""docs/PROTOCOL.md and docs/THREATS.md say what the code and the vectors say."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import shardcast.errors
import shardcast.protocol
from shardcast.errors import ShardcastError
from shardcast.protocol import limits
from shardcast.protocol.envelope import HEAD_PAYLOAD_TYPE
from shardcast.protocol.wire import (
    API_PREFIX,
    BLOB_CACHE_CONTROL,
    BLOB_CONTENT_TYPE,
    DEPTH_HEADER,
    ERROR_CACHE_CONTROL,
    HEAD_CACHE_CONTROL,
    NODE_HEADER,
    SIBLING_HEADER,
    SOURCE_HEADER,
)

ROOT: Final = Path(__file__).parents[3]
PROTOCOL: Final = (ROOT / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
THREATS: Final = (ROOT / "docs" / "THREATS.md").read_text(encoding="utf-8")


def test_examples_are_the_vectors() -> None:
    examples = re.findall(r"`(tests/vectors/[^`]+)`:\n\n```json\n(.*?)\n```\n", PROTOCOL, re.DOTALL)
    assert len(examples) == PROTOCOL.count("```json") == 10
    for path, text in examples:
        assert text.encode() == (ROOT / path).read_bytes(), path


def test_limits_table() -> None:
    listed = {
        name: int(value) for name, value in re.findall(r"\| `([A-Z_]+)` \| (\d+) \|", PROTOCOL)
    }
    defined = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert listed == {n: v for n, v in defined.items() if n not in {"KIB", "MIB"}}


def errors(kind: type[ShardcastError] = ShardcastError) -> Iterator[type[ShardcastError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from errors(below)


def test_exit_codes_table() -> None:
    for module in pkgutil.iter_modules(shardcast.protocol.__path__):
        importlib.import_module(f"shardcast.protocol.{module.name}")
    ours = (shardcast.errors.__name__, shardcast.protocol.__name__)
    defined = {(e.code, str(e.exit_code)) for e in errors() if e.__module__.startswith(ours)}
    listed = re.findall(r"^\| `([a-z_]+)` \| (\d+) \|", PROTOCOL, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == defined


def test_names_on_the_wire() -> None:
    for text in (
        f"`{API_PREFIX}`",
        HEAD_PAYLOAD_TYPE,
        f"Cache-Control: {BLOB_CACHE_CONTROL}\n",
        f"Content-Type: {BLOB_CONTENT_TYPE}\n",
        f"`Cache-Control: {HEAD_CACHE_CONTROL}`",
        f"`Cache-Control: {ERROR_CACHE_CONTROL}`",
        f"`{DEPTH_HEADER}`",
        f"`{NODE_HEADER}`",
        f"{SOURCE_HEADER}: disk",
        f"`{SIBLING_HEADER}: ",
    ):
        assert text in PROTOCOL, text


def test_refusals_in_the_order_of_the_specification_have_codes() -> None:
    section = PROTOCOL.split("## 5.")[1].split("## 6.")[0]
    codes = {error.code for error in errors()}
    for row in re.findall(r"^\| .* \| (`[^|]+`) \|$", section, re.MULTILINE):
        assert {code.strip("`") for code in row.split(", ")} <= codes


def test_every_test_that_threats_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", THREATS))
    assert len(named) > 30
    sources = [
        *(ROOT / "tests").glob("unit/protocol/*.py"),
        *(ROOT / "tests").glob("property/*.py"),
        *(ROOT / "tests").glob("unit/worker/*.py"),
        *(ROOT / "tests").glob("unit/publishing/*.py"),
        *(ROOT / "tests").glob("unit/store/*.py"),
        *(ROOT / "tests").glob("contract/*.py"),
        *(ROOT / "tests").glob("faults/*.py"),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert named <= set(re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))

"""Heavy imports stay at the rim: each module, imported alone, loads only what its place allows.

import-linter reads the source and sees every import, also those inside functions; these tests see
what importing really loads, through third parties too. New modules are found by themselves.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("import_probe.py")
PACKAGES = ("shardcast", "relay", "trainer_adapter")

# The rim: modules that may load torch or vllm, and that may be impossible to import without them.
RIM = frozenset(
    f"trainer_adapter.vllm.{name}"
    for name in (
        "kv_memory",
        "loader",
        "preparing",
        "reload",
        "shadow",
        "threads",
        "transfer",
        "tree",
    )
)

ENGINES = frozenset({"torch", "vllm"})
HEAVY = ENGINES | {"aiohttp", "asyncio", "numpy", "prometheus_client", "rich", "typer"}


class Loaded(NamedTuple):
    """What one import brought into a fresh process."""

    error: str | None
    modules: frozenset[str]

    def of(self, names: frozenset[str]) -> set[str]:
        """Returns those of `names` that were loaded."""
        return {name for name in names if name in self.modules}


def _modules() -> list[str]:
    names = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__":  # importing it would start the program
                names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


MODULES = _modules()
PURE = [m for m in MODULES if m in ("shardcast", "shardcast.errors", "shardcast.protocol")] + [
    m for m in MODULES if m.startswith("shardcast.protocol.")
]


@pytest.fixture(scope="module")
def loaded() -> dict[str, Loaded]:
    # Without coverage's hook, which would load modules of its own before ours.
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    env["PYTHONPATH"] = str(ROOT)
    probe = subprocess.run(
        [sys.executable, str(PROBE), *(module for module in MODULES if module not in RIM)],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return {
        module: Loaded(result["error"], frozenset(result.get("loaded", ())))
        for module, result in json.loads(probe.stdout).items()
    }


@pytest.mark.parametrize("module", [m for m in MODULES if m not in RIM])
def test_every_module_imports_alone_and_without_torch_or_vllm(
    loaded: dict[str, Loaded], module: str
) -> None:
    assert loaded[module].error is None
    assert not loaded[module].of(ENGINES)


def test_the_rim_names_only_modules_that_exist() -> None:
    assert set(MODULES) >= RIM


@pytest.mark.parametrize("module", PURE)
def test_the_protocol_loads_nothing_heavy(loaded: dict[str, Loaded], module: str) -> None:
    assert not loaded[module].of(HEAVY)


@pytest.mark.parametrize("module", PURE)
def test_the_protocol_loads_nothing_of_ours_but_itself_and_the_errors(
    loaded: dict[str, Loaded], module: str
) -> None:
    ours = {name for name in loaded[module].modules if name.split(".")[0] in PACKAGES}
    assert ours <= set(PURE)


def test_the_command_line_starts_without_the_relay_and_its_web_server(
    loaded: dict[str, Loaded],
) -> None:
    assert not loaded["shardcast.cli.main"].of(frozenset({"aiohttp", "relay", "trainer_adapter"}))


def test_a_worker_needs_no_web_framework_and_no_terminal(loaded: dict[str, Loaded]) -> None:
    unneeded = frozenset({"aiohttp", "numpy", "prometheus_client", "relay", "rich", "typer"})
    assert not loaded["shardcast.worker"].of(unneeded)


def test_only_a_relay_that_rebuilds_shards_loads_the_codec(loaded: dict[str, Loaded]) -> None:
    codec = frozenset({"shardcast.codec", "zstandard"})
    assert not loaded["relay.app"].of(codec)
    assert loaded["relay.materialize"].of(codec)


def test_a_relay_that_rebuilds_nothing_loads_no_codec(loaded: dict[str, Loaded]) -> None:
    codec = frozenset({"shardcast.codec", "shardcast.codec._kernel", "zstandard"})
    for module in ("relay.app", "shardcast.protocol", "shardcast.cli.main"):
        assert not loaded[module].of(codec), module


@pytest.mark.parametrize("package", [m for m in MODULES if (ROOT / m.replace(".", "/")).is_dir()])
def test_a_package_init_holds_a_docstring_and_at_most_a_version(package: str) -> None:
    init = ROOT / package.replace(".", "/") / "__init__.py"
    tree = ast.parse(init.read_text())
    assert ast.get_docstring(tree), f"{init} says nothing about its package"
    match tree.body[1:]:
        case [] | [ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant())]:
            pass
        case _:
            pytest.fail(f"{init} holds more than a docstring and a version")

"""One process that has imported vLLM for the whole session; engines are forked from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.checkpoints import Out
from tests.engine.engines import EngineHost, RunningEngine
from tests.engine.servers import ServerHost

_paths: list[str] = []


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    host = EngineHost(tmp_path_factory.mktemp("engines"))
    yield host
    host.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHost]:
    """The same for servers, which end with their tests."""
    host = ServerHost(tmp_path_factory.mktemp("servers"))
    yield host
    host.close()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Out:
    return Out(tmp_path_factory.mktemp("out"))


Start = Callable[..., RunningEngine]


@pytest.fixture(scope="module")
def start(host: EngineHost) -> Iterator[Start]:
    """Start engines that end with the module."""
    running: list[RunningEngine] = []

    def start(model: Path | str, **options: object) -> RunningEngine:
        engine = host.start(model, **options)
        running.append(engine)
        return engine

    yield start
    for engine in running:
        engine.end()


@pytest.fixture(scope="session")
def note_path() -> Callable[[str, RunningEngine], None]:
    """Remember which kernels an engine's layers and experts go through; the summary shows it."""

    def note(name: str, engine: RunningEngine) -> None:
        gemm = engine.state().gemm
        assert gemm, "no linear layer was recognised"
        _paths.append(f"{name}: {', '.join(f'{n} x {path}' for path, n in sorted(gemm.items()))}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows the matrix multiplications that the equality was proved for."""
    if _paths:
        terminalreporter.section("GEMM paths of linear layers and experts")
        for line in _paths:
            terminalreporter.write_line(line)

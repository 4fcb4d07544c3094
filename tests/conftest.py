"""What every test shares: hypothesis profiles, nothing left behind, and no silent skips where interop is required."""

import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

# Deterministic and bounded, so that a red run stays red. `--hypothesis-profile=explore` looks
# further, with fresh randomness.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("ci")


# They need torch and vLLM, which are no part of the development environment.
collect_ignore = [] if os.environ.get("SHARDCAST_ENGINE_TESTS") else ["engine"]
if not os.environ.get("SHARDCAST_SGLANG_TESTS"):  # and these an environment of SGLang's own
    collect_ignore.append("engine_sglang")


def pytest_report_header() -> str | None:
    """Says which tests are not among these, and how to run them."""
    if "engine" in collect_ignore:
        return "tests/engine needs a real engine (vLLM) and is left out here: make test-engine"
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector look only at what tests make: a look takes milliseconds then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A socket, a file or a task that a test leaves unclosed fails that test, not a later one."""
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skipped interop test into a failure if SHARDCAST_REQUIRE_INTEROP is set."""
    report = yield
    required = bool(os.environ.get("SHARDCAST_REQUIRE_INTEROP"))
    if required and report.skipped and item.get_closest_marker("interop") is not None:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but interop is required: {report.longrepr}"
    return report

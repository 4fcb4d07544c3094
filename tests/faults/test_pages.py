"""A page in place of a head (a captive portal, a proxy's apology): it passes, and it is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcast.errors import MalformedError
from shardcast.inspection import inspect_run
from shardcast.origin_client import OriginClient
from shardcast.store.store import Store
from shardcast.uploader import amend_remote
from tests.contract.made import signer
from tests.fakes import Action, FakeRun, Request, RunServer, response
from tests.tree import contents_of
from tests.unit.worker.conftest import with_config
from tests.unit.worker.test_pull import worker

pytestmark = pytest.mark.fault(9)

PAGE: list[Action] = [response(200, b"<html>log in first</html>", {"Content-Type": "text/html"})]


@pytest.fixture
def run() -> FakeRun:
    found = FakeRun()
    found.publish({"model": bytes(range(256)) * 2048, "config.json": b"{}"})
    return found


@pytest.fixture
def server(run: FakeRun) -> Iterator[RunServer]:
    with RunServer(run) as serving:
        yield serving


def test_a_pull_waits_until_the_page_is_gone(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    asked: list[Request] = []

    def portal(request: Request) -> list[Action] | None:
        asked.append(request)
        return PAGE if len(asked) < 4 else None

    server.head_fault = portal
    update = worker(tmp_path / "out", run, server, config=with_config(give_up_after_s=30)).pull()
    assert contents_of(update.path) == run.files[1]


def test_a_page_that_stays_is_what_the_error_says(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    server.head_fault = lambda request: PAGE
    with pytest.raises(MalformedError, match="malformed") as caught:
        worker(tmp_path / "out", run, server, config=with_config(give_up_after_s=0.3)).pull()
    assert caught.value.source == server.url


def test_a_version_named_by_its_manifest_needs_no_head(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    assert run.head is not None
    server.head_fault = lambda request: PAGE
    pull = worker(tmp_path / "out", run, server, config=with_config(give_up_after_s=30))
    assert contents_of(pull.pull(manifest=run.head.versions[0].manifest).path) == run.files[1]


def test_those_who_ask_once_name_who_sent_it(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    server.head_fault = lambda request: PAGE
    with pytest.raises(MalformedError) as inspected:
        inspect_run(server.url, "policy", [], 0)
    assert inspected.value.source == server.url
    store = Store(tmp_path / "memory")
    memory = store.run("policy", create=True)
    client = OriginClient(server.url, "policy", "token")
    with pytest.raises(MalformedError) as amended:
        amend_remote(memory, client, [signer()], lambda: 0, lambda head, issue: head)
    assert amended.value.source == server.url
    client.close()
    store.close()

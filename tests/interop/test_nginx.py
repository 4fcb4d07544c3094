"""Stock nginx with the recipe of deploy/nginx is a relay for twenty followers."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest import nginx
from loadtest.documents import get, head_of, head_url, survey, wait_head
from loadtest.recorder import Recorder, Request
from tests.interop.test_curl import answer
from tests.tree import MiB, Tree, assert_same_files, need, small_checkpoint, tree, wait_all

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

FOLLOWERS = 20
NEWS_MS = 2000.0
TIMEOUT_S = 120.0


@dataclass
class Site:
    """origin <- recorder (what nginx asks) <- nginx <- recorder (what followers ask)."""

    made: Tree
    upstream: Recorder
    front: Recorder
    root: Path


@contextmanager
def site(root: Path) -> Iterator[Site]:
    need(["nginx"])
    with tree(root / "tree") as made:
        origin = made.origin()
        with Recorder(origin.url) as upstream:
            cache = nginx.caching_relay(made.processes, root / "nginx", upstream.url)
            with Recorder(cache.url) as front:
                yield Site(made, upstream, front, root)


def blobs(request: Request) -> bool:
    return request.is_blob


def test_twenty_followers_cost_the_origin_each_blob_once(tmp_path: Path) -> None:
    first = small_checkpoint(tmp_path / "first", size=2 * MiB)
    second = small_checkpoint(tmp_path / "second", size=2 * MiB, seed=1)
    with site(tmp_path) as here:
        made = here.made
        published = made.publish(first)
        workers = [made.follow(f"worker{n}", sources=[here.front.url]) for n in range(FOLLOWERS)]
        for worker in workers:
            worker.wait_committed(published.version, timeout=TIMEOUT_S)
            assert_same_files(first, worker.current)
        asked = [request.target for request in here.upstream.requests(blobs)]
        assert len(asked) == len(set(asked)), "a cold blob was fetched twice"
        assert len(here.front.requests(blobs)) >= FOLLOWERS * len(asked)

        # Warm: newcomers cost the origin nothing.
        out = tmp_path / "newcomer"
        made.pull(out, sources=[here.front.url])
        assert_same_files(first, (out / "current").resolve(strict=True))
        assert len(here.upstream.requests(blobs)) == len(asked)

        # News: everyone waits in a long poll; the first blob request shows that it arrived.
        before = len(here.front.requests(blobs))
        published = made.publish(second)
        news = here.front.wait_request(blobs, timeout=TIMEOUT_S, count=before + 1)
        assert news.unix_ms - published.event["t"] < NEWS_MS
        wait_all(workers, published.version, timeout=TIMEOUT_S)
        asked = [request.target for request in here.upstream.requests(blobs)]
        assert len(asked) == len(set(asked))


def test_twenty_long_polls_cost_one_and_all_hear_within_two_seconds(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        made = here.made
        first = made.publish(small_checkpoint(tmp_path / "first", size=MiB))
        sequence = wait_head(here.front.url, made.run)["sequence"]
        url = f"{head_url(here.front.url, made.run)}?after={sequence}&wait=25"
        heard: list[float] = []
        lock = threading.Lock()

        def poll(_number: int) -> int:
            head = head_of(get(url))
            with lock:
                heard.append(time.time() * 1000)
            return int(head["version"])

        def polls(request: Request) -> bool:
            return f"after={sequence}" in request.target

        with ThreadPoolExecutor(FOLLOWERS) as pool:
            waiting = [pool.submit(poll, number) for number in range(FOLLOWERS)]
            here.front.wait_request(polls, timeout=TIMEOUT_S, count=FOLLOWERS)
            here.upstream.wait_request(polls, timeout=TIMEOUT_S)
            published = made.publish(small_checkpoint(tmp_path / "second", size=MiB, seed=1))
            versions = {job.result(timeout=TIMEOUT_S) for job in waiting}
        assert versions == {published.version}
        assert published.version > first.version
        assert len(here.upstream.requests(polls)) == 1
        assert max(heard) - published.event["t"] < NEWS_MS


def test_ranges_and_head_work_through_the_cache(tmp_path: Path) -> None:
    """nginx answers a range of a cached blob by itself, with our ETag."""
    need(["curl"])
    with site(tmp_path) as here:
        made = here.made
        made.publish(small_checkpoint(tmp_path / "first", size=MiB))
        shards = survey(here.front.url, made.run).shards
        digest = shards[len(shards) // 2]
        url = f"{here.front.url}/v1/{made.run}/blobs/{digest}.bin"
        for _pass in ("cold", "warm"):
            status, headers = answer(url, tmp_path / "piece", "--range", "100-199")
            assert (status, headers["content-length"]) == (206, "100")
            assert headers["etag"] == f'"blake3-{digest}"'
            status, headers = answer(url, tmp_path / "head", "--head")
            assert status == 200
        asked = here.upstream.requests(lambda request: digest in request.target)
        assert [request.method for request in asked] == ["GET"]

"""The recorder forwards bytes untouched and sees every request."""

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadtest.http_wire import WireError, parse_head
from loadtest.rawclient import read_over
from loadtest.recorder import Recorder
from loadtest.scripted_parent import ScriptedParent

BLOB = "ab" * 32


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    blobs = tmp_path / "v1" / "policy" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{BLOB}.bin").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def test_requests_are_counted_and_bytes_are_untouched(exported: Path) -> None:
    with (
        ScriptedParent(exported, "policy", victim="", pause_at=0) as parent,
        Recorder(parent.url) as recorder,
    ):
        url = f"{recorder.url}/v1/policy/blobs/{BLOB}.bin"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == bytes(range(256)) * 4096
        assert read_over([url] * 10, 3) == 10 * 256 * 4096
        assert len(recorder.requests(lambda request: request.is_blob)) == 11
        assert recorder.requests()[0].method == "GET"
        with pytest.raises(TimeoutError, match="11 of 12"):
            recorder.wait_request(lambda _request: True, timeout=0.05, count=12)


def test_a_paused_blob_goes_on_when_it_is_released(exported: Path) -> None:
    with ScriptedParent(exported, "policy", victim=BLOB, pause_at=1000) as parent:
        url = f"{parent.url}/v1/policy/blobs/{BLOB}.bin"
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(read_over, [url], 1)
            assert parent.paused.wait(10)
            assert parent.sent == []
            assert not job.done()
            parent.released.set()
            assert job.result(10) == 256 * 4096
        parent.wait_sent([BLOB], timeout=10)


def test_closing_breaks_waiting_connections(exported: Path) -> None:
    with ScriptedParent(exported, "policy", victim=BLOB, pause_at=1000) as parent:
        recorder = Recorder(parent.url)
        url = f"{recorder.url}/v1/policy/blobs/{BLOB}.bin"
        failed = threading.Event()

        def read() -> None:
            with pytest.raises((OSError, WireError)):
                read_over([url], 1)
            failed.set()

        reader = threading.Thread(target=read)
        with recorder:
            reader.start()
            assert parent.paused.wait(10)
        assert failed.wait(10)
        reader.join()


def test_a_head_without_end_is_refused() -> None:
    assert parse_head(b"GET / HTTP/1.1\r\nHost:") is None
    with pytest.raises(WireError, match="64 KiB"):
        parse_head(b"x" * 70_000)

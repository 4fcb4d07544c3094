"""Any static file server is a relay: `python -m http.server` over an export."""

import sys
from pathlib import Path

import pytest
from safetensors import deserialize

from loadtest.processes import free_port, wait_for_port
from tests.tree import Tree, assert_same_files, last, small_checkpoint, tree

pytestmark = [pytest.mark.interop, pytest.mark.timeout(180)]

TIMEOUT_S = 60.0


def serve(made: Tree, directory: Path) -> str:
    port = free_port()
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    process = made.processes.start([*argv, "--directory", str(directory)], name="http-server")
    wait_for_port(process, port, timeout=TIMEOUT_S)
    return f"http://127.0.0.1:{port}"


def tensors_of(path: Path) -> dict[str, dict[str, object]]:
    """Name to type, shape and bytes, as the safetensors library reads the file."""
    return dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]


def test_pull_from_python_http_server(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "source")
    with tree(tmp_path / "tree") as made:
        published = made.publish(source)
        url = serve(made, made.export(tmp_path / "exported"))
        out = tmp_path / "out"
        event = last(made.pull(out, sources=[url]), "committed")
        assert event["manifest"] == published.event["manifest"]
        assert_same_files(source, (out / "current").resolve(strict=True))


def test_a_follower_of_a_static_server_polls_for_news(tmp_path: Path) -> None:
    """It cannot hold a long poll, so the follower asks again by itself."""
    with tree(tmp_path / "tree") as made:
        first = made.publish(small_checkpoint(tmp_path / "first"))
        exported = made.export(tmp_path / "exported")
        worker = made.follow("worker", sources=[serve(made, exported)])
        worker.wait_committed(first.version, timeout=TIMEOUT_S)
        second = made.publish(small_checkpoint(tmp_path / "second", seed=1))
        made.export(exported)
        worker.wait_committed(second.version, timeout=TIMEOUT_S)
        assert_same_files(tmp_path / "second", worker.current)


def test_a_relay_below_a_static_server(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "source")
    with tree(tmp_path / "tree") as made:
        made.publish(source)
        url = serve(made, made.export(tmp_path / "exported"))
        relay = made.relay("relay", parents=[url])
        out = tmp_path / "out"
        made.pull(out, sources=[relay.url])
        assert_same_files(source, (out / "current").resolve(strict=True))


def test_safetensors_loads_what_was_pulled(tmp_path: Path) -> None:
    """Tensor by tensor: same name, type, shape and bytes as in the source."""
    source = small_checkpoint(tmp_path / "source")
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        made.publish(source)
        out = tmp_path / "out"
        made.pull(out, sources=[origin.url])
        names = sorted(path.name for path in source.glob("*.safetensors"))
        assert len(names) == 3
        for name in names:
            theirs = tensors_of(source / name)
            ours = tensors_of(out / "current" / name)
            assert theirs
            assert ours == theirs

"""The harness itself: it notices what it is there to notice, and undoes what it did."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.wire_client import eventually, http
from tests.fakes import FakeRun
from tests.faults.criteria import Verdict, criteria, directories, published
from tests.faults.machine import (
    Networks,
    command,
    cut_tail,
    fill_up,
    flip_bit,
    read_only,
    small_tmpfs,
    stopped,
    zero_tail,
)
from tests.faults.upstream import Body, Head, Play, Raw, Shut, Upstream, cut_after, status
from tests.faults.world import needed_bytes, small_version


def waived(verdict: Verdict) -> None:
    for criterion in "bcde":
        verdict.waive(criterion, "the harness is tested")


def a_version(root: Path, run: FakeRun) -> Path:
    directory = root / "versions" / "000001"
    for name, data in run.files[1].items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.publish(small_version())
    return run


# --- criteria ---------------------------------------------------------------------------------


def test_a_right_version_and_a_right_blob_pass(tmp_path: Path, run: FakeRun) -> None:
    digest, data = next(iter(run.blobs.items()))
    with criteria(published(run)) as verdict:
        verdict.watch(tmp_path)
        a_version(tmp_path / "elsewhere", run).parent.rename(tmp_path / "versions")
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / ".x.tmp").write_bytes(data)
        (tmp_path / "blobs" / ".x.tmp").rename(tmp_path / "blobs" / f"{digest}.bin")
        waived(verdict)


@pytest.mark.parametrize("what", ["flipped", "missing", "more", "unknown", "blob", "current"])
def test_what_is_wrong_under_a_final_name_is_noticed(
    tmp_path: Path, run: FakeRun, what: str
) -> None:
    directory = a_version(tmp_path, run)

    def spoil() -> None:
        if what == "flipped":
            flip_bit(directory / "config.json", 3)
        elif what == "missing":
            (directory / "empty.txt").unlink()
        elif what == "more":
            (directory / "more.txt").write_bytes(b"")
        elif what == "unknown":
            directory.rename(tmp_path / "versions" / "000002")
        elif what == "blob":
            (tmp_path / "blobs").mkdir()
            (tmp_path / "blobs" / ("0" * 64 + ".bin")).write_bytes(b"zero")
        else:
            (tmp_path / "current").symlink_to("versions/000009")

    def case() -> None:
        with criteria(published(run)) as verdict:
            verdict.watch(tmp_path)
            spoil()
            waived(verdict)

    with pytest.raises(AssertionError, match=r"config|empty|more|nobody|bin|not there"):
        case()


def test_a_criterion_that_nobody_judged_fails_the_case(tmp_path: Path, run: FakeRun) -> None:
    def case() -> None:
        with criteria(published(run)) as verdict:
            verdict.watch(tmp_path)
            verdict.named(["error: http://x: it is broken"], "http://x", "broken")
            verdict.waive("c", "nobody else is there")
            verdict.fetched(10, 8, failures=1)

    with pytest.raises(AssertionError, match=r"not judged: \['e'\]"):
        case()


def test_each_criterion_can_fail(tmp_path: Path, run: FakeRun) -> None:
    verdict = Verdict(published(run))
    with pytest.raises(AssertionError, match="nobody said"):
        verdict.named(["error: http://y: broken"], "http://x")
    out = tmp_path / "out"
    a_version(out, run)
    (out / "current").symlink_to("versions/000001")
    with pytest.raises(AssertionError, match="troubled"):
        verdict.unaffected(out, published(run), 1, ["source failed"])
    with pytest.raises(AssertionError, match="again after 1"):
        verdict.fetched(8 + 262_145, 8, failures=1)
    with pytest.raises(AssertionError, match="who sent"):
        verdict.fetched(7, 8, failures=1)
    with pytest.raises(AssertionError, match="wrong blob"):
        verdict.served("0" * 64, b"")
    with pytest.raises(FileNotFoundError):
        verdict.recovered(tmp_path / "nowhere", 1)


def test_truth_of_directories(tmp_path: Path, run: FakeRun) -> None:
    directory = a_version(tmp_path, run)
    assert directories({1: directory})(1) == published(run)(1)
    assert directories({1: directory})(2) is None


# --- the scripted upstream --------------------------------------------------------------------


async def test_scripts_say_every_byte_and_bytes_are_counted(run: FakeRun) -> None:
    digest = run.shard_digests(1)[0]
    path, data = f"/v1/policy/blobs/{digest}.bin", run.blobs[digest]
    on = frozenset({digest})
    with Upstream(run) as upstream:
        upstream.play(
            Play(cut_after(1000), on=on),
            Play(status(503, b"later", Retry_After="1"), on=on, first=1),
            Play((Head(), Body(stop=-1), Raw(b"!"), Shut()), on=on, first=2),
        )
        cut = await http(upstream.url, path)
        assert (cut.whole, cut.body) == (False, data[:1000])
        busy = await http(upstream.url, path)
        assert (busy.status, busy["Retry-After"], busy.body) == (503, "1", b"later")
        part = await http(upstream.url, path, headers={"Range": "bytes=100-"})
        assert part.status == 206
        assert part["Content-Range"] == f"bytes 100-{len(data) - 1}/{len(data)}"
        assert part.body == data[100:-1] + b"!"
        assert (await http(upstream.url, path)).body == data
        # A reader may have its bytes a moment before they are counted.
        counted = [1000, 5, len(data) - 100, len(data)]
        await eventually(lambda: [answer.body for answer in upstream.answers] == counted)
        assert upstream.failures == 3
        assert upstream.sent_for(run) < needed_bytes(run) * 3


async def test_a_healed_upstream_is_honest(run: FakeRun) -> None:
    digest = run.shard_digests(1)[0]
    path = f"/v1/policy/blobs/{digest}.bin"
    with Upstream(run) as upstream:
        upstream.play(Play(status(404), times=None))
        assert (await http(upstream.url, path)).status == 404
        assert upstream.hit.is_set()
        upstream.heal()
        assert (await http(upstream.url, path)).status == 200


# --- the machine ------------------------------------------------------------------------------


def test_damage_to_files_changes_just_that(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(16)))
    before = os.stat(path).st_mtime_ns
    flip_bit(path, 3)
    assert path.read_bytes() == bytes([0, 1, 2, 2, *range(4, 16)])
    zero_tail(path, 2)
    assert path.read_bytes()[-3:] == b"\x0d\0\0"
    assert os.stat(path).st_mtime_ns == before
    cut_tail(path, 10)
    assert path.read_bytes() == bytes([0, 1, 2, 2, 4, 5])


def test_a_small_file_system_is_small_and_goes_away(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", 2 << 20) as disk:
        ballast = fill_up(disk)
        with pytest.raises(OSError, match="No space"), open(disk / "x", "wb", buffering=0) as file:
            file.write(b"x")
        ballast.unlink()
        with read_only(disk), pytest.raises(OSError, match="Read-only"):
            (disk / "y").write_bytes(b"y")
        (disk / "y").write_bytes(b"y")
    assert not os.path.ismount(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_stopped_process_goes_on_afterwards() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        with stopped(child.pid):
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
        child.communicate(b"\n", timeout=10)
        assert child.returncode == 0


def test_a_namespace_is_reached_cut_off_and_removed() -> None:
    script = (
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1) as s:\n"
        "    sys.exit(0 if s.recv(2) == b'ok' else 3)\n"
    )
    with Networks() as networks, socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(10)
        space = networks.namespace()
        space.limit("8mbit")
        port = str(server.getsockname()[1])
        argv = space.argv(sys.executable, "-c", script, space.here, port)
        with subprocess.Popen(argv) as child:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"ok")
            assert child.wait(10) == 0
        for cut in (space.dropped, space.blackholed, space.unplugged):
            with cut():
                done = subprocess.run(argv, check=False, timeout=20, capture_output=True)
                assert done.returncode == 1, cut
        assert space.name in command("ip", "netns", "list")
    assert space.name not in command("ip", "netns", "list")
    assert space.device not in command("ip", "link")

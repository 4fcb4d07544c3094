"""Stock curl and b3sum agree with our origin about every blob and every header."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.documents import Reach, blob_url, head_of, head_url, survey, wait_head
from tests.tree import Tree, need, small_checkpoint, tree

pytestmark = [pytest.mark.interop, pytest.mark.timeout(180)]

DIGEST = re.compile(r"[0-9a-f]{64}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tree, str]]:
    """An origin that serves one version."""
    need(["curl", "b3sum"])
    root = tmp_path_factory.mktemp("curl")
    with tree(root / "tree") as made:
        made.publish(small_checkpoint(root / "source"))
        url = made.origin().url
        wait_head(url, made.run)
        yield made, url


@pytest.fixture(scope="module")
def found(served: tuple[Tree, str]) -> Reach:
    made, url = served
    return survey(url, made.run)


@pytest.fixture(scope="module")
def shard(found: Reach) -> str:
    """A shard out of the middle, so a whole one, of weights."""
    return found.shards[len(found.shards) // 2]


def curl(*arguments: str) -> str:
    argv = ["curl", "--silent", "--show-error", "--max-time", "30", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(url: str, body: Path, *options: str) -> tuple[int, dict[str, str]]:
    """Status and headers (lowercase names) of a request whose body goes to a file."""
    body.unlink(missing_ok=True)
    text = curl("--dump-header", "-", "--output", str(body), *options, url)
    first, *lines = text.strip().splitlines()
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


def b3sum(*paths: Path) -> list[str]:
    done = subprocess.run(
        ["b3sum", "--no-names", *paths], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_every_blob_has_the_digest_in_its_name(
    served: tuple[Tree, str], found: Reach, tmp_path: Path
) -> None:
    made, url = served
    digests = list(found)
    assert len(found.shards) > 30
    config = tmp_path / "curl.config"
    config.write_text(
        "\n".join(
            f'url = "{blob_url(url, made.run, d)}"\noutput = "{tmp_path / d}"' for d in digests
        )
    )
    curl("--fail", "--config", str(config))
    assert b3sum(*(tmp_path / digest for digest in digests)) == digests


def test_the_shards_are_the_files_in_order(
    served: tuple[Tree, str], found: Reach, tmp_path: Path
) -> None:
    """Every source file is the concatenation of its shards, by the layout that curl fetched."""
    made, url = served
    layout = next(
        document
        for document in (json.loads(curl(blob_url(url, made.run, d))) for d in found.documents)
        if document["format"] == "shardcast.layout/1"
    )
    size = layout["shard_bytes"]
    counted = sum(-(-file["bytes"] // size) for file in layout["files"])
    head = head_of(curl(head_url(url, made.run)).encode())
    assert head["versions"][0]["bytes"] == sum(file["bytes"] for file in layout["files"])
    assert len(found.shards) <= counted  # equal shards have one name


def test_a_blob_answers_as_the_protocol_says(
    served: tuple[Tree, str], shard: str, tmp_path: Path
) -> None:
    made, url = served
    digest = shard
    status, headers = answer(blob_url(url, made.run, digest), tmp_path / "body")
    assert status == 200
    assert headers["content-length"] == str((tmp_path / "body").stat().st_size)
    assert headers["accept-ranges"] == "bytes"
    assert headers["etag"] == f'"blake3-{digest}"'
    assert headers["cache-control"] == "public, max-age=31536000, immutable, no-transform"
    assert headers["content-type"] == "application/octet-stream"
    assert headers["shardcast-source"] == "disk"
    assert not {"vary", "content-encoding", "transfer-encoding", "set-cookie"} & headers.keys()


def test_head_method_answers_like_get_without_a_body(
    served: tuple[Tree, str], shard: str, tmp_path: Path
) -> None:
    made, url = served
    target = blob_url(url, made.run, shard)
    _status, by_get = answer(target, tmp_path / "get")
    status, by_head = answer(target, tmp_path / "head", "--head")
    assert status == 200
    for name in ("content-length", "etag", "accept-ranges", "cache-control", "content-type"):
        assert by_head[name] == by_get[name]


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("0-99", 0, 100), ("1000-1999", 1000, 2000), ("-500", -500, None), ("5000-", 5000, None)],
)
def test_a_range_is_those_bytes(
    served: tuple[Tree, str], shard: str, tmp_path: Path, asked: str, start: int, stop: int | None
) -> None:
    made, url = served
    target = blob_url(url, made.run, shard)
    answer(target, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    status, headers = answer(target, tmp_path / "piece", "--range", asked)
    piece = (tmp_path / "piece").read_bytes()
    begin, end, _step = slice(start, stop).indices(len(whole))
    assert status == 206
    assert piece == whole[start:stop]
    assert headers["content-range"] == f"bytes {begin}-{end - 1}/{len(whole)}"
    assert headers["content-length"] == str(len(piece))
    assert headers["etag"] == f'"blake3-{shard}"'


def test_a_range_behind_the_end_is_416(
    served: tuple[Tree, str], shard: str, tmp_path: Path
) -> None:
    made, url = served
    target = blob_url(url, made.run, shard)
    answer(target, tmp_path / "whole")
    size = (tmp_path / "whole").stat().st_size
    status, headers = answer(target, tmp_path / "body", "--range", f"{size}-")
    assert status == 416
    assert headers["content-range"] == f"bytes */{size}"


def test_if_range_with_another_etag_gets_everything(
    served: tuple[Tree, str], shard: str, tmp_path: Path
) -> None:
    made, url = served
    target = blob_url(url, made.run, shard)
    same = f'If-Range: "blake3-{shard}"'
    other = f'If-Range: "blake3-{"0" * 64}"'
    assert answer(target, tmp_path / "a", "--range", "0-9", "--header", same)[0] == 206
    assert answer(target, tmp_path / "b", "--range", "0-9", "--header", other)[0] == 200


def test_curl_resumes_a_broken_download(
    served: tuple[Tree, str], shard: str, tmp_path: Path
) -> None:
    made, url = served
    target = blob_url(url, made.run, shard)
    answer(target, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    broken = tmp_path / "broken"
    broken.write_bytes(whole[:12345])
    curl("--fail", "--continue-at", "-", "--output", str(broken), target)
    assert b3sum(broken) == [shard]


def test_the_head_answers_as_the_protocol_says(served: tuple[Tree, str], tmp_path: Path) -> None:
    made, url = served
    status, headers = answer(head_url(url, made.run), tmp_path / "head")
    assert status == 200
    assert headers["cache-control"] == "public, max-age=1"
    assert headers["etag"] == f'"{b3sum(tmp_path / "head")[0]}"'
    assert headers.get("shardcast-depth", "0") == "0"
    assert head_of((tmp_path / "head").read_bytes())["run"] == made.run


@pytest.mark.parametrize("path", ["v1/policy/blobs/" + "0" * 64 + ".bin", "v1/other/head"])
def test_what_is_not_there_is_404_and_not_stored(
    served: tuple[Tree, str], tmp_path: Path, path: str
) -> None:
    _made, url = served
    status, headers = answer(f"{url}/{path}", tmp_path / "body")
    assert status == 404
    assert headers["cache-control"] == "no-store"


def test_digests_look_like_digests(found: Reach) -> None:
    assert all(DIGEST.fullmatch(digest) for digest in found)

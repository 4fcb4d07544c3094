"""Digests against the official BLAKE3 vectors and another implementation."""

import shutil
import subprocess
from pathlib import Path

import pytest
from blake3 import blake3

from shardcast.errors import MalformedError
from shardcast.protocol.digest import (
    digest_of,
    is_digest,
    pack_digests,
    parse_digest,
    unpack_digests,
)

# github.com/BLAKE3-team/BLAKE3, test_vectors/test_vectors.json: byte i of the input is i mod 251.
OFFICIAL = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.mark.parametrize("size", OFFICIAL)
def test_official_vectors(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    assert digest_of(data) == OFFICIAL[size]
    assert digest_of(memoryview(bytearray(data))) == OFFICIAL[size]


@pytest.mark.interop
def test_b3sum_agrees(tmp_path: Path) -> None:
    b3sum = shutil.which("b3sum")
    if b3sum is None:
        pytest.skip("b3sum is not installed")
    path = tmp_path / "data"
    path.write_bytes(b"shardcast" * 100_000)
    run = subprocess.run([b3sum, "--no-names", path], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digest_of(path.read_bytes())


@pytest.mark.parametrize(
    "text",
    ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n", " " + "a" * 63, "\u0661" * 64],
)
def test_what_is_no_digest(text: str) -> None:
    assert not is_digest(text)
    with pytest.raises(MalformedError, match="blob name is not 64 lowercase hex digits"):
        parse_digest(text, what="blob name")
    with pytest.raises(MalformedError):
        pack_digests([text])


def test_a_digest_is_itself() -> None:
    assert is_digest("0123456789abcdef" * 4)
    assert parse_digest("ab" * 32) == "ab" * 32


def test_packing() -> None:
    first, second = blake3(b"1"), blake3(b"2")
    packed = first.digest() + second.digest()
    assert unpack_digests(packed) == (first.hexdigest(), second.hexdigest())
    assert pack_digests([first.hexdigest(), second.hexdigest()]) == packed
    assert unpack_digests(b"") == ()
    with pytest.raises(MalformedError, match="33 bytes"):
        unpack_digests(packed[:33])

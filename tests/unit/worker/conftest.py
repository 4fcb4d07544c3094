"""What the worker's tests share: bounds that make faults quick, and a run to pull."""

from __future__ import annotations

import random
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcast.cancel import Cancel
from shardcast.config import NetConfig
from tests.fakes import KIB, FakeRun, RunServer

QUICK = NetConfig(
    connect_timeout_s=1.0,
    read_timeout_s=0.4,
    header_timeout_s=0.6,
    minimum_rate_bytes_per_s=20_000,
    rate_window_s=0.3,
    backoff_first_s=0.005,
    backoff_cap_s=0.05,
    retry_after_cap_s=0.3,
    give_up_after_s=1.5,
    head_wait_s=20,
    head_poll_s=0.02,
    head_grace_s=0.3,
    lag_s=0.1,
    silent_s=0.2,
)
"""A tenth of the real patience and less."""


def with_config(**changes: float) -> NetConfig:
    """QUICK, with something else."""
    return replace(QUICK, **changes)  # type: ignore[arg-type]


def some_bytes(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress and differ by seed."""
    return random.Random(seed).randbytes(size)


@pytest.fixture
def cancel() -> Cancel:
    return Cancel()


@pytest.fixture
def files() -> dict[str, bytes]:
    """A checkpoint: 9 shards of 256 KiB and less, in a tree with an empty file."""
    return {
        "model-00001-of-00002.safetensors": some_bytes(1024 * KIB, 1),
        "model-00002-of-00002.safetensors": some_bytes(700 * KIB + 1, 2),
        "config.json": b'{"model_type": "test"}',
        "tokenizer/vocab.txt": b"a\nb\n",
        "empty.txt": b"",
    }


@pytest.fixture
def run(files: dict[str, bytes]) -> FakeRun:
    run = FakeRun()
    run.publish(files, step=10)
    return run


@pytest.fixture
def server(run: FakeRun) -> Iterator[RunServer]:
    with RunServer(run) as server:
        yield server


@pytest.fixture
def servers(run: FakeRun) -> Iterator[tuple[RunServer, RunServer]]:
    with RunServer(run) as first, RunServer(run) as second:
        yield first, second


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", path, "-out", path.with_suffix(".crt"), "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with path.open("ab") as both:
        both.write(path.with_suffix(".crt").read_bytes())
    return path


def serving(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate.with_suffix(".crt")))

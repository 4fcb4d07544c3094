"""Booting while ``current`` moves: one version for the configuration and for every rank, or an error."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardcast.errors import EngineRefusedError, NotFoundError
from shardcast.store.run import RunStore
from tests.unit.ranks.test_rank import Words
from tests.unit.ranks.versions import publish
from trainer_adapter.checkpoint import CONFIG, Checkpoint
from trainer_adapter.vllm.agreement import Agreement, Alone
from trainer_adapter.vllm.http import Endpoints
from trainer_adapter.vllm.pinning import agree_on, check_server, check_start, pin_boots, resolve
from trainer_adapter.vllm.ranks import Target
from trainer_adapter.vllm.started import KEPT

RANKS = 3
GENERATION = "generation_config.json"


def current(scratch: Path) -> Path:
    return scratch / "out" / "current"


def move(scratch: Path, target: Target) -> None:
    """Let ``current`` lead to a version."""
    RunStore(scratch / "out", "policy").switch_current(target.version)


def on_every_rank(work: Callable[[Agreement], Target]) -> list[Target | Exception]:
    """Return what came of it on each rank."""
    words, barrier = [""] * RANKS, threading.Barrier(RANKS)

    def run(number: int) -> Target | Exception:
        try:
            return work(Words(number, words, barrier))
        except NotFoundError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


@pytest.mark.parametrize("pinned", [False, True])
def test_all_ranks_load_what_the_first_looked_up(tmp_path: Path, pinned: bool) -> None:
    one, two = publish(tmp_path, 1), publish(tmp_path, 2)
    move(tmp_path, two if pinned else one)

    def look_up() -> Target:
        found = resolve(current(tmp_path), one.digest if pinned else None)
        move(tmp_path, two)
        return found

    found = on_every_rank(lambda ranks: agree_on(ranks, look_up, current(tmp_path)))

    assert found == [one] * RANKS
    assert current(tmp_path).resolve() == Path(two.path)


def test_only_the_first_rank_looks_it_up(tmp_path: Path) -> None:
    target = publish(tmp_path, 1)
    looked: list[Path] = []

    def look_up() -> Target:
        looked.append(current(tmp_path))
        return resolve(current(tmp_path), None)

    on_every_rank(lambda ranks: agree_on(ranks, look_up, current(tmp_path)))
    assert len(looked) == 1
    assert agree_on(Alone(), look_up, current(tmp_path)) == target


@pytest.mark.parametrize("said", ["version 7 is not complete", ""])
def test_what_the_first_rank_finds_wrong_is_every_rank_s_error(tmp_path: Path, said: str) -> None:
    def look_up() -> Target:
        raise ValueError(said)

    found = on_every_rank(lambda ranks: agree_on(ranks, look_up, current(tmp_path)))

    assert [type(one) for one in found] == [NotFoundError] * RANKS
    assert {str(one) for one in found} == {said or "ValueError"}


def test_a_rank_on_whose_host_the_version_is_not_says_so(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    elsewhere = Target(run="policy", version=9, digest="9" * 64, path="/elsewhere/versions/000009")

    found = on_every_rank(lambda ranks: agree_on(ranks, lambda: elsewhere, current(tmp_path)))

    assert found[0] == elsewhere
    for one in found[1:]:
        assert isinstance(one, NotFoundError)
        assert f"no version with manifest {elsewhere.digest}" in str(one)


# --- before vLLM reads anything -------------------------------------------------------------------


@dataclass
class Arguments:
    """As vLLM's ``EngineArgs``: making a configuration reads the model's path."""

    model: str
    load_format: str = "shardcast"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    meanwhile: Callable[[], None] = lambda: None

    def create_engine_config(self, usage: str, *, headless: bool = False) -> dict[str, Any]:
        self.meanwhile()
        return {"usage": usage, "headless": headless, "loading": self.model_loader_extra_config}


@pytest.fixture
def kind() -> type[Arguments]:
    class Own(Arguments):
        def create_engine_config(self, usage: str, *, headless: bool = False) -> dict[str, Any]:
            return super().create_engine_config(usage, headless=headless)

    pin_boots(Own)
    return Own


def test_the_version_is_pinned_before_the_configuration_is_read(
    tmp_path: Path, kind: type[Arguments]
) -> None:
    one, two = publish(tmp_path, 1), publish(tmp_path, 2)
    move(tmp_path, one)
    arguments = kind(str(current(tmp_path)), meanwhile=lambda: move(tmp_path, two))

    made = arguments.create_engine_config("server", headless=True)

    assert made == {"usage": "server", "headless": True, "loading": {"digest": one.digest}}
    assert arguments.model_loader_extra_config == {}
    again = arguments.create_engine_config("server")
    assert again["loading"] == {"digest": two.digest}


def test_what_a_user_chose_stays(tmp_path: Path, kind: type[Arguments]) -> None:
    target = publish(tmp_path, 1)
    where = str(current(tmp_path))
    chosen = {"digest": "0" * 64}
    assert kind(where, "shardcast", chosen).create_engine_config("x")["loading"] == chosen
    assert kind(str(tmp_path), "auto").create_engine_config("x")["loading"] == {}
    more = kind(where, "ShardCast", {"threads": 3}).create_engine_config("x")["loading"]
    assert more == {"threads": 3, "digest": target.digest}  # the loader names what it does not know


def test_a_path_that_leads_to_no_version_is_named_at_once(
    tmp_path: Path, kind: type[Arguments]
) -> None:
    arguments = kind(str(tmp_path))
    with pytest.raises(NotFoundError, match="give OUT/current"):
        arguments.create_engine_config("x")
    assert arguments.model_loader_extra_config == {}


# --- when the weights are loaded ------------------------------------------------------------------


def two_versions(scratch: Path, name: str, old: bytes | None, new: bytes | None) -> Checkpoint:
    """Publish two that differ in one small file; return the first, ``current`` leads to the second."""
    config = json.dumps({"layers": 2}).encode()
    made = [
        publish(scratch, seed, files={CONFIG: config} | ({} if data is None else {name: data}))
        for seed, data in ((1, old), (2, new))
    ]
    return Checkpoint(
        Path(made[0].path), run="policy", version=made[0].version, digest=made[0].digest
    )


@pytest.mark.parametrize("name", [CONFIG, *KEPT])
@pytest.mark.parametrize(("old", "new"), [(b'{"a": 1}', b'{"a": 2}'), (b"{}", None), (None, b"{}")])
def test_other_small_files_under_the_path_end_the_boot(
    tmp_path: Path, name: str, old: bytes | None, new: bytes | None
) -> None:
    with two_versions(tmp_path, name, old, new) as checkpoint:
        with pytest.raises(EngineRefusedError) as refused:
            check_start(checkpoint, current(tmp_path))
        check_start(checkpoint, checkpoint.directory)
    message = str(refused.value)
    assert (refused.value.phase, refused.value.reason) == ("boot", "incompatible")
    assert f"another {name}, which may be what vLLM has read" in message
    assert f"start the engine again, or with --model {checkpoint.directory}" in message


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            CONFIG,
            b'{"a": 1, "transformers_version": "4"}',
            b'{"a": 1, "transformers_version": "5"}',
        ),
        ("tokenizer_config.json", b'{"name_or_path": "step-1"}', b'{"name_or_path": "step-2"}'),
        ("tokenizer.json", b'{"a": [1], "b": 2}', b'{"b": 2, "a": [1]}'),
        ("README.md", b"one", b"two"),
    ],
)
def test_a_version_that_vllm_would_read_alike_may_have_come(
    tmp_path: Path, name: str, old: bytes, new: bytes
) -> None:
    with two_versions(tmp_path, name, old, new) as checkpoint:
        assert Path(current(tmp_path)).resolve() != checkpoint.directory
        check_start(checkpoint, current(tmp_path))


# --- when a server is about to serve ---------------------------------------------------------------


def config_of(model: Path, digest: str, load_format: str = "shardcast") -> Any:
    """Return as much of a ``VllmConfig`` as is looked at."""
    loading = SimpleNamespace(load_format=load_format, model_loader_extra_config={"digest": digest})
    return SimpleNamespace(load_config=loading, model_config=SimpleNamespace(model=str(model)))


async def start_server(config: Any) -> None:
    """Do what vLLM does last when it starts a server."""
    await Endpoints().init_state(SimpleNamespace(vllm_config=config), None, Namespace())


async def test_a_server_does_not_start_with_another_version_s_sampling_defaults(
    tmp_path: Path,
) -> None:
    one, two = (
        publish(tmp_path, seed, files={GENERATION: b'{"top_k": %d}' % seed}) for seed in (1, 2)
    )
    move(tmp_path, one)
    with Checkpoint(Path(one.path), run=one.run, version=one.version, digest=one.digest) as loaded:
        check_start(loaded, current(tmp_path))
    check_server(config_of(current(tmp_path), one.digest))
    move(tmp_path, two)  # after the load, before vLLM reads it

    with pytest.raises(EngineRefusedError, match=f"has another .*{GENERATION}") as refused:
        await start_server(config_of(current(tmp_path), one.digest))

    assert f"start the engine again, or with --model {one.path}" in str(refused.value)
    check_server(config_of(Path(one.path), one.digest))
    check_server(config_of(current(tmp_path), two.digest))
    check_server(config_of(current(tmp_path), one.digest, load_format="auto"))


def test_what_a_server_has_read_cannot_be_compared_where_its_version_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 1)
    check_server(config_of(current(tmp_path), "9" * 64))
    assert f"no version with manifest {'9' * 64}" in caplog.text

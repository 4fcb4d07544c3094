"""One version for all of a boot: its configuration, its tokenizer, and every rank's weights.

``current`` may move at any moment. So the version is looked up once, before vLLM reads its first
file, and written into the engine's configuration (``model_loader_extra_config``: ``digest``), which
vLLM hands to every process. Its small files vLLM reads through ``current`` all the same, so they are
compared when the weights are loaded, and once more when a server has read its sampling defaults.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from shardcast.errors import EngineRefusedError, NotFoundError
from trainer_adapter.booting import find_version, version_at
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.agreement import Agreement
from trainer_adapter.vllm.ranks import Target
from trainer_adapter.vllm.started import unlike

log = logging.getLogger("vllm.shardcast")

FORMAT: Final = "shardcast"
DIGEST: Final = "digest"


def pin_boots(kind: type[Any]) -> None:
    """Let vLLM's ``EngineArgs`` name the version of every engine that boots from a run."""
    make = kind.create_engine_config

    @functools.wraps(make)
    def create_engine_config(arguments: Any, *args: Any, **members: Any) -> Any:
        with _pinned(arguments):
            return make(arguments, *args, **members)

    kind.create_engine_config = create_engine_config


@contextmanager
def _pinned(arguments: Any) -> Iterator[None]:
    """Put the digest in for as long as a configuration is made: the next one looks again.

    Raises:
        ShardcastError: If the model's path leads to no version.
    """
    given = arguments.model_loader_extra_config
    if str(arguments.load_format).lower() == FORMAT and DIGEST not in (given or {}):
        found = version_at(Path(str(arguments.model)))
        arguments.model_loader_extra_config = {**(given or {}), DIGEST: found.manifest}
    try:
        yield
    finally:
        arguments.model_loader_extra_config = given


def resolve(where: Path, digest: str | None) -> Target:
    """Return the version with a digest, or the one that a path leads to now.

    Raises:
        ShardcastError: If there is none.
    """
    found = version_at(where) if digest is None else find_version(where, digest)
    return Target(
        run=found.run,
        version=found.number,
        digest=found.manifest,
        path=str(found.directory),
        step=found.step,
    )


def agree_on(agreement: Agreement, look_up: Callable[[], Target], where: Path) -> Target:
    """Return what rank 0 looked up, as it lies on this rank's host.

    Raises:
        ShardcastError: What rank 0 found wrong, on every rank.
    """
    word = ""
    if agreement.rank == 0:
        try:
            word = msgspec.json.encode(look_up()).decode()
        except Exception as error:
            word = str(error) or type(error).__name__
    first = agreement.gather(word)[0]
    if not first.startswith("{"):
        raise NotFoundError(first)
    target = msgspec.json.decode(first.encode(), type=Target)
    if agreement.rank == 0:
        return target
    return msgspec.structs.replace(target, path=str(find_version(where, target.digest).directory))


def check_start(checkpoint: Checkpoint, where: Path) -> None:
    """Refuse where vLLM may have read another version's configuration, tokenizer or defaults.

    Args:
        checkpoint: The version that is loaded.
        where: The path that vLLM was given as its model.

    Raises:
        EngineRefusedError: Names the files, and says how to start the engine.
    """
    _refuse_others(checkpoint.directory, checkpoint.version.number, where)


def check_server(config: Any) -> None:
    """Do that again when a server is about to serve: vLLM reads its sampling defaults last of all.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        EngineRefusedError: As ``check_start``.
        ShardcastError: If the version cannot be looked up.
    """
    loading, where = config.load_config, Path(str(config.model_config.model))
    if str(loading.load_format).lower() != FORMAT:
        return
    digest = loading.model_loader_extra_config.get(DIGEST)
    if digest is None:  # nobody has pinned it: made without ``EngineArgs``
        return
    try:
        found = find_version(where, str(digest))
    except NotFoundError as error:  # the ranks have it, on other hosts
        log.warning("what this server has read cannot be compared with its version: %s", error)
        return
    _refuse_others(found.directory, found.number, where)


def _refuse_others(directory: Path, number: int, where: Path) -> None:
    if others := unlike(directory, where):
        raise EngineRefusedError(
            f"{where} does not lead to version {number} any more, or never did, and the version "
            f"there has another {', '.join(others)}, which may be what vLLM has read: start the "
            f"engine again, or with --model {directory}",
            phase="boot",
            reason="incompatible",
        )

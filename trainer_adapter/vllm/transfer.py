"""The weight-transfer engine ``shardcast``: what every rank of a vLLM engine does with versions.

Two roads lead here.

1. **Ours**: the worker method ``shardcast`` (``trainer_adapter.vllm.ranks``), which ``plugin`` puts
   on vLLM's worker class. Its replies carry what happened. The server's routes and ``inprocess`` use
   this one, on every number of ranks.
2. **vLLM's own** (``LLM.init_weight_transfer_engine``, ``start_weight_update``, ``update_weights``,
   ``finish_weight_update``), for programs that drive every backend alike:

   - ``init_info``: ``{}`` or ``{"run", "version", "digest", "path", "step"?}``: stage it, and wait.
   - ``update_info``: the same members: stage it if it is not, then load it. Raises RuntimeError with
     ``shardcast[CODE]: MESSAGE`` (``shardcast.engine.forms.coded``); after ``outcome`` *restored*
     the old version is served, after *poisoned* nothing should be.

   Every rank raises or none does. Yet vLLM's multi-process executor mixes answers up after an
   exception (it reads none behind the first rank that raised), so with several ranks use road 1.

Start the server with ``--weight-transfer-config '{"backend": "shardcast"}'``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.worker_base import WorkerBase

from shardcast.engine.forms import STATUS_OF, coded
from trainer_adapter.vllm.agreement import Alone, World
from trainer_adapter.vllm.configured import stale_drafts
from trainer_adapter.vllm.kv_memory import KvMemory
from trainer_adapter.vllm.loader import take_booted
from trainer_adapter.vllm.rank import Rank
from trainer_adapter.vllm.ranks import Command, RankReply, Target, read_command, write_reply
from trainer_adapter.vllm.reload import Model
from trainer_adapter.vllm.residue import Residue
from trainer_adapter.vllm.started import Started, directory_of
from trainer_adapter.vllm.verifying import Verifier

log = logging.getLogger("vllm.shardcast")

AHEAD: Final = "SHARDCAST_PREPARE"
"""Set to 0, nothing is prepared while the engine serves: no second copy of the weights, a longer
pause."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What to stage; nothing if all are left out."""

    run: str = ""
    version: int = 0
    digest: str = ""
    path: str = ""
    step: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to load."""

    run: str
    version: int
    digest: str
    path: str
    step: int | None = None


class ShardcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Both roads' way to a rank (``rank.Rank``)."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        """Take the model that this worker has loaded.

        Args:
            config: Its ``backend`` is ``shardcast``.
            vllm_config: The whole configuration.
            device: Where the model lies.
            model: The model.
        """
        super().__init__(config, vllm_config, device, model)
        for kind in (WorkerBase, *_below(WorkerBase)):
            watch_sleep(kind)
        agreement = World() if torch.distributed.is_initialized() else Alone()
        if agreement.rank == 0 and (stale := stale_drafts(vllm_config)):
            log.warning("%s", stale)
        booted = take_booted(model)
        directory = (
            directory_of(str(self.model_config.model)) if booted is None else booted[1].directory
        )
        weights = Model(
            model,
            self.model_config,
            device,
            started=Started.at(directory),
            ranks=agreement.size,
            ahead=os.environ.get(AHEAD, "1") != "0",
        )
        layers = vllm_config.compilation_config.static_forward_context
        residue = Residue(KvMemory(layers, device=device))
        prepare = residue.preparing(weights.prepare)
        verifier = Verifier(prepare, threads=_threads(agreement.size))
        self.rank = Rank(weights, verifier, agreement, residue)
        if booted is not None:
            self.rank.boot(*booted)

    # --- our road ---------------------------------------------------------------------------

    def tell(self, command: dict[str, Any]) -> RankReply:
        """Do what a command says."""
        with set_current_vllm_config(self.vllm_config):
            return self.rank.tell(read_command(command))

    # --- vLLM's road ------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Stage a version, and wait until it is.

        Raises:
            RuntimeError: If it cannot be; says why.
        """
        if init_info.path:
            self._stage(Target(**asdict(init_info)))

    def start_weight_update(self) -> None:
        """Nothing: all that touches the model is in ``receive_weights``."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version; the engine must be paused.

        Raises:
            RuntimeError: If it was not loaded; says what is served instead.
        """
        target = Target(**asdict(update_info))
        with set_current_vllm_config(self.vllm_config):
            self._stage(target)
            reply = self.rank.activate(target)
        if reply.outcome not in ("activated", "already"):
            raise RuntimeError(_coded(reply.code, f"{reply.outcome}: {reply.message}"))

    def finish_weight_update(self) -> None:
        """Nothing: what was received is loaded already."""

    def shutdown(self) -> None:
        """Give leases and files back."""
        self.rank.close()

    def _stage(self, target: Target) -> None:
        self.rank.tell(Command(op="stage", target=target))
        reply = self.rank.wait()
        # Whether it is staged everywhere, activate finds out together with the others.
        if reply.failed is not None and self.rank.alone:
            raise RuntimeError(_coded(reply.failed.code, reply.failed.message))


def watch_sleep(kind: type[Any]) -> None:
    """Let a worker class tell its rank when weights are thrown away: sleep of level 2, discarding.

    Whoever wakes it up again without loading has whatever lies in that memory.
    """
    for name, gone in (
        ("sleep", lambda level=1: level >= 2),
        ("discard", lambda tags=(): "weights" in tags),
    ):
        method = kind.__dict__.get(name)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(kind, name, _telling(method, gone))


def _telling(method: Callable[..., Any], gone: Callable[..., bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def telling(worker: Any, *args: Any, **members: Any) -> Any:
        engine = getattr(worker, "weight_transfer_engine", None)
        if isinstance(engine, ShardcastEngine) and gone(*args, **members):
            engine.rank.lost("the weights were thrown away (sleep mode)")
        return method(worker, *args, **members)

    return telling


def answer(worker: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Be the worker method ``shardcast``: what ``plugin`` puts on vLLM's worker class."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, ShardcastEngine):
        reply = RankReply(
            rank=int(getattr(worker, "rank", 0)),
            outcome="refused",
            code="unsupported",
            message="the engine was not started with --weight-transfer-config "
            """'{"backend": "shardcast"}'""",
        )
        return write_reply(reply)
    reply = engine.tell(command)
    if reply.outcome in ("activated", "restored"):
        worker.model_runner.reset_lora_state()  # as vLLM does after every weight update
    return write_reply(reply)


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


def _coded(code: str, message: str) -> str:
    return coded(code if code in STATUS_OF else "failed", message)  # type: ignore[arg-type]


def _threads(ranks: int) -> int:
    """Return how many threads a rank hashes with while it serves: half its share of the cores."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * ranks)))

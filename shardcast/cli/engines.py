"""``follow --engine``: the options, and the agent that they make."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shardcast.cli.options import read_token
from shardcast.cli.output import Output
from shardcast.cli.units import parse_time
from shardcast.connection import parse_endpoint
from shardcast.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from shardcast.engine.agent import Agent
    from shardcast.engine.driver import Engine, Target
    from shardcast.engine.forms import Requests
    from shardcast.events import Observer, WorkerEvent
    from shardcast.worker import Update, Worker

ENGINES: Final = "Engines"
TOKEN_VARIABLE: Final = "SHARDCAST_ENGINE_TOKEN"  # noqa: S105 - its name, not the token


class EngineChoice(enum.StrEnum):
    """Which engine."""

    VLLM = "vllm"
    SGLANG = "sglang"


class ActivateChoice(enum.StrEnum):
    """Who activates."""

    AUTO = "auto"
    MANUAL = "manual"


class RequestsChoice(enum.StrEnum):
    """What becomes of running requests."""

    RECOMPUTE = "recompute"
    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


EngineOption = Annotated[
    EngineChoice | None,
    typer.Option(
        "--engine",
        help="Let running engines of this kind take each version, without a restart.",
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]
EngineUrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-url",
        metavar="URL",
        help="An engine on this host. May be repeated.",
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]
EngineTokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--engine-token-file",
        metavar="FILE",
        help=f"The engines' API key (first line). Or {TOKEN_VARIABLE} in the environment.",
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]
ActivateOption = Annotated[
    ActivateChoice,
    typer.Option(
        "--activate",
        help="auto: as soon as an engine has staged a version. manual: your orchestrator does.",
        rich_help_panel=ENGINES,
    ),
]
MaxSwappingOption = Annotated[
    int,
    typer.Option(
        "--max-swapping",
        metavar="N",
        min=1,
        help="How many of these engines may be paused at once.",
        rich_help_panel=ENGINES,
    ),
]
MaxLagOption = Annotated[
    int | None,
    typer.Option(
        "--max-lag",
        metavar="K",
        min=0,
        help="An engine that is more than K versions behind says that it is not ready.",
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]
RequestsOption = Annotated[
    RequestsChoice,
    typer.Option(
        "--requests",
        help="Running requests: recomputed under the new weights, finished before, aborted, or "
        "kept with their cache.",
        rich_help_panel=ENGINES,
    ),
]
LeaseOption = Annotated[
    str,
    typer.Option(
        "--lease",
        metavar="TIME",
        help="How long an activation may take, pause included.",
        rich_help_panel=ENGINES,
    ),
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="NAME",
        help="What the run's adapters are called; else as their metadata or the run says. Versions that "
        "are no adapters are refused.",
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]
CheckCanaryOption = Annotated[
    bool,
    typer.Option(
        "--check-canary",
        help="Compare an engine's answers with the version's canary (`publish --canary`).",
        rich_help_panel=ENGINES,
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve Prometheus metrics of the engines from here.",
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What was said about engines on the command line."""

    kind: EngineChoice
    urls: tuple[str, ...]
    token_file: Path | None
    activate: ActivateChoice
    max_swapping: int
    max_lag: int | None
    requests: RequestsChoice
    lease: str
    lora: str | None
    check_canary: bool


class Relay:
    """Hands a worker's events on, and wakes the agent when a head comes. From any thread."""

    def __init__(self, view: Observer) -> None:
        """Wake nobody yet."""
        self._view = view
        self._wake: Callable[[], object] | None = None

    def on_event(self, event: WorkerEvent) -> None:
        """Take an event."""
        self._view.on_event(event)
        if event.kind == "head" and self._wake is not None:
            self._wake()

    @contextlib.contextmanager
    def waking(self, agent: Agent) -> Iterator[None]:
        """Wake an agent of the running loop while the block runs."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(agent.look)

        self._wake = wake
        try:
            yield
        finally:
            self._wake = None


def make_agent(options: EngineOptions, directory: Path, run: str, view: Observer) -> Agent:
    """Make the agent that the options ask for.

    Raises:
        UsageError: If they do not fit together.
    """
    from shardcast.engine.agent import Agent
    from shardcast.engine.board import AgentOptions
    from shardcast.engine.decide import Mode
    from shardcast.engine.forms import MAX_LEASE_SECONDS, MIN_LEASE_SECONDS

    lease_s = parse_time(options.lease, "--lease")
    if not MIN_LEASE_SECONDS <= lease_s <= MAX_LEASE_SECONDS:
        raise UsageError(
            f"--lease {options.lease} is not from {MIN_LEASE_SECONDS:g} to {MAX_LEASE_SECONDS:g} s"
        )
    found: list[Agent] = []  # SGLang's drivers ask the agent where versions are

    def find(digest: str) -> Target | None:
        return found[0].find(digest)

    agent = Agent(
        [_engine(options, url, lease_s, directory, find) for url in options.urls],
        directory,
        run,
        view.on_event,
        AgentOptions(
            mode=Mode(options.activate.value),
            max_swapping=options.max_swapping,
            max_lag=options.max_lag,
            lease_s=lease_s,
            adapter=options.lora,
            check_canary=options.check_canary,
        ),
    )
    found.append(agent)
    return agent


def readable_keys(options: EngineOptions) -> list[str]:
    """Return the engines whose key anybody on the way could read."""
    if read_token(options.token_file, TOKEN_VARIABLE) is None:
        return []
    ends = [(url, parse_endpoint(url)) for url in options.urls]
    return [url for url, end in ends if not (end.tls or _is_this_machine(end.host))]


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _engine(
    options: EngineOptions,
    url: str,
    lease_s: float,
    directory: Path,
    find: Callable[[str], Target | None],
) -> Engine:
    from shardcast.engine.driver import Manner

    requests: Requests = options.requests.value
    manner = Manner(requests, lease_s)

    def token() -> str | None:
        return read_token(options.token_file, TOKEN_VARIABLE)

    if options.kind is EngineChoice.VLLM:
        from shardcast.engine.vllm import VllmEngine

        return VllmEngine(url, token, manner)
    from shardcast.engine.intents import FileIntents
    from shardcast.engine.sglang import SglangEngine

    intents = FileIntents(directory / "state" / "engines", url.rstrip("/"))
    return SglangEngine(url, token, manner, intents=intents, check=_hash, find=find)


async def _hash(target: Target) -> None:
    """Hash what an engine is about to load; SGLang itself looks at nothing."""
    from trainer_adapter.checkpoint import Checkpoint

    stopped = threading.Event()

    def work() -> None:
        checkpoint = Checkpoint(
            target.path, run=target.run, version=target.version, digest=target.digest
        )
        try:
            checkpoint.verify(threads=os.cpu_count() or 1, stopping=stopped.is_set)
        finally:
            checkpoint.close()

    try:
        await asyncio.to_thread(work)
    finally:
        stopped.set()


class Minding:
    """An agent beside the worker that brings the versions."""

    def __init__(self, out: Output, agent: Agent, relay: Relay, metrics: str | None) -> None:
        """Do nothing yet.

        Args:
            out: Where words go.
            agent: Minds the engines.
            relay: Hears of heads.
            metrics: ``HOST:PORT`` to serve metrics from, or None.
        """
        self._out = out
        self._agent = agent
        self._relay = relay
        self._metrics = metrics

    def update(self, update: Update) -> None:
        """A version has become current, or was before."""
        from shardcast.engine.driver import Target

        self._agent.update(
            Target(
                run=self._agent.run_name,
                version=update.version,
                digest=update.manifest,
                path=update.path,
                step=update.step,
            )
        )

    async def run(self, worker: Worker, work: Callable[[], Awaitable[None]]) -> None:
        """Mind the engines while ``work`` follows the run, until cancelled.

        Args:
            worker: Brings the versions.
            work: Makes it follow, and tells ``update``; called once the engines have been looked at.

        Raises:
            UsageError, EngineError: As ``Agent.greet``; before anything is fetched.
        """
        with contextlib.ExitStack() as stack:
            if self._metrics is not None:
                url = stack.enter_context(exposed(self._agent.metrics.registry, self._metrics))
                self._out.emit("metrics", url=url)
            try:
                await self._agent.greet()
            except BaseException:
                await self._agent.close()
                raise
            self._agent.follow_head(lambda: worker.head)
            self._agent.repair_with(worker.repair)
            stack.enter_context(self._relay.waking(self._agent))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._agent.run())
                await work()


@contextlib.contextmanager
def exposed(registry: CollectorRegistry, listen: str) -> Iterator[str]:
    """Serve metrics while the block runs; yield the URL.

    Raises:
        UsageError: If it cannot listen there.
    """
    from prometheus_client import start_http_server

    from relay.config import split_listen

    host, port = split_listen(listen)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"--metrics {listen}: {error.strerror or error}") from error
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

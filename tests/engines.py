"""Engines for tests: one in memory, a server that speaks our routes, one that behaves as SGLang.

All three "load" a version by reading the file ``weights`` of its directory, so a test can ask what
they really have in memory, whatever they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import msgspec

from shardcast.engine import forms
from shardcast.engine.driver import Swapped, Target, reason_of
from shardcast.engine.forms import EngineState, Identity
from shardcast.errors import EngineRefusedError, EngineUnreachableError, ShardcastError

WAIT_S: Final = 20.0
"""No wait of a test is longer."""


def make_version(root: Path, number: int, *, run: str = "policy", text: str = "") -> Target:
    """A version's directory with a file of weights; its digest is made up."""
    path = root / f"{number:06d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "weights").write_text(text or f"weights of {run} {number}")
    return Target(run=run, version=number, digest=f"{number:064x}", path=path, step=number * 10)


def weights_of(target: Target) -> str:
    """What an engine has in memory once it has loaded a version."""
    return (target.path / "weights").read_text()


@dataclass
class Machine:
    """What stands behind a fake engine: weights in memory, and a label.

    Attributes:
        weights: What is loaded; None: what it was booted with.
        paused: Whether it would answer no request.
        fail_loads: How many of the next loads break in the middle.
        gate: A load waits for it.
        loading: Set while a load is under way.
        loads: Paths that were loaded, in order.
        wrong_by: Added to every log-probability.
    """

    weights: str | None = None
    half: bool = False
    paused: bool = False
    fail_loads: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)
    loads: list[str] = field(default_factory=list)
    served_half: bool = False
    wrong_by: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def load(self, path: str) -> None:
        """Load, or break half-way."""
        self.loads.append(path)
        self.half = True
        self.loading.set()
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        self.loading.clear()
        if self.fail_loads > 0:
            self.fail_loads -= 1
            raise OSError("the 7th tensor is truncated")
        self.weights = (Path(path) / "weights").read_text()
        self.half = False

    def answer(self) -> str | None:
        """Answer a request: the weights that are used for it.

        Raises:
            AssertionError: If it would answer with half of two versions.
        """
        assert not self.paused, "it is paused"
        assert not self.half, "it serves half of one version and half of another"
        return self.weights


def logprobs(weights: str | None, tokens: Sequence[int]) -> list[float]:
    """What a fake engine says about tokens: depends on all that is before them."""
    seed = sum((weights or "").encode())
    return [-((seed + sum(tokens[: n + 1])) % 97) / 10 for n in range(1, len(tokens))]


# --- in memory --------------------------------------------------------------------------------


class FakeEngine:
    """An engine in this process. Its own faults are set on it.

    Attributes:
        unreachable: It does not answer.
        refuse_stage: Why it does not stage; ``refuse_reason`` is the code.
    """

    def __init__(self, name: str = "http://fake:1", machine: Machine | None = None) -> None:
        self.name = name
        self.machine = machine or Machine()
        self.unreachable: Exception | None = None
        self.refuse_stage: str | None = None
        self.refuse_activate: str | None = None
        self.refuse_reason = "incompatible"
        self.lose_answers = 0
        self.poisoned = False
        self.calls: list[str] = []
        self.changed = asyncio.Event()
        self._state = fresh_state("fake")
        self._old: Target | None = None

    def restart(self) -> None:
        """As a process that is started again."""
        self.machine.weights, self.machine.half, self.machine.paused = None, False, False
        self._state, self._old, self.poisoned = fresh_state("fake"), None, False

    def set(self, **changes: object) -> None:
        """Change what it says."""
        self._state = msgspec.structs.replace(self._state, **changes)

    def called(self, call: str) -> None:
        """Note a call."""
        self.calls.append(call)
        self.changed.set()

    async def state(self) -> EngineState:
        if self.unreachable is not None:
            raise self.unreachable
        return self._state

    async def stage(self, target: Target) -> EngineState:
        self._reach()
        self.called(f"stage {target.version}")
        if self.refuse_stage is not None or not target.path.is_dir():
            why = self.refuse_stage or f"no directory {target.path}"
            reason = "unavailable" if self.refuse_stage is None else self.refuse_reason
            raise EngineRefusedError(why, source=self.name, phase="stage", reason=reason)
        self.set(staged=staged_of(target))
        return self._state

    async def activate(self, target: Target) -> Swapped:
        self._reach()
        self.called(f"activate {target.version}")
        if self._state.identity == target.identity and not self.poisoned:
            return Swapped(0.0, {}, self._state)
        if self.refuse_activate is not None:
            raise EngineRefusedError(
                self.refuse_activate, source=self.name, phase="load", reason="failed"
            )
        if not target.path.is_dir():
            raise EngineRefusedError(
                f"no directory {target.path}", source=self.name, phase="stage", reason="unavailable"
            )
        self.machine.paused = True
        before = self._state.identity
        self.set(activating=activating_of(target), paused=True, ready=False)
        try:
            await asyncio.to_thread(self.machine.load, str(target.path))
        except OSError as error:
            self._gave_up(target, error)
            raise EngineRefusedError(
                str(error), source=self.name, phase="load", reason="failed"
            ) from error
        self.machine.paused, self.poisoned = False, False
        self._old = target
        self._state = served_state(self._state, target, before)
        if self.lose_answers:
            self.lose_answers -= 1
            from shardcast.errors import EngineUncertainError

            raise EngineUncertainError("the connection was reset", source=self.name)
        return Swapped(1.0, {"load": 1.0}, self._state)

    def _gave_up(self, target: Target, error: OSError) -> None:
        failure = failure_of(target, str(error))
        try:
            if self._old is None:
                raise OSError("nothing to go back to")
            self.machine.load(str(self._old.path))
        except OSError:
            self.poisoned = True
            self.set(served=None, poisoned=True, paused=True, ready=False, activating=None,
                     staged=None, last_failure=failure)  # fmt: skip
        else:
            self.machine.paused = False
            self.set(activating=None, staged=None, paused=False, ready=True, last_failure=failure)

    async def tell(self, run: str, newest: int, max_lag: int | None) -> EngineState:
        self._reach()
        self.called(f"tell {newest}")
        self._state = told_state(self._state, run, newest, max_lag)
        return self._state

    async def load_adapter(self, name: str, target: Target) -> EngineState:
        self._reach()
        self.called(f"load {target.version}")
        if not target.path.is_dir():
            raise EngineRefusedError("no such adapter", phase="lora", reason="unavailable")
        self._state = msgspec.structs.replace(
            self._state, lora=[*self._state.lora, lora_of(name, target)]
        )
        return self._state

    async def unload_adapter(self, name: str, identity: Identity) -> EngineState:
        self._reach()
        self.called(f"unload {identity.version}")
        left = [one for one in self._state.lora if one.digest != identity.digest]
        self._state = msgspec.structs.replace(self._state, lora=left)
        return self._state

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return scores_of(self.machine, list(tokens))

    async def close(self) -> None:
        """Nothing is open."""

    def _reach(self) -> None:
        if self.unreachable is not None:
            raise EngineUnreachableError("gone", source=self.name)


# --- states -----------------------------------------------------------------------------------


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


def fresh_state(engine: str) -> EngineState:
    """Of an engine that was booted from elsewhere."""
    return EngineState(engine=engine, engine_version="1", plugin_version="1", ready=True)


def staged_of(target: Target) -> forms.Staged:
    """As a state tells it."""
    return forms.Staged(
        run=target.run, version=target.version, digest=target.digest, step=target.step,
        path=str(target.path), since=now_ms(),
    )  # fmt: skip


def activating_of(target: Target) -> forms.Activating:
    """As a state tells it."""
    return forms.Activating(
        run=target.run, version=target.version, digest=target.digest, phase="load", since=now_ms()
    )


def failure_of(target: Target, message: str) -> forms.Failure:
    """As a state tells it."""
    return forms.Failure(
        phase="load", code="failed", message=message, version=target.version, t=now_ms()
    )


def lora_of(name: str, target: Target) -> forms.Lora:
    """As a state tells it."""
    return forms.Lora(
        name=name, model=f"{name}-{target.digest}", run=target.run, version=target.version,
        digest=target.digest, path=str(target.path), loaded=True,
    )  # fmt: skip


def served_state(state: EngineState, target: Target, before: Identity | None) -> EngineState:
    """After an activation."""
    swap = forms.Swap(
        n=state.swap_count + 1,
        from_=None if before is None else str(before),
        to=str(target.identity),
        paused_at=now_ms(),
        resumed_at=now_ms(),
        pause_ms=1.0,
        requests="recompute",
    )
    new = msgspec.structs.replace(
        state,
        run=target.run,
        served=forms.Served(
            version=target.version, digest=target.digest, step=target.step, since=now_ms()
        ),
        staged=None,
        activating=None,
        paused=False,
        poisoned=False,
        ready=True,
        last_failure=None,
        swap_count=state.swap_count + 1,
        swaps=[*state.swaps, swap],
    )
    return told_state(new, target.run, state.newest, state.max_lag)


def told_state(
    state: EngineState, run: str, newest: int | None, max_lag: int | None
) -> EngineState:
    """After it was told how far the run is."""
    if newest is None:
        return state
    lag = None if state.served is None else max(newest - state.served.version, 0)
    behind = lag is not None and max_lag is not None and lag > max_lag
    return msgspec.structs.replace(
        state,
        run=state.run or run,
        newest=newest,
        max_lag=max_lag,
        lag=lag,
        ready=not behind and not state.poisoned and not state.paused,
    )


# --- HTTP -------------------------------------------------------------------------------------

Answering = Callable[[str, str, dict[str, Any]], tuple[int, Any]]


class JsonServer:
    """Answers JSON over HTTP from a function, in threads; checks a bearer token.

    Attributes:
        token: What requests must show.
        faults: What becomes of the next requests of a path: a status, ``reset``, ``silent`` (no answer
            ever comes), or one of these two with `` after``: once it was done.
        asked: Method and path of every request.
    """

    def __init__(self, answer: Answering, token: str | None = None, port: int = 0) -> None:
        self.token = token
        self.faults: dict[str, list[int | str]] = {}
        self.asked: list[str] = []
        self.changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                outer.handle(self, "GET", {}, answer)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                body = json.loads(self.rfile.read(length) or b"{}")
                outer.handle(self, "POST", body, answer)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients that go away are what some tests are about."""

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def handle(
        self,
        request: BaseHTTPRequestHandler,
        method: str,
        body: dict[str, Any],
        answer: Answering,
    ) -> None:
        """Answer a request, or do what the test wants instead."""
        path = request.path.partition("?")[0]
        with self.changed:
            self.asked.append(f"{method} {path}")
            faults = self.faults.get(path, [])
            fault = faults.pop(0) if faults else None
            self.changed.notify_all()
        if fault == "reset":
            return self._reset(request)
        if fault == "silent":
            return self._wait_until_gone(request)
        if isinstance(fault, int):
            return self._send(request, fault, {"detail": "a proxy says so"})
        if self.token is not None and request.headers.get("Authorization") != (
            f"Bearer {self.token}"
        ):
            return self._send(request, 401, {"error": "Unauthorized"})
        status, content = answer(method, path, body)
        if fault == "reset after":
            return self._reset(request)
        if fault == "silent after":
            return self._wait_until_gone(request)
        return self._send(request, status, content)

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @staticmethod
    def _reset(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        linger = struct.pack("ii", 1, 0)
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request.connection.close()

    def _wait_until_gone(self, request: BaseHTTPRequestHandler) -> None:
        """Say nothing until the client gives up."""
        with self.changed:
            self.changed.notify_all()
        request.close_connection = True
        request.connection.settimeout(WAIT_S)
        with contextlib.suppress(OSError):
            request.rfile.read(1)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition over what was asked holds."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout=WAIT_S), "it never happened"

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class PluginServer:
    """Behaves as vLLM with our plug-ins: an activation is a task of the server's own.

    Attributes:
        verify: Looks at a version that is to be staged, and raises what is wrong with it.
    """

    def __init__(self, *, token: str | None = None, model: str = "policy", port: int = 0) -> None:
        self.machine = Machine()
        self.http = JsonServer(self._answer, token, port)
        self.state = fresh_state("vllm")
        self.model = model
        self.fault: tuple[str, str, str] | None = None
        self.verify: Callable[[Target], None] = lambda target: None
        self._lock = threading.Lock()
        self._served: Target | None = None

    @property
    def url(self) -> str:
        return self.http.url

    def restart(self) -> None:
        """As a process that is started again."""
        self.machine.weights, self.machine.half, self.machine.paused = None, False, False
        self.state, self._served = fresh_state("vllm"), None

    def _answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        match method, path:
            case "GET", forms.STATE_PATH:
                return 200, forms.write(self.state)
            case "GET", "/v1/models":
                return 200, {"data": [{"id": self.model, "object": "model"}]}
            case "POST", "/v1/completions":
                return vllm_completion(self.machine, body)
            case "POST", forms.STAGE_PATH:
                request = forms.read_request(data, forms.StageRequest)
                return self._stage(target_of(request, Path(request.path)))
            case "POST", forms.ACTIVATE_PATH:
                wish = forms.read_request(data, forms.ActivateRequest)
                assert wish.path is not None
                return self._activate(target_of(wish, Path(wish.path)))
            case "POST", forms.NEWEST_PATH:
                news = forms.read_request(data, forms.NewestRequest)
                self.state = told_state(self.state, news.run, news.version, news.max_lag)
                return 200, forms.write(forms.StageAnswer(state=self.state))
            case "POST", forms.LORA_PATH:
                return self._lora(forms.read_request(data, forms.LoraRequest))
        return 404, {"detail": "Not Found"}

    def _fault(self, code: str, message: str, phase: forms.Phase) -> tuple[int, Any]:
        fault = forms.Fault(code=code, message=message, phase=phase)
        answer = forms.FaultAnswer(error=fault, state=self.state)
        return forms.STATUS_OF[code], forms.write(answer)

    def _stage(self, target: Target) -> tuple[int, Any]:
        if self.fault is not None and self.fault[0] == "stage":
            return self._fault(self.fault[1], self.fault[2], "check")
        if not target.path.is_dir():
            return self._fault("unavailable", f"cannot read {target.path}", "stage")
        try:
            self.verify(target)
        except ShardcastError as error:
            return self._fault(reason_of(error), str(error), "stage")
        self.state = msgspec.structs.replace(self.state, staged=staged_of(target))
        return 200, forms.write(forms.StageAnswer(state=self.state))

    def _activate(self, target: Target) -> tuple[int, Any]:
        done = forms.Activated(
            run=target.run, version=target.version, digest=target.digest, step=target.step
        )
        with self._lock:
            if self.state.activating is not None:
                return self._fault("busy", "another activation runs", "pause")
            if self.state.identity == target.identity and not self.state.poisoned:
                answer = forms.ActivateAnswer(
                    activated=done, pause_ms=0.0, phases_ms={}, state=self.state
                )
                return 200, forms.write(answer)
            if not target.path.is_dir():
                return self._fault("unavailable", f"cannot read {target.path}", "stage")
            before = self.state.identity
            self.machine.paused = True
            self.state = msgspec.structs.replace(
                self.state, activating=activating_of(target), paused=True, ready=False
            )
        try:
            self.machine.load(str(target.path))
        except OSError as error:
            self._give_back(target, str(error))
            return self._fault("failed", str(error), "load")
        self.machine.paused = False
        self._served = target
        self.state = served_state(self.state, target, before)
        answer = forms.ActivateAnswer(
            activated=done, pause_ms=1.0, phases_ms={"load": 1.0}, state=self.state
        )
        return 200, forms.write(answer)

    def _give_back(self, target: Target, message: str) -> None:
        changes: dict[str, Any] = {
            "activating": None, "staged": None, "last_failure": failure_of(target, message)
        }  # fmt: skip
        try:
            if self._served is None:
                raise OSError("nothing to go back to")
            self.machine.load(str(self._served.path))
        except OSError:
            changes |= {"served": None, "poisoned": True, "paused": True, "ready": False}
        else:
            self.machine.paused = False
            changes |= {"paused": False, "ready": True}
        self.state = msgspec.structs.replace(self.state, **changes)

    def _lora(self, request: forms.LoraRequest) -> tuple[int, Any]:
        left = [one for one in self.state.lora if one.digest != request.digest]
        if request.action == "load":
            assert request.path is not None
            if not Path(request.path).is_dir():
                return self._fault("unavailable", f"cannot read {request.path}", "lora")
            left.append(lora_of(request.name, target_of(request, Path(request.path))))
        self.state = msgspec.structs.replace(self.state, lora=left)
        return 200, forms.write(forms.StageAnswer(state=self.state))


def target_of(
    request: forms.StageRequest | forms.ActivateRequest | forms.LoraRequest, path: Path
) -> Target:
    """What a request is about."""
    return Target(
        run=request.run,
        version=request.version,
        digest=request.digest,
        path=path,
        step=getattr(request, "step", None),
    )


def scores_of(machine: Machine, tokens: list[int]) -> list[float]:
    """The log-probabilities of a prompt, as an engine answers."""
    weights = machine.answer()
    wrong = machine.wrong_by.get(weights or "", 0.0)
    return [one + wrong for one in logprobs(weights, tokens)]


def vllm_completion(machine: Machine, body: dict[str, Any]) -> tuple[int, Any]:
    """A completion with the prompt's log-probabilities, as vLLM 0.32 gives it."""
    assert (body["prompt_logprobs"], body["max_tokens"]) == (0, 1)
    tokens = body["prompt"]
    places = [
        {str(token): {"logprob": score, "rank": 2, "decoded_token": None}}
        for token, score in zip(tokens[1:], scores_of(machine, tokens), strict=True)
    ]
    return 200, {"choices": [{"text": "", "logprobs": None, "prompt_logprobs": [None, *places]}]}


def generated(machine: Machine, body: dict[str, Any]) -> tuple[int, Any]:
    """A generation with the prompt's log-probabilities, as SGLang 0.5.23 gives it."""
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
    assert body["sampling_params"]["max_new_tokens"] == 1
    tokens = body["input_ids"]
    scores = [None, *scores_of(machine, tokens)]
    places = [[score, token, None] for score, token in zip(scores, tokens, strict=True)]
    return 200, {"text": "", "meta_info": {"input_token_logprobs": places}}


class SglangServer:
    """Behaves as SGLang 0.5.23 does, its traps included (docs/ENGINES.md).

    Attributes:
        skip_flushes: How many of the next updates and flushes do not flush the cache.
        boot: The directory that it is started from.
        path: The directory that it says it has loaded.
        label: The weight version that it reports.
        cached: Which weights its prefix cache is of.
        deaths: How often it ended, and was started again by a supervisor.
    """

    def __init__(self, *, token: str | None = None, port: int = 0) -> None:
        self.machine = Machine()
        self.http = JsonServer(self._answer, token, port)
        self.label = "default"
        self.boot = self.path = "/boot"
        self.skip_flushes = 0
        self.cached: str | None = None
        self.adapters: dict[str, str] = {}
        self.deaths = 0

    @property
    def url(self) -> str:
        return self.http.url

    def restart(self) -> None:
        """As a process that is started again."""
        self.machine.weights, self.machine.half, self.machine.paused = None, False, False
        self.label, self.path, self.cached, self.adapters = "default", self.boot, None, {}

    def _answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match method, path:
            case "GET", "/model_info":
                return 200, {"model_path": self.path, "weight_version": self.label}
            case "GET", "/v1/models":  # the model is named after what was loaded last
                names = {self.path: self.path, **self.adapters}
                return 200, {"data": [{"id": n, "root": root} for n, root in names.items()]}
            case "POST", "/generate":
                assert self.cached in (None, self.machine.weights), "a stale prefix is used"
                return generated(self.machine, body)
            case "POST", "/pause_generation":
                assert body["mode"] in ("retract", "abort")
                self.machine.paused = True
                return 200, {"message": "Generation paused successfully.", "status": "ok"}
            case "POST", "/continue_generation":
                self.machine.paused = False
                return 200, {"message": "Generation continued successfully.", "status": "ok"}
            case "POST", "/update_weights_from_disk":
                return self._update(body)
            case "POST", "/flush_cache":
                return self._flushed()
            case "POST", "/load_lora_adapter":
                return self._load_lora(body)
            case "POST", "/unload_lora_adapter":
                found = self.adapters.pop(body["lora_name"], None) is not None
                said = None if found else f"LoRA with name {body['lora_name']} is not loaded."
                return (200 if found else 400), {"success": found, "error_message": said}
        return 404, {"detail": "Not Found"}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.cached = self.cached or self.machine.weights
        path = body["model_path"]
        if not Path(path).is_dir():
            return self._no("Failed to get weights iterator: it is no directory.")
        try:
            self.machine.load(path)
        except OSError as error:
            self._roll_back(path)
            return self._no(
                f"Failed to update weights: {error}.\nRolling back to original weights."
            )
        if body["flush_cache"] and not self._flushes():
            return self._no("Weights were updated, but the cache was not flushed because ...")
        self.label, self.path = body["weight_version"], path
        return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}

    @staticmethod
    def _no(message: str) -> tuple[int, Any]:
        return 400, {"success": False, "message": message, "num_paused_requests": 0}

    def _roll_back(self, path: str) -> None:
        """Read the *new* path once more, as SGLang does; where that fails, too, the server ends."""
        try:
            self.machine.load(path)
        except OSError:
            self.restart()
            self.deaths += 1
            raise  # no answer comes

    def _flushes(self) -> bool:
        if self.skip_flushes > 0:
            self.skip_flushes -= 1
            return False
        self.cached = None
        return True

    def _flushed(self) -> tuple[int, Any]:
        return (200, b"Cache flushed.\n") if self._flushes() else (400, b"Flush cache failed.\n")

    def _load_lora(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, path = body["lora_name"], body["lora_path"]
        if not Path(path).is_dir():
            return 400, {"success": False, "error_message": f"no adapter in {path}"}
        if name in self.adapters:
            message = f"LoRA with name {name} already exists."
            return 400, {"success": False, "error_message": message}
        self.adapters[name] = path
        return 200, {"success": True, "error_message": None}

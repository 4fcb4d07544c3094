"""A real server with our plug-ins: its routes, its guards, and its clients over a swap."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcast.engine.forms import (
    ACTIVATE_PATH,
    LORA_PATH,
    NEWEST_PATH,
    READY_PATH,
    STAGE_PATH,
    START_HEADER,
    STATE_PATH,
    VERSION_HEADER,
    Identity,
    label_of,
)
from shardcast.engine.stamps import spans_of, stamp
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from tests.contract.made import signer
from tests.engine.adapters import save_adapter
from tests.engine.checkpoints import Out, add_tokenizer, save
from tests.engine.moving import variables
from tests.engine.servers import (
    BACKEND,
    INJECTED,
    KEY,
    Answer,
    Server,
    ServerHost,
    Told,
    members,
    until,
)
from trainer_adapter.vllm.ranks import Target

PROMPT = [5, 17, 101, 44, 8]
LONG = [7, 9, 300, 41] * 24
"""Three blocks of the prefix cache."""
STREAMED = 80

Versions = list[Target]


@pytest.fixture(scope="module")
def versions(out: Out) -> Versions:
    return [out.model("qwen2", "bfloat16", seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def plain(servers: ServerHost, versions: Versions, out: Out) -> Iterator[Server]:
    """Booted from elsewhere: from a directory that happens to be version 1. It has words."""
    words = add_tokenizer(out.scratch / "words")  # beside a config.json it would become Qwen's
    server = servers.begin(
        versions[0].path, *BACKEND, *INJECTED, "--enable-scale-out", "--no-skip-tokenizer-init",
        "--tokenizer", str(words),
    )  # fmt: skip
    try:
        server.wait_started()
        yield server
    finally:
        server.end()


@pytest.fixture
def first(plain: Server, versions: Versions) -> Server:
    """The plain server, serving version 1 and nothing wrong."""
    answer = plain.activate(versions[0])
    assert answer.status == 200, answer.body
    plain.ask(NEWEST_PATH, {"run": versions[0].run, "version": 1})
    return plain


def served(server: Server) -> Identity | None:
    return server.state().identity


# --- guards ------------------------------------------------------------------------------------


def test_every_route_is_guarded_by_the_key_and_dev_mode_is_off(
    plain: Server, versions: Versions
) -> None:
    posts = {
        STAGE_PATH: members(versions[1]),
        ACTIVATE_PATH: members(versions[1]),
        NEWEST_PATH: {"run": "policy", "version": 1},
        LORA_PATH: members(versions[1]) | {"action": "load", "name": "x"},
    }
    before = plain.state()
    for key in (None, "wrong", KEY + " "):
        for path, body in posts.items():
            assert plain.ask(path, body, key=key).status == 401
        for path in (STATE_PATH, READY_PATH):
            assert plain.ask(path, key=key).status == 401
    assert plain.state() == before
    assert plain.ask(READY_PATH).status == 200
    assert plain.ask(STAGE_PATH, {"run": "policy"}).status == 422
    assert plain.ask(STATE_PATH, {}).status == 405
    for path in ("/pause", "/collective_rpc", "/start_weight_update", "/update_weights"):
        assert plain.ask(path, {}).status == 404


def test_an_engine_from_elsewhere_is_synced_before_it_is_labelled(
    plain: Server, versions: Versions
) -> None:
    answer = plain.completion(PROMPT)
    assert answer.headers[VERSION_HEADER.lower()] == "unknown"
    assert plain.ask(f"{READY_PATH}?require=served").status == 503
    assert plain.stage(versions[0]).status == 200
    state = plain.state()
    assert state.served is None
    assert state.staged is not None
    named = {name: value for name, value in members(versions[0]).items() if name != "path"}
    activated = plain.ask(ACTIVATE_PATH, named)
    assert activated.status == 200, activated.body
    assert activated.json["pause_ms"] > 0
    assert plain.ask(f"{READY_PATH}?require=served").status == 200
    again = plain.completion(PROMPT)
    assert again.headers[VERSION_HEADER.lower()] == label_of(versions[0].identity)
    assert again.json["choices"][0]["token_ids"] == answer.json["choices"][0]["token_ids"]
    stamped = stamp(again.headers)
    assert stamped.identity == versions[0].identity
    assert again.headers[START_HEADER.lower()] == plain.state().start != ""
    assert not stamped.ambiguous
    # Once more: nothing is done.
    count = plain.state().swap_count
    assert plain.ask(ACTIVATE_PATH, named).json["pause_ms"] == 0
    assert plain.state().swap_count == count


def test_a_body_that_is_too_long(plain: Server) -> None:
    answer = plain.ask(STAGE_PATH, {"run": "x" * 70_000})
    assert answer.status == 413
    assert answer.json["error"]["code"] == "too_large"


def test_a_client_that_leaves_before_its_request_is_whole(first: Server) -> None:
    before = first.state()
    head = f"POST {ACTIVATE_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", first.port)) as link:
        link.sendall(f"{head}Content-Length: 900\r\n\r\n{{".encode())
    assert first.state() == before
    assert "Exception in ASGI application" not in first.log.read_text(errors="replace")


@pytest.mark.parametrize("false_name", [{"run": "other"}, {"version": 99}])
def test_a_digest_under_another_name_is_refused(
    first: Server, versions: Versions, false_name: dict[str, Any]
) -> None:
    before = first.state()
    answer = first.activate(versions[0], **false_name)
    assert answer.status == 409
    assert answer.json["error"]["code"] == "conflict"
    assert first.state() == before
    wrong = first.activate(versions[1], step=4242)
    assert wrong.json["state"]["served"]["step"] == versions[1].step


def test_bytes_that_are_not_those_of_the_digest(first: Server, versions: Versions) -> None:
    lie = {**members(versions[1]), "path": versions[2].path}
    answer = first.ask(ACTIVATE_PATH, lie)
    assert answer.status in {409, 424}, answer.body
    assert served(first) == versions[0].identity
    missing = {**members(versions[1]), "path": f"{versions[1].path}-not"}
    assert first.ask(STAGE_PATH, missing).status == 424


# --- requests over a swap ------------------------------------------------------------------------


def test_streams_go_on_over_a_swap_and_are_recomputed(first: Server, versions: Versions) -> None:
    stream = first.stream(PROMPT, STREAMED)
    head = [token for token, _ in zip(stream, range(10), strict=False)]
    answer = first.activate(versions[1])
    assert answer.status == 200, answer.body
    tokens = stream.rest()
    assert len(tokens) == STREAMED
    assert stream.finish == "length"
    assert tokens[:10] == head
    # From some token on, every token is what the new weights say after all those before it. The last
    # twenty tokens tell; nothing that the old weights computed has a part in them.
    for split in (STREAMED - 20, STREAMED - 1):
        rest = first.tokens(PROMPT + tokens[:split], STREAMED - split, cache_salt="cold")
        assert rest == tokens[split:]
    stamped = stamp(stream.headers, first.state(), streamed=True)
    assert stamped.ambiguous
    assert stamped.identity == versions[0].identity
    assert stamped.candidates == tuple(label_of(one.identity) for one in versions[:2])


def test_several_streams_at_once_get_every_token_exactly_once(
    first: Server, versions: Versions
) -> None:
    """Completions, and chats of two choices each: in one batch, all at once."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [*PROMPT, 60 + n], "temperature": 0, "logprobs": 1})
        for n in range(2)
    ] + [
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": f"w{70 + n} w8 w9"}], "temperature": 1.0,
          "seed": n, "n": 2, "logprobs": True, "top_logprobs": 1})
        for n in range(2)
    ]  # fmt: skip

    def told(over: Callable[[], None]) -> list[Told]:
        streams = [Told(first, path, STREAMED, **body) for path, body in bodies]
        for stream in streams:
            stream.wait_for(10)
        over()
        return [stream.whole() for stream in streams]

    def swap() -> None:
        assert first.activate(versions[1]).status == 200

    before = told(lambda: None)
    assert first.stage(versions[1]).status == 200
    found = told(swap)
    for stream, still in zip(found, before, strict=True):
        assert stream.finish == still.finish == {index: ["length"] for index in stream.tokens}
        assert stream.usage == still.usage == STREAMED * len(stream.tokens)
        for index, tokens in stream.tokens.items():
            assert len(tokens) == STREAMED
            assert tokens[:10] == still.tokens[index][:10]
            assert tokens != still.tokens[index]
            assert stream.logprobs[index] == [f"token_id:{token}" for token in tokens]
            assert stream.text[index].split() == [f"w{token}" for token in tokens]
    assert [len(stream.tokens) for stream in found] == [1, 1, 2, 2]
    # None lost in the middle either: the new weights say the same after all that was received.
    for (_, body), stream in zip(bodies, found[:2], strict=False):
        tokens, split = stream.tokens[0], STREAMED - 20
        rest = first.tokens(body["prompt"] + tokens[:split], 20, cache_salt="cold")
        assert rest == tokens[split:]


def test_requests_that_arrive_during_a_swap_are_answered(first: Server, versions: Versions) -> None:
    answers: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(first.completion(PROMPT, 4).status)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for target in (versions[1], versions[2], versions[0]):
            assert first.activate(target).status == 200
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert set(answers) == {200}


def test_wait_lets_running_requests_end_on_the_old_weights(
    first: Server, versions: Versions
) -> None:
    old = first.tokens(PROMPT, STREAMED)
    stream = first.stream(PROMPT, STREAMED)
    next(iter(stream))
    answer = first.activate(versions[1], requests="wait")
    assert answer.status == 200, answer.body
    assert stream.rest() == old
    assert first.tokens(PROMPT, STREAMED) != old


def test_a_wait_that_is_longer_than_its_lease_goes_back(first: Server, versions: Versions) -> None:
    old = first.tokens(PROMPT, 160)
    stream = first.stream(PROMPT, 160)
    next(iter(stream))
    answer = first.activate(versions[1], requests="wait", lease_s=0.1)
    assert answer.status == 504, answer.body
    assert answer.json["error"]["phase"] in {"stage", "pause"}
    assert stream.rest() == old
    state = first.state()
    assert (state.ready, state.paused, state.poisoned) == (True, False, False)
    assert state.identity == versions[0].identity
    assert state.last_failure is not None
    assert first.activate(versions[1]).status == 200
    assert first.state().last_failure is None


def test_abort_ends_running_requests(first: Server, versions: Versions) -> None:
    stream = first.stream(PROMPT, STREAMED)
    next(iter(stream))
    assert first.activate(versions[1], requests="abort").status == 200
    assert len(stream.rest()) < STREAMED
    assert stream.finish == "abort"


def test_keep_is_refused_where_requests_are_not_salted(first: Server, versions: Versions) -> None:
    answer = first.activate(versions[1], requests="keep")
    assert answer.status == 409
    assert "SHARDCAST_SALT=1" in answer.json["error"]["message"]
    assert served(first) == versions[0].identity


def test_a_prefix_is_never_stale(first: Server, versions: Versions) -> None:
    for number, target in enumerate((versions[1], versions[2], versions[0])):
        first.tokens(LONG, 8)  # now the prefix is cached
        assert first.activate(target).status == 200
        warm, cold = first.generate(LONG, 8), first.generate(LONG, 8, cache_salt=f"new {number}")
        assert warm["token_ids"] == cold["token_ids"]
        assert warm["logprobs"]["content"]
        assert warm["logprobs"] == cold["logprobs"]


# --- failures ----------------------------------------------------------------------------------


def test_a_load_that_fails_leaves_the_old_version(first: Server, versions: Versions) -> None:
    old = first.tokens(PROMPT, 40)
    stream = first.stream(PROMPT, STREAMED)
    next(iter(stream))
    first.arm("tensors", 3)
    answer = first.activate(versions[1])
    assert answer.status == 500
    assert answer.json["error"]["phase"] == "load"
    assert "injected" in answer.json["error"]["message"]
    state = first.state()
    assert state.identity == versions[0].identity
    assert (state.ready, state.paused) == (True, False)
    assert len(stream.rest()) == STREAMED
    assert not stamp(stream.headers, first.state(), streamed=True).ambiguous
    assert first.tokens(PROMPT, 40) == old
    assert first.tokens(PROMPT, 40, cache_salt="fresh") == old


def test_a_poisoned_engine_stays_paused_until_the_next_full_load(
    first: Server, versions: Versions
) -> None:
    stream: list[int] = []
    first.arm("tensors", 3, times=2)  # the new version, and then the old one again
    answer = first.activate(versions[1])
    assert answer.status == 500
    assert "send activate again" in answer.json["error"]["message"]
    state = first.state()
    assert (state.ready, state.paused, state.poisoned) == (False, True, True)
    assert state.served is None
    ready = first.ask(READY_PATH)
    assert ready.status == 503
    assert "restart the engine" in ready.json["why"]
    waiting = threading.Thread(target=lambda: stream.extend(first.tokens(PROMPT, 20)))
    waiting.start()
    assert first.activate(versions[2]).status == 200
    waiting.join(60)
    assert stream == first.tokens(PROMPT, 20, cache_salt="fresh")
    assert served(first) == versions[2].identity
    assert first.ask(READY_PATH).status == 200


def test_a_client_that_is_gone_changes_nothing(first: Server, versions: Versions) -> None:
    body = json.dumps(members(versions[1])).encode()
    with socket.create_connection(("127.0.0.1", first.port)) as link:
        link.sendall(
            f"POST {ACTIVATE_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        until(lambda: served(first) != versions[0].identity, "the activation began")
    until(lambda: served(first) == versions[1].identity, "the activation ended")
    state = first.state()
    assert (state.ready, state.activating, state.last_failure) == (True, None, None)


def test_a_load_that_hangs_is_said_when_its_lease_ends_and_heals(
    first: Server, versions: Versions
) -> None:
    rank = first.arm("stop", 3)
    try:
        answer = first.activate(versions[1], lease_s=2)
        assert answer.status == 504, answer.body
        state = first.state()
        assert (state.ready, state.paused, state.poisoned) == (False, True, False)
        assert "restart the engine" in state.why
        assert first.ask(READY_PATH).status == 503
        assert first.activate(versions[2]).status == 409
    finally:
        os.kill(rank, signal.SIGCONT)
    until(lambda: first.state().activating is None, "the load ended after all")
    state = first.state()
    assert (state.ready, state.identity) == (True, versions[1].identity)
    assert state.last_failure is None
    assert first.tokens(PROMPT) == first.tokens(PROMPT, cache_salt="fresh")


def test_an_engine_that_somebody_paused_is_seen_and_resumed(
    first: Server, versions: Versions
) -> None:
    first.pause()
    state = first.state()
    assert (state.paused, state.ready) == (True, False)
    assert first.ask(READY_PATH).status == 503
    assert first.activate(versions[0]).json["pause_ms"] > 0
    assert first.state().ready
    assert first.completion(PROMPT).status == 200
    first.pause()
    assert first.activate(versions[1]).status == 200
    assert first.state().ready


def test_falling_behind_drops_readiness_and_goes_on_answering(
    first: Server, versions: Versions
) -> None:
    told = first.ask(NEWEST_PATH, {"run": versions[0].run, "version": 9, "max_lag": 4})
    assert told.json["state"]["lag"] == 8
    ready = first.ask(READY_PATH)
    assert (ready.status, "behind" in ready.json["why"]) == (503, True)
    assert not first.state().paused
    assert first.completion(PROMPT).status == 200
    metrics = first.ask("/metrics", key=None).body.decode()
    assert "\nshardcast_vllm_lag_versions 8.0\n" in metrics
    assert "\nshardcast_vllm_ready_state 0.0\n" in metrics
    assert "\nshardcast_vllm_served_version 1.0\n" in metrics
    assert 'shardcast_vllm_activations_total{outcome="activated"}' in metrics
    assert "shardcast_vllm_pause_seconds_bucket" in metrics


# --- boot from a run, salts, spans ---------------------------------------------------------------


@pytest.fixture(scope="module")
def booted(servers: ServerHost, versions: Versions, out: Out) -> Iterator[Server]:
    """Booted from OUT/current, which is version 3; salted; with vLLM's generate route."""
    server = servers.begin(
        str(out.current), *BACKEND, *INJECTED, "--load-format", "shardcast", "--enable-scale-out",
        SHARDCAST_SALT="1",
    )  # fmt: skip
    try:
        server.wait_started()
        yield server
    finally:
        server.end()


def test_a_boot_from_a_run_is_labelled(booted: Server, plain: Server, versions: Versions) -> None:
    assert served(booted) == versions[2].identity
    answer = booted.completion(LONG, 20)
    assert stamp(answer.headers).identity == versions[2].identity
    # A cold start and a swap give the same.
    assert plain.activate(versions[2]).status == 200
    assert answer.json["choices"][0]["token_ids"] == plain.tokens(LONG, 20)
    choice = booted.generate(PROMPT, 6)
    (span,) = spans_of(choice["weight_versions"])
    assert (span.identity, span.start, span.end) == (versions[2].identity, 0, 6)


def test_requests_keep_their_cache_and_nobody_finds_a_stale_prefix(
    booted: Server, versions: Versions
) -> None:
    assert booted.state().keep_allowed
    assert booted.activate(versions[0]).status == 200
    booted.tokens(LONG, 4)  # cached under version 1's salt
    stream = booted.stream(LONG, STREAMED)
    next(iter(stream))
    found: list[Any] = []
    spanned = threading.Thread(target=lambda: found.append(booted.generate(PROMPT, STREAMED)))
    spanned.start()
    for _, _ in zip(stream, range(10), strict=False):
        pass
    answer = booted.activate(versions[1], requests="keep")
    assert answer.status == 200, answer.body
    during = booted.tokens(LONG, 12)
    tokens = stream.rest()
    assert len(tokens) == STREAMED
    spanned.join(60)
    spans = spans_of(found[0]["weight_versions"])
    assert spans[-1].identity == versions[1].identity
    assert spans[-1].end == STREAMED
    # The same prompt while the old cache is still held, and afterwards: as from a cold start.
    assert during == booted.tokens(LONG, 12) == booted.tokens(LONG, 12, cache_salt="never seen")
    # And back: what was cached under version 1 before is not found either.
    assert booted.activate(versions[0], requests="keep").status == 200
    assert booted.tokens(LONG, 12) == booted.tokens(LONG, 12, cache_salt="never seen 2")


def test_what_cannot_be_salted_is_refused(booted: Server) -> None:
    answer = booted.ask("/v1/chat/completions/batch", {"model": "policy", "messages": []})
    assert answer.status == 501
    assert "SHARDCAST_SALT" in answer.json["error"]["message"]
    assert booted.ask("/v1/completions", [1]).status == 400


def test_a_rank_that_dies_in_the_load_never_answers_as_new(
    booted: Server, versions: Versions
) -> None:
    """Last: it takes the booted server along."""
    assert booted.activate(versions[0]).status == 200
    booted.arm("die", 3)
    gone(booted, lambda: booted.activate(versions[1]))


def gone(server: Server, last: Callable[[], Answer]) -> None:
    """Check that a request ends without success, and that the server is not ready from then on."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        answer = last()
        assert answer.status == 503, answer.body
        assert answer.json["error"]["code"] == "dead"
        assert "restart the engine" in answer.json["error"]["message"]
    # vLLM ends a server whose engine is dead; until then it is not ready.
    with contextlib.suppress(OSError, http.client.HTTPException):
        assert server.ask(READY_PATH).status == 503


# --- adapters ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Two versions of a run of adapters."""
    root = tmp_path_factory.mktemp("adapters")
    run = RunStore(root / "style", "style")
    found = []
    for seed in (11, 12):
        source = save_adapter(root / f"adapter-{seed}", seed)
        options = PublishOptions(source=source, threads=1, keep=16, delta=False)
        done = publish_directory(options, run, [signer()], lambda: time.time_ns() // 1_000_000)
        found.append(
            Target(
                run="style",
                version=done.ref.version,
                digest=done.ref.manifest,
                path=str(run.version_directory(done.ref.version)),
            )
        )
    return found


def test_adapters_over_swaps(servers: ServerHost, versions: Versions, adapters: Versions) -> None:
    server = servers.begin(
        versions[0].path, *BACKEND, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"
    )
    with contextlib.ExitStack() as undo:
        undo.callback(server.end)
        server.wait_started()
        assert server.activate(versions[0]).status == 200
        base = server.tokens(PROMPT, 20)

        def load(target: Target, name: str = "style") -> str:
            order = {**members(target), "action": "load", "name": name}
            answer = server.ask(LORA_PATH, {k: v for k, v in order.items() if k != "step"})
            assert answer.status == 200, answer.body
            (lora,) = (one for one in answer.json["state"]["lora"] if one["name"] == name)
            assert lora["loaded"]
            return str(lora["model"])

        first = load(adapters[0])
        one = server.tokens(PROMPT, 20, model=first)
        assert one != base
        second = load(adapters[1])
        assert second != first
        two = server.tokens(PROMPT, 20, model=second)
        assert two not in (one, base)
        assert server.completion(PROMPT, 4, model=first).status == 404
        # A swap of the base drops every adapter; it is back before anyone asks for it.
        answer = server.activate(versions[1])
        assert answer.status == 200, answer.body
        assert "lora" in answer.json["phases_ms"]
        (lora,) = answer.json["state"]["lora"]
        assert lora["loaded"]
        assert server.state().last_failure is None
        assert server.tokens(PROMPT, 20, model=second) not in (two, server.tokens(PROMPT, 20))
        assert server.activate(versions[0]).status == 200
        assert server.tokens(PROMPT, 20, model=second) == two
        lie = {**members(adapters[0]), "path": adapters[1].path, "action": "load", "name": "style"}
        assert server.ask(LORA_PATH, lie).status in {409, 424}
        assert server.state().lora[0].model == second
        # vLLM reads an adapter's files again after a swap: they are what was verified, or it is gone.
        weights = Path(adapters[1].path) / "adapter_model.safetensors"
        good = weights.read_bytes()
        weights.chmod(0o644)
        weights.write_bytes(good[:-64] + bytes(64))
        assert server.activate(versions[1]).status == 200
        (lora,) = server.state().lora
        assert not lora.loaded
        failure = server.state().last_failure
        assert failure is not None
        assert failure.phase == "lora"
        assert server.completion(PROMPT, 4, model=second).status == 404
        weights.write_bytes(good)
        assert load(adapters[1]) == second
        assert server.activate(versions[0]).status == 200
        assert server.tokens(PROMPT, 20, model=second) == two
        # It holds two at a time (--max-loras), and loads the third when a request wants it.
        for name in ("tone", "mood"):
            load(adapters[0], name)
        assert server.activate(versions[1]).status == 200
        assert server.activate(versions[0]).status == 200
        state = server.state()
        assert state.last_failure is None
        assert [(lora.name, lora.loaded) for lora in state.lora] == [
            ("mood", True), ("style", True), ("tone", True),
        ]  # fmt: skip
        told = {lora.name: server.tokens(PROMPT, 20, model=lora.model) for lora in state.lora}
        assert told == {"mood": one, "style": two, "tone": one}


# --- servers that cannot swap, and one that dies ---------------------------------------------------


def test_a_plugin_list_without_the_engine_is_explained(
    servers: ServerHost, versions: Versions
) -> None:
    server = servers.begin(versions[0].path, VLLM_PLUGINS="shardcast_http")
    with contextlib.ExitStack() as undo:
        undo.callback(server.end)
        server.wait_started()
        answer = server.activate(versions[0])
        assert answer.status == 501
        assert "VLLM_PLUGINS=shardcast,shardcast_http" in answer.json["error"]["message"]
        assert not server.state().ready
        assert server.completion(PROMPT).status == 200


def test_a_server_does_not_start_with_another_version_s_sampling_defaults(
    servers: ServerHost, tmp_path: Path
) -> None:
    """vLLM reads them when the weights are loaded: ``current`` may have moved by then."""
    out, made = Out(tmp_path), []
    for seed in (21, 22):
        directory = save("qwen2-tied", "bfloat16", seed, out.scratch / f"defaults-{seed}")
        (directory / "generation_config.json").write_text(f'{{"top_k": {seed}}}')
        made.append(out.publish(directory))
    out.run.switch_current(made[0].version)
    server = servers.begin(
        str(out.current), "--load-format", "shardcast", **variables(out.current, made[1].version)
    )
    with contextlib.ExitStack() as undo:
        undo.callback(server.end)
        with pytest.raises(AssertionError, match="the server ended") as ended:
            server.wait_started()
    assert out.current.resolve() == Path(made[1].path)
    said = f"has another generation_config.json, .*start the engine again, or with --model {made[0].path}"
    assert re.search(said, str(ended.value).replace("\n", " "))


def test_an_engine_that_is_killed_never_answers_as_new(plain: Server, versions: Versions) -> None:
    """Last: it takes the plain server along."""
    assert plain.activate(versions[0]).status == 200
    core = plain.engine_pid()
    os.kill(core, signal.SIGSTOP)  # so that the activation is under way when it dies
    thread = threading.Thread(target=gone, args=(plain, lambda: plain.activate(versions[1])))
    thread.start()
    until(lambda: plain.state().activating is not None, "the activation is under way")
    os.kill(core, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()

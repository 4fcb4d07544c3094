"""Which version wrote a rollout: certain, or marked ambiguous; never guessed."""

from __future__ import annotations

import pytest

from shardcast.engine.forms import EngineState, Swap, label_of, parse_label
from shardcast.engine.stamps import Span, spans_of, stamp
from shardcast.errors import MalformedError
from tests.unit.swapping.engine import NEW, OLD

OLD_LABEL, NEW_LABEL = label_of(OLD.identity), label_of(NEW.identity)


def headers(
    label: str = OLD_LABEL, swaps: int = 3, answered: int = 3, start: str = "a"
) -> dict[str, str]:
    return {
        "Shardcast-Version": label,
        "shardcast-swaps": str(swaps),
        "SHARDCAST-SWAPS-ANSWERED": str(answered),
        "Shardcast-Start": start,
    }


def state(
    *swaps: tuple[int, str | None], count: int | None = None, start: str = "a"
) -> EngineState:
    log = [
        Swap(n=n, from_=None, to=to, paused_at=1, resumed_at=2, pause_ms=1, requests="recompute")
        for n, to in swaps
    ]
    return EngineState(
        engine="vllm",
        engine_version="0.32.0",
        plugin_version="0.1.0",
        swaps=log,
        swap_count=log[-1].n if count is None else count,
        start=start,
    )


def test_an_answer_without_a_swap_in_it_is_certain() -> None:
    one = stamp(headers())
    assert one.fields() == {
        "run": "demo",
        "version": OLD.version,
        "manifest": OLD.digest,
        "ambiguous": False,
    }
    assert one.candidates == (OLD_LABEL,)


def test_an_answer_with_a_swap_in_it_is_ambiguous() -> None:
    blind = stamp(headers(answered=4))
    assert blind.ambiguous
    assert blind.identity == OLD.identity
    assert "swap 4" in blind.why
    seen = stamp(headers(answered=4), state((3, OLD_LABEL), (4, NEW_LABEL)))
    assert seen.ambiguous
    assert seen.candidates == (OLD_LABEL, NEW_LABEL)


def test_a_pause_that_changed_nothing_is_no_swap() -> None:
    assert not stamp(headers(answered=4), state((4, OLD_LABEL))).ambiguous


def test_a_swap_after_the_end_of_an_answer_is_none_of_its() -> None:
    assert not stamp(headers(), state((3, OLD_LABEL), (4, NEW_LABEL))).ambiguous


def test_a_streamed_answer_needs_the_state_after_its_end() -> None:
    assert stamp(headers(), streamed=True).ambiguous
    assert not stamp(headers(), state((3, OLD_LABEL)), streamed=True).ambiguous
    assert not stamp(headers(swaps=0, answered=0), state((1, OLD_LABEL)), streamed=True).ambiguous
    over = stamp(headers(), state((3, OLD_LABEL), (4, NEW_LABEL), (5, OLD_LABEL)), streamed=True)
    assert over.ambiguous
    assert "swaps 4 to 5" in over.why


def test_a_log_that_does_not_reach_back_leaves_it_ambiguous() -> None:
    assert stamp(headers(), state((5, OLD_LABEL)), streamed=True).ambiguous
    assert stamp(headers(), state((4, None), count=4), streamed=True).candidates[-1] == "unknown"


def test_an_event_stream_is_streamed_whoever_forgets_to_say_so() -> None:
    stream = headers() | {"Content-Type": "text/event-stream; charset=utf-8"}
    assert stamp(stream).ambiguous
    assert not stamp(stream, state((3, OLD_LABEL))).ambiguous
    assert stamp(stream, state((3, OLD_LABEL), (4, NEW_LABEL))).ambiguous
    assert not stamp(headers() | {"content-type": "application/json"}).ambiguous


@pytest.mark.parametrize("count", [1, 3, 4])
def test_counts_of_a_server_that_was_restarted_or_of_another_one_say_nothing(count: int) -> None:
    """The swap that fell into the answer is in no log any more; the new process counts from 0."""
    later = state(count=count, start="b")
    one = stamp(headers(), later, streamed=True)
    assert one.ambiguous
    assert "restarted" in one.why
    assert not stamp(headers(), later).ambiguous  # not streamed: its own headers say all
    gone_on = state((4, OLD_LABEL), start="b")
    assert stamp(headers(answered=4), gone_on).ambiguous  # swap 4 of another process


@pytest.mark.parametrize(("mine", "its"), [("", ""), ("a", ""), ("", "a")])
def test_a_server_that_names_no_start_may_have_been_restarted(mine: str, its: str) -> None:
    one = stamp(headers(start=mine), state((3, OLD_LABEL), start=its), streamed=True)
    assert one.ambiguous
    assert "Shardcast-Start" in one.why
    assert not stamp(headers(start=mine)).ambiguous


def test_counts_that_go_back_are_certain_of_nothing() -> None:
    assert stamp(headers(swaps=3, answered=2)).ambiguous


def test_an_engine_that_serves_no_version() -> None:
    one = stamp(headers("unknown"))
    assert one.ambiguous
    assert one.fields() == {"run": None, "version": None, "manifest": None, "ambiguous": True}


@pytest.mark.parametrize(
    "wrong", [{}, {"Shardcast-Version": OLD_LABEL}, headers() | {"shardcast-swaps": "-1"}]
)
def test_headers_that_are_missing_or_malformed(wrong: dict[str, str]) -> None:
    with pytest.raises(MalformedError):
        stamp(wrong)


def test_spans_name_the_version_of_every_token() -> None:
    spans = spans_of(
        [
            {"version": "default", "start": 0, "end": 2},
            {"version": OLD_LABEL, "start": 2, "end": 5},
            {"version": NEW_LABEL, "start": 5, "end": 6},
        ]
    )
    assert spans == (Span(None, 0, 2), Span(OLD.identity, 2, 5), Span(NEW.identity, 5, 6))
    assert spans_of([]) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        [{"version": OLD_LABEL, "start": 0}],
        [{"version": 3, "start": 0, "end": 1}],
        [{"version": OLD_LABEL, "start": 2, "end": 1}],
        [
            {"version": OLD_LABEL, "start": 0, "end": 3},
            {"version": NEW_LABEL, "start": 2, "end": 4},
        ],
    ],
)
def test_spans_that_make_no_sense(wrong: list[dict[str, object]]) -> None:
    with pytest.raises(MalformedError):
        spans_of(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "default",
        f"demo/0/{OLD.digest}",
        f"demo/01/{OLD.digest}",
        f"Demo/1/{OLD.digest}",
        f"demo/1/{OLD.digest}\n",
        f"demo/{2**60}/{OLD.digest}",
        f"demo/1/{OLD.digest[:-1]}",
    ],
)
def test_labels_that_are_none(text: str) -> None:
    assert parse_label(text) is None


def test_labels_are_read_as_they_are_written() -> None:
    assert parse_label(OLD_LABEL) == OLD.identity
    assert str(OLD.identity) == OLD_LABEL

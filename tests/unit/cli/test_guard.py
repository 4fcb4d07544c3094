import json
import os
import signal

import pytest

from shardcast import errors
from shardcast.cli.guard import (
    EXIT_BROKEN_PIPE,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    guard,
)
from shardcast.cli.output import Output


def ends_with(error: BaseException, out: Output | None = None) -> int:
    with pytest.raises(SystemExit) as ended, guard(out or Output()):
        raise error
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.BusyError("x"), 2),
        (errors.NotFoundError("x"), 2),
        (errors.MalformedError("x"), 10),
        (errors.UnsafePathError("x"), 10),
        (errors.IntegrityError("x"), 11),
        (errors.ModifiedError("x"), 11),
        (errors.RollbackError("x"), 12),
        (errors.WithdrawnError("x"), 12),
        (errors.StallError("x"), 13),
        (errors.SourceStatusError("x", status=503), 13),
        (errors.DiskFullError("x"), 14),
        (errors.StateError("x"), 14),
        (errors.EngineError("x"), 15),
    ],
)
def test_the_exit_code_follows_who_must_act(error: errors.ShardcastError, code: int) -> None:
    assert ends_with(error) == code


def test_an_error_in_a_group_of_groups_counts(capsys: pytest.CaptureFixture[str]) -> None:
    inner = ExceptionGroup("inner", [ValueError("first"), errors.DiskError("no room")])
    assert ends_with(ExceptionGroup("outer", [inner])) == 14
    assert capsys.readouterr().err.startswith("error: no room")


def test_a_group_of_bugs_is_a_bug() -> None:
    assert ends_with(ExceptionGroup("outer", [ValueError("first")])) == EXIT_BUG


def test_the_system_s_errors_are_disk_errors_that_name_the_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ends_with(PermissionError(13, "Permission denied", "/some/where")) == 14
    text = capsys.readouterr().err
    assert "/some/where" in text
    assert "Permission denied" in text


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(KeyboardInterrupt()) == EXIT_INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_sigterm_cleans_up_like_an_interrupt_and_ends_with_143(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cleaned = []
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # an impatient second one
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended, guard(Output()):
        work()
    assert (ended.value.code, cleaned) == (EXIT_TERMINATED, [True])
    assert capsys.readouterr().err == "warning: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_while_a_class_is_made_is_no_bug() -> None:
    class Interrupts:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended, guard(Output()):
        type("Made", (), {"member": Interrupts()})
    assert ended.value.code == EXIT_INTERRUPTED


def test_a_bug_shows_its_trace_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(ZeroDivisionError("oops")) == EXIT_BUG
    short = capsys.readouterr().err
    assert "bug in shardcast: ZeroDivisionError: oops" in short
    assert "Traceback" not in short
    assert ends_with(ZeroDivisionError("oops"), Output(verbose=True)) == EXIT_BUG
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_an_event_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    ends_with(ZeroDivisionError("oops"), Output(json=True))
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["code"]) == ("error", "bug")


def test_hints_fit_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    ends_with(errors.WithdrawnError("x"), Output(command="pull"))
    assert "leave --version out" in capsys.readouterr().err
    ends_with(errors.WithdrawnError("x"), Output(command="withdraw"))
    assert "hint" not in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_failure_worth_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    saved = os.dup(1)
    try:
        assert ends_with(BrokenPipeError()) == EXIT_BROKEN_PIPE
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert capfd.readouterr().err == ""

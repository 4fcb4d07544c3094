"""What the parser refuses, which modules a command imports, what options may hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardcast.cli.main import COMMANDS
from shardcast.cli.output import EVENT_MEMBERS
from tests.unit.cli.conftest import Cli

MISTYPED = [
    ["nonsense"],
    ["publish"],
    ["publish", "a", "b"],
    ["publish", "ckpt", "--step", "abc"],
    ["pull", "r", "--from", "http://127.0.0.1:9", "--out", "o", "--version", "0"],
    ["pull", "r", "--from"],
    ["relay", "--nonsense"],
    ["withdraw", "r", "x"],
]


@pytest.mark.parametrize("arguments", MISTYPED, ids=" ".join)
def test_what_the_parser_refuses_is_an_error_event_too(cli: Cli, arguments: list[str]) -> None:
    ran = cli(*arguments, "--json") if arguments[-1] != "--from" else cli("--json", *arguments)
    assert ran.code == 2
    event = ran.event("error")
    assert event["code"] == "usage"
    assert event["message"]
    assert event.keys() >= {*EVENT_MEMBERS, "t", "source"}
    assert ran.stderr == f"error: {event['message']}\n"


@pytest.mark.parametrize("arguments", MISTYPED, ids=" ".join)
def test_what_the_parser_refuses_is_one_plain_line_for_people(
    cli: Cli, arguments: list[str]
) -> None:
    ran = cli(*arguments)
    assert (ran.code, ran.stdout) == (2, "")
    error, hint = ran.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: shardcast ")


def test_json_may_come_from_the_environment(cli: Cli) -> None:
    assert cli("publish", env={"SHARDCAST_JSON": "1"}).event("error")["code"] == "usage"
    assert cli("publish", env={"SHARDCAST_PUBLISH_JSON": "yes"}).events
    assert cli("publish", env={"SHARDCAST_JSON": "0"}).stdout == ""


def test_a_mistyped_command_is_named_with_the_one_that_is_meant(cli: Cli) -> None:
    assert "did you mean publish?" in cli("pubish").stderr


def test_nothing_at_all_shows_the_help_and_is_a_usage_error(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 2
    assert all(name in ran.stdout for name in COMMANDS)


def test_a_command_imports_no_other_command() -> None:
    program = (
        "import sys\n"
        "from shardcast.cli.main import app\n"
        "try: app(['keygen', '--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    loaded = {name for name in COMMANDS if f"shardcast.cli.{name}" in ran.stderr.split()}
    assert loaded == {"keygen"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", ""],
        ["publish", "CKPT", "--store", ""],
        ["publish", "CKPT", "--key", ""],
        ["pull", "r", "--from", "http://127.0.0.1:9", "--out", ""],
        ["pull", "r", "--from", "http://127.0.0.1:9", "--out", "o", "--pubkey", ""],
        ["verify", ""],
        ["relay", "--publish-token-file", ""],
        ["keygen", "--out", ""],
    ],
)
def test_an_empty_path_is_not_this_directory(
    cli: Cli, checkpoint: Path, arguments: list[str]
) -> None:
    ran = cli(*(str(checkpoint) if word == "CKPT" else word for word in arguments))
    assert ran.code == 2
    assert "empty path" in ran.stderr


@pytest.mark.parametrize("name", ["../x", "A", "", "runs", "status", "a b", "x" * 65])
@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "CKPT", "--run", "NAME"],
        ["relay", "--run", "NAME"],
        ["pull", "NAME", "--from", "http://127.0.0.1:9", "--out", "OUT", "--trust-on-first-use"],
        ["inspect", "NAME", "--from", "http://127.0.0.1:9"],
        ["hold", "NAME"],
        ["withdraw", "NAME", "1"],
        ["export", "NAME", "--out", "OUT"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_no_run_can_have_is_a_usage_error_and_makes_nothing(
    cli: Cli, tmp_path: Path, checkpoint: Path, arguments: list[str], name: str
) -> None:
    words = {"NAME": name, "CKPT": str(checkpoint), "OUT": str(tmp_path / "out")}
    before = sorted(tmp_path.rglob("*"))
    ran = cli(*(words.get(word, word) for word in arguments), "--json")
    assert ran.code == 2
    assert ran.event("error")["code"] == "usage"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[keygen]\nout = 5\n", None),
        ("[gc]\ndry-run = 1\n", "true or false"),
        ('[gc]\ndry-run = "yes"\n', "true or false"),
        ("[publish]\nkeep = true\n", "not true or false"),
        ("[publish]\nkeep = 1.5\n", "1.5"),
        ('[publish]\nkeep = "abc"\n', "abc"),
        ('[publish]\ndurability = "maybe"\n', "maybe"),
    ],
)
def test_a_value_in_a_file_is_checked_as_on_the_command_line(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    text: str,
    named: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.toml"
    file.write_text(text)
    if named is None:
        assert cli("keygen", "--config", file).code == 0
        assert (tmp_path / "5" / "shardcast.key").exists()
        return
    ran = cli("publish", checkpoint, "--config", file, "--json")
    assert ran.code == 2
    assert named in json.loads(ran.stdout)["message"]


def test_a_configuration_file_that_is_a_directory_is_a_usage_error(
    cli: Cli, tmp_path: Path
) -> None:
    ran = cli("gc", "--config", tmp_path, "--json")
    assert ran.code == 2
    assert str(tmp_path) in ran.event("error")["message"]

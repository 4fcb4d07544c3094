"""Options from the command line, the environment and a file, in this order."""

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli


def keygen_writes_to(cli: Cli, directory: Path, *arguments: object, **env: str) -> None:
    ran = cli("keygen", *arguments, env=env)
    assert ran.code == 0, ran.stderr
    assert (directory / "shardcast.key").exists()


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_the_file_is_below_the_environment_is_below_the_command_line(
    cli: Cli, tmp_path: Path
) -> None:
    file = config(tmp_path, f'[keygen]\nout = "{tmp_path}/from-file"\n')
    keygen_writes_to(cli, tmp_path / "from-file", "--config", file)
    env = {"SHARDCAST_KEYGEN_OUT": str(tmp_path / "from-env")}
    keygen_writes_to(cli, tmp_path / "from-env", "--config", file, **env)
    keygen_writes_to(
        cli, tmp_path / "from-line", "--config", file, "--out", tmp_path / "from-line", **env
    )


def test_the_name_for_one_command_is_above_the_shared_name(cli: Cli, tmp_path: Path) -> None:
    keygen_writes_to(cli, tmp_path / "shared", SHARDCAST_OUT=str(tmp_path / "shared"))
    keygen_writes_to(
        cli,
        tmp_path / "own",
        SHARDCAST_OUT=str(tmp_path / "shared"),
        SHARDCAST_KEYGEN_OUT=str(tmp_path / "own"),
    )


def test_a_command_s_table_is_above_the_defaults_for_all(cli: Cli, tmp_path: Path) -> None:
    file = config(tmp_path, f'out = "{tmp_path}/all"\n[keygen]\nout = "{tmp_path}/own"\n')
    keygen_writes_to(cli, tmp_path / "own", "--config", file)
    keygen_writes_to(
        cli, tmp_path / "all", "--config", config(tmp_path, f'out = "{tmp_path}/all"\n')
    )


def test_the_file_itself_may_come_from_the_environment(cli: Cli, tmp_path: Path) -> None:
    file = config(tmp_path, f'[keygen]\nout = "{tmp_path}/from-file"\n')
    keygen_writes_to(cli, tmp_path / "from-file", SHARDCAST_CONFIG=str(file))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[keygen]\noutt = 1\n", "keygen.outt"),
        ('nonsense = "x"\n', "nonsense"),
        ("[keygenn]\nout = 1\n", "[keygenn]"),
        ("[keygen]\nout = [1, 2]\n", "keygen.out"),
        ("[keygen]\nout = 1979-05-27\n", "keygen.out"),
        ("[keygen]\n[keygen.out]\nx = 1\n", "keygen.out"),
        ("[keygen]\nhelp = true\n", "keygen.help"),
        ('config = "x"\n', "config"),
    ],
)
def test_a_key_that_means_nothing_is_an_error_that_names_it(
    cli: Cli, tmp_path: Path, text: str, named: str
) -> None:
    ran = cli("keygen", "--config", config(tmp_path, text))
    assert ran.code == 2
    assert named in ran.stderr
    assert "config.toml" in ran.stderr


def test_a_close_name_is_suggested(cli: Cli, tmp_path: Path) -> None:
    ran = cli("publish", "x", "--config", config(tmp_path, '[publish]\nsteps = "3"\n'))
    assert "did you mean step?" in ran.stderr


def test_a_file_that_is_not_toml_is_malformed(cli: Cli, tmp_path: Path) -> None:
    ran = cli("keygen", "--config", config(tmp_path, "out = \n"))
    assert ran.code == 10
    assert "config.toml" in ran.stderr


def test_no_file_is_a_usage_error_and_with_json_an_event(cli: Cli, tmp_path: Path) -> None:
    ran = cli("keygen", "--config", tmp_path / "none.toml")
    assert ran.code == 2
    assert "none.toml" in ran.stderr


def test_underscores_numbers_flags_and_lists_in_a_file(
    cli: Cli, tmp_path: Path, checkpoint: Path
) -> None:
    file = config(
        tmp_path,
        f'store = "{tmp_path}/store"\n[publish]\nrun = "policy"\nstep = 7\nlink = true\n'
        'exclude = ["*.txt", "sub/*"]\n',
    )
    event = cli("publish", checkpoint, "--config", file, "--json").event("published")
    assert (event["run"], event["step"], event["method"]) == ("policy", 7, "link")
    assert event["left_out"] == [{"reason": "excluded", "files": 2, "bytes": 2}]


def test_a_value_of_the_wrong_type_names_the_option(
    cli: Cli, tmp_path: Path, checkpoint: Path
) -> None:
    ran = cli("publish", checkpoint, "--config", config(tmp_path, '[publish]\nstep = "three"\n'))
    assert ran.code == 2
    assert "--step" in ran.stderr


def test_a_hook_s_environment_does_not_become_an_option(cli: Cli, checkpoint: Path) -> None:
    event = cli(
        "publish", checkpoint, "--json", env={"SHARDCAST_STEP": "9", "SHARDCAST_VERSION": "4"}
    ).event("published")
    assert event["step"] is None
    own = cli("publish", checkpoint, "--json", env={"SHARDCAST_PUBLISH_STEP": "9"})
    assert own.event("published")["step"] == 9

"""The file that ``--config`` names: options by command, checked against what the command knows.

TOML; a table for a command (``[publish]``, ``[relay]``, ...) holds its options under their long
names; keys outside tables are defaults for every command that has such an option.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer

from shardcast.cli.output import Output
from shardcast.errors import MalformedError, NotFoundError, UsageError

_NOT_IN_A_FILE: Final = frozenset({"config", "help", "version", "json", "verbose", "quiet"})
_ALLOWED_ANYWAY: Final = frozenset({("pull", "version")})

Options = Mapping[str, tuple[str, bool]]
"""Long option name without dashes -> (parameter name, may be repeated)."""


def apply_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's options the defaults of the command that is being parsed.

    The command line and the environment stay above them.
    """
    from shardcast.cli.guard import guard

    if path is not None and not context.resilient_parsing:
        import sys

        with guard(Output(json="--json" in sys.argv)):
            root = context.find_root().command
            commands: Mapping[str, Any] = getattr(root, "commands", {})
            known = {name: known_options(command) for name, command in commands.items()}
            table = read_config(path, known)
            context.default_map = dict(table.get(context.info_name or "", {}))
    return path


def known_options(command: Any) -> Options:
    """Return the options of a command that a file may set."""
    found: dict[str, tuple[str, bool]] = {}
    for parameter in command.params:
        for option in parameter.opts:
            name = option.removeprefix("--")
            if not option.startswith("--"):
                continue
            if name not in _NOT_IN_A_FILE or (command.name, name) in _ALLOWED_ANYWAY:
                found[name] = (parameter.name, bool(parameter.multiple))
    return found


def read_config(path: Path, known: Mapping[str, Options]) -> dict[str, dict[str, object]]:
    """Read and check the file; return the values by command and parameter name.

    Raises:
        NotFoundError: If there is no such file.
        MalformedError: If it is not TOML.
        UsageError: If it names a command or option that does not exist, or a value cannot be one.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"no configuration file {path}", source=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"configuration file {path}: {error}", source=str(path)) from error
    values: dict[str, dict[str, object]] = {name: {} for name in known}
    for key, value in document.items():
        if isinstance(value, dict):
            continue
        owners = [name for name, options in known.items() if _name(key) in options]
        if not owners:
            raise _unknown(path, key, {option for options in known.values() for option in options})
        for name in owners:
            _put(values[name], known[name], path, key, value)
    for command, table in document.items():
        if not isinstance(table, dict):
            continue
        if command not in known:
            raise _unknown(path, f"[{command}]", {f"[{name}]" for name in known})
        for key, value in table.items():
            if _name(key) not in known[command]:
                raise _unknown(path, f"{command}.{key}", set(known[command]))
            _put(values[command], known[command], path, f"{command}.{key}", value)
    return values


def _put(values: dict[str, object], options: Options, path: Path, key: str, value: object) -> None:
    parameter, repeated = options[_name(key.rpartition(".")[2])]
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise UsageError(f"{path}: {key} must be text, a number, true or false, or a list of text")
    if isinstance(value, list) and not repeated:
        raise UsageError(f"{path}: {key} takes one value, not a list")
    values[parameter] = [str(item) for item in items] if repeated else value


def _name(key: str) -> str:
    return key.replace("_", "-")


def _unknown(path: Path, key: str, names: set[str]) -> UsageError:
    import difflib

    close = difflib.get_close_matches(key.rpartition(".")[2], sorted(names), n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return UsageError(f"{path}: unknown key {key}{meant}", source=str(path))

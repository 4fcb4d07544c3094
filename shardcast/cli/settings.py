"""The file that ``--config`` names: options by command, checked against what the command knows.

TOML; a table for a command (``[publish]``, ``[relay]``, ...) holds its options under their long
names; keys outside tables are defaults for every command that has such an option.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from shardcast.errors import MalformedError, NotFoundError, UsageError

_NOT_IN_A_FILE: Final = frozenset({"config", "help", "version", "json", "verbose", "quiet"})
_ALLOWED_ANYWAY: Final = frozenset({("pull", "version")})


@dataclass(frozen=True, slots=True)
class Known:
    """An option that a file may set."""

    parameter: str
    repeated: bool
    flag: bool


Options = Mapping[str, Known]
"""By long option name without dashes."""


def apply_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's options the defaults of the command that is being parsed.

    The command line and the environment stay above them.

    Raises:
        NotFoundError, MalformedError, UsageError: As ``read_config``.
    """
    if path is not None and not context.resilient_parsing:
        root = context.find_root()
        group: Any = root.command
        known = {
            name: known_options(group.get_command(root, name)) for name in group.list_commands(root)
        }
        table = read_config(path, known)
        context.default_map = dict(table.get(context.info_name or "", {}))
    return path


def known_options(command: Any) -> Options:
    """Return the options of a command that a file may set."""
    found: dict[str, Known] = {}
    for parameter in command.params:
        for option in parameter.opts:
            name = option.removeprefix("--")
            if not option.startswith("--"):
                continue
            if name not in _NOT_IN_A_FILE or (command.name, name) in _ALLOWED_ANYWAY:
                found[name] = Known(
                    parameter.name, bool(parameter.multiple), bool(parameter.is_flag)
                )
    return found


def read_config(path: Path, known: Mapping[str, Options]) -> dict[str, dict[str, object]]:
    """Read and check the file; return the values by command and parameter name.

    Raises:
        NotFoundError: If there is no such file.
        MalformedError: If it is not TOML.
        UsageError: If it names a command or option that does not exist, or a value cannot be one.
    """
    document = _parse(path)
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


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"no configuration file {path}", source=str(path)) from None
    except OSError as error:
        raise UsageError(
            f"cannot read configuration file {path}: {error.strerror}", source=str(path)
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"configuration file {path}: {error}", source=str(path)) from error


def _put(values: dict[str, object], options: Options, path: Path, key: str, value: object) -> None:
    option = options[_name(key.rpartition(".")[2])]
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise UsageError(f"{path}: {key} must be text, a number, true or false, or a list of text")
    if isinstance(value, list) and not option.repeated:
        raise UsageError(f"{path}: {key} takes one value, not a list")
    if any(isinstance(item, bool) != option.flag for item in items):
        wanted = "true or false" if option.flag else "text or a number, not true or false"
        raise UsageError(f"{path}: {key} takes {wanted}")
    if option.flag:
        values[option.parameter] = value
    else:  # as text, so that it is checked as on the command line
        texts = [str(item) for item in items]
        values[option.parameter] = texts if option.repeated else texts[0]


def _name(key: str) -> str:
    return key.replace("_", "-")


def _unknown(path: Path, key: str, names: set[str]) -> UsageError:
    import difflib

    close = difflib.get_close_matches(key.rpartition(".")[2], sorted(names), n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return UsageError(f"{path}: unknown key {key}{meant}", source=str(path))

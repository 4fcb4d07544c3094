"""How a plain function becomes a command: common options, environment names, errors.

A command is ``def name(out: Output, ...)`` with typer's annotations. Building it adds
``--config``, ``--json``, ``--verbose`` and ``--quiet``, lets each option come from the environment,
and turns errors into exit codes.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.models import OptionInfo, ParameterInfo

from shardcast.cli.guard import guard
from shardcast.cli.output import Output
from shardcast.cli.settings import apply_config
from shardcast.errors import MalformedError, UsageError

ENVIRONMENT_PREFIX: Final = "SHARDCAST"

_NOT_SHARED: Final = frozenset({"RUN", "VERSION", "STEP", "PATH", "MANIFEST"})
"""``--on-update`` sets SHARDCAST_VERSION and the like: a hook's own commands must not obey them."""

_PANEL: Final = "Output and configuration"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=apply_config,
        is_eager=True,
        help="Take options from this TOML file.",
        rich_help_panel=_PANEL,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Events on stdout, one JSON object a line.", rich_help_panel=_PANEL
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "--debug", "-v", help="Say more; traces of failures.", rich_help_panel=_PANEL
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, no notices.", rich_help_panel=_PANEL)
]

_COMMON: Final[tuple[tuple[str, Any, object], ...]] = (
    ("config", ConfigOption, None),
    ("json", JsonOption, False),
    ("verbose", VerboseOption, False),
    ("quiet", QuietOption, False),
)


def build(name: str, function: Callable[..., None], *, panel: str | None = None) -> Any:
    """Return ``function`` as the parser's command ``name``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without `out`

    def run(**values: Any) -> None:
        values.pop("config")
        out = Output(
            command=name,
            json=values.pop("json"),
            verbose=values.pop("verbose"),
            quiet=values.pop("quiet"),
        )
        run_name = values.get("run")
        out.run = run_name if isinstance(run_name, str) else None
        with guard(out):
            _require_run_names(run_name)
            function(out, **values)

    signature = [
        parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=_with_environment(hints[parameter.name], parameter.name, name),
        )
        for parameter in parameters
    ]
    signature += [
        inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=_with_environment(annotation, option, name),
        )
        for option, annotation, default in _COMMON
    ]
    # Functions have the attribute for inspect alone; typer reads it.
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    run.__doc__ = function.__doc__
    app.command(name, rich_help_panel=panel)(run)
    return typer.main.get_command(app)


def _require_run_names(value: object) -> None:
    """Check the names that somebody typed before anything is made or asked for.

    Raises:
        UsageError: If one is no run name.
    """
    from shardcast.protocol.documents import check_run

    for name in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
        try:
            check_run(name)
        except MalformedError as error:
            raise UsageError(error.message) from error


def _path(text: str | Path) -> Path:
    """Return a path option's value; an empty one is a variable that was not set."""
    if text == "":
        raise typer.BadParameter("an empty path")
    return Path(text)


def _with_environment(annotation: Any, parameter: str, command: str) -> Any:
    """Return the annotation with the environment variables that its option may come from."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation
    base, *rest = typing.get_args(annotation)
    named = [
        _named(info, parameter, command, flag=base is bool)
        if isinstance(info, OptionInfo)
        else copy.copy(info)
        for info in rest
    ]
    if Path in (base, *typing.get_args(base)) or base == list[Path] | None:
        for info in named:
            if isinstance(info, ParameterInfo):
                info.parser = _path
    return Annotated[(base, *named)]


def _named(info: OptionInfo, parameter: str, command: str, *, flag: bool) -> OptionInfo:
    declared = [info.default, *(info.param_decls or ())]
    long = (text for text in declared if isinstance(text, str) and text.startswith("--"))
    option = next(long, parameter).strip("-").replace("-", "_").upper()
    names = [f"{ENVIRONMENT_PREFIX}_{command.upper()}_{option}"]
    if option not in _NOT_SHARED:
        names.append(f"{ENVIRONMENT_PREFIX}_{option}")
    named = copy.copy(info)
    named.envvar = names
    named.show_envvar = False
    if flag:
        named.metavar = " "  # or the help says <bool>, as if a value were wanted
    return named

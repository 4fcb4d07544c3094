"""A group of commands that imports only the one that is asked for, and says what is mistyped.

Help lists all commands and so imports all. What the parser refuses is reported like every other
error: one line on stderr, with ``--json`` an ``error`` event, exit code 2.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import typer
from typer.core import TyperGroup

from shardcast.cli.command import ENVIRONMENT_PREFIX, build
from shardcast.cli.guard import guard
from shardcast.cli.output import Output
from shardcast.errors import UsageError

PARSER_ERROR: Final[type[Exception]] = typer.BadParameter.__bases__[0]
"""What the parser raises for wrong arguments; typer has no public name for it."""

_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})


class CommandGroup(TyperGroup):
    """Commands that are modules ``shardcast.cli.{name}`` with a function of that name.

    Attributes:
        panels: The panel of the help that shows a command, by its name.
    """

    panels: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(self.panels)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is none of that name."""
        if cmd_name not in self.panels:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"shardcast.cli.{cmd_name}")
            function = getattr(module, cmd_name)
            self.commands[cmd_name] = build(cmd_name, function, panel=self.panels[cmd_name])
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments begin with.

        Raises:
            PARSER_ERROR: If there is none; names the one that may be meant.
        """
        name = args[0]
        if not name.startswith("-") and name not in self.panels:
            close = difflib.get_close_matches(name, self.panels, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            ctx.fail(f"no command {name!r}{meant}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run the command line and exit.

        Raises:
            SystemExit: Always, with the exit code.
        """
        words = sys.argv[1:] if args is None else list(args)
        more["standalone_mode"] = False
        command = next((word for word in words if word in self.panels), "")
        out = Output(command=command, json=wants_json(words, command))
        with guard(out):  # of the configuration file, of the help
            try:
                code = super().main(words or ["--help"], *rest, **more)
            except PARSER_ERROR as error:
                sys.exit(report_mistyped(out, error))
        if not words:
            sys.exit(UsageError.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


def report_mistyped(out: Output, error: Any) -> int:
    """Report what the parser refused; return the exit code."""
    out.error(UsageError(error.format_message().strip().rstrip(".")))
    usage = f"usage: shardcast {out.command}" if error.ctx is None else error.ctx.get_usage()
    words = re.sub(r"[{}]", "", usage).split()[1:]
    out.notice(f"hint: {' '.join(words)} (-h says more)")
    return UsageError.exit_code


def wants_json(words: Sequence[str], command: str) -> bool:
    """Say whether ``--json`` was asked for, where the arguments could not be parsed."""
    names = (f"{ENVIRONMENT_PREFIX}_{command.upper()}_JSON", f"{ENVIRONMENT_PREFIX}_JSON")
    value = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return "--json" in words or value.strip().lower() in _TRUE

"""Options and arguments that several commands share, and what stands behind them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shardcast.cli.xdg import default_key_directory, default_store
from shardcast.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from shardcast.keys import Ed25519Signer
    from shardcast.store.store import Store

TRUST: Final = "Trust"
SOURCES: Final = "Where from"
DISK: Final = "On this disk"
DESTINATION: Final = "Where to"


class DurabilityChoice(enum.StrEnum):
    """What a commit waits for."""

    NONE = "none"
    SYNC = "sync"


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="The store. Default: $XDG_DATA_HOME/shardcast/store.",
        show_default=False,
        rich_help_panel=DISK,
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="URL",
        help="A remote origin instead of a local store (https, or loopback).",
        show_default=False,
        rich_help_panel=DESTINATION,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The remote origin's publish token. Or SHARDCAST_TOKEN in the environment.",
        show_default=False,
        rich_help_panel=DESTINATION,
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The publisher's private key. Default: $XDG_CONFIG_HOME/shardcast/shardcast.key.",
        show_default=False,
        rich_help_panel=TRUST,
    ),
]
FromOption = Annotated[
    list[str],
    typer.Option(
        "--from",
        metavar="URL",
        help="A relay, origin or static server with the run. May be repeated.",
        show_default=False,
        rich_help_panel=SOURCES,
    ),
]
PubkeyOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--pubkey",
        metavar="FILE",
        help="The publisher's public key: heads signed by others are refused.",
        show_default=False,
        rich_help_panel=TRUST,
    ),
]
FirstUseOption = Annotated[
    bool,
    typer.Option(
        "--trust-on-first-use",
        help="Trust the key of the first head that is seen, and remember it.",
        rich_help_panel=TRUST,
    ),
]


def open_store(path: Path | None) -> Store:
    """Return the store that ``--store`` names, or the default one.

    Raises:
        NotFoundError: If it is not there.
        UsageError: If it is the directory of one run, such as a worker's.
    """
    from shardcast.store.store import Store, is_run_directory

    root = path if path is not None else default_store()
    if not root.is_dir():
        raise NotFoundError(f"no store {root}; `shardcast publish` makes one", source=str(root))
    if is_run_directory(root):
        raise UsageError(
            f"{root} is the directory of one run, not a store: a store is the directory above",
            source=str(root),
        )
    return Store(root)


def load_pubkeys(paths: list[Path] | None) -> tuple[bytes, ...]:
    """Return the raw keys in public key files.

    Raises:
        UsageError: If a file is not a public key.
    """
    from shardcast.keys import load_public_key

    return tuple(load_public_key(path) for path in paths or ())


def key_file(path: Path | None) -> Path:
    """Return the private key's file: the given one, or the default."""
    from shardcast.keys import PRIVATE_NAME

    return path if path is not None else default_key_directory() / PRIVATE_NAME


def load_signers(path: Path | None, now_ms: int) -> tuple[Ed25519Signer, ...]:
    """Load the signing key (and the one it replaced, for 30 days).

    Raises:
        UsageError: If there is none.
    """
    from shardcast import keys

    file = key_file(path)
    if path is None and not file.exists():
        raise UsageError(
            f"no private key {file}: give the publisher's with --key FILE", source=str(file)
        )
    return keys.load_signers(file, now_ms)


def load_token(path: Path | None) -> str:
    """Return the publish token: the first line of the file, else of SHARDCAST_TOKEN.

    Raises:
        UsageError: If there is none, it cannot be read, or it is no token.
    """
    token = read_token(path, "SHARDCAST_TOKEN")
    if token is None:
        raise UsageError("--to needs --token-file FILE, or SHARDCAST_TOKEN in the environment")
    return token


def read_token(path: Path | None, variable: str) -> str | None:
    """Return a secret: the first line of a file, else of a variable of the environment.

    Args:
        path: The file, or None.
        variable: The variable's name.

    Returns:
        None if neither is given.

    Raises:
        UsageError: If the file cannot be read, or holds no token.
    """
    import os

    if path is None:
        where, text = variable, os.environ.get(variable, "")
        if not text.strip():
            return None
    else:
        where = f"token file {path}"
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {where}: {error.strerror}", source=str(path)) from error
        except UnicodeDecodeError:
            raise UsageError(f"{where} is not text", source=str(path)) from None
    token = text.strip().split("\n", 1)[0].strip()
    if not token:
        raise UsageError(f"{where} is empty", source=str(path))
    if any(not "!" <= character <= "~" for character in token):
        raise UsageError(f"the token in {where} is not plain ASCII without spaces")
    return token

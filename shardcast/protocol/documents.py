"""How documents become bytes and back: strict, bounded JSON (msgspec), unknown members ignored.

Encoding is deterministic: members in the order of the class, no white space. Readers never
depend on it, since every document is named by the digest of the bytes it has. What is written
is held to the same rules as what is read, so that nobody signs what nobody accepts.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from shardcast.errors import LimitError, MalformedError
from shardcast.protocol.digest import DIGEST_PATTERN
from shardcast.protocol.limits import MAX_BYTES, MAX_DOCUMENT_BYTES, MAX_TEXT_CHARS

Digest = Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)] | None
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
RunName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]

RESERVED_RUNS: Final = frozenset({"runs", "status"})

_T = TypeVar("_T", bound=msgspec.Struct)

_MESSAGE_CHARS: Final = 200
"""Errors may quote what they refuse; a log line is not the place for all of it."""

_encoder: Final = msgspec.json.Encoder()


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every document: frozen, keyword-only, checked by ``check`` after decoding."""

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            MalformedError: Naming the member that is wrong.
        """


class _Probe(msgspec.Struct):
    """The member that every document must have, though its classes have a default for it."""

    format: str


def encode(document: msgspec.Struct, *, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the document as compact JSON, members in declared order.

    Raises:
        LimitError: If it is longer than ``limit`` or a count is over its limit.
        MalformedError: If ``decode`` would refuse it.
    """
    what = type(document).__name__.lower()
    if isinstance(document, Document):
        document.check()
    try:
        data = _encoder.encode(document)
    except UnicodeError as error:
        raise MalformedError(f"{what} cannot be written: {_brief(error)}") from error
    if len(data) > limit:
        raise LimitError(f"{what} of {len(data)} bytes is over the limit of {limit}")
    _convert(data, type(document), what)
    return data


def decode(data: bytes, kind: type[_T], *, limit: int, what: str) -> _T:
    """Decode one document.

    Args:
        data: The whole document.
        kind: The class to decode into.
        limit: Most bytes accepted.
        what: Names the document in errors.

    Raises:
        LimitError: If ``data`` is longer than ``limit``.
        MalformedError: If it is anything but a valid document of ``kind``.
    """
    if len(data) > limit:
        raise LimitError(f"{what} of {len(data)} bytes is over the limit of {limit}")
    document = _convert(data, kind, what)
    if isinstance(document, Document):
        try:
            document.check()
        except MalformedError as error:
            raise type(error)(f"{what}: {error.message}") from error
    return document


def _convert(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        data.decode("utf-8")  # msgspec does not look into the strings of members that it skips
        if "format" in kind.__struct_fields__:
            msgspec.json.decode(data, type=_Probe, strict=True)
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"{what} is malformed: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    text = str(error)[:_MESSAGE_CHARS]
    return "".join(char if char.isprintable() else "?" for char in text)


def check_run(name: str) -> str:
    """Return ``name`` if it may name a run.

    Raises:
        MalformedError: If it does not match ``[a-z0-9][a-z0-9._-]{0,63}`` or is reserved.
    """
    try:
        msgspec.convert(name, RunName)
    except msgspec.ValidationError:
        raise MalformedError(
            f"run name {name[:80]!r} does not match [a-z0-9][a-z0-9._-]{{0,63}}"
        ) from None
    if name in RESERVED_RUNS:
        raise MalformedError(f"run name {name!r} is reserved")
    return name

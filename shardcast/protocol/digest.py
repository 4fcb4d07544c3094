"""BLAKE3 digests as the protocol writes them: 64 lowercase hex digits (docs/adr/0001)."""

from __future__ import annotations

import re
from typing import Final

from blake3 import blake3

from shardcast.errors import MalformedError

DIGEST_BYTES: Final = 32
DIGEST_PATTERN: Final = r"^[0-9a-f]{64}\Z"

_DIGEST = re.compile(DIGEST_PATTERN)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 digest of ``data`` in lowercase hex (one thread)."""
    return blake3(data).hexdigest()


def is_digest(text: str) -> bool:
    """Say whether ``text`` is a digest as the protocol writes it."""
    return _DIGEST.match(text) is not None


def parse_digest(text: str, *, what: str = "digest") -> str:
    """Return ``text`` if it is a digest.

    Raises:
        MalformedError: If it is anything else; ``what`` names it in the message.
    """
    if not is_digest(text):
        raise MalformedError(f"{what} is not 64 lowercase hex digits: {text[:80]!r}")
    return text


def unpack_digests(packed: bytes) -> tuple[str, ...]:
    """Split concatenated 32-byte digests into hex digests.

    Raises:
        MalformedError: If the length is not a multiple of 32 bytes.
    """
    if len(packed) % DIGEST_BYTES:
        raise MalformedError(f"packed digests of {len(packed)} bytes: not a multiple of 32")
    text = packed.hex()
    width = 2 * DIGEST_BYTES
    return tuple(text[i : i + width] for i in range(0, len(text), width))


def pack_digests(digests: tuple[str, ...] | list[str]) -> bytes:
    """Concatenate hex digests as 32 bytes each, the inverse of ``unpack_digests``.

    Raises:
        MalformedError: If one is not a digest.
    """
    return bytes.fromhex("".join(parse_digest(digest) for digest in digests))

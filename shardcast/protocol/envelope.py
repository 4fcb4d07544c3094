"""DSSE envelopes signed with Ed25519.

Formats: https://github.com/secure-systems-lab/dsse (protocol.md, envelope.md) and RFC 8032.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from typing import Annotated, Final, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shardcast.errors import BadSignatureError, MalformedError, UnknownKeyError
from shardcast.protocol.documents import Document, decode, encode
from shardcast.protocol.limits import MAX_HEAD_BYTES, MAX_SIGNATURES

HEAD_PAYLOAD_TYPE: Final = "application/vnd.shardcast.head+json"
PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

_PRIME: Final = 2**255 - 19
_SMALL_ORDER_Y: Final = frozenset(
    [
        0,
        1,
        _PRIME - 1,
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
    ]
)
"""y of the eight points of order 1, 2, 4 and 8: under such a key anybody can sign anything."""


class Signer(Protocol):
    """Something that signs with one Ed25519 key."""

    @property
    def public_key(self) -> bytes:
        """The raw 32-byte public key."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of ``message``."""
        ...


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """One signature: ``keyid`` is the hex SHA-256 of the raw public key."""

    keyid: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    sig: Annotated[str, msgspec.Meta(max_length=88)]


class Envelope(Document, frozen=True, kw_only=True):
    """The signed form of a head: base64 payload and at least one signature."""

    payloadType: Annotated[str, msgspec.Meta(max_length=128)]  # noqa: N815 - DSSE's name
    payload: str
    signatures: Annotated[list[Signature], msgspec.Meta(min_length=1, max_length=MAX_SIGNATURES)]


def key_id(public_key: bytes) -> str:
    """Return the keyid of a raw public key: its SHA-256 in lowercase hex."""
    return hashlib.sha256(public_key).hexdigest()


def encode_key(public_key: bytes) -> str:
    """Return a raw public key as the head lists it: padded standard base64."""
    return base64.b64encode(public_key).decode("ascii")


def check_public_key(raw: bytes) -> bytes:
    """Return ``raw`` if it may be an Ed25519 public key of the protocol.

    Refused, though RFC 8032 section 5.1.3 or common verifiers let them pass: an encoding with
    y >= 2^255 - 19 (one key would have two keyids) and the eight points of small order.

    Raises:
        MalformedError: If it is one of those, or not 32 bytes.
    """
    if len(raw) != PUBLIC_KEY_BYTES:
        raise MalformedError(f"key has {len(raw)} bytes, not {PUBLIC_KEY_BYTES}")
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
    if y >= _PRIME or y in _SMALL_ORDER_Y:
        raise MalformedError(f"key {raw.hex()} is not a usable Ed25519 public key")
    return raw


def decode_key(text: str) -> bytes:
    """Return the raw public key that a head or state lists.

    Raises:
        MalformedError: If it is not padded base64 of a usable key.
    """
    return check_public_key(decode_base64(text, what="key"))


def decode_base64(text: str, *, what: str, length: int | None = None) -> bytes:
    """Decode padded standard base64, canonical form only.

    Raises:
        MalformedError: If it is not that, or not ``length`` bytes.
    """
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise MalformedError(f"{what} is not padded standard base64") from error
    if base64.b64encode(raw).decode("ascii") != text:
        raise MalformedError(f"{what} is not canonical base64")
    if length is not None and len(raw) != length:
        raise MalformedError(f"{what} has {len(raw)} bytes, not {length}")
    return raw


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return DSSE's PAE, the bytes that are signed."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, signers: Iterable[Signer]) -> bytes:
    """Sign ``payload`` as a head and return the envelope's bytes.

    Raises:
        LimitError: If the envelope is larger than readers accept.
        MalformedError: If nobody signs.
    """
    message = pre_authentication_encoding(HEAD_PAYLOAD_TYPE, payload)
    signatures = [
        Signature(
            keyid=key_id(signer.public_key),
            sig=base64.b64encode(signer.sign(message)).decode("ascii"),
        )
        for signer in signers
    ]
    envelope = Envelope(
        payloadType=HEAD_PAYLOAD_TYPE,
        payload=base64.b64encode(payload).decode("ascii"),
        signatures=signatures,
    )
    return encode(envelope, limit=MAX_HEAD_BYTES)


def open_unverified(data: bytes) -> tuple[Envelope, bytes]:
    """Decode an envelope and its payload without looking at the signatures.

    Raises:
        MalformedError: If it is not a head envelope within its limit.
    """
    envelope = decode(data, Envelope, limit=MAX_HEAD_BYTES, what="head envelope")
    if envelope.payloadType != HEAD_PAYLOAD_TYPE:
        raise MalformedError(f"head envelope has payloadType {envelope.payloadType!r}")
    return envelope, decode_base64(envelope.payload, what="head payload")


def verify(envelope: Envelope, payload: bytes, keys: Iterable[bytes]) -> frozenset[bytes]:
    """Return those of ``keys`` that signed the envelope.

    Signatures by other keys are ignored, as DSSE says; a broken signature under a trusted
    keyid does not void a good one by another key.

    Raises:
        UnknownKeyError: If no signature names one of the keys.
        BadSignatureError: If one does, and none of those verifies.
    """
    by_id = {key_id(key): key for key in keys}
    message = pre_authentication_encoding(envelope.payloadType, payload)
    named = [(by_id[s.keyid], s.sig) for s in envelope.signatures if s.keyid in by_id]
    if not named:
        signed_by = ", ".join(s.keyid[:16] for s in envelope.signatures)
        wanted = ", ".join(sorted(k[:16] for k in by_id)) or "none"
        raise UnknownKeyError(f"head is signed by key {signed_by}; trusted: {wanted}")
    good = frozenset(key for key, sig in named if _signed(key, sig, message))
    if not good:
        raise BadSignatureError(f"head signature by trusted key {key_id(named[0][0])[:16]} is bad")
    return good


def _signed(key: bytes, sig: str, message: bytes) -> bool:
    try:
        raw = decode_base64(sig, what="signature", length=SIGNATURE_BYTES)
        Ed25519PublicKey.from_public_bytes(key).verify(raw, message)
    except (MalformedError, InvalidSignature, ValueError):
        return False
    return True

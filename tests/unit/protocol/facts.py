"""Values from outside that several tests need: published keys, and small documents by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast.protocol.envelope import encode_key, seal
from shardcast.protocol.head import DeltaRef, Head, OpenRef, VersionRef, encode_head
from shardcast.protocol.layout import FileEntry, Layout

DAY_MS = 24 * 3600 * 1000
NOW = 1767225600000  # 2026-01-01T00:00:00Z in Unix milliseconds
A, B, C, D = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
KIB_256 = 262144

# RFC 8032 section 7.1: secret key, public key, message, signature of TEST 1, 2 and 3.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e"
            "39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        ),
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f"
            "3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
        ),
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        (
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67"
            "f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
        ),
    ),
]


class Key:
    """A signer with the secret key of one of the RFC's tests."""

    def __init__(self, secret: str) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))

    @property
    def public_key(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    @property
    def text(self) -> str:
        return encode_key(self.public_key)

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


OLD, NEW, STRANGER = (Key(secret) for secret, *_ in RFC_8032)


def ref(version: int, manifest: str = A, **members: Any) -> VersionRef:
    given: dict[str, Any] = {"step": None, "bytes": 10, "deltas": [], **members}
    return VersionRef(version=version, manifest=manifest, **given)


def open_ref(version: int, layout: str = B, **members: Any) -> OpenRef:
    given: dict[str, Any] = {"step": None, "parts": [], "deltas": [], **members}
    return OpenRef(version=version, layout=layout, **given)


def delta_ref(base: str | None, base_version: int | None) -> DeltaRef:
    return DeltaRef(base=base, base_version=base_version, parts=[C], bytes=1)


def head(sequence: int = NOW, **members: Any) -> Head:
    given: dict[str, Any] = {
        "run": "demo",
        "issued_at": NOW,
        "expires_at": NOW + 7 * DAY_MS,
        "keys": [OLD.text],
        "version": None,
        "versions": [],
        "open": None,
        "withdrawn": [],
        "hold": False,
        **members,
    }
    return Head(sequence=sequence, **given)


def sealed(document: Head, *signers: Key) -> bytes:
    return seal(encode_head(document), signers or (OLD,))


def layout(files: Sequence[tuple[str, int]] = (("f", 1),), **members: Any) -> Layout:
    given: dict[str, Any] = {
        "run": "demo",
        "version": 1,
        "step": None,
        "lineage": "",
        "created_at": NOW,
        "shard_bytes": KIB_256,
        "metadata": {},
        **members,
    }
    return Layout(files=[FileEntry(path=path, bytes=size) for path, size in files], **given)


def with_members(data: bytes, **members: Any) -> bytes:
    """The JSON object ``data`` with some members replaced or added."""
    return json.dumps({**json.loads(data), **members}).encode()


def without(data: bytes, member: str) -> bytes:
    """The JSON object ``data`` without a member."""
    document = json.loads(data)
    del document[member]
    return json.dumps(document).encode()

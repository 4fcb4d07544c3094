"""Key files: Ed25519 as PEM (PKCS#8 private, SPKI public), made by ``shardcast keygen``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shardcast.errors import UsageError
from shardcast.protocol.limits import ROTATION_OVERLAP_MS
from shardcast.store.files import atomic_write, disk_errors, fsync_directory, write_all

PRIVATE_NAME: Final = "shardcast.key"
PUBLIC_NAME: Final = "shardcast.pub"
_MAX_KEY_FILE_BYTES: Final = 64 * 1024


class Ed25519Signer:
    """Signs with a private key that never leaves this object."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_key = private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of ``message`` (RFC 8032)."""
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"Ed25519Signer(public_key={self.public_key.hex()})"


def generate(directory: Path) -> tuple[Path, Path]:
    """Make a key pair and return the paths of its private and public file.

    Raises:
        UsageError: If one of the files exists; nothing is written then.
        DiskError: If they cannot be written.
    """
    private_path, public_path = directory / PRIVATE_NAME, directory / PUBLIC_NAME
    for path in (private_path, public_path):
        with disk_errors(path, "looking at a key"):
            if os.path.lexists(path):
                what = f"key file exists and is never overwritten: {path}"
                raise UsageError(what, source=str(path))
    private = Ed25519PrivateKey.generate()
    private_pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with disk_errors(directory, "writing a key"):
        directory.mkdir(parents=True, exist_ok=True)
        public = public_pem(private.public_key().public_bytes_raw())
        with contextlib.ExitStack() as made:
            for path, data, mode in (
                (private_path, private_pem, 0o600),
                (public_path, public, 0o644),
            ):
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
                made.callback(_remove_quietly, path)
                try:
                    write_all(fd, memoryview(data), 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
            fsync_directory(directory)
            made.pop_all()  # both, or neither
    return private_path, public_path


def _remove_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def public_pem(public_key: bytes) -> bytes:
    """Return a raw public key as an SPKI PEM file."""
    return Ed25519PublicKey.from_public_bytes(public_key).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def load_signer(path: Path) -> Ed25519Signer:
    """Load a private key file.

    Raises:
        UsageError: If it is missing, unreadable or not an unencrypted Ed25519 private key.
    """
    try:
        key = serialization.load_pem_private_key(_read(path, "private key"), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(f"not an unencrypted PEM private key: {path}", source=str(path)) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"not an Ed25519 private key: {path}", source=str(path))
    return Ed25519Signer(key)


def load_public_key(path: Path) -> bytes:
    """Load a public key file and return the raw 32 bytes.

    Raises:
        UsageError: If it is missing, unreadable or not an Ed25519 public key.
    """
    data = _read(path, "public key")
    if b"PRIVATE KEY" in data:
        raise UsageError(
            f"{path} is a private key; give the public one ({PUBLIC_NAME})", source=str(path)
        )
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"not a PEM public key: {path}", source=str(path)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"not an Ed25519 public key: {path}", source=str(path))
    return key.public_bytes_raw()


def _read(path: Path, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise UsageError(
            f"cannot read {what} {path}: {error.strerror}", source=str(path)
        ) from error


# --- rotation ---------------------------------------------------------------------------------


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """Beside a new key, ``{key}.rotation``: the old key that signs too until ``until_ms``."""

    previous: str
    until_ms: int


def rotation_path(key: Path) -> Path:
    """Return where the rotation that led to ``key`` is remembered."""
    return key.with_name(key.name + ".rotation")


def record_rotation(new: Path, old: Path, now_ms: int) -> None:
    """Remember that ``new`` replaced ``old``, so that both sign for 30 days."""
    rotation = Rotation(previous=str(old.resolve()), until_ms=now_ms + ROTATION_OVERLAP_MS)
    atomic_write(rotation_path(new), msgspec.json.encode(rotation), mode=0o600)


def load_signers(path: Path, now_ms: int) -> tuple[Ed25519Signer, ...]:
    """Load the key and, within 30 days of a rotation to it, the key it replaced.

    Raises:
        UsageError: If a key cannot be loaded; during the overlap the old one is needed, because
            workers that have not seen the rotation trust only it.
    """
    signer = load_signer(path)
    record = rotation_path(path)
    if not record.exists():
        return (signer,)
    try:
        rotation = msgspec.json.decode(_read(record, "rotation record"), type=Rotation)
    except msgspec.MsgspecError as error:
        raise UsageError(f"rotation record is damaged: {error}", source=str(record)) from error
    if now_ms >= rotation.until_ms:
        return (signer,)
    return (signer, load_signer(Path(rotation.previous)))

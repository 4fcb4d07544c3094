"""Key files: standard PEM, never overwritten, never confused."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from shardcast import keys
from shardcast.errors import DiskError, UsageError


def test_openssl_reads_both_files_and_verifies_a_signature(tmp_path: Path) -> None:
    private, public = keys.generate(tmp_path / "k")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    message, signature = tmp_path / "message", tmp_path / "signature"
    message.write_bytes(b"hello")
    signature.write_bytes(keys.load_signer(private).sign(b"hello"))
    ended = subprocess.run(
        [
            "openssl",
            "pkeyutl",
            "-verify",
            "-pubin",
            "-rawin",
            "-inkey",
            str(public),
            "-in",
            str(message),
            "-sigfile",
            str(signature),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    derived = subprocess.run(
        ["openssl", "pkey", "-in", str(private), "-pubout"], capture_output=True, check=True
    )
    assert derived.stdout == public.read_bytes()


def test_the_public_file_holds_the_signers_key(tmp_path: Path) -> None:
    private, public = keys.generate(tmp_path)
    signer = keys.load_signer(private)
    assert keys.load_public_key(public) == signer.public_key
    assert signer.public_key.hex() in repr(signer)
    assert len(repr(signer)) < 120  # the public key and nothing else


@pytest.mark.parametrize("name", [keys.PRIVATE_NAME, keys.PUBLIC_NAME])
def test_an_existing_file_is_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="never overwritten"):
        keys.generate(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError):
        keys.generate(tmp_path / "file" / "k")


def test_wrong_key_files_are_named(tmp_path: Path) -> None:
    private, public = keys.generate(tmp_path / "k")
    junk = tmp_path / "junk"
    junk.write_text("not a key")
    curve = tmp_path / "curve.pem"
    key = generate_private_key(SECP256R1())
    pkcs8 = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    curve.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    curve_pub = tmp_path / "curve.pub"
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    curve_pub.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, spki))
    locked = tmp_path / "locked.pem"
    secret = serialization.BestAvailableEncryption(b"pass")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, secret))

    for path in (tmp_path / "missing", junk, curve, locked, public):
        with pytest.raises(UsageError, match=path.name):
            keys.load_signer(path)
    for path in (tmp_path / "missing", junk, curve_pub):
        with pytest.raises(UsageError, match=path.name):
            keys.load_public_key(path)
    with pytest.raises(UsageError, match="is a private key; give the public one"):
        keys.load_public_key(private)


def test_a_damaged_rotation_record_is_named_and_a_lost_old_key_too(tmp_path: Path) -> None:
    old, _ = keys.generate(tmp_path / "old")
    new, _ = keys.generate(tmp_path / "new")
    keys.record_rotation(new, old, 1000)
    assert stat.S_IMODE(keys.rotation_path(new).stat().st_mode) == 0o600
    old.unlink()
    with pytest.raises(UsageError, match=r"old.shardcast\.key"):
        keys.load_signers(new, 2000)
    keys.rotation_path(new).write_text("{")
    with pytest.raises(UsageError, match="rotation record is damaged"):
        keys.load_signers(new, 2000)

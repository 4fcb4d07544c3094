"""Writes the golden files of this directory, or of the directory given, from the specification.

It shares no code with the product: json, cryptography and the blake3 package only. The files
are pinned. Run it to add a vector, never to make a changed encoder pass: what is published
stays readable.
"""

import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HERE = Path(__file__).parent
SHARD = 262144
NEW_YEAR = 1767225600000  # 2026-01-01T00:00:00Z in milliseconds
HEAD_TYPE = "application/vnd.shardcast.head+json"

# RFC 8032 section 7.1, TEST 1 and TEST 2.
KEY_1 = Ed25519PrivateKey.from_private_bytes(
    bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
)
KEY_2 = Ed25519PrivateKey.from_private_bytes(
    bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
)

FILES = [
    ("config.json", 27),
    ("model-00001-of-00002.safetensors", SHARD + 100),
    ("model-00002-of-00002.safetensors", SHARD),
    ("tokenizer/added_tokens.json", 0),
    ("tokenizer/größe.txt", 1),
]


def compact(value: Any) -> bytes:
    """JSON without white space, members in the order they have here, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def content(index: int, size: int) -> bytes:
    """What file ``index`` holds: byte i is (i + index) mod 251."""
    pattern = bytes((i + index) % 251 for i in range(251))
    return (pattern * (size // 251 + 1))[:size]


def shard_digests() -> list[str]:
    return [
        digest(content(index, size)[offset : offset + SHARD])
        for index, (_, size) in enumerate(FILES)
        for offset in range(0, size, SHARD)
    ]


def raw_public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def layout(version: int, **more: Any) -> bytes:
    return compact(
        {
            "format": "shardcast.layout/1",
            "run": "demo",
            "version": version,
            "step": 100 * version,
            "lineage": "first",
            "created_at": NEW_YEAR,
            "shard_bytes": SHARD,
            "metadata": {"note": "größer", "base_model": "tiny"},
            "files": [{"path": path, "bytes": size} for path, size in FILES],
            **more,
        }
    )


def part(of: str, first: int, digests: list[str]) -> bytes:
    packed = b64(b"".join(bytes.fromhex(d) for d in digests))
    return compact(
        {"format": "shardcast.part/1", "layout": of, "first_shard": first, "digests": packed}
    )


def head(**members: Any) -> dict[str, Any]:
    return {
        "format": "shardcast.head/1",
        "run": "demo",
        "sequence": NEW_YEAR,
        "issued_at": NEW_YEAR,
        "expires_at": NEW_YEAR + 7 * 24 * 3600 * 1000,
        "keys": [b64(raw_public(KEY_1))],
        "version": None,
        "versions": [],
        "open": None,
        "withdrawn": [],
        "hold": False,
        **members,
    }


def seal(payload: bytes, *keys: Ed25519PrivateKey, **more: Any) -> bytes:
    message = b"DSSEv1 %d %s %d %s" % (len(HEAD_TYPE), HEAD_TYPE.encode(), len(payload), payload)
    signatures = [
        {"keyid": hashlib.sha256(raw_public(key)).hexdigest(), "sig": b64(key.sign(message))}
        for key in keys
    ]
    return compact(
        {"payloadType": HEAD_TYPE, "payload": b64(payload), "signatures": signatures, **more}
    )


def documents() -> dict[str, bytes]:
    """All golden files by name."""
    made: dict[str, bytes] = {}
    shards = shard_digests()
    size = sum(size for _, size in FILES)
    base = digest(b"the manifest of version 56")

    made["layout.json"] = layout(57)
    of = digest(made["layout.json"])
    made["part-0.json"] = part(of, 0, shards[:2])
    made["part-2.json"] = part(of, 2, shards[2:])
    parts = [digest(made["part-0.json"]), digest(made["part-2.json"])]
    made["manifest.json"] = compact(
        {"format": "shardcast.manifest/1", "layout": of, "parts": parts}
    )
    made["delta.json"] = compact(
        {
            "format": "shardcast.delta/1",
            "layout": of,
            "base": base,
            "codec": "shardcast.egap/1",
            "first_shard": 1,
            "blobs": [
                {"digest": digest(b"blob one"), "bytes": 300, "frames": [[1, 100], [1, 200]]},
                {"digest": digest(b"blob two"), "bytes": 50, "frames": [[1, 50]]},
            ],
        }
    )
    delta = {
        "base": base,
        "base_version": 56,
        "parts": [digest(made["delta.json"])],
        "bytes": 350,
    }
    complete = {
        "version": 57,
        "step": 5700,
        "manifest": digest(made["manifest.json"]),
        "bytes": size,
        "deltas": [delta],
    }
    before: dict[str, Any] = {
        "version": 56,
        "step": None,
        "manifest": base,
        "bytes": 9,
        "deltas": [],
    }
    first = compact(head(version=57, versions=[complete, before]))
    made["head.json"] = first
    made["head.envelope.json"] = seal(first, KEY_1)

    # Version 58 is being published: its second part came first; a compressed copy streams along.
    made["layout-open.json"] = layout(58)
    opened = digest(made["layout-open.json"])
    made["part-open-2.json"] = part(opened, 2, shards[2:])
    made["delta-full.json"] = compact(
        {
            "format": "shardcast.delta/1",
            "layout": opened,
            "base": None,
            "codec": "zstd",
            "first_shard": 0,
            "blobs": [{"digest": digest(b"blob three"), "bytes": 7, "frames": [[5, 7]]}],
        }
    )
    streaming = {
        "version": 58,
        "step": 5800,
        "layout": opened,
        "parts": [digest(made["part-open-2.json"])],
        "deltas": [
            {
                "base": None,
                "base_version": None,
                "parts": [digest(made["delta-full.json"])],
            },
            {"base": complete["manifest"], "base_version": 57, "parts": []},
        ],
    }
    second = compact(
        head(
            sequence=NEW_YEAR + 60000,
            issued_at=NEW_YEAR + 60000,
            expires_at=NEW_YEAR + 60000 + 3600 * 1000,
            version=57,
            versions=[complete],
            open=streaming,
            withdrawn=[55, 56],
            hold=True,
        )
    )
    made["head-open.json"] = second
    made["head-open.envelope.json"] = seal(second, KEY_1)

    # The key is rotated: both sign, the new one is listed.
    third = compact(
        head(
            sequence=NEW_YEAR + 120000,
            issued_at=NEW_YEAR + 120000,
            keys=[b64(raw_public(KEY_2))],
        )
    )
    made["head-rotated.json"] = third
    made["head-rotated.envelope.json"] = seal(third, KEY_1, KEY_2)

    # What later versions of the formats may add, and readers of today must ignore.
    made["layout-future.json"] = layout(
        57,
        files=[{"path": path, "bytes": size, "mode": 420} for path, size in FILES],
        tensors={"deep": [[[None, 1.5e300, -0.0, True, "ß\u0000"]]]},
    )
    future = compact(
        head(
            version=57,
            versions=[{**complete, "deltas": [{**delta, "codec": "x"}], "signed_off": {}}, before],
            channel="stable",
        )
    )
    made["head-future.json"] = future
    made["head-future.envelope.json"] = seal(future, KEY_1, transparency=[{"log": "none"}])

    made["trust.json"] = compact(
        {
            "format": "shardcast.trust/1",
            "run": "demo",
            "anchors": [b64(raw_public(KEY_1))],
            "keys": [b64(raw_public(KEY_2))],
            "retired": [b64(raw_public(KEY_1))],
            "sequence": NEW_YEAR + 120000,
            "payload": digest(third),
            "manifests": {"56": base, "57": complete["manifest"]},
            "layouts": {"58": opened},
        }
    )
    return made


def write(out: Path) -> None:
    """Write every file and the index of their digests, as ``b3sum`` prints them."""
    made = documents()
    for name, data in made.items():
        (out / name).write_bytes(data)
    index = "".join(f"{digest(data)}  {name}\n" for name, data in sorted(made.items()))
    (out / "B3SUMS").write_text(index, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

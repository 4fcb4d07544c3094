"""Golden bytes: every later version must read them, and write the same."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from blake3 import blake3

from shardcast.protocol.delta import DeltaBlob, DeltaPart, decode_delta_part, encode_delta_part
from shardcast.protocol.envelope import Envelope, key_id, open_unverified, seal, verify
from shardcast.protocol.head import (
    DeltaRef,
    Head,
    OpenDeltaRef,
    OpenRef,
    VersionRef,
    decode_head,
    encode_head,
)
from shardcast.protocol.layout import (
    FileEntry,
    Layout,
    Part,
    decode_layout,
    decode_part,
    encode_layout,
    encode_part,
)
from shardcast.protocol.manifest import (
    Manifest,
    assemble,
    assemble_open,
    decode_manifest,
    encode_manifest,
)
from shardcast.protocol.trust import TrustState, accept, begin, decode_state, encode_state
from tests.unit.protocol.facts import NEW, NOW, OLD
from tests.vectors import make_vectors

VECTORS: Final = Path(make_vectors.__file__).parent
NAMES: Final = sorted(path.name for path in VECTORS.glob("*.json"))

LAYOUT: Final = "aacfe7f2da70d36d1a80bb3d759cb4d224987e2ca983b164287b2ea4f84884fb"
OPEN_LAYOUT: Final = "6f00716c0b744f77ac53a8af385adaa58274fc43ff558a92ca81253dbb09818c"
MANIFEST: Final = "a55d4d6b5597a3f0135701e6204395382ab391abaf4a4a217d64ea22c66ef8b6"
BASE: Final = "140e45dd42d5a4b0c73ce96d3624cf3e50fd0255fbd3950d70bdee53a09cc88d"
PARTS: Final = [
    "edd93fe3c578e617f2245a294086d0bcba20c0f79bc8972244c3161de27877bb",
    "4ad5cadde4c392845c3f666acbd52c69002e551865cbbc1d5c357c4c6f43eb3b",
]
DELTA: Final = "484dfd19b474644e819335c1e6b352fc3ce4953eb63f4c9a0525b93e00b44fb1"
OPEN_PART: Final = "b720901d7a433c0987b4ba81a6e69960d779b9dbb8f1345376d430651aa91d72"
FULL_DELTA: Final = "88d49c2acfc8da07a645c7e8a48deff29a7831ef8ae287bc72ee271be0c719d1"
OLD_TEXT: Final = "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
NEW_TEXT: Final = "PUAXw+hDiVqStwqnTRt+vJyYLM8uxJaMwM1V8Sr0Zgw="

A_LAYOUT: Final = Layout(
    run="demo",
    version=57,
    step=5700,
    lineage="first",
    created_at=1767225600000,
    shard_bytes=262144,
    metadata={"note": "größer", "base_model": "tiny"},
    files=[
        FileEntry(path="config.json", bytes=27),
        FileEntry(path="model-00001-of-00002.safetensors", bytes=262244),
        FileEntry(path="model-00002-of-00002.safetensors", bytes=262144),
        FileEntry(path="tokenizer/added_tokens.json", bytes=0),
        FileEntry(path="tokenizer/größe.txt", bytes=1),
    ],
)
AN_OPEN_LAYOUT: Final = msgspec.structs.replace(A_LAYOUT, version=58, step=5800)
FIRST_TWO: Final = (
    "YwrwVCgyuT9vnJpCmcBOBsyJ8GCXlsutBxTOxbl6Ibc7+/ZpDGNTrenuXfiYjGsYTs8AkNRTM1OCW90BfCgJ7Q=="
)
LAST_THREE: Final = (
    "O7heolvlFpvA0xMX5YQ2kVKyhYbYCsESiJbxLA+8HWzQCbmSp7aFV/VTZidjquWW6xLgNsTQacesGV4boK1LoAw4"
    "mnQ+NP2kNfvVdbuInbwNPma5+dgeAL4ztxiFCefr"
)
VERSION_57: Final = VersionRef(
    version=57,
    step=5700,
    manifest=MANIFEST,
    bytes=524416,
    deltas=[DeltaRef(base=BASE, base_version=56, parts=[DELTA], bytes=350)],
)
VERSION_56: Final = VersionRef(version=56, step=None, manifest=BASE, bytes=9, deltas=[])
A_HEAD: Final = Head(
    run="demo",
    sequence=1767225600000,
    issued_at=1767225600000,
    expires_at=1767830400000,
    keys=[OLD_TEXT],
    version=57,
    versions=[VERSION_57, VERSION_56],
    open=None,
    withdrawn=[],
    hold=False,
)
AN_OPEN_HEAD: Final = Head(
    run="demo",
    sequence=1767225660000,
    issued_at=1767225660000,
    expires_at=1767229260000,
    keys=[OLD_TEXT],
    version=57,
    versions=[VERSION_57],
    open=OpenRef(
        version=58,
        step=5800,
        layout=OPEN_LAYOUT,
        parts=[OPEN_PART],
        deltas=[
            OpenDeltaRef(base=None, base_version=None, parts=[FULL_DELTA]),
            OpenDeltaRef(base=MANIFEST, base_version=57, parts=[]),
        ],
    ),
    withdrawn=[55, 56],
    hold=True,
)
A_ROTATED_HEAD: Final = Head(
    run="demo",
    sequence=1767225720000,
    issued_at=1767225720000,
    expires_at=1767830400000,
    keys=[NEW_TEXT],
    version=None,
    versions=[],
    open=None,
    withdrawn=[],
    hold=False,
)


def payload_of(data: bytes) -> Head:
    return decode_head(open_unverified(data)[1])


EXPECTED: Final[dict[str, tuple[Callable[[bytes], object], object]]] = {
    "layout.json": (decode_layout, A_LAYOUT),
    "layout-open.json": (decode_layout, AN_OPEN_LAYOUT),
    "layout-future.json": (decode_layout, A_LAYOUT),
    "part-0.json": (decode_part, Part(layout=LAYOUT, first_shard=0, digests=FIRST_TWO)),
    "part-2.json": (decode_part, Part(layout=LAYOUT, first_shard=2, digests=LAST_THREE)),
    "part-open-2.json": (
        decode_part,
        Part(layout=OPEN_LAYOUT, first_shard=2, digests=LAST_THREE),
    ),
    "manifest.json": (decode_manifest, Manifest(layout=LAYOUT, parts=PARTS)),
    "delta.json": (
        decode_delta_part,
        DeltaPart(
            layout=LAYOUT,
            base=BASE,
            codec="shardcast.egap/1",
            first_shard=1,
            blobs=[
                DeltaBlob(
                    digest="9c64fd4b5764e7e09b39cf36c3a8f14a322751dcf5c23618b6f5847d58f6e582",
                    bytes=300,
                    frames=[(1, 100), (1, 200)],
                ),
                DeltaBlob(
                    digest="2a29fb5f1e96b2500647b11c942bd7a7744c75c1c7cad991660a229d58781ddd",
                    bytes=50,
                    frames=[(1, 50)],
                ),
            ],
        ),
    ),
    "delta-full.json": (
        decode_delta_part,
        DeltaPart(
            layout=OPEN_LAYOUT,
            base=None,
            codec="zstd",
            first_shard=0,
            blobs=[
                DeltaBlob(
                    digest="01afe1c44d4f050dcc4a047a86d25f374827ce514eed5840f6920ab62bce553c",
                    bytes=7,
                    frames=[(5, 7)],
                )
            ],
        ),
    ),
    "head.json": (decode_head, A_HEAD),
    "head-open.json": (decode_head, AN_OPEN_HEAD),
    "head-rotated.json": (decode_head, A_ROTATED_HEAD),
    "head-future.json": (decode_head, A_HEAD),
    "head.envelope.json": (payload_of, A_HEAD),
    "head-open.envelope.json": (payload_of, AN_OPEN_HEAD),
    "head-rotated.envelope.json": (payload_of, A_ROTATED_HEAD),
    "head-future.envelope.json": (payload_of, A_HEAD),
    "trust.json": (
        decode_state,
        TrustState(
            run="demo",
            anchors=[OLD_TEXT],
            keys=[NEW_TEXT],
            retired=[OLD_TEXT],
            sequence=1767225720000,
            payload="b54b201c9aa62417841d08657bd8549482014f04e9bd72ca328480424ace03e0",
            manifests={56: BASE, 57: MANIFEST},
            layouts={58: OPEN_LAYOUT},
        ),
    ),
}
ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    DeltaPart: encode_delta_part,
    Head: encode_head,
    Layout: encode_layout,
    Manifest: lambda manifest: encode_manifest(manifest.layout, manifest.parts),
    Part: lambda part: encode_part(part.layout, part.first_shard, part.shard_digests),
    TrustState: encode_state,
}
SIGNERS: Final = {"head.envelope.json": [OLD], "head-open.envelope.json": [OLD]} | {
    "head-rotated.envelope.json": [OLD, NEW]
}


def read(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def test_every_vector_is_expected() -> None:
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_decodes_to_what_is_written_here(name: str) -> None:
    decode, value = EXPECTED[name]
    assert decode(read(name)) == value


@pytest.mark.parametrize("name", [n for n in NAMES if "future" not in n])
def test_encodes_to_the_same_bytes(name: str) -> None:
    _, value = EXPECTED[name]
    if name in SIGNERS:  # Ed25519 is deterministic
        assert seal(encode_head(value), SIGNERS[name]) == read(name)  # type: ignore[arg-type]
    else:
        assert ENCODERS[type(value)](value) == read(name)


def test_digests() -> None:
    for name, digest in (
        ("layout.json", LAYOUT),
        ("layout-open.json", OPEN_LAYOUT),
        ("manifest.json", MANIFEST),
        ("part-0.json", PARTS[0]),
        ("part-2.json", PARTS[1]),
        ("part-open-2.json", OPEN_PART),
        ("delta.json", DELTA),
        ("delta-full.json", FULL_DELTA),
    ):
        assert blake3(read(name)).hexdigest() == digest
    listed = [f"{blake3(read(name)).hexdigest()}  {name}" for name in NAMES]
    assert read("B3SUMS").decode().splitlines() == listed


@pytest.mark.interop
def test_b3sum_checks_the_index() -> None:
    b3sum = shutil.which("b3sum")
    if b3sum is None:
        pytest.skip("b3sum is not installed")
    run = subprocess.run(
        [b3sum, "--check", "B3SUMS"], cwd=VECTORS, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stdout


def test_the_script_writes_what_is_here(tmp_path: Path) -> None:
    make_vectors.write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        name: read(name) for name in [*NAMES, "B3SUMS"]
    }


def test_signatures() -> None:
    for name in NAMES:
        if "envelope" in name:
            envelope, payload = open_unverified(read(name))
            assert isinstance(envelope, Envelope)
            assert OLD.public_key in verify(envelope, payload, [OLD.public_key])
    assert key_id(OLD.public_key) == (
        "21fe31dfa154a261626bf854046fd2271b7bed4b6abe45aa58877ef47f9721b9"
    )


def test_the_vectors_make_versions() -> None:
    parts = [decode_part(read("part-0.json")), decode_part(read("part-2.json"))]
    manifest = decode_manifest(read("manifest.json"))
    version = assemble(VERSION_57, "demo", manifest, decode_layout(read("layout.json")), parts)
    assert version.complete
    assert list(version.digests) == make_vectors.shard_digests()
    assert [extent.length for extent in version.layout.extents()] == [27, 262144, 100, 262144, 1]
    opened = assemble_open(
        AN_OPEN_HEAD.open,  # type: ignore[arg-type]
        "demo",
        decode_layout(read("layout-open.json")),
        [decode_part(read("part-open-2.json"))],
    )
    assert opened.digests == (None, None, *version.digests[2:])


def test_the_heads_make_the_state() -> None:
    """One worker's history: an open version, then the key rotates."""
    state = begin("demo", pinned=[OLD.public_key])
    for name in ("head.envelope.json", "head-open.envelope.json", "head-rotated.envelope.json"):
        state = accept(state, read(name), NOW + 120_000).state
    assert encode_state(state) == read("trust.json")

"""Whatever a signed delta says: it is refused, or its frames lie where they can and weigh what they may."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcast import publisher
from shardcast.base_files import BaseFiles
from shardcast.codec.elements import ElementType
from shardcast.codec.frame import BaseRange, Group, Mode, Segment, write_frame
from shardcast.errors import ShardcastError, TrustError
from shardcast.frames import Arena, checked_shards, decoded
from shardcast.keys import generate, load_signer
from shardcast.protocol.delta import DeltaBlob, DeltaPart, assemble_deltas
from shardcast.protocol.head import DeltaRef
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from tests.unit.protocol.facts import KIB_256, A, B, C, layout

TARGET = layout([("f", 3 * KIB_256), ("g", 5), ("h", 0), ("i", KIB_256 + 1)], version=2)

frames = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), min_size=1, max_size=3)


@st.composite
def parts(draw: st.DrawFn) -> DeltaPart:
    """A part as its decoder lets it through, which may reach anywhere."""
    blobs = [
        DeltaBlob(digest=C, bytes=sum(taken for _, taken in listed), frames=listed)
        for listed in draw(st.lists(frames, min_size=1, max_size=3))
    ]
    made = DeltaPart(
        layout=draw(st.sampled_from([A, A, A, C])),
        base=draw(st.sampled_from([B, B, B, None])),
        codec="scf/1",
        first_shard=draw(st.integers(0, 7)),
        blobs=blobs,
    )
    made.check()
    return made


@given(made=parts())
def test_frames_fill_their_blobs_and_follow_each_other(made: DeltaPart) -> None:
    shard = made.first_shard
    for blob, placed in made.placed():
        at = 0
        for frame in placed:
            assert (frame.offset, frame.shards.start) == (at, shard)
            at, shard = at + frame.length, frame.shards.stop
        assert at == blob.bytes
    assert range(made.first_shard, shard) == made.shards


@given(made=st.lists(parts(), max_size=3), size=st.integers(0, 300))
def test_parts_are_put_together_or_refused(made: list[DeltaPart], size: int) -> None:
    ref = DeltaRef(base=B, base_version=1, parts=[C], bytes=size)
    try:
        found = assemble_deltas(ref, A, TARGET, made)
    except TrustError:
        return
    shards = [shard for part in found for shard in part.shards]
    assert shards == sorted(set(shards))
    assert set(shards) <= set(range(TARGET.shard_count))
    assert sum(blob.bytes for part in found for blob in part.blobs) <= size
    assert all((part.layout, part.base) == (A, B) for part in found)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredVersion:
    """A version of files of 300,000, 0 and 10 bytes."""
    root: Path = tmp_path_factory.mktemp("base")
    (root / "ckpt").mkdir()
    for name, data in FILES.items():
        (root / "ckpt" / name).write_bytes(data)
    run = RunStore(root / "store/policy", "policy")
    signer = load_signer(generate(root / "key")[0])
    publisher.publish_directory(PublishOptions(source=root / "ckpt"), run, [signer], lambda: 10**12)
    found = run.stored(1)
    assert found is not None
    return found


FILES = {"a.json": bytes(range(250)) * 1200, "b.json": b"", "c.json": b"0123456789"}
anything = st.integers(-2, 4) | st.integers(-10, 300_010) | st.integers(-(1 << 62), 1 << 62)


@given(file=anything, offset=anything, length=anything)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_frame_reads_its_base_or_is_refused(
    stored: StoredVersion, file: int, offset: int, length: int
) -> None:
    reader = BaseFiles(stored, memoryview(bytearray(1000)))
    try:
        found = bytes(reader.range(file, offset, length))
    except ShardcastError:
        return
    finally:
        reader.close()
    data = list(FILES.values())[file]
    assert found == data[offset : offset + length]
    assert len(found) == length


@given(data=st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"SCF1" + tail))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_frame_gives_bytes_that_were_not_signed(stored: StoredVersion, data: bytes) -> None:
    """Nothing raises, and what counts as a shard has its digest."""
    version = stored.version
    extents = [version.layout.extent(shard) for shard in range(version.layout.shard_count)]
    with contextlib.closing(BaseFiles(stored, memoryview(bytearray(1000)))) as reader:
        out, problem = decoded(memoryview(data), version.layout.total_bytes, reader, Arena())
    assert bool(problem) == (len(out) == 0)
    checked = list(checked_shards(out, extents, version, range(len(extents))))
    assert [extent for extent, _ in checked] == extents
    whole = b"".join(FILES.values())
    at = 0
    for extent, piece in checked:
        assert piece is None or piece == whole[at : at + extent.length]
        at += extent.length


def test_a_bug_of_the_decoder_is_a_reason_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def range(self, file: int, offset: int, length: int) -> memoryview:
            raise ZeroDivisionError("a bug")

    group = Group(Mode.SAME, ElementType.BYTES, b"")
    frame = write_frame([group], [Segment(10, 0, BaseRange(0, 0))])
    with caplog.at_level(logging.ERROR, "shardcast.frames"):
        out, problem = decoded(memoryview(frame), 10, Broken(), Arena())
    assert (bytes(out), problem) == (b"", "decoding broke: ZeroDivisionError: a bug")
    (record,) = caplog.records
    assert record.exc_info is not None

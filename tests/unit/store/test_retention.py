"""What is evicted, and which documents stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.errors import BusyError, ShardcastError
from shardcast.protocol.envelope import seal
from shardcast.protocol.head import Head, OpenRef, encode_head
from shardcast.protocol.succession import Issue, with_version
from shardcast.store import retention
from shardcast.store.retention import (
    Held,
    Keep,
    choose_evictions,
    collect,
    unreachable_versions,
)
from shardcast.store.run import RunStore
from tests.fakes import new_signer
from tests.unit.store.conftest import Sample, make_sample


def held(*numbers: int, size: int = 100) -> list[Held]:
    return [Held(number, size, age_ms=1000 * (10 - number)) for number in numbers]


def test_the_oldest_beyond_the_count_go_first() -> None:
    assert choose_evictions(held(1, 2, 3, 4), Keep(count=2), ()) == (1, 2)
    assert choose_evictions(held(1, 2, 3, 4), Keep(), ()) == ()


def test_a_quota_counts_what_stays() -> None:
    assert choose_evictions(held(1, 2, 3, 4), Keep(quota_bytes=250), ()) == (1, 2)
    assert choose_evictions(held(1, 2, 3, 4), Keep(quota_bytes=250), (2,)) == (1,)


def test_age_evicts_but_never_the_newest() -> None:
    assert choose_evictions(held(1, 2, 3), Keep(max_age_ms=7500), ()) == (1, 2)
    assert choose_evictions(held(1), Keep(count=1, quota_bytes=1, max_age_ms=1), ()) == ()


@given(
    st.lists(st.integers(1, 50), unique=True, max_size=12),
    st.integers(1, 5) | st.none(),
    st.integers(1, 1000) | st.none(),
    st.sets(st.integers(1, 50)),
)
def test_what_must_stay_stays(
    numbers: list[int], count: int | None, quota: int | None, protected: set[int]
) -> None:
    versions = held(*numbers)
    gone = choose_evictions(versions, Keep(count, quota), protected)
    assert set(gone) <= set(numbers) - protected - {max(numbers, default=0)}
    assert list(gone) == sorted(gone)
    left = [n for n in numbers if n not in gone]
    if count is not None and not protected:
        assert len(left) <= max(count, 1)


def test_collect_needs_a_head(run: RunStore) -> None:
    with pytest.raises(ShardcastError, match="no head"):
        unreachable_versions(run)


def test_documents_of_what_is_gone_go_too(run: RunStore, sample: Sample) -> None:
    other = make_sample(2)
    for each in (sample, other):
        each.fill(run)
    run.commit(1)
    run.commit(2)
    before = collect(run, [1], dry_run=True)
    assert (before.versions, run.committed()) == ((1,), [2, 1])
    done = collect(run, [1])
    assert done.versions == (1,)
    assert done.blobs == 3
    assert done.bytes == sum(map(len, sample.blobs.values())) + sample.ref.bytes
    assert set(run.blobs()) == set(other.version.documents)


@pytest.mark.parametrize(
    "method", ["read_head", "read_blob", "committed", "stored", "blobs", "evict"]
)
def test_what_comes_during_a_collection_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A relay takes heads and their documents while it collects in another thread."""
    old, kept, new = make_sample(1), make_sample(2), make_sample(3)
    for moment in count(1):
        run = RunStore(tmp_path / str(moment), "test")
        for each in (old, kept):
            each.fill(run)
            run.commit(each.version.number)
        run.write_head(_head_of(kept))
        come = partial(_announced, run, new, kept)
        calls = _after(monkeypatch, run, method, moment, come)
        collect(run, [1])
        monkeypatch.undo()
        if calls() < moment:
            break
        assert set(new.blobs) <= set(run.blobs())
        assert not set(old.blobs) & set(run.blobs())
    assert moment > 1


def _announced(run: RunStore, *samples: Sample) -> None:
    run.write_head(_head_of(*samples))
    for digest in samples[0].version.documents:  # what names others comes first
        run.write_blob(digest, samples[0].blobs[digest])


def _after(
    monkeypatch: pytest.MonkeyPatch,
    run: RunStore,
    method: str,
    moment: int,
    action: Callable[[], None],
) -> Callable[[], int]:
    """Do something right after a method's call of that number; return what counts its calls."""
    real: Callable[..., object] = getattr(run, method)
    calls = 0

    def called(*args: object, **options: object) -> object:
        nonlocal calls
        answer = real(*args, **options)
        calls += 1
        if calls == moment:
            action()
        return answer

    monkeypatch.setattr(run, method, called)
    return lambda: calls


def _head_of(*newest_first: Sample) -> bytes:
    signer = new_signer()
    issue = Issue(run="test", now_ms=1, keys=(signer.public_key,), expiry_ms=1)
    head: Head | None = None
    for each in reversed(newest_first):
        head = with_version(head, issue, each.ref, keep=4)
    assert head is not None
    return seal(encode_head(head), [signer])


# --- what is being uploaded -------------------------------------------------------------------


def uploaded(run: RunStore, sample: Sample) -> None:
    """Its documents but the manifest are here; only the layout is described."""
    layout, *parts = [d for d in sample.version.documents if d != sample.version.manifest]
    for digest in (layout, *parts):
        run.write_blob(digest, sample.blobs[digest])
    described = OpenRef(
        version=sample.version.number, step=sample.ref.step, layout=layout, parts=[], deltas=[]
    )
    version = run.load_open(described)
    assert version is not None
    run.stage(version)


def test_documents_of_a_version_that_is_on_its_way_stay(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    run.commit(1)
    run.write_head(_head_of(sample))
    coming = make_sample(2)
    uploaded(run, coming)
    here = set(run.blobs())
    done = collect(run, ())
    assert (done.blobs, done.uploading, set(run.blobs())) == (0, False, here)
    assert collect(run, [2], dry_run=True).blobs == len(coming.version.documents) - 1
    assert set(run.blobs()) == here
    run.write_head(_head_of(make_sample(3), sample))  # it was passed by
    assert collect(run, ()).blobs == len(coming.version.documents) - 2  # its layout is described
    assert collect(run, [2]).blobs == 1


def test_documents_stay_while_somebody_uploads(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "UPLOAD_WAIT_S", 0.0)
    sample.fill(run)
    run.commit(1)
    uploader = retention.unnamed_lock(run, exclusive=False)
    uploader.acquire()
    done = collect(run, [1])
    assert (done.versions, done.blobs, done.uploading) == ((1,), 0, True)
    assert set(run.blobs()) == set(sample.blobs) & set(sample.version.documents)
    uploader.release()
    assert collect(run, ()).blobs == len(sample.version.documents)


def test_nobody_uploads_a_document_while_others_are_chosen_and_removed(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be listed before, and named after what is on disk was read."""
    sample.fill(run)
    run.commit(1)
    uploader, kept_out = retention.unnamed_lock(run, exclusive=False), []

    def looking(method: str) -> Callable[..., object]:
        done = getattr(RunStore, method)

        def look(self: RunStore, *arguments: object) -> object:
            try:
                uploader.acquire()
            except BusyError:
                kept_out.append(method)
            uploader.release()
            return done(self, *arguments)

        return look

    for method in ("blobs", "staged", "remove_blob"):
        monkeypatch.setattr(RunStore, method, looking(method))
    assert collect(run, [1]).blobs == 3
    assert set(kept_out) == {"blobs", "staged", "remove_blob"}
    assert kept_out.count("remove_blob") == 3

"""What is evicted, and which documents stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.errors import ShardcastError
from shardcast.store.retention import (
    Held,
    Keep,
    choose_evictions,
    collect,
    unreachable_versions,
)
from shardcast.store.run import RunStore
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

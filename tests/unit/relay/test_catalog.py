"""What each digest is: only what a head reaches, as far as documents tell."""

from relay.catalog import Catalog, DataBlob, DocumentBlob, Kind, Place, ShardBlob, parse_document
from shardcast.protocol.delta import decode_delta_part
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, OpenRef, decode_head
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise


def head_of(*versions: MadeVersion, opened: OpenRef | None = None) -> Head:
    return decode_head(open_unverified(make_head(*versions, opened=opened))[1])


def learn_all(catalog: Catalog, version: MadeVersion) -> None:
    """Learns documents in whatever order the catalog asks for them."""
    while missing := catalog.missing_documents(version.ref.version):
        for document in missing:
            data = version.blobs[document.digest]
            catalog.learn(document.digest, parse_document(document.kind, data))


def test_before_a_head_nothing_is_known() -> None:
    catalog = Catalog(RUN)
    assert catalog.find(make_version().layout) is None
    assert catalog.missing_documents(1) == []


def test_a_head_reaches_manifests_first_and_shards_once_all_documents_are_here() -> None:
    version = make_version(1)
    catalog = Catalog(RUN)
    catalog.set_head(head_of(version))
    assert catalog.find(version.ref.manifest) == DocumentBlob(version.ref.manifest, Kind.MANIFEST)
    assert catalog.find(version.layout) is None
    manifest = parse_document(Kind.MANIFEST, version.blobs[version.ref.manifest])
    catalog.learn(version.ref.manifest, manifest)
    assert [d.kind for d in catalog.missing_documents(1)] == [Kind.LAYOUT, Kind.PART]
    assert catalog.find(version.shards[0]) is None
    learn_all(catalog, version)
    assert catalog.find(version.shards[0]) == ShardBlob(version.shards[0], SHARD, (Place(1, 0),))
    assert catalog.find(version.layout) == DocumentBlob(version.layout, Kind.LAYOUT)
    found = catalog.version(1)
    assert found is not None
    assert found.digests == tuple(version.shards)


def test_an_equal_shard_has_a_place_in_every_version_newest_first() -> None:
    first, second = make_version(1, {"a": noise(SHARD)}), make_version(2, {"b": noise(2 * SHARD)})
    assert first.shards[0] == second.shards[0]
    catalog = Catalog(RUN)
    catalog.set_head(head_of(first, second))
    learn_all(catalog, first)
    learn_all(catalog, second)
    found = catalog.find(first.shards[0])
    assert isinstance(found, ShardBlob)
    assert found.places == (Place(2, 0), Place(1, 0))


def test_what_the_head_drops_is_forgotten() -> None:
    first, second = make_version(1), make_version(2)
    catalog = Catalog(RUN)
    catalog.set_head(head_of(first))
    learn_all(catalog, first)
    catalog.set_head(head_of(second))
    for digest in (*first.documents, *first.shards):
        assert catalog.find(digest) is None


def test_a_version_that_lingers_is_served_last_and_not_listed() -> None:
    """It was dropped while somebody was still fetching it."""
    old, new = make_version(1, {"a": noise(SHARD)}), make_version(2, {"b": noise(2 * SHARD, 5)})
    same = make_version(3, {"c": noise(SHARD)})
    catalog = Catalog(RUN)
    catalog.set_head(head_of(old))
    learn_all(catalog, old)
    catalog.set_head(head_of(new), linger={1, 7})
    assert catalog.find(old.shards[0]) == ShardBlob(old.shards[0], SHARD, (Place(1, 0),))
    assert isinstance(catalog.find(old.ref.manifest), DocumentBlob)
    assert (catalog.numbers(), catalog.lingering()) == ([2], [1])
    assert catalog.missing_documents(1) == []
    catalog.set_head(head_of(same, new), linger={1})
    learn_all(catalog, same)
    found = catalog.find(old.shards[0])
    assert isinstance(found, ShardBlob)
    assert found.places == (Place(3, 0), Place(1, 0))
    catalog.forget({1, 2})
    assert (catalog.numbers(), catalog.lingering()) == ([3, 2], [])
    assert catalog.find(old.ref.manifest) is None
    assert isinstance(catalog.find(new.ref.manifest), DocumentBlob)


def test_few_versions_linger_and_those_that_do_are_not_displaced() -> None:
    versions = [make_version(n, {"a": noise(SHARD, n)}) for n in range(1, 6)]
    catalog = Catalog(RUN)
    catalog.set_head(head_of(*versions))
    for version in versions:
        learn_all(catalog, version)
    everything = {1, 2, 3, 4, 5}
    catalog.set_head(head_of(*versions[1:]), linger=everything)
    assert catalog.lingering() == [1]
    catalog.set_head(head_of(versions[4]), linger=everything)
    assert catalog.lingering() == [4, 1]
    catalog.set_head(head_of(versions[4]), linger={2, 3, 4})
    assert catalog.lingering() == [4]


def test_what_was_withdrawn_or_is_not_known_whole_does_not_linger() -> None:
    old, half, new = make_version(1), make_version(2), make_version(3)
    catalog = Catalog(RUN)
    catalog.set_head(head_of(old, half))
    learn_all(catalog, old)
    withdrawn = decode_head(open_unverified(make_head(new, withdrawn=[1]))[1])
    catalog.set_head(withdrawn, linger={1, 2})
    assert catalog.lingering() == []
    assert catalog.find(old.shards[0]) is None
    assert Catalog(RUN).lingering() == []


def test_a_version_that_stays_keeps_its_shards_over_heads() -> None:
    first, second = make_version(1), make_version(2)
    catalog = Catalog(RUN)
    catalog.set_head(head_of(first))
    learn_all(catalog, first)
    catalog.set_head(head_of(first, second))
    assert catalog.missing_documents(1) == []
    assert isinstance(catalog.find(first.shards[0]), ShardBlob)


def test_delta_blobs_become_known_by_their_parts_and_go_with_them() -> None:
    version = make_version(1, deltas=[noise(100), noise(200, 1)])
    plain = make_version(1)
    (part,) = version.ref.deltas[0].parts
    catalog = Catalog(RUN)
    catalog.set_head(head_of(version))
    learn_all(catalog, version)
    blobs = [blob.digest for blob in decode_delta_part(version.blobs[part]).blobs]
    assert [catalog.find(digest) for digest in blobs] == [
        DataBlob(blobs[0], 100, 1),
        DataBlob(blobs[1], 200, 1),
    ]
    assert plain.ref.manifest == version.ref.manifest
    catalog.set_head(head_of(plain))
    assert [catalog.find(digest) for digest in blobs] == [None, None]
    assert isinstance(catalog.find(version.shards[0]), ShardBlob)


def test_an_open_version_grows_part_by_part_and_closes() -> None:
    version = make_version(1)
    opened = OpenRef(version=1, step=10, layout=version.layout, parts=[], deltas=[])
    catalog = Catalog(RUN)
    catalog.set_head(head_of(opened=opened))
    learn_all(catalog, version)
    assert catalog.find(version.shards[0]) is None
    assert catalog.version(1) is not None
    more = OpenRef(version=1, step=10, layout=version.layout, parts=version.parts, deltas=[])
    catalog.set_head(head_of(opened=more))
    learn_all(catalog, version)
    assert isinstance(catalog.find(version.shards[0]), ShardBlob)
    catalog.set_head(head_of(version))  # closed; the manifest is not here yet
    assert isinstance(catalog.find(version.shards[0]), ShardBlob)
    assert catalog.find(version.layout) is not None
    learn_all(catalog, version)
    found = catalog.version(1)
    assert found is not None
    assert found.complete


def test_documents_that_do_not_belong_together_are_not_usable_and_asked_for_once() -> None:
    version, other = make_version(1), make_version(2)
    catalog = Catalog(RUN)
    head = head_of(version)
    catalog.set_head(head)
    catalog.learn(
        version.ref.manifest, parse_document(Kind.MANIFEST, other.blobs[other.ref.manifest])
    )
    for document in catalog.missing_documents(1):
        data = other.blobs[document.digest]
        catalog.learn(document.digest, parse_document(document.kind, data))
    assert catalog.version(1) is None
    assert catalog.problem(1) is not None
    assert catalog.missing_documents(1) == []


def test_a_malformed_document_is_not_asked_for_again() -> None:
    version = make_version(1)
    catalog = Catalog(RUN)
    catalog.set_head(head_of(version))
    catalog.learn(version.ref.manifest, None)
    assert catalog.missing_documents(1) == []


def test_a_delta_part_of_another_layout_brings_no_blobs() -> None:
    version = make_version(1, deltas=[noise(100)])
    other = make_version(1, {"x": b"y"}, deltas=[noise(100)])
    (part,), (foreign,) = version.ref.deltas[0].parts, other.ref.deltas[0].parts
    catalog = Catalog(RUN)
    catalog.set_head(head_of(version))
    catalog.learn(part, parse_document(Kind.DELTA_PART, other.blobs[foreign]))
    learn_all(catalog, version)
    assert catalog.delta_blobs(1) == []
    assert catalog.problem(1) is not None
    assert isinstance(catalog.find(version.shards[0]), ShardBlob)  # the version itself is fine

"""The trust state machine, a test for each attack (docs/THREATS.md names them)."""

import base64
import json

import msgspec
import pytest

from shardcast.errors import (
    BadSignatureError,
    ClockError,
    EquivocationError,
    ExpiredError,
    LimitError,
    MalformedError,
    MixAndMatchError,
    NotFoundError,
    RollbackError,
    TrustError,
    UnknownKeyError,
    UsageError,
    WithdrawnError,
    WrongRunError,
)
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import key_id, seal
from shardcast.protocol.head import encode_head
from shardcast.protocol.layout import (
    decode_layout,
    decode_part,
    encode_layout,
    encode_part,
)
from shardcast.protocol.limits import MAX_BYTES, MAX_HEAD_BYTES
from shardcast.protocol.manifest import (
    Manifest,
    Version,
    assemble,
    bound_parts,
    encode_manifest,
)
from shardcast.protocol.trust import (
    TrustState,
    accept,
    begin,
    check_version,
    decode_state,
    encode_state,
    fresh,
    require_fresh,
    require_version,
)
from tests.unit.protocol.facts import (
    DAY_MS,
    NEW,
    NOW,
    OLD,
    STRANGER,
    A,
    B,
    C,
    D,
    head,
    layout,
    open_ref,
    ref,
    sealed,
    with_members,
)

SKEW = 5 * 60 * 1000
PINNED = begin("demo", pinned=[OLD.public_key])


def after(state: TrustState, *heads: bytes, now: int = NOW) -> TrustState:
    """The state after accepting ``heads``, kept on disk in between."""
    for data in heads:
        state = decode_state(encode_state(accept(state, data, now).state))
    return state


def test_a_first_head_by_the_pinned_key() -> None:
    data = sealed(head(version=1, versions=[ref(1)]))
    accepted = accept(PINNED, data, NOW)
    assert accepted.head == head(version=1, versions=[ref(1)])
    assert accepted.envelope is data
    assert accepted.changed
    assert not accepted.expired
    assert accepted.state.sequence == NOW
    assert accepted.state.payload == digest_of(encode_head(accepted.head))
    assert accepted.state.manifests == {1: A}


def test_the_same_head_again_changes_nothing() -> None:
    data = sealed(head())
    state = after(PINNED, data)
    again = accept(state, data, NOW)
    assert not again.changed
    assert again.state == state
    both = accept(state, sealed(head(), STRANGER, OLD), NOW)  # another envelope, the same payload
    assert not both.changed


# --- attacks --------------------------------------------------------------------------------


def test_rollback() -> None:
    """An older head, genuine once, is refused, also after a restart."""
    older, newer = sealed(head(NOW)), sealed(head(NOW + 1))
    state = after(PINNED, older, newer)
    with pytest.raises(RollbackError, match=f"{NOW} is older than {NOW + 1}"):
        accept(state, older, NOW)
    restarted = begin("demo", pinned=[OLD.public_key], remembered=state)
    with pytest.raises(RollbackError):
        accept(restarted, older, NOW)
    other_pin = begin("demo", pinned=[NEW.public_key], remembered=state)
    with pytest.raises(RollbackError):
        accept(other_pin, sealed(head(NOW, keys=[NEW.text]), NEW), NOW)


def test_freeze() -> None:
    """A head that is withheld from expires, after five minutes of grace, and is still passed on."""
    data = sealed(head(expires_at=NOW + 1000))
    for now in (NOW + 1000, NOW + 1000 + SKEW):
        accepted = accept(PINNED, data, now)
        assert not accepted.expired
        require_fresh(accepted, now)
    for after, said in ((SKEW + 3_600_000, "1.1 hours"), (SKEW + 1, "5.0 minutes")):
        late = NOW + 1000 + after
        accepted = accept(PINNED, data, late)
        assert accepted.expired
        assert accepted.expired_ms == after - SKEW
        with pytest.raises(ExpiredError, match=f"expired {said} ago.*this machine's clock {late}"):
            require_fresh(accepted, late)
    assert require_version(head(version=1, versions=[ref(1)]), None).version == 1


def test_a_wrong_clock_is_named_where_a_head_seems_expired() -> None:
    """It never makes an expired head fresh: the sources that it is measured by are not trusted."""
    data = sealed(head(issued_at=NOW, expires_at=NOW + 1000))
    day_ahead = NOW + DAY_MS
    accepted = accept(PINNED, data, day_ahead)
    with pytest.raises(ClockError, match=r"24\.0 hours ahead of all its sources'.*set it right"):
        require_fresh(accepted, day_ahead, DAY_MS)
    with pytest.raises(ExpiredError, match=r"2\.0 hours ahead of .*expired by theirs"):
        require_fresh(accepted, day_ahead, DAY_MS // 12)
    with pytest.raises(ExpiredError, match="or a clock is wrong"):
        require_fresh(accepted, day_ahead)


def test_mix_and_match() -> None:
    """Documents of two genuine versions do not make a third."""
    one = encode_layout(layout([("w", 1)], version=1))
    two = encode_layout(layout([("w", 1)], version=2))
    part_of_one = encode_part(digest_of(one), 0, [C])
    manifest = encode_manifest(digest_of(two), [digest_of(part_of_one)])
    entry = ref(2, digest_of(manifest), bytes=1)
    read = msgspec.json.decode(manifest, type=Manifest)
    with pytest.raises(MixAndMatchError, match="belongs to layout"):
        assemble(entry, "demo", read, decode_layout(two), [decode_part(part_of_one)])
    with pytest.raises(MixAndMatchError, match="layout is of version 1"):
        assemble(entry, "demo", read, decode_layout(one), [decode_part(part_of_one)])


def test_endless_data() -> None:
    """Sizes are declared, signed and bounded; nothing is read or allocated beyond them."""
    with pytest.raises(LimitError, match="over the limit"):
        accept(PINNED, sealed(head()) + b" " * MAX_HEAD_BYTES, NOW)
    with pytest.raises(LimitError, match="in all are over"):
        encode_layout(layout([("a", MAX_BYTES), ("b", MAX_BYTES)]))
    with pytest.raises(LimitError, match="shards are over"):
        encode_layout(layout([("a", 2**50)]))
    with pytest.raises(MixAndMatchError, match="3 parts"):
        bound_parts(layout([("a", 1)]), [A, B, C])


def test_wrong_run() -> None:
    """A genuine head of another run of the same publisher is no head of this one."""
    with pytest.raises(WrongRunError, match="head of run 'other' where 'demo'"):
        accept(PINNED, sealed(head(run="other")), NOW)
    with pytest.raises(WrongRunError):
        accept(begin("demo", first_use=True), sealed(head(run="other")), NOW)
    with pytest.raises(WrongRunError, match="remembered trust is for run 'demo'"):
        begin("other", remembered=PINNED)


def test_unknown_key() -> None:
    """Signed well, by somebody else, who may list whatever keys they like."""
    for keys in ([STRANGER.text], [OLD.text], [OLD.text, STRANGER.text]):
        with pytest.raises(UnknownKeyError, match=key_id(STRANGER.public_key)[:16]):
            accept(PINNED, sealed(head(keys=keys), STRANGER), NOW)


def test_bad_signature() -> None:
    payload = base64.b64encode(encode_head(head(NOW + 1))).decode()
    with pytest.raises(BadSignatureError):
        accept(PINNED, with_members(sealed(head()), payload=payload), NOW)


def test_nothing_is_decoded_before_the_signature() -> None:
    garbage = seal(b"garbage", [STRANGER])
    with pytest.raises(UnknownKeyError):
        accept(PINNED, garbage, NOW)
    with pytest.raises(MalformedError):
        accept(PINNED, seal(b"garbage", [OLD]), NOW)
    with pytest.raises(MalformedError):
        accept(begin("demo", first_use=True), garbage, NOW)
    with pytest.raises(MalformedError, match="not padded standard base64"):
        accept(PINNED, with_members(sealed(head()), payload="?"), NOW)


def test_equivocation() -> None:
    """One sequence, two statements; one version number, two contents."""
    state = after(PINNED, sealed(head(versions=[ref(3, A)], open=open_ref(4, B))))
    with pytest.raises(EquivocationError, match="two different heads have sequence"):
        accept(state, sealed(head(hold=True)), NOW)
    with pytest.raises(EquivocationError, match=f"version 3 was manifest {A} and is now {C}"):
        accept(state, sealed(head(NOW + 1, versions=[ref(3, C)])), NOW)
    with pytest.raises(EquivocationError, match=f"open version 4 had layout {B} and has now {C}"):
        accept(state, sealed(head(NOW + 1, open=open_ref(4, C))), NOW)
    # The identities outlive heads that do not mention them, and restarts.
    later = after(state, sealed(head(NOW + 1)), sealed(head(NOW + 2)))
    with pytest.raises(EquivocationError):
        accept(later, sealed(head(NOW + 3, versions=[ref(3, C)])), NOW)
    # An open version that closes as something else.
    closed = after(later, sealed(head(NOW + 3, versions=[ref(4, C), ref(3, A)])))
    check_version(closed, version_of(4, B))
    check_version(closed, version_of(5, D))
    with pytest.raises(EquivocationError, match=f"version 4 was opened with layout {B}"):
        check_version(closed, version_of(4, D))


def version_of(number: int, layout_digest: str) -> Version:
    return Version(
        layout=layout(version=number),
        layout_digest=layout_digest,
        digests=(None,),
        manifest=None,
        documents=(),
    )


def test_replayed_open_version() -> None:
    """A version that was complete does not become open again, whoever signs it."""
    complete = sealed(head(NOW + 1, version=4, versions=[ref(4, A)]))
    state = after(PINNED, sealed(head(open=open_ref(4, B))), complete)
    with pytest.raises(RollbackError, match="sequence"):
        accept(state, sealed(head(open=open_ref(4, B))), NOW)
    with pytest.raises(RollbackError, match="version 4 is open again"):
        accept(state, sealed(head(NOW + 2, open=open_ref(4, B))), NOW)


def rotating() -> bytes:
    return sealed(head(NOW + 1, keys=[NEW.text]), OLD, NEW)


def test_head_signed_by_rotated_out_key() -> None:
    """A stolen key that was replaced says nothing any more, and the error says why."""
    state = after(PINNED, sealed(head()), rotating())
    stolen = sealed(head(NOW + 2, keys=[OLD.text]), OLD)
    with pytest.raises(UnknownKeyError, match="was rotated out"):
        accept(state, stolen, NOW)
    restarted = begin("demo", pinned=[OLD.public_key], remembered=state)
    with pytest.raises(UnknownKeyError, match="was rotated out"):
        accept(restarted, stolen, NOW)
    with pytest.raises(UnknownKeyError, match="is signed by key"):
        accept(state, sealed(head(NOW + 2), STRANGER), NOW)


@pytest.mark.parametrize("days", [-1, 1])
def test_clock_a_day_off(days: int) -> None:
    """Behind: a live head seems to lie ahead. Ahead: it seems expired. Both name both clocks."""
    mine = NOW + days * DAY_MS
    live = head(expires_at=NOW + 3_600_000)
    accepted = accept(PINNED, sealed(live), mine)  # exactly a day is within the tolerance
    if days > 0:
        with pytest.raises(ExpiredError, match=f"{live.expires_at}.*clock {mine}"):
            require_fresh(accepted, mine)
        assert accepted.state.sequence == NOW  # a follower keeps its version, and its place
    else:
        require_fresh(accepted, mine)
        with pytest.raises(ClockError, match=f"{NOW + 1}.*ahead of this machine's clock {mine}"):
            accept(PINNED, sealed(head(NOW + 1)), mine)


def test_a_sequence_from_the_far_future_cannot_block_later_heads() -> None:
    with pytest.raises(ClockError, match=r"365\.0 days ahead"):
        accept(PINNED, sealed(head(NOW + 365 * DAY_MS)), NOW)
    state = after(PINNED, sealed(head(NOW + DAY_MS)))
    assert state.sequence == NOW + DAY_MS


def test_every_refusal_leaves_the_state_alone() -> None:
    state = after(PINNED, sealed(head(NOW + 5)))
    before = encode_state(state)
    for data in (sealed(head()), sealed(head(NOW + 6), STRANGER), sealed(head(NOW + 5, hold=True))):
        with pytest.raises(TrustError):
            accept(state, data, NOW)
    assert encode_state(state) == before


# --- what goes well -------------------------------------------------------------------------


def test_a_worker_pinned_to_the_old_key_adopts_the_new() -> None:
    state = after(PINNED, rotating())
    assert (state.anchors, state.keys, state.retired) == ([OLD.text], [NEW.text], [OLD.text])
    state = after(state, sealed(head(NOW + 2, keys=[NEW.text]), NEW))
    assert state.sequence == NOW + 2


def test_old_and_new_signatures_reach_workers_pinned_to_either() -> None:
    for pin in (OLD, NEW):
        state = after(begin("demo", pinned=[pin.public_key]), rotating())
        assert state.keys == [NEW.text]


def test_pinning_the_old_anchor_again_keeps_the_rotated_keys() -> None:
    state = after(PINNED, rotating())
    assert begin("demo", pinned=[OLD.public_key], remembered=state) == state
    assert begin("demo", pinned=[NEW.public_key], remembered=state) == state
    assert begin("demo", remembered=state) == state
    assert begin("demo", first_use=True, remembered=state) == state


def test_another_pin_replaces_the_keys_and_keeps_the_place() -> None:
    state = after(PINNED, sealed(head(versions=[ref(1)])), rotating())
    pinned = begin("demo", pinned=[STRANGER.public_key], remembered=state)
    assert (pinned.anchors, pinned.keys, pinned.retired) == ([STRANGER.text], [STRANGER.text], [])
    assert (pinned.sequence, pinned.manifests) == (NOW + 1, {1: A})


def test_rotating_back_and_forth() -> None:
    state = after(PINNED, rotating(), sealed(head(NOW + 2, keys=[OLD.text]), NEW))
    assert (state.keys, state.retired) == ([OLD.text], [NEW.text])
    state = after(state, sealed(head(NOW + 3, keys=[OLD.text, STRANGER.text]), OLD))
    assert state.retired == [NEW.text]


def test_trust_on_first_use() -> None:
    state = begin("demo", first_use=True)
    with pytest.raises(UnknownKeyError):  # the first head must be signed by a key it lists
        accept(state, sealed(head(keys=[NEW.text]), OLD), NOW)
    state = after(state, sealed(head()))
    assert (state.anchors, state.keys) == ([], [OLD.text])
    with pytest.raises(UnknownKeyError):
        accept(state, sealed(head(NOW + 1, keys=[STRANGER.text]), STRANGER), NOW)
    remembered = begin("demo", remembered=state)
    assert after(remembered, sealed(head(NOW + 1))).sequence == NOW + 1


def test_exactly_one_way_to_trust() -> None:
    with pytest.raises(UsageError, match="no key is known for run 'demo'"):
        begin("demo")
    with pytest.raises(UsageError, match="not both"):
        begin("demo", pinned=[OLD.public_key], first_use=True)
    unused = begin("demo", first_use=True)  # remembered before any head came
    with pytest.raises(UsageError, match="no key is known"):
        begin("demo", remembered=unused)
    assert begin("demo", pinned=[OLD.public_key], remembered=unused) == PINNED
    assert begin("demo", first_use=True, remembered=unused) == unused


def test_a_pin_given_as_an_iterator_is_a_pin() -> None:
    """An exhausted iterator must not silently become trust on first use."""
    assert begin("demo", pinned=iter([OLD.public_key])) == PINNED
    assert begin("demo", pinned=iter([OLD.public_key]), remembered=PINNED) == PINNED
    assert fresh("demo", iter([OLD.public_key, OLD.public_key])) == PINNED


def test_unusable_pins() -> None:
    with pytest.raises(UsageError, match="public key: key has 3 bytes"):
        begin("demo", pinned=[b"abc"])
    with pytest.raises(UsageError, match="not a usable"):
        fresh("demo", [bytes(32)])
    with pytest.raises(UsageError, match="9 public keys"):
        begin("demo", pinned=[bytes([2 * n]) + bytes(31) for n in range(1, 10)])


def test_withdrawn() -> None:
    document = head(version=1, versions=[ref(2, B), ref(1)], withdrawn=[2])
    with pytest.raises(WithdrawnError, match="version 2 of run 'demo' was withdrawn"):
        require_version(document, 2)
    assert require_version(document, None).version == 1
    assert require_version(document, 1).version == 1
    with pytest.raises(WithdrawnError, match="every version that run 'demo' retains was withdrawn"):
        require_version(head(versions=[ref(1)], withdrawn=[1]), None)


def test_versions_that_are_not_there() -> None:
    with pytest.raises(NotFoundError, match="does not retain version 7; retained: 2, 1"):
        require_version(head(version=2, versions=[ref(2, B), ref(1)]), 7)
    with pytest.raises(NotFoundError, match="retained: none"):
        require_version(head(), 7)
    with pytest.raises(NotFoundError, match="no complete version yet"):
        require_version(head(), None)


def test_memory_of_versions_is_bounded() -> None:
    state = PINNED
    for first in range(1, 1000, 64):
        refs = [ref(n, f"{n:064x}") for n in range(first + 63, first - 1, -1)]
        data = head(NOW + first, versions=refs, open=open_ref(first + 64))
        state = after(state, sealed(data))
    assert len(state.manifests) == 256
    assert max(state.manifests) == 1024
    assert len(state.layouts) == 16


# --- the state on disk ----------------------------------------------------------------------


def test_state_round_trip() -> None:
    state = after(PINNED, sealed(head(versions=[ref(3, A)], open=open_ref(4, B))), rotating())
    assert decode_state(encode_state(state)) == state
    assert json.loads(encode_state(state))["manifests"] == {"3": A}


@pytest.mark.parametrize(
    "members",
    [
        {"keys": ["AAAA"]},
        {"retired": ["x"]},
        {"keys": []},
        {"keys": [], "anchors": []},
        {"sequence": None},
        {"payload": None},
        {"manifests": {"-1": A}},
        {"manifests": {"0": A}},
        {"manifests": {"1.5": A}},
        {"manifests": {"x": A}},
        {"manifests": {"9" * 40: A}},
        {"manifests": {"1": "x"}},
        {"layouts": {str(n): A for n in range(1, 258)}},
        {"manifests": []},
    ],
)
def test_a_damaged_state(members: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        decode_state(with_members(encode_state(after(PINNED, rotating())), **members))

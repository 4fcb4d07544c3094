"""DSSE and Ed25519 against their published examples, and the ways to cheat with them."""

import base64
import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shardcast.errors import BadSignatureError, LimitError, MalformedError, UnknownKeyError
from shardcast.protocol.envelope import (
    HEAD_PAYLOAD_TYPE,
    check_public_key,
    decode_base64,
    decode_key,
    encode_key,
    key_id,
    open_unverified,
    pre_authentication_encoding,
    seal,
    verify,
)
from tests.unit.protocol.facts import NEW, OLD, RFC_8032, STRANGER, Key

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493


@pytest.mark.parametrize(("secret", "public", "message", "signature"), RFC_8032)
def test_rfc_8032_vectors(secret: str, public: str, message: str, signature: str) -> None:
    key = Key(secret)
    assert key.public_key.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert check_public_key(bytes.fromhex(public)).hex() == public


def test_pae_example_of_the_dsse_specification() -> None:
    # secure-systems-lab/dsse, protocol.md, "Test Vectors".
    assert (
        pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
        == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_pae_counts_bytes_and_takes_any() -> None:
    assert pre_authentication_encoding("ü", b"\xff\x00 1") == b"DSSEv1 2 \xc3\xbc 4 \xff\x00 1"
    assert pre_authentication_encoding("", b"") == b"DSSEv1 0  0 "


def test_keyid_is_the_sha256_of_the_raw_key() -> None:
    assert key_id(OLD.public_key) == hashlib.sha256(OLD.public_key).hexdigest()


def test_a_sealed_payload_is_verified_by_plain_ed25519() -> None:
    envelope = json.loads(seal(b"payload", [OLD]))
    assert envelope["payloadType"] == HEAD_PAYLOAD_TYPE
    assert base64.b64decode(envelope["payload"]) == b"payload"
    message = b"DSSEv1 35 application/vnd.shardcast.head+json 7 payload"
    Ed25519PublicKey.from_public_bytes(OLD.public_key).verify(
        base64.b64decode(envelope["signatures"][0]["sig"]), message
    )


def test_who_signed() -> None:
    envelope, payload = open_unverified(seal(b"payload", [OLD, NEW]))
    both = frozenset([OLD.public_key, NEW.public_key])
    assert verify(envelope, payload, both) == both
    assert verify(envelope, payload, [OLD.public_key]) == frozenset([OLD.public_key])
    with pytest.raises(UnknownKeyError, match="trusted: " + key_id(STRANGER.public_key)[:16]):
        verify(envelope, payload, [STRANGER.public_key])


def test_an_empty_key_list_trusts_nobody() -> None:
    envelope, payload = open_unverified(seal(b"payload", [OLD]))
    with pytest.raises(UnknownKeyError, match="trusted: none"):
        verify(envelope, payload, [])


def tampered(**members: Any) -> bytes:
    return json.dumps({**json.loads(seal(b"payload", [OLD])), **members}).encode()


def signature(**members: Any) -> dict[str, Any]:
    first: dict[str, Any] = json.loads(seal(b"payload", [OLD]))["signatures"][0]
    return {**first, **members}


def test_payload_type_confusion() -> None:
    """A signature for another purpose under the same key is none of a head."""
    for kind in ("application/vnd.in-toto+json", "", HEAD_PAYLOAD_TYPE.upper(), "x" * 129):
        with pytest.raises(MalformedError, match="payloadType"):
            open_unverified(tampered(payloadType=kind))
    message = pre_authentication_encoding("application/vnd.in-toto+json", b"payload")
    other = base64.b64encode(OLD.sign(message)).decode()
    envelope, payload = open_unverified(tampered(signatures=[signature(sig=other)]))
    with pytest.raises(BadSignatureError):
        verify(envelope, payload, [OLD.public_key])


def test_a_keyid_that_lies() -> None:
    """The keyid is a hint: the signature must still be by that key."""
    stranger = json.loads(seal(b"payload", [STRANGER]))["signatures"][0]
    lie = {**stranger, "keyid": key_id(OLD.public_key)}
    envelope, payload = open_unverified(tampered(signatures=[lie]))
    with pytest.raises(BadSignatureError, match=key_id(OLD.public_key)[:16]):
        verify(envelope, payload, [OLD.public_key])


def test_a_broken_signature_beside_a_good_one() -> None:
    broken = signature(sig=base64.b64encode(bytes(64)).decode())
    envelope, payload = open_unverified(tampered(signatures=[broken, signature()]))
    assert verify(envelope, payload, [OLD.public_key]) == frozenset([OLD.public_key])


def test_duplicate_signatures_count_once() -> None:
    envelope, payload = open_unverified(tampered(signatures=[signature()] * 16))
    assert verify(envelope, payload, [OLD.public_key]) == frozenset([OLD.public_key])


@pytest.mark.parametrize("count", [0, 17])
def test_number_of_signatures(count: int) -> None:
    with pytest.raises(MalformedError, match="signatures"):
        open_unverified(tampered(signatures=[signature()] * count))
    with pytest.raises(MalformedError, match="signatures"):
        seal(b"payload", [OLD] * count)


@pytest.mark.parametrize(
    "sig", ["", "AA==", "!" * 88, "ä", base64.b64encode(bytes(65)).decode(), "A" * 86 + "==\n"]
)
def test_signatures_of_wrong_form_are_bad(sig: str) -> None:
    data = tampered(signatures=[signature(sig=sig)])
    with pytest.raises((BadSignatureError, MalformedError)):
        verify(*open_unverified(data), [OLD.public_key])


def test_ed25519_malleability() -> None:
    """S + L is another encoding of the same signature: refused (RFC 8032 section 5.1.7)."""
    raw = base64.b64decode(signature()["sig"])
    s = int.from_bytes(raw[32:], "little") + L
    other = base64.b64encode(raw[:32] + s.to_bytes(32, "little")).decode()
    envelope, payload = open_unverified(tampered(signatures=[signature(sig=other)]))
    with pytest.raises(BadSignatureError):
        verify(envelope, payload, [OLD.public_key])


def test_a_tampered_payload() -> None:
    envelope, payload = open_unverified(tampered(payload=base64.b64encode(b"paYload").decode()))
    with pytest.raises(BadSignatureError):
        verify(envelope, payload, [OLD.public_key])


def test_an_envelope_over_the_limit_is_not_sealed() -> None:
    with pytest.raises(LimitError):
        seal(b"x" * 800_000, [OLD])


# --- keys -----------------------------------------------------------------------------------


def _add(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Affine addition on edwards25519 (RFC 8032 section 5.1), written out."""
    d = -121665 * pow(121666, -1, P)
    (x1, y1), (x2, y2) = one, other
    t = d * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + t, -1, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - t, -1, P)
    return x % P, y % P


def _point(y: int) -> tuple[int, int] | None:
    d = -121665 * pow(121666, -1, P)
    square = (y * y - 1) * pow(d * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    for root in (x, x * pow(2, (P - 1) // 4, P) % P):
        if root * root % P == square:
            return root, y
    return None


def _small_order() -> set[bytes]:
    """Every encoding of the points that eight times themselves are neutral."""
    ys = {0, 1, P - 1}
    y = 2
    while len(ys) < 5:  # L times a point outside the prime subgroup has small order
        point, multiple = _point(y), (0, 1)
        y += 1
        if point is None:
            continue
        for bit in bin(L)[2:]:
            multiple = _add(multiple, multiple)
            if bit == "1":
                multiple = _add(multiple, point)
        ys.add(multiple[1])
    return {(y | sign << 255).to_bytes(32, "little") for y in ys for sign in (0, 1)}


def test_small_order_keys() -> None:
    """Under such a key anybody can sign: a publisher must not be talked into listing one."""
    points = _small_order()
    assert len(points) == 10
    for raw in points:
        with pytest.raises(MalformedError, match="not a usable"):
            check_public_key(raw)
    neutral = (1).to_bytes(32, "little")
    assert neutral in points
    forged = neutral + bytes(32)  # R = neutral, S = 0: valid under the neutral key for any message
    Ed25519PublicKey.from_public_bytes(neutral).verify(forged, b"anything")


@pytest.mark.parametrize("y", [P, P + 1, P + 18, 2**255 - 1])
def test_a_key_has_one_encoding(y: int) -> None:
    with pytest.raises(MalformedError, match="not a usable"):
        check_public_key(y.to_bytes(32, "little"))


def test_key_text() -> None:
    assert decode_key(encode_key(OLD.public_key)) == OLD.public_key
    for text in ("", "AAAA", base64.b64encode(bytes(33)).decode()):
        with pytest.raises(MalformedError, match="bytes, not 32"):
            decode_key(text)


@pytest.mark.parametrize(
    "text", ["A", "AA", "AA=", "AB==", "A A=", "AA==\n", "-_==", "ä", "=", "===="]
)
def test_base64_is_standard_padded_and_canonical(text: str) -> None:
    with pytest.raises(MalformedError, match="what is not"):
        decode_base64(text, what="what")


def test_base64_length() -> None:
    assert decode_base64("AA==", what="x", length=1) == b"\0"
    with pytest.raises(MalformedError, match="x has 1 bytes, not 2"):
        decode_base64("AA==", what="x", length=2)

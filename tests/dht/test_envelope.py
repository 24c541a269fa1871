from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dht.envelope import (
    MAX_LIFE_SECONDS,
    MAX_SEALED_BYTES,
    Kind,
    Place,
    check,
    open_listing,
    open_span,
    seal,
    seal_gone,
    seal_listing,
    seal_span,
)
from dht.errors import RecordRejected, Rejection
from dht.identity import Identity
from dht.keys import ARTIFACTS_KEY, key_hash, segment_key, segments
from dht.listing import ArtifactEntry
from tests.dht.support import ARTIFACT, CUTS, N_LAYERS, span_record

OWNER, STRANGER = Identity.ephemeral(), Identity.ephemeral()
NOW = 1.8e9
EXPIRES = NOW + 60
KEY = key_hash(segment_key(ARTIFACT, 3))
SEALED = seal_span(OWNER, 3, EXPIRES, span_record(OWNER.peer_id, 2, 7))


def rejection(*arguments: Any) -> Rejection:
    with pytest.raises(RecordRejected) as caught:
        check(*arguments)
    return caught.value.reason


def test_a_span_comes_back_as_it_was() -> None:
    record = span_record(OWNER.peer_id, 2, 7, addresses=("/ip4/192.0.2.7/tcp/1",), public_name="Ägir")
    sealed = seal_span(OWNER, 3, EXPIRES, record)
    assert open_span(check(KEY, OWNER.peer_id, sealed, EXPIRES, NOW)) == record


def test_a_span_taken_back_is_none() -> None:
    sealed = seal_gone(OWNER, ARTIFACT, 3, EXPIRES)
    assert open_span(check(KEY, OWNER.peer_id, sealed, EXPIRES, NOW)) is None


def test_a_listing_comes_back_as_it_was() -> None:
    entry = ArtifactEntry(artifact_id=ARTIFACT, name="tiny", n_layers=N_LAYERS, cuts=CUTS)
    sealed = seal_listing(OWNER, EXPIRES, entry)
    assert open_listing(check(key_hash(ARTIFACTS_KEY), OWNER.peer_id, sealed, EXPIRES, NOW)) == entry


@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(place: int, change: int) -> None:
    forged = bytearray(SEALED)
    forged[place] ^= change
    assert rejection(KEY, OWNER.peer_id, bytes(forged), EXPIRES, NOW)


@given(st.integers(0, len(SEALED) - 1))
def test_nothing_can_be_cut_off(length: int) -> None:
    assert rejection(KEY, OWNER.peer_id, SEALED[:length], EXPIRES, NOW)


@given(st.binary(max_size=MAX_SEALED_BYTES + 10), st.text(max_size=70), st.floats(), st.binary(max_size=24))
def test_garbage_is_rejected_and_nothing_else_happens(sealed: bytes, subkey: str, expires: float, key: bytes) -> None:
    assert rejection(key, subkey, sealed, expires, NOW)
    assert rejection(KEY, subkey, b"GSE1" + sealed, expires, NOW)


@given(st.floats(NOW + 1, NOW + MAX_LIFE_SECONDS))
def test_the_expiry_is_signed(expires: float) -> None:
    assume(expires != EXPIRES)
    assert rejection(KEY, OWNER.peer_id, SEALED, expires, NOW) is Rejection.BAD_SIGNATURE


def test_an_entry_has_one_place_and_one_owner() -> None:
    elsewhere = key_hash(segment_key(ARTIFACT, 4))
    assert rejection(elsewhere, OWNER.peer_id, SEALED, EXPIRES, NOW) is Rejection.WRONG_KEY
    assert rejection(KEY, STRANGER.peer_id, SEALED, EXPIRES, NOW) is Rejection.BAD_SIGNATURE
    forged = seal_span(STRANGER, 3, EXPIRES, span_record(OWNER.peer_id, 2, 7))
    assert rejection(KEY, OWNER.peer_id, forged, EXPIRES, NOW) is Rejection.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("expires", "reason"),
    [
        (NOW, Rejection.EXPIRED),
        (-math.inf, Rejection.MALFORMED),
        (math.inf, Rejection.MALFORMED),
        (math.nan, Rejection.MALFORMED),
        (NOW + MAX_LIFE_SECONDS + 4, Rejection.EXPIRES_TOO_LATE),
    ],
)
def test_lives_are_short(expires: float, reason: Rejection) -> None:
    sealed = seal_span(OWNER, 3, expires, span_record(OWNER.peer_id, 2, 7))
    assert rejection(KEY, OWNER.peer_id, sealed, expires, NOW) is reason


def test_size_is_limited_on_both_sides() -> None:
    place = Place(Kind.SPAN, ARTIFACT, 3)
    with pytest.raises(ValueError, match="over the limit"):
        seal(OWNER, place, EXPIRES, b"x" * MAX_SEALED_BYTES)
    assert rejection(KEY, OWNER.peer_id, SEALED.ljust(MAX_SEALED_BYTES + 1), EXPIRES, NOW) is Rejection.TOO_LARGE


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peer_id": STRANGER.peer_id}, Rejection.WRONG_SUBKEY),
        ({"artifact_id": "cd" * 32}, Rejection.WRONG_KEY),
        ({"first": 4}, Rejection.WRONG_KEY),
        ({"last": 3}, Rejection.WRONG_KEY),
        ({"n_layers": 6}, Rejection.MALFORMED),
        ({"version": 2}, Rejection.UNKNOWN_VERSION),
        ({"version": 2, "state": "sleeping"}, Rejection.UNKNOWN_VERSION),
        ({"state": "sleeping"}, Rejection.MALFORMED),
        ({"queue": -1}, Rejection.MALFORMED),
        ({"decode_tokens_per_second": math.nan}, Rejection.MALFORMED),
        ({"public_name": "\x1b[2J"}, Rejection.MALFORMED),
        ({"public_name": "x" * 200}, Rejection.MALFORMED),
    ],
)
def test_what_its_own_author_got_wrong(fields: dict[str, Any], reason: Rejection) -> None:
    """Stored by nodes, which know no schema; dropped by readers."""
    record = span_record(OWNER.peer_id, 2, 7).model_copy(update=fields)
    payload = record.model_dump_json(warnings=False).replace("null", "NaN").encode()
    envelope = check(KEY, OWNER.peer_id, seal(OWNER, Place(Kind.SPAN, ARTIFACT, 3), EXPIRES, payload), EXPIRES, NOW)
    with pytest.raises(RecordRejected) as caught:
        open_span(envelope)
    assert caught.value.reason is reason


@given(st.binary(max_size=200))
def test_a_payload_is_read_or_rejected(payload: bytes) -> None:
    for kind, opened in ((Kind.SPAN, open_span), (Kind.LISTING, open_listing)):
        place = Place(kind, ARTIFACT, 3 if kind is Kind.SPAN else 0)
        sealed = seal(OWNER, place, EXPIRES, payload)
        with pytest.raises(RecordRejected):
            opened(check(key_hash(place.key), OWNER.peer_id, sealed, EXPIRES, NOW))


@pytest.mark.parametrize("cuts", [(0, 5), (1, N_LAYERS), (0, 5, 5, N_LAYERS), (0, 7, 3, N_LAYERS), (0,), ()])
def test_listings_with_impossible_cuts(cuts: tuple[int, ...]) -> None:
    entry = ArtifactEntry.model_construct(artifact_id=ARTIFACT, name="", n_layers=N_LAYERS, cuts=cuts)
    sealed = seal_listing(OWNER, EXPIRES, entry)
    with pytest.raises(RecordRejected, match="malformed"):
        open_listing(check(key_hash(ARTIFACTS_KEY), OWNER.peer_id, sealed, EXPIRES, NOW))


def test_segments_of_a_span() -> None:
    assert segments(3, 11, (0, 3, 7, 11)) == (3, 7)
    for first, last in [(0, 0), (7, 3), (1, 3), (3, 8), (0, 12), (11, 11)]:
        with pytest.raises(ValueError, match="does not start and end at cuts"):
            segments(first, last, (0, 3, 7, 11))

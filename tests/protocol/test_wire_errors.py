"""Errors on the wire and on either side of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import errors
from swarm.protocol import StreamClosed, WireError, clean_text, decode, encode, error_frame, pb, to_swarm_error
from tests.protocol.strategies import bodies

PEER = "12D3KooWExample"

KINDS: dict[int, type[errors.SwarmError]] = {
    pb.MALFORMED: errors.ProtocolError,
    pb.VERSION_MISMATCH: errors.IncompatiblePeer,
    pb.TOO_LARGE: errors.ProtocolError,
    pb.UNKNOWN_SESSION: errors.PeerFailed,
    pb.NOT_ALLOWED: errors.ProtocolError,
    pb.NODE_FULL: errors.NodeFull,
    pb.WRONG_ARTIFACT: errors.IncompatiblePeer,
    pb.ILLEGAL_RANGE: errors.PeerFailed,
    pb.GAP: errors.PeerFailed,
    pb.STALE_EPOCH: errors.PeerFailed,
    pb.CONTEXT_FULL: errors.ContextExceeded,
    pb.ENGINE_LOST: errors.PeerFailed,
    pb.JOURNAL_MISSING: errors.PeerFailed,
    pb.SESSION_POISONED: errors.SessionPoisoned,
    pb.NODE_DRAINING: errors.PeerFailed,
    pb.LIMIT_REACHED: errors.NodeFull,
    pb.NUMERICS_MISMATCH: errors.IncompatiblePeer,
    pb.NOT_READY: errors.PeerFailed,
    pb.INTERNAL: errors.PeerFailed,
    pb.ERROR_CODE_UNSPECIFIED: errors.PeerFailed,
    99: errors.PeerFailed,
}


def test_every_code_is_covered() -> None:
    assert set(pb.ErrorCode.values()) <= set(KINDS)


@pytest.mark.parametrize("code", KINDS)
def test_what_the_user_meets(code: int) -> None:
    frame = pb.Error(code=code, message="the text")  # type: ignore[arg-type]
    error = to_swarm_error(frame, PEER, (10, 20))
    assert type(error) is KINDS[code]
    text = str(error)
    assert text.startswith(f"peer {PEER} (layers 10:20) ")
    assert ": the text; " in text
    assert not text.endswith("; ")
    assert "\n" not in text
    if isinstance(error, errors.PeerFailed):
        assert (error.peer, error.layers) == (PEER, (10, 20))


def test_full_node_says_when_to_come_back() -> None:
    sent = error_frame(errors.NodeFull("every slot is taken", retry_after_seconds=2.5), session_id=bytes(16), step=4)
    assert (sent.code, sent.retry_after_seconds, sent.session_id, sent.step) == (pb.NODE_FULL, 2.5, bytes(16), 4)
    error = to_swarm_error(sent, PEER)
    assert isinstance(error, errors.NodeFull)
    assert error.retry_after_seconds == 2.5


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
def test_senseless_retry_times(seconds: float) -> None:
    for error in (errors.NodeFull("full", retry_after_seconds=seconds), WireError(pb.NODE_FULL, "full")):
        sent = error_frame(error)
        assert 0 <= sent.retry_after_seconds <= 1e9
    received = to_swarm_error(pb.Error(code=pb.NODE_FULL, retry_after_seconds=seconds))
    assert isinstance(received, errors.NodeFull)
    assert 0 <= received.retry_after_seconds <= 1e9


def test_versions_are_named_from_the_readers_side() -> None:
    refused = WireError(pb.VERSION_MISMATCH, "version 2", theirs="2", ours="1")
    here, there = to_swarm_error(refused, PEER), to_swarm_error(error_frame(refused), PEER)
    assert isinstance(here, errors.IncompatiblePeer) and isinstance(there, errors.IncompatiblePeer)
    assert "(theirs 2, ours 1)" in str(here)
    assert "(theirs 1, ours 2)" in str(there)


def test_gap_carries_the_position() -> None:
    error = WireError(pb.GAP, "the step starts at 9", position=7)
    assert error_frame(error).position == 7
    assert error_frame(error, position=8).position == 8


SENT: dict[errors.SwarmError, int] = {
    errors.ContextExceeded("too long"): pb.CONTEXT_FULL,
    errors.SessionPoisoned("twice"): pb.SESSION_POISONED,
    errors.SessionLost("gone"): pb.UNKNOWN_SESSION,
    errors.ArtifactMismatch("another"): pb.WRONG_ARTIFACT,
    errors.SpanError("illegal cut"): pb.ILLEGAL_RANGE,
    errors.ProtocolError("what?"): pb.MALFORMED,
}


@pytest.mark.parametrize("error", SENT, ids=lambda error: type(error).__name__)
def test_errors_of_this_side(error: errors.SwarmError) -> None:
    frame = error_frame(error)
    assert (frame.code, frame.message) == (SENT[error], str(error))


def test_texts_of_our_own_bugs_stay_here() -> None:
    frame = error_frame(FileNotFoundError("/home/somebody/key"))
    assert (frame.code, frame.message) == (pb.INTERNAL, "internal error")


@given(bodies[pb.Error], st.text(max_size=100))
def test_texts_of_strangers_are_one_printable_line(frame: pb.Error, peer: str) -> None:
    text = str(to_swarm_error(frame, peer, (0, 1)))
    assert text.isprintable()
    assert len(text) < 900


@given(st.text(), st.integers(1, 300))
def test_clean_text(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit)
    assert cleaned.isprintable()
    assert len(cleaned) <= limit
    assert clean_text(cleaned, limit) == cleaned


def test_terminal_escapes_and_direction_marks_are_dropped() -> None:
    assert clean_text("a\x1b[31m\r\nb\u202ec\u2028d\x00") == "a [31m b c d"


def test_plain_text_stays() -> None:
    assert clean_text("Größe — 語 é ok") == "Größe — 語 é ok"
    assert clean_text("x" * 300).endswith("x…")


@given(st.text(), st.text(), st.sampled_from(list(pb.ErrorCode.values())))
def test_every_error_can_be_sent(message: str, theirs: str, code: pb.ErrorCode.ValueType) -> None:
    frame = error_frame(WireError(code, message, theirs=theirs, ours=theirs, retry_after_seconds=math.nan))
    assert decode(encode(frame)[4:]) == frame


def test_broken_streams_and_garbage() -> None:
    gone = to_swarm_error(StreamClosed("the stream ended within a frame"), PEER, (0, 3))
    garbage = to_swarm_error(WireError(pb.MALFORMED, "epoch is 0"), PEER, (0, 3))
    assert type(gone) is errors.PeerFailed
    assert type(garbage) is errors.ProtocolError
    for error in (gone, garbage):
        assert isinstance(error, errors.PeerFailed)
        assert error.layers == (0, 3)

"""Errors on the wire, and what they are on either side of it.

``WireError`` is what decoding and serving raise. ``error_frame`` puts it, or one of ``swarm.errors``, into a frame;
``to_swarm_error`` makes of a peer's frame what the user of a client meets. Texts from peers are cleaned and cut here:
they are written by strangers and end up in terminals and logs.
"""

from __future__ import annotations

import math
import unicodedata
from typing import NamedTuple

from swarm import errors
from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb

MAX_PEER_TEXT = 200  # characters of a peer's text that are shown


class WireError(Exception):
    """A frame or a request can't be accepted; ``code`` says why. It can be sent with ``error_frame`` as it is."""

    def __init__(
        self,
        code: pb.ErrorCode.ValueType,
        message: str,
        *,
        theirs: str = "",
        ours: str = "",
        position: int = 0,
        retry_after_seconds: float = 0.0,
        blamed: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.theirs = theirs
        self.ours = ours
        self.position = position
        self.retry_after_seconds = retry_after_seconds
        self.blamed = blamed


class StreamClosed(Exception):
    """The other side is gone, or this side has closed the stream."""


def clean_text(text: str, limit: int = MAX_PEER_TEXT) -> str:
    """One line of printable text: control, format and unassigned characters become spaces, runs of spaces one."""
    kept = "".join(" " if unicodedata.category(character)[0] in "CZ" else character for character in text[: 4 * limit])
    line = " ".join(kept.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def error_frame(error: Exception, *, session_id: bytes = b"", step: int = 0, position: int | None = None) -> pb.Error:
    """The frame that tells a peer of ``error``. What is neither a ``WireError`` nor known to peers is INTERNAL, without
    its text: that may name files of this machine."""
    message = pb.Error(session_id=session_id, step=step, position=position or 0)
    if isinstance(error, WireError):
        _fill_from_wire_error(message, error, position)
    else:
        _fill_from_swarm_error(message, error)
    return message


def _fill_from_wire_error(message: pb.Error, error: WireError, position: int | None) -> None:
    message.code = error.code
    message.message = clean_text(error.message)
    message.theirs = clean_text(error.theirs)
    message.ours = clean_text(error.ours)
    message.retry_after_seconds = _sane_seconds(error.retry_after_seconds)
    message.position = error.position if position is None else position
    message.blamed = error.blamed


_CODES: tuple[tuple[type[errors.SwarmError], pb.ErrorCode.ValueType], ...] = (
    (errors.NodeFull, pb.NODE_FULL),
    (errors.ContextExceeded, pb.CONTEXT_FULL),
    (errors.SessionPoisoned, pb.SESSION_POISONED),
    (errors.SessionLost, pb.UNKNOWN_SESSION),
    (errors.ArtifactMismatch, pb.WRONG_ARTIFACT),
    (errors.SpanError, pb.ILLEGAL_RANGE),
    (errors.IncompatiblePeer, pb.NUMERICS_MISMATCH),
    (errors.ProtocolError, pb.MALFORMED),
)


def _fill_from_swarm_error(message: pb.Error, error: Exception) -> None:
    message.code = next((code for kind, code in _CODES if isinstance(error, kind)), pb.INTERNAL)
    message.message = "internal error" if message.code == pb.INTERNAL else clean_text(str(error))
    if isinstance(error, errors.NodeFull):
        message.retry_after_seconds = _sane_seconds(error.retry_after_seconds)


def _sane_seconds(seconds: float) -> float:
    return min(max(seconds, 0.0), limits.MAX_SECONDS) if seconds == seconds else 0.0


class _Reading(NamedTuple):
    """How a code reads to the user of a client. ``{later}`` in ``next`` becomes the time that the peer has named."""

    kind: type[errors.SwarmError]
    what: str
    next: str


_RETRY = "try again: another peer may serve these layers"
_SAME_RELEASE = "run the same release of glm-swarm on both sides"

_READINGS: dict[int, _Reading] = {
    pb.MALFORMED: _Reading(errors.ProtocolError, "refused a frame as malformed", _SAME_RELEASE),
    pb.VERSION_MISMATCH: _Reading(errors.IncompatiblePeer, "speaks another protocol version", _SAME_RELEASE),
    pb.TOO_LARGE: _Reading(errors.ProtocolError, "refused a frame as too large", "use smaller chunks (--chunk-tokens)"),
    pb.UNKNOWN_SESSION: _Reading(errors.PeerFailed, "no longer knows the session", _RETRY),
    pb.NOT_ALLOWED: _Reading(errors.ProtocolError, "did not allow a request", "start a new session"),
    pb.NODE_FULL: _Reading(errors.NodeFull, "has no free slot", "try again {later} or add a node"),
    pb.WRONG_ARTIFACT: _Reading(
        errors.IncompatiblePeer, "serves another artifact", "choose the model its swarm serves"
    ),
    pb.ILLEGAL_RANGE: _Reading(errors.PeerFailed, "does not run these layers", _RETRY),
    pb.GAP: _Reading(errors.PeerFailed, "lacks earlier tokens of the session", _RETRY),
    pb.STALE_EPOCH: _Reading(errors.PeerFailed, "has moved on to a newer epoch of the session", "start a new session"),
    pb.CONTEXT_FULL: _Reading(
        errors.ContextExceeded, "has no room left in the context", "shorten the prompt or lower --max-tokens"
    ),
    pb.ENGINE_LOST: _Reading(errors.PeerFailed, "lost its engine and the session with it", _RETRY),
    pb.JOURNAL_MISSING: _Reading(errors.PeerFailed, "no longer holds the outputs to replay", _RETRY),
    pb.SESSION_POISONED: _Reading(
        errors.SessionPoisoned, "refuses a session whose steps end engines", "start a new session with another prompt"
    ),
    pb.NODE_DRAINING: _Reading(errors.PeerFailed, "is leaving the swarm", _RETRY),
    pb.LIMIT_REACHED: _Reading(
        errors.NodeFull, "takes no more from this client", "close other sessions or try again {later}"
    ),
    pb.NUMERICS_MISMATCH: _Reading(errors.IncompatiblePeer, "computes with other numerics", _SAME_RELEASE),
    pb.NOT_READY: _Reading(errors.PeerFailed, "is not ready", "try again in a few seconds"),
    pb.INTERNAL: _Reading(errors.PeerFailed, "met an internal error", _RETRY),
}
_UNKNOWN = _Reading(errors.PeerFailed, "answered with an error that is not known here", "update glm-swarm")
_GARBAGE = _Reading(errors.ProtocolError, "sent a frame that makes no sense", _RETRY)
_GONE = _Reading(errors.PeerFailed, "closed the connection", _RETRY)


def to_swarm_error(
    cause: pb.Error | WireError | StreamClosed, peer: str = "", layers: tuple[int, int] | None = None
) -> errors.SwarmError:
    """What the user meets: ``cause`` is the peer's Error frame, or what its stream raised here."""
    if isinstance(cause, StreamClosed):
        return _build(_GONE, peer, layers, str(cause))
    if isinstance(cause, WireError):
        reading = _READINGS[pb.VERSION_MISMATCH] if cause.code == pb.VERSION_MISMATCH else _GARBAGE
        return _build(reading, peer, layers, cause.message + _both(cause.theirs, cause.ours))
    # The sender's "theirs" is ours.
    said = cause.message + _both(cause.ours, cause.theirs)
    error = _build(_READINGS.get(cause.code, _UNKNOWN), peer, layers, said, cause.retry_after_seconds)
    error.code = cause.code
    error.blamed = cause.blamed
    return error


def _later(seconds: float) -> str:
    return f"in {math.ceil(seconds)} s" if seconds else "later"


def _both(theirs: str, ours: str) -> str:
    return f" (theirs {theirs or 'unknown'}, ours {ours or 'unknown'})" if theirs or ours else ""


def _build(
    reading: _Reading, peer: str, layers: tuple[int, int] | None, said: str, retry_after_seconds: float = 0.0
) -> errors.SwarmError:
    said = clean_text(said)
    where = f" (layers {layers[0]}:{layers[1]})" if layers else ""
    who = f"peer {clean_text(peer)}" if peer else "a peer"
    retry_after_seconds = _sane_seconds(retry_after_seconds)
    advice = reading.next.replace("{later}", _later(retry_after_seconds))
    text = f"{who}{where} {reading.what}{': ' + said if said else ''}; {advice}"
    if issubclass(reading.kind, errors.NodeFull):
        full = reading.kind(text, peer, retry_after_seconds)
        full.layers = layers
        return full
    if issubclass(reading.kind, errors.PeerFailed):
        return reading.kind(text, peer, layers)
    error = reading.kind(text)
    error.peer = peer
    return error

"""Frames as bytes: a 4-byte big-endian length, then a ``Frame`` of at most 1 MiB with a version and one body.

The ``Frame`` around a body is written by hand (version, then the body's field): protobuf would copy the body once more.
"""

from __future__ import annotations

import time
from typing import TypeAlias, cast

from google.protobuf.message import DecodeError, Message

from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.limits import LENGTH_BYTES, MAX_FRAME_BYTES, MAX_HOPS, PROTOCOL_VERSION
from swarm.protocol.validate import validate
from swarm.protocol.wire_errors import WireError

Body: TypeAlias = (
    pb.DescribeRequest
    | pb.NodeDescription
    | pb.ArtifactRequest
    | pb.ArtifactPart
    | pb.Open
    | pb.Opened
    | pb.Reroute
    | pb.Rerouted
    | pb.Close
    | pb.Closed
    | pb.Ping
    | pb.Pong
    | pb.Answer
    | pb.RowRequest
    | pb.Row
    | pb.LinkFailed
    | pb.StepDone
    | pb.Draining
    | pb.CopyState
    | pb.Copied
    | pb.Attach
    | pb.Attached
    | pb.Step
    | pb.StepPart
    | pb.StateOffer
    | pb.StateAccepted
    | pb.KvRows
    | pb.StateHeld
    | pb.Error
)
Chunk: TypeAlias = bytes | bytearray | memoryview


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def length_delimited_tag(field_number: int) -> bytes:
    return varint(field_number << 3 | 2)


_VERSION_TAG = 0x08  # field 1, varint
_VERSION_FIELD = bytes([_VERSION_TAG]) + varint(PROTOCOL_VERSION)
_BODY_TAGS: dict[type[Message], bytes] = {
    type(getattr(pb.Frame(), field.name)): length_delimited_tag(field.number)
    for field in pb.Frame.DESCRIPTOR.oneofs_by_name["body"].fields
}
_TIMING_TAGS: dict[type[Message], bytes] = {
    pb.Answer: length_delimited_tag(pb.Answer.TIMINGS_FIELD_NUMBER),
    pb.Step: length_delimited_tag(pb.Step.TIMINGS_FIELD_NUMBER),
}


def encode(body: Body) -> bytes:
    """Length and frame. Raises ``WireError`` for what the receiver would refuse."""
    validate(body)
    return frame_of(type(body), body.SerializeToString())


def frame_of(kind: type[Message], *chunks: Chunk) -> bytes:
    """Length and frame around a body of type ``kind`` whose serialised form is ``chunks``, one after the other."""
    body_bytes = sum(map(len, chunks))
    head = _VERSION_FIELD + _BODY_TAGS[kind] + varint(body_bytes)
    frame_bytes = check_length(len(head) + body_bytes)
    return b"".join((frame_bytes.to_bytes(LENGTH_BYTES, "big"), head, *chunks))


def timing_field(body: pb.Answer | pb.Step, timing: pb.HopTiming, serialise_ns: int) -> bytes:
    """``timing`` as one more entry of ``body.timings``, to follow its serialised form: ``sent_us`` is now, and
    ``serialise_us`` has grown."""
    if len(body.timings) >= MAX_HOPS:
        raise WireError(pb.TOO_LARGE, f"a step went through more than {MAX_HOPS} hops")
    stamped = pb.HopTiming()
    stamped.CopyFrom(timing)
    stamped.serialise_us += serialise_ns // 1000
    stamped.sent_us = time.monotonic_ns() // 1000
    data = stamped.SerializeToString()
    return _TIMING_TAGS[type(body)] + varint(len(data)) + data


def check_length(frame_bytes: int) -> int:
    if frame_bytes > MAX_FRAME_BYTES:
        raise WireError(pb.TOO_LARGE, f"a frame has {frame_bytes} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return frame_bytes


def decode(frame: Chunk) -> Body:
    """The validated body of a frame (without its length). Hostile bytes raise nothing but ``WireError``."""
    check_length(len(frame))
    parsed = pb.Frame()
    try:
        # a bytearray is parsed in place, which the type stubs do not know
        parsed.ParseFromString(cast(bytes, frame) if isinstance(frame, bytearray) else bytes(frame))
    except DecodeError:
        _check_version(_peek_version(frame))
        raise WireError(pb.MALFORMED, "a frame can't be parsed") from None
    _check_version(parsed.version)
    name = parsed.WhichOneof("body")
    if name is None:
        raise WireError(pb.MALFORMED, "a frame has no body that is known")
    body: Body = getattr(parsed, name)
    validate(body)
    return body


def _check_version(version: int) -> None:
    if version == 0:
        raise WireError(pb.MALFORMED, "a frame has no version")
    if version != PROTOCOL_VERSION:
        raise WireError(
            pb.VERSION_MISMATCH,
            f"a frame has protocol version {version}, not {PROTOCOL_VERSION}",
            theirs=str(version),
            ours=str(PROTOCOL_VERSION),
        )


def _peek_version(frame: Chunk) -> int:
    """Version of a frame that can't be parsed: another version may have changed what follows."""
    version_is_first = len(frame) > 1 and frame[0] == _VERSION_TAG and 0 < frame[1] <= 0x7F
    return frame[1] if version_is_first else PROTOCOL_VERSION

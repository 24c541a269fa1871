"""What nodes say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.rules import check


def _describe(message: pb.DescribeRequest) -> None:
    """Has no fields."""


def _description(message: pb.NodeDescription) -> None:
    if message.artifact_id:
        check.artifact_id(message.artifact_id)
    if message.HasField("span"):
        check.layers("span", message.span)
    check.known("state", message.state, (pb.JOINING, pb.ONLINE, pb.DRAINING))
    check.text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    check.text("software", message.software)
    check.text("public_name", message.public_name)
    check.between("chunk_tokens", message.chunk_tokens, 0, limits.MAX_STEP_TOKENS)
    check.between("decode_tokens_per_second", message.decode_tokens_per_second, 0, 1e9)
    check.between("prefill_tokens_per_second", message.prefill_tokens_per_second, 0, 1e9)
    check.between("clock", message.clock, 0, 1e12)
    # an encoding that is not known here is one the node may use with others
    check.count("encodings", message.encodings, limits.MAX_ENCODINGS)
    check.count("slots", message.slots, limits.MAX_SLOT_CLASSES)
    for slot in message.slots:
        _slot_class(slot)


def _slot_class(slot: pb.SlotClass) -> None:
    check.between("slots.tokens", slot.tokens, 1, limits.MAX_CONTEXT_TOKENS)
    check.between("slots.total", slot.total, 0, limits.MAX_SLOTS)
    check.between("slots.free", slot.free, 0, slot.total)


def _artifact_request(message: pb.ArtifactRequest) -> None:
    check.artifact_id(message.artifact_id)
    check.known("piece", message.piece, (pb.MANIFEST, pb.HEADER, pb.DIGESTS))
    check.between("offset", message.offset, 0, limits.MAX_ARTIFACT_PIECE_BYTES)


def _artifact_part(message: pb.ArtifactPart) -> None:
    limit = limits.MAX_ARTIFACT_PIECE_BYTES
    check.part("the artifact piece", message.offset, len(message.data), message.total_bytes, limit)


RULES: dict[type[Message], Callable[[Any], None]] = {
    pb.DescribeRequest: _describe,
    pb.NodeDescription: _description,
    pb.ArtifactRequest: _artifact_request,
    pb.ArtifactPart: _artifact_part,
}

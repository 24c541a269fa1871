"""Between a hop and an understudy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.rules import check


def _state_offer(message: pb.StateOffer) -> None:
    check.session_id(message.session_id)
    check.artifact_id(message.artifact_id)
    check.text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    check.layers("run", message.run)


def _state_accepted(message: pb.StateAccepted) -> None:
    check.position("position", message.position)


def _kv_rows(message: pb.KvRows) -> None:
    check.between("layer", message.layer, 0, limits.MAX_LAYERS)
    check.between("count", message.count, 1, limits.MAX_STEP_TOKENS)
    check.position("first + count", message.first + message.count)
    row_bytes = message.key_bytes + message.value_bytes + message.indexer_bytes
    check.between("the bytes of a row", row_bytes, 1, limits.MAX_KV_ROW_BYTES)
    if len(message.data) != message.count * row_bytes:
        raise check.malformed(
            f"data has {len(message.data)} bytes, count and row bytes give {message.count * row_bytes}"
        )


def _state_held(message: pb.StateHeld) -> None:
    check.position("position", message.position)
    check.position("journal_first", message.journal_first)


RULES: dict[type[Message], Callable[[Any], None]] = {
    pb.StateOffer: _state_offer,
    pb.StateAccepted: _state_accepted,
    pb.KvRows: _kv_rows,
    pb.StateHeld: _state_held,
}

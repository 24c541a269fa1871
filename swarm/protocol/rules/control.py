"""Between a client and its hops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.activations import VALUE_BYTES
from swarm.protocol.rules import check


def _open(message: pb.Open) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)
    check.artifact_id(message.artifact_id)
    check.layers("run", message.run)
    check.between("context_tokens", message.context_tokens, 1, limits.MAX_CONTEXT_TOKENS)
    check.between("chunk_tokens", message.chunk_tokens, 1, limits.MAX_STEP_TOKENS)
    check.known("encoding", message.encoding, tuple(VALUE_BYTES))
    check.neighbours(message)
    check.text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    check.between("hop_index", message.hop_index, 0, limits.MAX_HOPS - 1)
    check.text("purpose", message.purpose)
    check.position("successor_position", message.successor_position)
    if message.HasField("understudy_of"):
        check.neighbour("understudy_of", message.understudy_of)
    if message.fork_of:
        check.session_id(message.fork_of)
    check.position("fork_tokens", message.fork_tokens)


def _opened(message: pb.Opened) -> None:
    check.epoch(message.epoch)
    check.position("slot_tokens", message.slot_tokens)
    check.text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    check.position("position", message.position)


def _reroute(message: pb.Reroute) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)
    check.neighbours(message)
    check.position("successor_position", message.successor_position)
    check.between("hop_index", message.hop_index, 0, limits.MAX_HOPS - 1)
    check.position("keep_tokens", message.keep_tokens)


def _rerouted(message: pb.Rerouted) -> None:
    check.epoch(message.epoch)
    check.position("position", message.position)
    check.position("journal_first", message.journal_first)


def _close(message: pb.Close) -> None:
    check.session_id(message.session_id)


def _closed(message: pb.Closed) -> None:
    """Has no fields."""


def _ping(message: pb.Ping) -> None:
    """Any nonce will do."""


def _pong(message: pb.Pong) -> None:
    check.position("position", message.position)


def _row_summary(row: pb.RowSummary) -> None:
    check.position("rows.position", row.position)
    check.count("rows.top_ids", row.top_ids, limits.MAX_TOP)
    check.count("rows.asked_logits", row.asked_logits, limits.MAX_ASKED_IDS)
    check.count("rows.drafts", row.drafts, limits.MAX_DRAFTS)
    check.token_ids("rows.top_ids", row.top_ids)
    check.token_ids("rows.drafts", row.drafts)
    check.finite("rows.top_logits", row.top_logits)
    check.finite("rows.asked_logits", row.asked_logits)
    if len(row.top_logits) != len(row.top_ids):
        raise check.malformed(f"rows has {len(row.top_ids)} top_ids but {len(row.top_logits)} top_logits")
    if len(set(row.top_ids)) != len(row.top_ids) or list(row.top_logits) != sorted(row.top_logits, reverse=True):
        raise check.malformed("rows.top_ids repeat, or rows.top_logits do not descend")
    # -inf says that no id is left out
    if not (math.isfinite(row.rest_log_sum_exp) or row.rest_log_sum_exp == -math.inf):
        raise check.malformed("rows.rest_log_sum_exp is neither finite nor -inf")


def _answer(message: pb.Answer) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)
    check.between("step", message.step, 1, math.inf)
    check.position("position", message.position)
    check.text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    check.timings(message.timings)
    check.count("rows", message.rows, limits.MAX_ROWS)
    for row in message.rows:
        _row_summary(row)


def _step_done(message: pb.StepDone) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)
    check.between("step", message.step, 1, math.inf)
    check.position("position", message.position)


def _row_request(message: pb.RowRequest) -> None:
    check.session_id(message.session_id)
    check.position("position", message.position)


def _row(message: pb.Row) -> None:
    check.position("position", message.position)
    check.part("the row", message.offset_bytes, len(message.data), message.total_bytes, limits.MAX_ROW_BYTES)
    if message.total_bytes % 4:
        raise check.malformed(f"the row has {message.total_bytes} bytes, which are not whole f32 values")


def _link_failed(message: pb.LinkFailed) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)
    check.peer_id("successor", message.successor)
    check.text("cause", message.cause)


def _draining(message: pb.Draining) -> None:
    check.session_id(message.session_id)
    check.between("seconds", message.seconds, 0, limits.MAX_SECONDS)


def _copy_state(message: pb.CopyState) -> None:
    check.session_id(message.session_id)
    if not message.HasField("understudy"):
        raise check.malformed("understudy is missing")
    check.neighbour("understudy", message.understudy)
    check.layers("run", message.run)
    check.position("upto_tokens", message.upto_tokens)


def _copied(message: pb.Copied) -> None:
    check.session_id(message.session_id)
    check.peer_id("understudy", message.understudy)
    check.position("position", message.position)
    check.position("journal_first", message.journal_first)
    check.text("failure", message.failure)


def _error(message: pb.Error) -> None:
    # a code that is not known is still an error, and read as one
    check.text("message", message.message)
    check.text("theirs", message.theirs)
    check.text("ours", message.ours)
    check.between("retry_after_seconds", message.retry_after_seconds, 0, limits.MAX_SECONDS)
    if message.session_id:
        check.session_id(message.session_id)
    check.position("position", message.position)


RULES: dict[type[Message], Callable[[Any], None]] = {
    pb.Open: _open,
    pb.Opened: _opened,
    pb.Reroute: _reroute,
    pb.Rerouted: _rerouted,
    pb.Close: _close,
    pb.Closed: _closed,
    pb.Ping: _ping,
    pb.Pong: _pong,
    pb.Answer: _answer,
    pb.RowRequest: _row_request,
    pb.Row: _row,
    pb.LinkFailed: _link_failed,
    pb.StepDone: _step_done,
    pb.Draining: _draining,
    pb.CopyState: _copy_state,
    pb.Copied: _copied,
    pb.Error: _error,
}

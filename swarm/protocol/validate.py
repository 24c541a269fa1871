"""Rules for every message of the wire: what decoding returns is in range, so what serves it need not check again.

A rule raises ``WireError``: TOO_LARGE for what asks for more room than version 1 grants, MALFORMED for the rest. Enum
numbers that are not known are refused where the receiver has to act on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.activations import VALUE_BYTES
from swarm.protocol.wire_errors import WireError

_HEX = frozenset("0123456789abcdef")


def validate(body: Message) -> None:
    """Raises ``WireError`` unless every field of a frame's body is in range."""
    _RULES[type(body)](body)


def _malformed(text: str) -> WireError:
    return WireError(pb.MALFORMED, text)


def _between(name: str, value: float, low: float, high: float) -> None:
    # a NaN fails both comparisons
    if not low <= value <= high:
        raise _malformed(f"{name} is {value:g}, must be {low:g} to {high:g}")


def _count(name: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise WireError(pb.TOO_LARGE, f"{name} has {len(values)} entries, at most {limit} are allowed")


def _text(name: str, value: str, limit: int = limits.MAX_TEXT) -> None:
    if len(value) > limit:
        raise WireError(pb.TOO_LARGE, f"{name} has {len(value)} characters, at most {limit} are allowed")


def _finite(name: str, values: Iterable[float]) -> None:
    # f32 values can't overflow a sum of doubles, and NaN or infinities can't leave it
    if not math.isfinite(sum(values)):
        raise _malformed(f"{name} holds values that are not finite")


def _known(name: str, value: int, known: tuple[int, ...]) -> None:
    if value not in known:
        raise _malformed(f"{name} is {value}, which is not known")


def _session_id(value: bytes) -> None:
    if len(value) != limits.SESSION_ID_BYTES:
        raise _malformed(f"session_id has {len(value)} bytes, must have {limits.SESSION_ID_BYTES}")


def _epoch(value: int) -> None:
    if value < 1:
        raise _malformed("epoch is 0, epochs start at 1")


def _position(name: str, value: int) -> None:
    _between(name, value, 0, limits.MAX_CONTEXT_TOKENS)


def _artifact_id(value: str) -> None:
    if len(value) != 64 or not _HEX.issuperset(value):
        raise _malformed("artifact_id is not 64 lower-case hex digits")


def _peer_id(name: str, value: str) -> None:
    if not 1 <= len(value) <= limits.MAX_PEER_ID or not (value.isascii() and value.isalnum()):
        raise _malformed(f"{name} is not a base58 peer id")


def _layers(name: str, layers: pb.Layers) -> None:
    if not layers.first < layers.last <= limits.MAX_LAYERS:
        raise _malformed(f"{name} is {layers.first}:{layers.last}, must be first < last <= {limits.MAX_LAYERS}")


def _token_ids(name: str, ids: Sequence[int]) -> None:
    if ids and max(ids) > limits.MAX_TOKEN_ID:
        raise _malformed(f"{name} holds {max(ids)}, token ids end at {limits.MAX_TOKEN_ID}")


def _neighbour(name: str, neighbour: pb.Neighbour) -> None:
    _peer_id(f"{name}.peer_id", neighbour.peer_id)
    _count(f"{name}.addresses", neighbour.addresses, limits.MAX_ADDRESSES)
    for address in neighbour.addresses:
        _text(f"{name}.addresses", address)


def _neighbours(message: pb.Open | pb.Reroute) -> None:
    if not message.HasField("predecessor"):
        raise _malformed("predecessor is missing")
    _neighbour("predecessor", message.predecessor)
    if message.HasField("successor"):
        _neighbour("successor", message.successor)


def _part(name: str, offset: int, n_bytes: int, total: int, limit: int) -> None:
    if total > limit:
        raise WireError(pb.TOO_LARGE, f"{name} has {total} bytes, at most {limit} are allowed")
    if offset + n_bytes > total:
        raise _malformed(f"{name} has {total} bytes, the part ends at {offset + n_bytes}")
    if n_bytes == 0 and offset != total:
        raise _malformed(f"a part of {name} is empty")


# --- info


def _describe(message: pb.DescribeRequest) -> None:
    """Has no fields."""


def _description(message: pb.NodeDescription) -> None:
    if message.artifact_id:
        _artifact_id(message.artifact_id)
    if message.HasField("span"):
        _layers("span", message.span)
    _known("state", message.state, (pb.JOINING, pb.ONLINE, pb.DRAINING))
    _text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    _text("software", message.software)
    _text("public_name", message.public_name)
    _between("chunk_tokens", message.chunk_tokens, 0, limits.MAX_STEP_TOKENS)
    _between("decode_tokens_per_second", message.decode_tokens_per_second, 0, 1e9)
    _between("prefill_tokens_per_second", message.prefill_tokens_per_second, 0, 1e9)
    _between("clock", message.clock, 0, 1e12)
    # an encoding that is not known here is one the node may use with others
    _count("encodings", message.encodings, limits.MAX_ENCODINGS)
    _count("slots", message.slots, limits.MAX_SLOT_CLASSES)
    for slot in message.slots:
        _slot_class(slot)


def _slot_class(slot: pb.SlotClass) -> None:
    _between("slots.tokens", slot.tokens, 1, limits.MAX_CONTEXT_TOKENS)
    _between("slots.total", slot.total, 0, limits.MAX_SLOTS)
    _between("slots.free", slot.free, 0, slot.total)


def _artifact_request(message: pb.ArtifactRequest) -> None:
    _artifact_id(message.artifact_id)
    _known("piece", message.piece, (pb.MANIFEST, pb.HEADER))
    _between("offset", message.offset, 0, limits.MAX_ARTIFACT_PIECE_BYTES)


def _artifact_part(message: pb.ArtifactPart) -> None:
    limit = limits.MAX_ARTIFACT_PIECE_BYTES
    _part("the artifact piece", message.offset, len(message.data), message.total_bytes, limit)


# --- control


def _open(message: pb.Open) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)
    _artifact_id(message.artifact_id)
    _layers("run", message.run)
    _between("context_tokens", message.context_tokens, 1, limits.MAX_CONTEXT_TOKENS)
    _between("chunk_tokens", message.chunk_tokens, 1, limits.MAX_STEP_TOKENS)
    _known("encoding", message.encoding, tuple(VALUE_BYTES))
    _neighbours(message)
    _text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    _between("hop_index", message.hop_index, 0, limits.MAX_HOPS - 1)
    _text("purpose", message.purpose)
    _position("successor_position", message.successor_position)
    if message.HasField("understudy_of"):
        _neighbour("understudy_of", message.understudy_of)
    if message.fork_of:
        _session_id(message.fork_of)
    _position("fork_tokens", message.fork_tokens)


def _opened(message: pb.Opened) -> None:
    _epoch(message.epoch)
    _position("slot_tokens", message.slot_tokens)
    _text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    _position("position", message.position)


def _reroute(message: pb.Reroute) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)
    _neighbours(message)
    _position("successor_position", message.successor_position)
    _between("hop_index", message.hop_index, 0, limits.MAX_HOPS - 1)
    _position("keep_tokens", message.keep_tokens)


def _rerouted(message: pb.Rerouted) -> None:
    _epoch(message.epoch)
    _position("position", message.position)
    _position("journal_first", message.journal_first)


def _close(message: pb.Close) -> None:
    _session_id(message.session_id)


def _closed(message: pb.Closed) -> None:
    """Has no fields."""


def _ping(message: pb.Ping) -> None:
    """Any nonce will do."""


def _pong(message: pb.Pong) -> None:
    _position("position", message.position)


def _timings(timings: Sequence[pb.HopTiming]) -> None:
    _count("timings", timings, limits.MAX_HOPS)
    for timing in timings:
        _between("timings.hop_index", timing.hop_index, 0, limits.MAX_HOPS - 1)


def _row_summary(row: pb.RowSummary) -> None:
    _position("rows.position", row.position)
    _count("rows.top_ids", row.top_ids, limits.MAX_TOP)
    _count("rows.asked_logits", row.asked_logits, limits.MAX_ASKED_IDS)
    _count("rows.drafts", row.drafts, limits.MAX_DRAFTS)
    _token_ids("rows.top_ids", row.top_ids)
    _token_ids("rows.drafts", row.drafts)
    _finite("rows.top_logits", row.top_logits)
    _finite("rows.asked_logits", row.asked_logits)
    if len(row.top_logits) != len(row.top_ids):
        raise _malformed(f"rows has {len(row.top_ids)} top_ids but {len(row.top_logits)} top_logits")
    if len(set(row.top_ids)) != len(row.top_ids) or list(row.top_logits) != sorted(row.top_logits, reverse=True):
        raise _malformed("rows.top_ids repeat, or rows.top_logits do not descend")
    # -inf says that no id is left out
    if not (math.isfinite(row.rest_log_sum_exp) or row.rest_log_sum_exp == -math.inf):
        raise _malformed("rows.rest_log_sum_exp is neither finite nor -inf")


def _answer(message: pb.Answer) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)
    _between("step", message.step, 1, math.inf)
    _position("position", message.position)
    _text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    _timings(message.timings)
    _count("rows", message.rows, limits.MAX_ROWS)
    for row in message.rows:
        _row_summary(row)


def _step_done(message: pb.StepDone) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)
    _between("step", message.step, 1, math.inf)
    _position("position", message.position)


def _row_request(message: pb.RowRequest) -> None:
    _session_id(message.session_id)
    _position("position", message.position)


def _row(message: pb.Row) -> None:
    _position("position", message.position)
    _part("the row", message.offset_bytes, len(message.data), message.total_bytes, limits.MAX_ROW_BYTES)
    if message.total_bytes % 4:
        raise _malformed(f"the row has {message.total_bytes} bytes, which are not whole f32 values")


def _link_failed(message: pb.LinkFailed) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)
    _peer_id("successor", message.successor)
    _text("cause", message.cause)


def _draining(message: pb.Draining) -> None:
    _session_id(message.session_id)
    _between("seconds", message.seconds, 0, limits.MAX_SECONDS)


def _copy_state(message: pb.CopyState) -> None:
    _session_id(message.session_id)
    if not message.HasField("understudy"):
        raise _malformed("understudy is missing")
    _neighbour("understudy", message.understudy)
    _layers("run", message.run)
    _position("upto_tokens", message.upto_tokens)


def _copied(message: pb.Copied) -> None:
    _session_id(message.session_id)
    _peer_id("understudy", message.understudy)
    _position("position", message.position)
    _position("journal_first", message.journal_first)
    _text("failure", message.failure)


# --- data


def _attach(message: pb.Attach) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)


def _attached(message: pb.Attached) -> None:
    _epoch(message.epoch)
    _position("position", message.position)


def _step(message: pb.Step) -> None:
    _session_id(message.session_id)
    _epoch(message.epoch)
    _between("step", message.step, 1, math.inf)
    _between("n_tokens", message.n_tokens, 1, limits.MAX_STEP_TOKENS)
    _position("start + n_tokens", message.start + message.n_tokens)
    _known("kind", message.kind, (pb.PREFILL, pb.DECODE))
    _count("tokens", message.tokens, message.n_tokens)
    _token_ids("tokens", message.tokens)
    _timings(message.timings)
    if message.payload_bytes or message.payload or message.width:
        _payload(message)
    elif len(message.tokens) != message.n_tokens:
        raise _malformed(f"the step has neither a payload nor one token id for each of its {message.n_tokens} rows")
    if message.HasField("output"):
        _output(message.output, message.n_tokens)


def _payload(message: pb.Step) -> None:
    _known("encoding", message.encoding, tuple(VALUE_BYTES))
    _between("width", message.width, 1, limits.MAX_WIDTH)
    expected = message.n_tokens * message.width * VALUE_BYTES[message.encoding]
    if message.payload_bytes != expected:
        raise _malformed(f"payload_bytes is {message.payload_bytes}, rows and width give {expected}")
    if len(message.payload) > expected:
        raise _malformed(f"payload has {len(message.payload)} bytes, more than the {expected} of the whole step")


def _output(output: pb.OutputRequest, n_tokens: int) -> None:
    if output.temperature != 0:
        _between("output.temperature", output.temperature, limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE)
    _between("output.top", output.top, 0, limits.MAX_TOP)
    _between("output.drafts", output.drafts, 0, limits.MAX_DRAFTS)
    _count("output.ids", output.ids, limits.MAX_ASKED_IDS)
    _token_ids("output.ids", output.ids)
    too_long = n_tokens * _summary_bytes(output) > limits.MAX_FRAME_BYTES - _ANSWER_BYTES
    if output.all_rows and (too_long or n_tokens > limits.MAX_ROWS):
        raise WireError(pb.TOO_LARGE, "the answer to all_rows would not fit a frame: ask for fewer rows, top or ids")


_ANSWER_BYTES = 40 << 10  # of an Answer beside its rows: 256 timings of at most 80 bytes, ids and texts


def _summary_bytes(output: pb.OutputRequest) -> int:
    """Upper bound of one RowSummary: ids take up to 5 bytes, logits 4."""
    return 9 * output.top + 4 * len(output.ids) + 5 * output.drafts + 48


def _step_part(message: pb.StepPart) -> None:
    _between("step", message.step, 1, math.inf)
    if not message.data:
        raise _malformed("a part of the step is empty")


# --- state


def _state_offer(message: pb.StateOffer) -> None:
    _session_id(message.session_id)
    _artifact_id(message.artifact_id)
    _text("numerics_id", message.numerics_id, limits.MAX_NUMERICS_ID)
    _layers("run", message.run)


def _state_accepted(message: pb.StateAccepted) -> None:
    _position("position", message.position)


def _kv_rows(message: pb.KvRows) -> None:
    _between("layer", message.layer, 0, limits.MAX_LAYERS)
    _between("count", message.count, 1, limits.MAX_STEP_TOKENS)
    _position("first + count", message.first + message.count)
    row_bytes = message.key_bytes + message.value_bytes + message.indexer_bytes
    _between("the bytes of a row", row_bytes, 1, limits.MAX_KV_ROW_BYTES)
    if len(message.data) != message.count * row_bytes:
        raise _malformed(f"data has {len(message.data)} bytes, count and row bytes give {message.count * row_bytes}")


def _state_held(message: pb.StateHeld) -> None:
    _position("position", message.position)
    _position("journal_first", message.journal_first)


# --- errors


def _error(message: pb.Error) -> None:
    # a code that is not known is still an error, and read as one
    _text("message", message.message)
    _text("theirs", message.theirs)
    _text("ours", message.ours)
    _between("retry_after_seconds", message.retry_after_seconds, 0, limits.MAX_SECONDS)
    if message.session_id:
        _session_id(message.session_id)
    _position("position", message.position)


_RULES: dict[type[Message], Callable[[Any], None]] = {
    pb.DescribeRequest: _describe,
    pb.NodeDescription: _description,
    pb.ArtifactRequest: _artifact_request,
    pb.ArtifactPart: _artifact_part,
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
    pb.Attach: _attach,
    pb.Attached: _attached,
    pb.Step: _step,
    pb.StepPart: _step_part,
    pb.StateOffer: _state_offer,
    pb.StateAccepted: _state_accepted,
    pb.KvRows: _kv_rows,
    pb.StateHeld: _state_held,
    pb.Error: _error,
}

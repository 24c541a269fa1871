"""Between a hop and the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.activations import VALUE_BYTES
from swarm.protocol.rules import check
from swarm.protocol.wire_errors import WireError


def _attach(message: pb.Attach) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)


def _attached(message: pb.Attached) -> None:
    check.epoch(message.epoch)
    check.position("position", message.position)


def _step(message: pb.Step) -> None:
    check.session_id(message.session_id)
    check.epoch(message.epoch)
    check.between("step", message.step, 1, math.inf)
    check.between("n_tokens", message.n_tokens, 1, limits.MAX_STEP_TOKENS)
    check.position("start + n_tokens", message.start + message.n_tokens)
    check.known("kind", message.kind, (pb.PREFILL, pb.DECODE))
    check.count("tokens", message.tokens, message.n_tokens)
    check.token_ids("tokens", message.tokens)
    check.timings(message.timings)
    if message.payload_bytes or message.payload or message.width:
        _payload(message)
    elif len(message.tokens) != message.n_tokens:
        raise check.malformed(
            f"the step has neither a payload nor one token id for each of its {message.n_tokens} rows"
        )
    if message.HasField("output"):
        _output(message.output, message.n_tokens)


def _payload(message: pb.Step) -> None:
    check.known("encoding", message.encoding, tuple(VALUE_BYTES))
    check.between("width", message.width, 1, limits.MAX_WIDTH)
    expected = message.n_tokens * message.width * VALUE_BYTES[message.encoding]
    if message.payload_bytes != expected:
        raise check.malformed(f"payload_bytes is {message.payload_bytes}, rows and width give {expected}")
    if len(message.payload) > expected:
        raise check.malformed(f"payload has {len(message.payload)} bytes, more than the {expected} of the whole step")


def _output(output: pb.OutputRequest, n_tokens: int) -> None:
    if output.temperature != 0:
        check.between("output.temperature", output.temperature, limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE)
    check.between("output.top", output.top, 0, limits.MAX_TOP)
    check.between("output.drafts", output.drafts, 0, limits.MAX_DRAFTS)
    check.count("output.ids", output.ids, limits.MAX_ASKED_IDS)
    check.token_ids("output.ids", output.ids)
    too_long = n_tokens * _summary_bytes(output) > limits.MAX_FRAME_BYTES - _ANSWER_BYTES
    if output.all_rows and (too_long or n_tokens > limits.MAX_ROWS):
        raise WireError(pb.TOO_LARGE, "the answer to all_rows would not fit a frame: ask for fewer rows, top or ids")


_ANSWER_BYTES = 40 << 10  # of an Answer beside its rows: 256 timings of at most 80 bytes, ids and texts


def _summary_bytes(output: pb.OutputRequest) -> int:
    """Upper bound of one RowSummary: ids take up to 5 bytes, logits 4."""
    return 9 * output.top + 4 * len(output.ids) + 5 * output.drafts + 48


def _step_part(message: pb.StepPart) -> None:
    check.between("step", message.step, 1, math.inf)
    if not message.data:
        raise check.malformed("a part of the step is empty")


RULES: dict[type[Message], Callable[[Any], None]] = {
    pb.Attach: _attach,
    pb.Attached: _attached,
    pb.Step: _step,
    pb.StepPart: _step_part,
}

"""A step and its activations: cut into frames by the sender, put together again by the receiver.

The first part of the payload travels in the ``Step`` itself, the rest in ``StepPart`` frames that follow it at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.activations import Activations, Buffer, decode_activations
from swarm.protocol.frames import frame_of, length_delimited_tag, varint
from swarm.protocol.limits import PART_BYTES
from swarm.protocol.validate import validate
from swarm.protocol.wire_errors import WireError

_STEP_PAYLOAD_TAG = length_delimited_tag(pb.Step.PAYLOAD_FIELD_NUMBER)
_PART_DATA_TAG = length_delimited_tag(pb.StepPart.DATA_FIELD_NUMBER)


@dataclass(frozen=True, eq=False)
class ReceivedStep:
    """A whole step. ``step`` no longer holds the payload; ``activations`` (f32 [n_tokens, width], maybe read-only) is
    None for a step of token ids. ``received_us`` is ``time.monotonic_ns() // 1000`` at its last byte,
    ``serialise_seconds`` what decoding took."""

    step: pb.Step
    activations: Activations | None
    serialise_seconds: float
    received_us: int


def split_step(step: pb.Step, payload: Buffer = b"", more: bytes = b"") -> Iterator[bytes]:
    """Frames with their lengths. ``step`` names ``payload_bytes`` and holds no payload; ``more`` are further fields of
    it, serialised. Each frame copies its part of the payload when it is taken from the iterator."""
    validate(step)
    view = memoryview(payload)
    first = view[:PART_BYTES]
    yield frame_of(pb.Step, step.SerializeToString(), more, _STEP_PAYLOAD_TAG + varint(len(first)), first)
    for offset in range(PART_BYTES, len(view), PART_BYTES):
        data = view[offset : offset + PART_BYTES]
        head = pb.StepPart(step=step.step, offset=offset).SerializeToString()
        yield frame_of(pb.StepPart, head, _PART_DATA_TAG + varint(len(data)), data)


class StepAssembler:
    """Puts the parts of one step at a time together. ``max_step_bytes`` bounds the payload."""

    def __init__(self, max_step_bytes: int) -> None:
        self.max_step_bytes = max_step_bytes
        self._step: pb.Step | None = None
        self._payload = memoryview(b"")
        self._filled_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether parts of a step are missing."""
        return self._step is not None

    def begin(self, step: pb.Step) -> tuple[pb.Step, Activations | None] | None:
        """Takes a validated ``Step``; the result when it is whole already."""
        if step.payload_bytes > self.max_step_bytes:
            text = f"the step has {step.payload_bytes} bytes, at most {self.max_step_bytes} are allowed here"
            raise WireError(pb.TOO_LARGE, text)
        first, head = step.payload, _without_payload(step)
        if len(first) == step.payload_bytes:
            return head, _activations(head, first)
        # Untouched pages of an empty array take no memory: what is held follows what has arrived.
        self._payload = np.empty(step.payload_bytes, dtype=np.uint8).data
        self._step, self._filled_bytes = head, 0
        self._append(first)
        return None

    def add(self, part: pb.StepPart) -> tuple[pb.Step, Activations | None] | None:
        """Takes the next ``StepPart``; the result when it was the last."""
        step = self._step
        if step is None or part.step != step.step:
            raise WireError(pb.MALFORMED, f"a part of step {part.step} does not follow that step")
        if part.offset != self._filled_bytes:
            raise WireError(pb.MALFORMED, f"a part of the step starts at {part.offset}, not at {self._filled_bytes}")
        data = part.data
        if part.offset + len(data) > len(self._payload):
            raise WireError(pb.MALFORMED, f"the parts of the step exceed its {len(self._payload)} bytes")
        self._append(data)
        return self._finish(step) if self._filled_bytes == len(self._payload) else None

    def _append(self, data: bytes) -> None:
        end = self._filled_bytes + len(data)
        self._payload[self._filled_bytes : end] = data
        self._filled_bytes = end

    def _finish(self, step: pb.Step) -> tuple[pb.Step, Activations | None]:
        payload, self._payload, self._step = self._payload, memoryview(b""), None
        return step, _activations(step, payload)


def _without_payload(step: pb.Step) -> pb.Step:
    """A copy that lets go of the frame's memory."""
    if not step.payload:
        return step
    step.ClearField("payload")
    head = pb.Step()
    head.CopyFrom(step)
    return head


def _activations(step: pb.Step, payload: Buffer) -> Activations | None:
    return decode_activations(payload, step.encoding, step.n_tokens, step.width) if step.payload_bytes else None

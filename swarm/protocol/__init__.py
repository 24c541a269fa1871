"""The wire between clients and nodes: frames, their rules, and streams that carry them."""

from swarm.protocol import limits
from swarm.protocol import swarm_pb2 as pb
from swarm.protocol.activations import Activations, decode_activations, encode_activations
from swarm.protocol.frames import Body, decode, encode
from swarm.protocol.limits import (
    CONTROL_STREAM,
    DATA_STREAM,
    INFO_STREAM,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    STATE_STREAM,
)
from swarm.protocol.meter import Meter
from swarm.protocol.parts import PartJoiner, artifact_parts, row_parts
from swarm.protocol.steps import ReceivedStep, StepAssembler, split_step
from swarm.protocol.stream import FrameStream, Received
from swarm.protocol.validate import validate
from swarm.protocol.wire_errors import StreamClosed, WireError, clean_text, error_frame, to_swarm_error

__all__ = [
    "CONTROL_STREAM",
    "DATA_STREAM",
    "INFO_STREAM",
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "STATE_STREAM",
    "Activations",
    "Body",
    "FrameStream",
    "Meter",
    "PartJoiner",
    "Received",
    "ReceivedStep",
    "StepAssembler",
    "StreamClosed",
    "WireError",
    "artifact_parts",
    "clean_text",
    "decode",
    "decode_activations",
    "encode",
    "encode_activations",
    "error_frame",
    "limits",
    "pb",
    "row_parts",
    "split_step",
    "to_swarm_error",
    "validate",
]

"""Bounds of the wire, version 1. A receiver checks them before it allocates, a sender before it sends."""

from __future__ import annotations

PROTOCOL_VERSION = 1

# libp2p protocol names; see swarm.proto for what each carries
INFO_STREAM = "glm-swarm/1/info"
CONTROL_STREAM = "glm-swarm/1/control"
DATA_STREAM = "glm-swarm/1/data"
STATE_STREAM = "glm-swarm/1/state"

LENGTH_BYTES = 4  # big-endian length before each frame
MAX_FRAME_BYTES = 1 << 20  # without the length
PART_BYTES = 256 << 10  # of a payload in one frame: a step's other fields take less than 400 KiB

MAX_UNSENT_BYTES = 1 << 20  # in a stream's write buffer
# One 13 MB chunk of the largest model is 512 rows of 6,144; sessions set their own, tighter limit.
DEFAULT_MAX_STEP_BYTES = 64 << 20

SESSION_ID_BYTES = 16
MAX_STEP_TOKENS = 1 << 16
MAX_WIDTH = 1 << 16
MAX_LAYERS = 4096
MAX_CONTEXT_TOKENS = 1 << 24
MAX_TOKEN_ID = (1 << 31) - 1
MAX_HOPS = 256
MAX_TOP = 256
MIN_TEMPERATURE = 1e-6  # beside 0: a logit divided by less may leave the range of f32
MAX_TEMPERATURE = 1e6
MAX_ASKED_IDS = 4096
MAX_DRAFTS = 64
MAX_ROWS = 4096  # summaries in one answer
MAX_TEXT = 512  # characters
MAX_PEER_ID = 128
MAX_NUMERICS_ID = 256
MAX_ADDRESSES = 16
MAX_SLOT_CLASSES = 64
MAX_SLOTS = 4096
MAX_ENCODINGS = 16
MAX_ARTIFACT_PIECE_BYTES = 1 << 28  # a manifest or a header
MAX_ROW_BYTES = 1 << 24  # a vocabulary of four million
MAX_SECONDS = 1e9
MAX_KV_ROW_BYTES = 512 << 10  # of one layer and position
STATE_BLOCK_TOKENS = 512  # copied as soon as they are computed; no engine call that copies takes more of a layer


_STEPS_OF_A_HOP = 1 << 40


def first_step(hop_index: int) -> int:
    """The number of the first step that hop ``hop_index`` sends of its own accord in an epoch; -1 is the client.

    Numbers grow within an epoch. What comes from further up the chain comes later: after the journal of a hop its
    successor sees that of the hop before it, and in the end the client's steps.
    """
    return (MAX_HOPS - hop_index) * _STEPS_OF_A_HOP + 1

"""Rules for every message of the wire: what decoding returns is in range, so what serves it need not check again.

A rule raises ``WireError``: TOO_LARGE for what asks for more room than version 1 grants, MALFORMED for the rest. Enum
numbers that are not known are refused where the receiver has to act on them.
"""

from __future__ import annotations

from google.protobuf.message import Message

from swarm.protocol.rules import control, data, info, state

_RULES = info.RULES | control.RULES | data.RULES | state.RULES


def validate(body: Message) -> None:
    """Raises ``WireError`` unless every field of a frame's body is in range."""
    _RULES[type(body)](body)

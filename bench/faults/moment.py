"""Points of a request at which a fault comes."""

from __future__ import annotations

import enum


class Moment(enum.Enum):
    """Each is what a hop has computed when it holds."""

    SESSION_OPEN = enum.auto()  # nothing, but every hop has opened
    MID_PREFILL = enum.auto()  # half of the prompt
    FIRST_TOKEN = enum.auto()  # the prompt, and the client has drawn a token from it
    MID_DECODE = enum.auto()  # half of the answer
    IN_RECOVERY = enum.auto()  # nothing: for a hop that takes the place of another, and is being replayed to

    def position(self, n_prompt: int, n_tokens: int) -> int:
        """Where a hop is to hold, for a prompt and an answer of so many tokens."""
        return {
            Moment.SESSION_OPEN: 0,
            Moment.MID_PREFILL: n_prompt // 2,
            Moment.FIRST_TOKEN: n_prompt,
            Moment.MID_DECODE: n_prompt + n_tokens // 2,
            Moment.IN_RECOVERY: 0,
        }[self]

"""An answer as far as it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from swarm.client.reply import Reply, ReplyEvent
from swarm.client.trace import RecoveryTrace, StepTrace


class StopReason(StrEnum):
    STOP_TOKEN = "stop token"
    STOP_STRING = "stop string"
    MAX_TOKENS = "max tokens"
    CONTEXT_FULL = "context full"


@dataclass(frozen=True)
class Token:
    """One generated token at ``position``.

    ``text`` is what became certain with it: empty while a character is unfinished or a stop string may be beginning.
    ``events`` is the same taken apart, and a little later where a mark may be beginning: thinking, answer, tool calls.
    ``log_probability`` is the model's own, at the temperature of the request (1 when greedy), before filters.
    """

    id: int
    text: str
    position: int
    log_probability: float
    is_stop: bool
    trace: StepTrace  # of the step whose row it was drawn from
    events: tuple[ReplyEvent, ...] = ()


@dataclass
class Timing:
    """Moments on ``time.monotonic()``; None when they haven't come."""

    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.started is None or self.first_token is None else self.first_token - self.started


@dataclass
class Progress:
    """What has happened so far; complete when the iteration has ended."""

    token_ids: list[int] = field(default_factory=list)  # without the stop token
    text: str = ""  # all of it, marks included
    reply: Reply = field(default_factory=Reply)  # the same text, taken apart
    stop_reason: StopReason | None = None
    stop_string: str | None = None
    reused_tokens: int = 0  # of the prompt, computed already for an answer before
    prefill: list[StepTrace] = field(default_factory=list)
    decode: list[StepTrace] = field(default_factory=list)
    full_rows: int = 0  # logits rows fetched because the top ones could not decide
    numerics_ids: tuple[str, ...] = ()  # of every hop that took part; more than one kind may mean other bits
    recoveries: list[RecoveryTrace] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)

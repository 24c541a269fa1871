"""One interruption of a session: what failed, and what was done about it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from swarm.client.suspicion import Suspicion
from swarm.client.trace import RecoveryTrace, StepTrace
from swarm.errors import SwarmError
from swarm.ids import PeerId

MAX_TOLD = 8  # failures in an error text
MAX_TOLD_OF_ONE = 2


@dataclass
class Case:
    """One interruption: from the first failure to the next answer, however much fails in between."""

    position: int
    silent_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    linked: float = 0.0  # when the hops were last under a new route
    waiting_since: float | None = None
    patience_seconds: float | None = None  # for somebody to take over; None: as long as the client has
    attempts: int = 0
    copied_tokens: int | None = None  # the least that an understudy held which came into the chain
    replayed_tokens: int = 0  # of the last attempt: what some hop must compute again
    suspicion: Suspicion = field(default_factory=Suspicion)  # outlives the case when its steps do
    pending_end: int = 0  # of the steps under way
    engine_losers: set[PeerId] = field(default_factory=set)  # another is asked first, if there is one
    verdicts: dict[PeerId, SwarmError] = field(default_factory=dict)  # who says that the session itself is at fault
    leaving: set[PeerId] = field(default_factory=set)  # hops that are well, but shall be replaced
    replaced: set[PeerId] = field(default_factory=set)  # or that leave themselves: others are asked first
    wanted: set[PeerId] = field(default_factory=set)  # who is asked before all others
    voluntary: bool = False  # nothing had failed when it began
    lost: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    came: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)
    told_of: Counter[str] = field(default_factory=Counter)
    troubles: Counter[tuple[PeerId, PeerId | None]] = field(default_factory=Counter)

    def tell(self, error: SwarmError) -> None:
        what = str(error).partition("; ")[0]
        if what not in self.story and self.told_of[error.peer] < MAX_TOLD_OF_ONE:
            self.told_of[error.peer] += 1
            self.story.append(what)

    def agreed(self, peer: PeerId, verdict: SwarmError) -> bool:
        """Whether another peer than ``peer`` has said the same."""
        self.verdicts[peer] = verdict
        return any(other != peer and isinstance(said, type(verdict)) for other, said in self.verdicts.items())

    def took_over(self, copied_tokens: int) -> None:
        """An understudy that held so much came into the chain."""
        self.copied_tokens = copied_tokens if self.copied_tokens is None else min(self.copied_tokens, copied_tokens)

    def told(self) -> str:
        more = len(self.story) - MAX_TOLD
        return ", ".join(self.story[:MAX_TOLD]) + (f", and {more} more failures" if more > 0 else "")

    def paused(self) -> None:
        """Till now nobody asked for anything since the hops were linked: that time was no wait."""
        idle = time.monotonic() - self.linked if self.linked else 0.0
        self.began, self.linked = self.began + idle, self.linked + idle

    def trace(self, answer: StepTrace) -> RecoveryTrace:
        """When the session has answered again; ``answer`` is that step's."""
        now = time.monotonic()
        return RecoveryTrace(
            position=self.position,
            lost=tuple(self.lost.items()),
            came=tuple(self.came.items()),
            story=tuple(self.story),
            silent_seconds=self.silent_seconds,
            planning_seconds=self.linked - self.began,
            replay_seconds=now - self.linked,
            attempts=self.attempts,
            recompute_seconds=max((hop.replay_us for hop in answer.hops), default=0) / 1e6,
            voluntary=self.voluntary,
            copied_tokens=self.copied_tokens,
            replayed_tokens=self.replayed_tokens,
        )

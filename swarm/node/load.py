"""How much of what is to be computed may lie in a node's memory: a row of hidden states has up to 24 KiB."""

from __future__ import annotations

import asyncio
from collections import Counter

from swarm.ids import PeerId
from swarm.node.config import Limits
from swarm.node.scheduler import MAX_SHARED_ROWS


class Load:
    """Tokens of steps that were taken and that the engine has not answered for, by client peer.

    What is over a limit waits in the transport. That can't lock two nodes that feed each other: the engine needs nobody
    to go on. Steps of few rows always come in and are not counted; and of each peer one step, so that the scheduler,
    which is fair, has it to choose from.
    """

    def __init__(self, limits: Limits) -> None:
        self.steps_of_session = limits.steps_in_flight
        self._most_of_peer = limits.tokens_in_flight_per_peer
        self._most = limits.tokens_in_flight
        self._held: Counter[PeerId] = Counter()
        self.total = 0
        self._waiting: set[asyncio.Event] = set()

    def of(self, peer: PeerId) -> int:
        return self._held[peer]

    def admits(self, peer: PeerId, n_tokens: int, changed: asyncio.Event) -> bool:
        """Whether a step of ``n_tokens`` may come in; if not, ``changed`` is set when it is worth to ask again."""
        if n_tokens <= MAX_SHARED_ROWS or not (held := self._held[peer]):
            return True
        if held + n_tokens <= self._most_of_peer and self.total + n_tokens <= self._most:
            return True
        self._waiting.add(changed)
        return False

    def add(self, peer: PeerId, n_tokens: int) -> None:
        if n_tokens > MAX_SHARED_ROWS:
            self._held[peer] += n_tokens
            self.total += n_tokens

    def remove(self, peer: PeerId, n_tokens: int) -> None:
        if n_tokens <= MAX_SHARED_ROWS:
            return
        self._held[peer] -= n_tokens
        self.total -= n_tokens
        if not self._held[peer]:
            del self._held[peer]
        for changed in self._waiting:
            changed.set()
        self._waiting.clear()

"""Peers and links that failed: left out for a while that grows with each failure, forgiven when they serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from swarm.errors import PeerFailed, SwarmError
from swarm.ids import PeerId
from swarm.routing import Edge

K = TypeVar("K", bound=Hashable)

FIRST_BAN_SECONDS = 10.0
LONGEST_BAN_SECONDS = 600.0


def is_to_blame(error: SwarmError) -> bool:
    """Whether the peer's transport failed or it broke the protocol. What it says of itself (full, leaving, an engine
    lost), and that it refused what this program sent, is no reason to shun it."""
    return isinstance(error, PeerFailed) and error.code == 0


@dataclass
class _Ban:
    seconds: float
    until: float


class Bans(Generic[K]):
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bans: dict[K, _Ban] = {}

    def add(self, who: K) -> None:
        """One that is banned already is not banned for longer: its failures have one cause."""
        now = self._clock()
        ban = self._bans.get(who)
        if ban is None:
            self._bans[who] = _Ban(FIRST_BAN_SECONDS, now + FIRST_BAN_SECONDS)
        elif ban.until <= now:
            ban.seconds = min(2 * ban.seconds, LONGEST_BAN_SECONDS)
            ban.until = now + ban.seconds

    def forgive(self, who: K) -> None:
        self._bans.pop(who, None)

    def now(self) -> frozenset[K]:
        now = self._clock()
        # one that has behaved for long after its ban begins anew
        self._bans = {who: ban for who, ban in self._bans.items() if ban.until + LONGEST_BAN_SECONDS > now}
        return frozenset(who for who, ban in self._bans.items() if ban.until > now)


class Avoided:
    """What this client leaves out while there is a way around it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers: Bans[PeerId] = Bans(clock)
        self._edges: Bans[Edge] = Bans(clock)

    def add(self, peer: PeerId) -> None:
        self._peers.add(peer)

    def add_edge(self, sender: PeerId, receiver: PeerId) -> None:
        self._edges.add((sender, receiver))

    def forgive(self, peer: PeerId) -> None:
        self._peers.forgive(peer)

    def forgive_chain(self, peers: Sequence[PeerId]) -> None:
        """They have served a step together."""
        for peer in peers:
            self._peers.forgive(peer)
        for edge in pairwise(peers):
            self._edges.forgive(edge)

    def now(self) -> frozenset[str]:
        return self._peers.now()

    def edges(self) -> frozenset[Edge]:
        return self._edges.now()

"""An order of nodes that all nodes compute alike, and who may leave a layer by it.

Among the nodes online that serve a layer, the first in order is its keeper and stays. Whoever leaves relies on a node
before it, that one perhaps on another: the very first stays, however old the others' views are. The order changes with
every turn, so that nobody is bound for good; in the first part of a turn nobody leaves, because views from the turn
before may still be believed somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from dht.record import NodeState, SpanRecord
from swarm.placement.choice import Span


def order(peer_id: str, turn: int = 0) -> bytes:
    return sha256(f"{turn}/{peer_id}".encode()).digest()


def layers_lost(span: Span, new: Span) -> list[int]:
    return [layer for layer in range(*span) if not new[0] <= layer < new[1]]


@dataclass(frozen=True)
class Turns:
    """``settle_seconds`` must exceed a record's life (60 s) and what clocks may differ by."""

    turn_seconds: float = 600.0
    settle_seconds: float = 120.0

    def number(self, now: float) -> int:
        return int(now // self.turn_seconds)

    def may_leave(
        self, peer_id: str, span: Span, layers: Iterable[int], records: Sequence[SpanRecord], now: float
    ) -> bool:
        """Whether this node, which serves ``span``, is the keeper of none of these layers."""
        wanted = tuple(layers)
        if not wanted:
            return True
        if now % self.turn_seconds < self.settle_seconds:
            return False
        turn = self.number(now)
        own = _rank(peer_id, span, turn)
        before = [
            (record.first, record.last)
            for record in records
            if record.peer_id != peer_id
            and record.state is NodeState.ONLINE
            and _rank(record.peer_id, (record.first, record.last), turn) < own
        ]
        return all(any(first <= layer < last for first, last in before) for layer in wanted)


def _rank(peer_id: str, span: Span, turn: int) -> tuple[int, bytes]:
    """Every other turn long spans come last, so that a large node gets away from many small ones."""
    return (span[1] - span[0]) * (turn % 2), order(peer_id, turn)

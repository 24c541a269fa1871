"""When a node takes other layers than it has: while it joins, and later while it serves.

The idea: every node decides alone, from records that are up to a minute old, so each rule must hold when many nodes
decide at once.

- **Joiners** announce first and look again: each counts only the joiners whose ids come before its own, as if they had
  come one after another.
- **A layer is only left by a node that is not its keeper.** The keeper of a layer is, among the nodes online that serve
  it, the first in an order all nodes compute alike. Whoever leaves relies on a node before it in that order, that one
  perhaps on another: the first one stays, however old the others' views are. The order changes with every turn (some
  minutes), and in the first part of a turn nobody leaves, so that views of the turn before have expired.
- **A move needs a clear gain**: it covers a layer that nobody serves, or lifts weak layers from layers that have half
  as many servers again. Each move makes the sorted list of servers per layer larger, so a swarm where nobody comes or
  goes comes to rest.
- **Few go at a time**: among nodes that could go, the same order says whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from dht.record import NodeState, SpanRecord
from swarm.placement import Choice, Cost, Span, choose_span


@dataclass(frozen=True)
class MoveRules:
    """``recheck_seconds`` lie between two looks of a serving node, give or take a tenth."""

    join_delay_seconds: float = 10.0  # a joiner waits up to so long before its first look
    second_look_seconds: float = 25.0  # from its announcement to the look that settles ties: records are 20 s apart
    recheck_seconds: float = 300.0
    turn_seconds: float = 600.0
    settle_seconds: float = 120.0  # of each turn, in which nobody leaves: above a record's life of 60 s and clock skew
    dwell_seconds: float = 1800.0  # after a move, before one that is no repair


@dataclass(frozen=True)
class Place:
    """What one node knows of itself. ``cost`` is (first, last) -> bytes, as in ``swarm.placement``."""

    cuts: Sequence[int]
    artifact_id: str
    peer_id: str
    budget_bytes: int
    cost: Cost


class Mover:
    """Fed with records and the time (Unix seconds), it answers None (stay) or the ``Choice`` to move to.

    While joining: wait ``join_delay``, choose, announce JOINING, wait ``second_look_seconds``, then ``look_again`` before
    fetching and now and then while fetching. While serving: ``look`` every ``recheck``; on a choice fetch what is new,
    then ask ``may_switch`` with a fresh view, again every minute or so until it says yes or ``look`` has another answer;
    then drain, serve the new layers and say ``switched``.
    """

    def __init__(self, place: Place, rules: MoveRules | None = None) -> None:
        self.place = place
        self.rules = rules or MoveRules()
        self._moved_at = float("-inf")

    def join_delay_seconds(self, random: float) -> float:
        """``random`` is from 0 to 1."""
        return self.rules.join_delay_seconds * random

    def recheck_seconds(self, random: float) -> float:
        return self.rules.recheck_seconds * (0.9 + 0.2 * random)

    def look_again(self, records: Sequence[SpanRecord], span: Span, held: Sequence[Span] = ()) -> Choice | None:
        """Of a joiner that has announced ``span``: a better choice, now that others have announced theirs. ``held`` are
        spans whose data is here (or on its way) already."""
        earlier = [record for record in records if self._comes_before(record)]
        choice = self._choose(earlier)
        return None if (choice.first, choice.last) == span else choice

    def look(self, records: Sequence[SpanRecord], span: Span, now: float, held: Sequence[Span] = ()) -> Choice | None:
        """Of a serving node: where it should move, if that is a clear gain and its turn."""
        return None

    def may_switch(self, records: Sequence[SpanRecord], span: Span, new: Span, now: float) -> bool:
        """Whether the layers of ``span`` that are not in ``new`` may be left this moment."""
        return False

    def switched(self, now: float) -> None:
        self._moved_at = now

    def _choose(self, records: Sequence[SpanRecord]) -> Choice:
        place = self.place
        return choose_span(
            place.cuts,
            records,
            place.budget_bytes,
            place.cost,
            artifact_id=place.artifact_id,
            peer_id=place.peer_id,
        )

    def _comes_before(self, record: SpanRecord) -> bool:
        if record.state is not NodeState.JOINING:
            return True
        return _order(record.peer_id) < _order(self.place.peer_id)


def _order(peer_id: str, turn: int = 0) -> bytes:
    return sha256(f"{turn}/{peer_id}".encode()).digest()

"""When a node takes other layers than it has: while it joins (``look_again``), and while it serves (``look``).

The idea: every node decides alone, from records that are up to a minute old, so each rule holds when many decide at
once.

- A layer is left only as ``swarm.placement.turns`` allows: the first in an order that all compute alike stays.
- A node that moves is away for a minute or two, also from layers it keeps. While all layers are served, somebody else
  must serve every layer of a node that moves. While some are not, nobody can use the others, and it is enough that
  nothing is left for good.
- A move needs a clear gain: it covers a layer that nobody serves, or lifts weak layers from layers that have half as
  many servers again. Each such move makes the sorted list of servers per layer larger, and a step aside for a
  neighbour is made once for each gap: a swarm where nobody comes or goes comes to rest.
- Few go at a time: nodes that could go are in order too, and the first of them goes first.

Announced speeds play no part: a stranger who lies about them moves nobody.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import ceil

from dht.record import NodeState, SpanRecord
from swarm.placement.choice import (
    Choice,
    Coverage,
    Place,
    Span,
    choice_of,
    coverage_of,
    largest_windows,
    usable_records,
)
from swarm.placement.joining import better_choice
from swarm.placement.slides import Holder, shortest_slide
from swarm.placement.turns import Turns, layers_lost, order

__all__ = ["MoveRules", "Mover", "Place"]


@dataclass(frozen=True)
class MoveRules:
    """When to look, and what counts as a clear gain."""

    join_delay_seconds: float = 10.0  # a joiner waits up to so long before its first look
    second_look_seconds: float = 25.0  # after an announcement, until every other's newest record has been seen
    recheck_seconds: float = 300.0  # between two looks of a serving node, give or take a tenth
    turns: Turns = field(default_factory=Turns)
    patience_seconds: float = 90.0  # a gap that a restart closes is none
    repair_step_seconds: float = 1800.0  # what each node waits for the one before it to fill a gap
    balance_turn_seconds: float = 3600.0
    dwell_seconds: float = 3600.0  # after a move, before one that is no repair
    clear_ratio: float = 1.5  # servers left on the layers that are left, to those of the weakest
    clear_share: float = 0.25  # of the new window that must be weakest layers, unless those are all there are
    at_once: float = 0.02  # of the nodes that could go, in one balance turn


class _Kind(StrEnum):
    REPAIR = "repair"
    STEP = "step"
    BALANCE = "balance"


class Mover:
    """Fed with records and the time (Unix seconds), it answers None (stay) or the ``Choice`` to move to.

    While joining: wait ``join_delay``, choose, announce JOINING, wait ``second_look_seconds``, then ``look_again``
    before fetching and now and then while fetching. While serving: ``look`` every ``recheck``; on a choice fetch what
    is new and go on asking, because another answer, or None, means that the swarm has changed. When all is here ask
    ``look``, then ``may_switch``, with a view just read, every minute or so; on yes drain, serve the new layers and say
    ``switched``, and ``failed`` when they can't be served. Nothing here reads a clock or the network.
    """

    def __init__(self, place: Place, rules: MoveRules | None = None) -> None:
        self.place = place
        self.rules = rules or MoveRules()
        self._moved_at = float("-inf")
        self._gap_since: dict[int, float] = {}  # by layer
        self._stepped_for: set[Span] = set()
        self._going: tuple[_Kind, Choice] | None = None
        self._hopeless: set[Span] = set()

    def join_delay_seconds(self, random: float) -> float:
        """``random`` is from 0 to 1."""
        return self.rules.join_delay_seconds * random

    def recheck_seconds(self, random: float) -> float:
        return self.rules.recheck_seconds * (0.9 + 0.2 * random)

    def look_again(self, records: Sequence[SpanRecord], span: Span, held: Sequence[Span] = ()) -> Choice | None:
        """Of a joiner that has announced ``span``: a better choice, now that others have announced theirs. ``held`` are
        spans whose data is here (or on its way) already."""
        return better_choice(self.place, records, span, held)

    def look(self, records: Sequence[SpanRecord], span: Span, now: float, held: Sequence[Span] = ()) -> Choice | None:
        """Where a node that serves ``span`` should move. ``held`` are spans whose data is here already."""
        scene = self._scene(records, span, held)
        self._watch_gaps(scene, now)
        if self._going is None or not _is_still_a_gain(scene, *self._going):
            self._going = self._repair(scene, now) if scene.gaps else self._balance(scene, now)
        return None if self._going is None else self._going[1]

    def may_switch(self, records: Sequence[SpanRecord], span: Span, new: Span, now: float) -> bool:
        """Whether a node that serves ``span`` may leave it this moment for ``new``."""
        scene = self._scene(records, span)
        return self.rules.turns.may_leave(self.place.peer_id, span, scene.away_from(new), scene.others, now)

    def switched(self, now: float) -> None:
        self._moved_at = now
        self._going = None

    def failed(self, span: Span) -> None:
        """It could not be served here, and would not be the next time."""
        self._hopeless.add(span)

    def _scene(self, records: Sequence[SpanRecord], span: Span, held: Sequence[Span] = ()) -> _Scene:
        usable = usable_records(records, self.place.cuts, self.place.artifact_id)
        return _Scene(self.place, usable, span, held, self._hopeless)

    def _watch_gaps(self, scene: _Scene, now: float) -> None:
        bare = [layer for gap in scene.gaps for layer in range(*gap)]
        self._gap_since = {layer: self._gap_since.get(layer, now) for layer in bare}
        if not bare:
            self._stepped_for.clear()

    # --- some layers have no server

    def _repair(self, scene: _Scene, now: float) -> tuple[_Kind, Choice] | None:
        """Nodes that leave nothing bare go first, one by one; then those whose window reaches over; then neighbours
        move up."""
        waited = now - min(self._gap_since.values()) - self.rules.patience_seconds
        steps = int(waited // self.rules.repair_step_seconds)  # below 0: it is no gap yet
        bytes_of = self.place.cost_of_others
        able = [record for record in scene.free(1) if bytes_of(record.first, record.last) >= scene.gap_bytes]
        window = scene.best_repair()
        if window is not None:
            before = self._place_among(able, scene.gaps[0][0]) if scene.is_free(1) else len(able)
            return (_Kind.REPAIR, scene.choice(window)) if steps >= before else None
        return self._step(scene) if steps >= len(able) else None

    def _step(self, scene: _Scene) -> tuple[_Kind, Choice] | None:
        """The own step of the shortest chain of steps, if it is the one that is free to be made."""
        cuts, cost = self.place.cuts, self.place.cost_of_others
        for gap in scene.gaps:
            steps = shortest_slide(cuts, cost, gap, scene.holders()) or shortest_slide(
                cuts, cost, gap, scene.holders(hopeful=True)
            )
            if not steps or gap in self._stepped_for:
                continue
            peer_id, window = steps[-1]
            if peer_id == self.place.peer_id and scene.may_take(window) and scene.is_possible(window):
                self._stepped_for.add(gap)
                return _Kind.STEP, scene.choice(window)
        return None

    # --- all layers have a server, some have more than others

    def _balance(self, scene: _Scene, now: float) -> tuple[_Kind, Choice] | None:
        rules = self.rules
        if now < self._moved_at + rules.dwell_seconds:
            return None
        weakest = min(scene.with_own.servers)
        enough = max(weakest + 1, ceil(weakest * rules.clear_ratio))
        could_go = scene.free(enough)
        turn = int(now // rules.balance_turn_seconds)
        if self._place_among(could_go, turn) > rules.at_once * len(could_go):
            return None
        window = scene.best_balance(enough, rules.clear_share)
        return None if window is None else (_Kind.BALANCE, scene.choice(window))

    def _place_among(self, records: Sequence[SpanRecord], turn: int) -> int:
        """How many of them come before this node."""
        own = order(self.place.peer_id, turn)
        return sum(order(record.peer_id, turn) < own for record in records)


class _Scene:
    """The swarm as one serving node sees it: ``records`` are usable, its own among them or not."""

    def __init__(
        self, place: Place, records: Sequence[SpanRecord], span: Span, held: Sequence[Span], hopeless: Set[Span]
    ) -> None:
        self._place = place
        self._span = span
        self._held = held
        self._hopeless = hopeless
        self.others = [record for record in records if record.peer_id != place.peer_id]
        self._online = [record for record in self.others if record.state is NodeState.ONLINE]
        # who is online serves, who joins only will
        self._serving = coverage_of(self._online, place.cuts, place.artifact_id)
        self._coming = coverage_of(self.others, place.cuts, place.artifact_id)

    @cached_property
    def with_own(self) -> Coverage:
        return self._coming.plus(*self._span)

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        return self.with_own.uncovered

    @property
    def gap_bytes(self) -> int:
        """What the first segment of the first gap takes."""
        cuts = self._place.cuts
        at = cuts.index(self.gaps[0][0])
        return self._place.cost_of_others(cuts[at], cuts[at + 1])

    def holders(self, *, hopeful: bool = False) -> list[Holder]:
        """All that serve. How much memory another has can only be told from its span: it holds that, and it would
        serve another segment if that one fitted; ``hopeful`` takes it for only just too small."""
        spans = {record.peer_id: (record.first, record.last) for record in self._online}
        bytes_of = self._next_bytes if hopeful else self._place.cost_of_others
        others = [Holder(peer_id, span, bytes_of(*span)) for peer_id, span in sorted(spans.items())]
        return [*others, Holder(self._place.peer_id, self._span, self._place.budget_bytes)]

    def _next_bytes(self, first: int, last: int) -> int:
        cuts = self._place.cuts
        start, end = cuts.index(first), cuts.index(last)
        longer = (cuts[start], cuts[end + 1]) if end + 1 < len(cuts) else (cuts[max(0, start - 1)], last)
        cost = self._place.cost_of_others
        return max(cost(*longer) - 1, cost(first, last))

    def is_free(self, enough: int) -> bool:
        """Whether without this node all its layers have ``enough`` servers."""
        return min(self._serving.servers[slice(*self._span)]) >= enough

    def free(self, enough: int) -> list[SpanRecord]:
        """The others for which that is so, as far as the records tell."""
        servers = self._serving.plus(*self._span).servers
        return [record for record in self._online if min(servers[record.first : record.last]) > enough]

    def may_take(self, window: Span, enough: int = 1) -> bool:
        """Whether the layers that the node would be away from have ``enough`` others."""
        return all(self._serving.servers[layer] >= enough for layer in self.away_from(window))

    def away_from(self, window: Span) -> list[int]:
        return layers_lost(self._span, window) if self.gaps else list(range(*self._span))

    def is_possible(self, window: Span) -> bool:
        """Whether it fits here now, and has not been found to fail."""
        return window not in self._hopeless and self._place.fits(window)

    def after(self, window: Span) -> list[int]:
        return sorted(self._coming.plus(*window).servers)

    def best_repair(self) -> Span | None:
        bare = {layer for gap in self.gaps for layer in range(*gap)}
        reaching = [window for window in self._windows() if bare.intersection(range(*window)) and self.may_take(window)]
        return max(reaching, key=lambda new: (len(bare.intersection(range(*new))), *self._merit(new)), default=None)

    def best_balance(self, enough: int, share: float) -> Span | None:
        servers = self.with_own.servers
        weakest = min(servers)
        better = [
            window
            for window in self._windows()
            if self.may_take(window, enough)
            and servers[slice(*window)].count(weakest) >= min(share * (window[1] - window[0]), servers.count(weakest))
            and self.after(window) > sorted(servers)
        ]
        return max(better, key=self._merit, default=None)

    def choice(self, window: Span) -> Choice:
        return choice_of(window, self._coming, self._place.cost)

    def _merit(self, window: Span) -> tuple[list[int], int]:
        here = {layer for first, last in (*self._held, self._span) for layer in range(first, last)}
        return self.after(window), len(here.intersection(range(*window)))

    def _windows(self) -> list[Span]:
        place = self._place
        windows = largest_windows(place.cuts, place.budget_bytes, place.cost)
        return [new for new in windows if new != self._span and new not in self._hopeless]


def _is_still_a_gain(scene: _Scene, kind: _Kind, choice: Choice) -> bool:
    window = choice.first, choice.last
    if not scene.may_take(window) or not scene.is_possible(window):
        return False
    if kind is _Kind.STEP:
        return bool(scene.gaps)
    return scene.after(window) > sorted(scene.with_own.servers)

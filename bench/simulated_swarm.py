"""A swarm of many nodes in simulated time: the product's own rules for choosing, joining and moving, fed with records
that are as old as real ones.

What is simulated: announcements every 20 s and on change, seen by others up to that much later; records of the dead,
which live on for up to 60 s; downloads at a bandwidth, of what is not on the disk yet; draining and loading. Clocks
agree, nobody lies, and every node is reached by all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, pairwise
from random import Random

from dht.record import NodeState, SpanRecord
from swarm.errors import NotEnoughMemory
from swarm.placement.choice import Cost, Span, choose_span
from swarm.placement.moving import Mover, MoveRules, Place

ANNOUNCE_SECONDS = 20.0
EXPIRY_SECONDS = 60.0
LOAD_SECONDS = 60.0
DRAIN_SECONDS = 60.0
SWITCH_LOOK_SECONDS = 60.0
ROUNDS = 8  # in which a joiner gives way to others

Life = Generator[float, None, None]  # yields seconds to wait


class Cause(StrEnum):
    """Why a layer lost its last server."""

    DEATH = "death"
    MOVE = "move"


@dataclass(frozen=True)
class World:
    """``weights`` and ``cost`` are (first, last) -> bytes, to fetch and to hold."""

    cuts: Sequence[int]
    artifact_id: str
    weights: Cost
    cost: Callable[[int], Cost]  # for a machine of so many bytes: its slots depend on its size
    bytes_per_second: float
    rules: MoveRules = field(default_factory=MoveRules)


@dataclass
class Measured:
    """What happened, in simulated seconds. ``uncovered`` are (layer, since, until, cause)."""

    covered_at: float | None = None
    moves: list[float] = field(default_factory=list)
    given_up: int = 0  # downloads for moves that lost their point
    fetched_bytes: int = 0
    uncovered: list[tuple[int, float, float, Cause]] = field(default_factory=list)
    bare_by_move: int = 0
    fewest: Counter[int] = field(default_factory=Counter)  # seconds by servers of the weakest layer


class Node:
    """One machine, from its start to its death."""

    def __init__(self, swarm: SimulatedSwarm, name: str, memory_bytes: int, start_span: Span | None) -> None:
        self.start_span = start_span
        self.swarm = swarm
        self.memory_bytes = memory_bytes
        world = swarm.world
        self.place = Place(world.cuts, world.artifact_id, name, memory_bytes, world.cost(memory_bytes))
        self.mover = Mover(self.place, world.rules)
        self.told: list[tuple[float, SpanRecord]] = []  # announcements, the newest last
        self.held: list[Span] = [] if start_span is None else [start_span]
        self.died_at: float | None = None

    def live(self) -> Life:
        """From start to death: joins, and serves until it is killed."""
        random = self.swarm.random.random
        span = self.start_span
        if span is None:
            yield self.mover.join_delay_seconds(random())
            span = yield from self._join()
        if span is None:
            return
        self.swarm.serve(self, span)
        while True:
            yield self.mover.recheck_seconds(random())
            choice = self.mover.look(self._view(), span, self.swarm.now, self.held)
            if choice is not None:
                new = choice.first, choice.last
                yield from self._fetch(new)
                if (yield from self._allowed(span, new)):
                    yield from self._switch(new)
                    span = new
                else:
                    self.swarm.measured.given_up += 1

    def _join(self) -> Generator[float, None, Span | None]:
        try:
            span = self._chosen(self._view())
        except NotEnoughMemory:
            return None
        while True:
            span = yield from self._settle(span)
            other = yield from self._fetch_watching(span)
            if other is None:
                yield LOAD_SECONDS
                return span
            span = other

    def _settle(self, span: Span) -> Generator[float, None, Span]:
        records = self._view()
        self._announce(span, NodeState.JOINING)
        for _ in range(ROUNDS):
            yield self.swarm.world.rules.second_look_seconds
            seen, records = _spans(records), self._view()
            other = self.mover.look_again(_believed(records, seen), span, self.held)
            if other is None:
                break
            span = other.first, other.last
            self._announce(span, NodeState.JOINING)
        return span

    def _fetch_watching(self, span: Span) -> Generator[float, None, Span | None]:
        """Another span that has become better meanwhile; what was fetched of this one is lost, unlike in a node."""
        seen = _spans(self._view())
        seconds = self._missing(span) / self.swarm.world.bytes_per_second
        while seconds > 0:
            pause = min(seconds, self.mover.recheck_seconds(self.swarm.random.random()))
            yield pause
            seconds -= pause
            other = self.mover.look_again(_believed(self._view(), seen), span, self.held)
            if other is not None:
                return other.first, other.last
        self._have(span)
        return None

    def _chosen(self, records: Sequence[SpanRecord]) -> Span:
        place = self.place
        choice = choose_span(
            place.cuts, records, place.budget_bytes, place.cost, artifact_id=place.artifact_id, peer_id=place.peer_id
        )
        return choice.first, choice.last

    def _fetch(self, span: Span) -> Life:
        yield self._missing(span) / self.swarm.world.bytes_per_second
        self._have(span)

    def _missing(self, span: Span) -> int:
        held = {layer for first, last in self.held for layer in range(first, last)}
        cuts = self.place.cuts
        return sum(
            self.swarm.world.weights(a, b) for a, b in pairwise(cuts) if span[0] <= a < span[1] and a not in held
        )

    def _have(self, span: Span) -> None:
        self.swarm.measured.fetched_bytes += self._missing(span)
        self.held = [*self.held[-1:], span]  # room for two spans on the disk

    def _allowed(self, span: Span, new: Span) -> Generator[float, None, bool]:
        while True:
            choice = self.mover.look(self._view(), span, self.swarm.now, self.held)
            if choice is None or (choice.first, choice.last) != new:
                return False
            if self.mover.may_switch(self._view(), span, new, self.swarm.now):
                return True
            yield SWITCH_LOOK_SECONDS

    def _switch(self, new: Span) -> Life:
        self.swarm.leave(self, Cause.MOVE, NodeState.DRAINING)
        yield DRAIN_SECONDS
        self._announce(new, NodeState.JOINING)
        yield LOAD_SECONDS
        self.swarm.serve(self, new)
        self.mover.switched(self.swarm.now)
        self.swarm.measured.moves.append(self.swarm.now)

    def _announce(self, span: Span, state: NodeState) -> None:
        self.swarm.announce(self, span, state)

    def _view(self) -> list[SpanRecord]:
        return self.swarm.view(self)


class SimulatedSwarm:
    """Time, the records, and what is true of them."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = Random(seed)
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.serving: dict[str, Span] = {}
        self.servers = [0] * world.cuts[-1]
        self.measured = Measured()
        self._bare_since: dict[int, tuple[float, Cause]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def start_node(self, memory_bytes: int, at: float = 0.0, span: Span | None = None) -> str:
        """``span``: it has these layers and serves them from the start; None: it joins with an empty disk."""
        name = f"node-{next(self._number)}-{self.random.getrandbits(32):08x}"
        node = Node(self, name, memory_bytes, span)
        self.nodes[name] = node
        life = node.live()
        self._at(at, lambda: self._go_on(node, life))
        return name

    def kill(self, name: str) -> None:
        """At once and without a word."""
        node = self.nodes[name]
        if node.died_at is None:
            node.died_at = self.now
            self.leave(node, Cause.DEATH, None)

    def kill_weakest(self) -> None:
        """One of those that serve the layer with fewest servers."""
        layer = self.servers.index(min(self.servers))
        names = [name for name, (first, last) in self.serving.items() if first <= layer < last]
        if names:
            self.kill(names[0])

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(seconds, act)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            at, _, act = heapq.heappop(self._events)
            self._pass(at)
            act()
        self._pass(until)
        for layer, (since, cause) in self._bare_since.items():
            self.measured.uncovered.append((layer, since, self.now, cause))

    # --- what nodes do

    def serve(self, node: Node, span: Span) -> None:
        self.serving[node.place.peer_id] = span
        for layer in range(*span):
            self.servers[layer] += 1
            if self.servers[layer] == 1 and layer in self._bare_since:
                since, cause = self._bare_since.pop(layer)
                self.measured.uncovered.append((layer, since, self.now, cause))
        if self.measured.covered_at is None and min(self.servers) > 0:
            self.measured.covered_at = self.now
        self.announce(node, span, NodeState.ONLINE)

    def leave(self, node: Node, cause: Cause, state: NodeState | None) -> None:
        span = self.serving.pop(node.place.peer_id, None)
        if span is None:
            return
        was_complete = min(self.servers) > 0
        for layer in range(*span):
            self.servers[layer] -= 1
            if self.servers[layer] == 0:
                self._bare_since[layer] = self.now, cause
                self.measured.bare_by_move += was_complete and cause is Cause.MOVE
        if state is not None:
            self.announce(node, span, state)

    def announce(self, node: Node, span: Span, state: NodeState) -> None:
        record = SpanRecord.model_construct(
            peer_id=node.place.peer_id,
            artifact_id=self.world.artifact_id,
            n_layers=self.world.cuts[-1],
            first=span[0],
            last=span[1],
            state=state,
            decode_tokens_per_second=0.0,
        )
        node.told = [*node.told[-3:], (self.now, record)]

    def view(self, viewer: Node) -> list[SpanRecord]:
        """The records a look finds: each as of up to one announcement ago, those of the dead until they expire."""
        found = []
        for node in self.nodes.values():
            if node is viewer:
                if node.told:
                    found.append(node.told[-1][1])
                continue
            if node.died_at is not None and self.now > node.died_at + EXPIRY_SECONDS - ANNOUNCE_SECONDS / 2:
                continue
            seen_at = self.now - self.random.uniform(0, ANNOUNCE_SECONDS)
            record = next((record for at, record in reversed(node.told) if at <= seen_at), None)
            if record is not None:
                found.append(record)
        return found

    # --- time

    def _pass(self, at: float) -> None:
        if self.measured.covered_at is not None:
            self.measured.fewest[min(self.servers)] += round((at - self.now) * 1000)
        self.now = at

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._number), act))

    def _go_on(self, node: Node, life: Life) -> None:
        if node.died_at is not None:
            life.close()
            return
        pause = next(life, None)
        if pause is not None:
            self._at(self.now + pause, lambda: self._go_on(node, life))


def _believed(records: Sequence[SpanRecord], seen: frozenset[object]) -> list[SpanRecord]:
    """As a node does: joiners whose announcement was there before its own choice count as if they were online."""
    return [
        record.model_copy(update={"state": NodeState.ONLINE})
        if record.state is NodeState.JOINING and _span(record) in seen
        else record
        for record in records
    ]


def _spans(records: Sequence[SpanRecord]) -> frozenset[object]:
    return frozenset(map(_span, records))


def _span(record: SpanRecord) -> object:
    return record.peer_id, record.first, record.last

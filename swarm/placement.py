"""Which layers a node should serve.

The idea: a swarm is as good as its weakest layer. A window of layers is worth what it does to the sorted list of
"servers per layer": the list that is larger at the first difference wins. Speeds break ties in the same way, then
windows that leave no gaps too small for a node like this one, then a hash of the peer id, so that nodes that join an
empty swarm at the same moment spread out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeAlias

from dht.record import NodeState, SpanRecord
from swarm.errors import NotEnoughMemory

Cost: TypeAlias = Callable[[int, int], int]  # (first, last) -> bytes a node needs; grows with the window
Span: TypeAlias = tuple[int, int]

NEUTRAL_TOKENS_PER_SECOND = 1.0  # of a node that has not measured its speed
RUNNERS_UP = 3
_MIB = 1 << 20


@dataclass(frozen=True)
class Coverage:
    """Who serves what: servers of each layer, and their decode speeds summed up."""

    servers: tuple[int, ...]
    tokens_per_second: tuple[float, ...]

    @classmethod
    def empty(cls, n_layers: int) -> Coverage:
        return cls((0,) * n_layers, (0.0,) * n_layers)

    def plus(self, first: int, last: int, tokens_per_second: float = NEUTRAL_TOKENS_PER_SECOND) -> Coverage:
        speed = tokens_per_second or NEUTRAL_TOKENS_PER_SECOND
        inside = [first <= layer < last for layer in range(len(self.servers))]
        return Coverage(
            tuple(count + here for count, here in zip(self.servers, inside, strict=True)),
            tuple(sum_ + speed * here for sum_, here in zip(self.tokens_per_second, inside, strict=True)),
        )

    @property
    def uncovered(self) -> tuple[Span, ...]:
        return tuple(span for span, servers in self.runs() if servers == 0)

    def runs(self) -> Iterator[tuple[Span, int]]:
        """Neighbouring layers with the same number of servers."""
        start = 0
        for servers, group in groupby(self.servers):
            length = sum(1 for _ in group)
            yield (start, start + length), servers
            start += length


@dataclass(frozen=True)
class Choice:
    """The window to serve. ``weakest_before`` and ``weakest_after`` are servers of the swarm's weakest layer."""

    first: int
    last: int
    needed_bytes: int
    weakest_before: int
    weakest_after: int
    reason: str
    runners_up: tuple[Choice, ...] = ()

    def explain(self) -> list[str]:
        """The choice and the windows that lost, a line each."""
        return [
            f"chosen: layers {self.first}:{self.last}: {self.reason}",
            *(f"lost: {_line(other)}" for other in self.runners_up),
        ]


@dataclass(frozen=True)
class Plan:
    """Spans for a known set of machines. ``idle`` names those on which not even the smallest window fits."""

    spans: tuple[tuple[str, int, int], ...]
    uncovered: tuple[Span, ...]
    idle: tuple[str, ...] = ()


def usable_records(records: Sequence[SpanRecord], cuts: Sequence[int], artifact_id: str) -> list[SpanRecord]:
    """Records that will serve this artifact's layers: of the same model, legal, and not leaving."""
    legal = frozenset(cuts)
    return [
        record
        for record in {record.peer_id: record for record in records}.values()
        if record.artifact_id == artifact_id
        and record.n_layers == cuts[-1]
        and record.first < record.last
        and record.first in legal
        and record.last in legal
        and record.state in (NodeState.JOINING, NodeState.ONLINE)
    ]


def coverage_of(records: Sequence[SpanRecord], cuts: Sequence[int], artifact_id: str, *, without: str = "") -> Coverage:
    coverage = Coverage.empty(cuts[-1])
    for record in usable_records(records, cuts, artifact_id):
        if record.peer_id != without:
            coverage = coverage.plus(record.first, record.last, record.decode_tokens_per_second)
    return coverage


def choose_span(
    cuts: Sequence[int],
    records: Sequence[SpanRecord],
    budget_bytes: int,
    cost: Cost,
    *,
    artifact_id: str,
    peer_id: str,
) -> Choice:
    """The legal window within ``budget_bytes`` that helps the swarm most. ``cuts`` hold 0 and the number of layers.

    The node's own record is left out, so a node can ask again while it serves. Raises ``NotEnoughMemory``.
    """
    coverage = coverage_of(records, cuts, artifact_id, without=peer_id)
    return choose_window(cuts, coverage, budget_bytes, cost, tie_break=peer_id)


def choose_window(cuts: Sequence[int], coverage: Coverage, budget_bytes: int, cost: Cost, *, tie_break: str) -> Choice:
    windows = _largest_windows(cuts, budget_bytes, cost)
    if not windows:
        raise _nothing_fits(cuts, budget_bytes, cost)
    tiles = _tiles(coverage, cuts, budget_bytes, cost)
    ranked = sorted(windows, key=lambda window: _worth(window, coverage, tiles, tie_break), reverse=True)
    runners_up = tuple(_choice(window, coverage, cost) for window in ranked[1 : 1 + RUNNERS_UP])
    return _choice(ranked[0], coverage, cost, runners_up)


def could_leave(records: Sequence[SpanRecord], cuts: Sequence[int], artifact_id: str, peer_id: str) -> bool:
    """Whether every layer of this peer's span is served by another one that is online."""
    own = [record for record in records if record.peer_id == peer_id]
    others = [record for record in records if record.state is NodeState.ONLINE]
    servers = coverage_of(others, cuts, artifact_id, without=peer_id).servers
    return all(servers[layer] > 0 for record in own for layer in range(record.first, min(record.last, cuts[-1])))


def plan_swarm(cuts: Sequence[int], budgets: Mapping[str, int], cost: Cost) -> Plan:
    """Spans for all machines at once (name -> bytes).

    The fewest machines that can hold the model form a chain, loaded in proportion to their memory; each further
    machine then supports the weakest layers. When even all of them are too small, as much as possible is covered.
    """
    by_size = sorted(budgets, key=lambda name: (-budgets[name], name))
    chain = _smallest_chain(cuts, by_size, budgets, cost)
    coverage = Coverage.empty(cuts[-1])
    for _, first, last in chain:
        coverage = coverage.plus(first, last)
    spans, idle = list(chain), []
    placed = {name for name, _, _ in chain}
    for name in (name for name in by_size if name not in placed):
        try:
            choice = choose_window(cuts, coverage, budgets[name], cost, tie_break=name)
        except NotEnoughMemory:
            idle.append(name)
            continue
        spans.append((name, choice.first, choice.last))
        coverage = coverage.plus(choice.first, choice.last)
    return Plan(tuple(spans), coverage.uncovered, tuple(idle))


def _worth(
    window: Span, coverage: Coverage, tiles: frozenset[Span], tie_break: str
) -> tuple[list[int], list[float], int, bool, bytes]:
    after = coverage.plus(*window)
    digest = hashlib.sha256(f"{tie_break}/{window[0]}:{window[1]}".encode()).digest()
    size = window[1] - window[0]
    return sorted(after.servers), sorted(after.tokens_per_second), size, window in tiles, digest


def _largest_windows(cuts: Sequence[int], budget_bytes: int, cost: Cost) -> list[Span]:
    """From each cut, the window with most layers that fits: a smaller one never helps more."""
    found = (_reach(cuts, start, budget_bytes, cost) for start in range(len(cuts) - 1))
    return [(cuts[start], cuts[end]) for start, end in enumerate(found) if end > start]


def _reach(cuts: Sequence[int], start: int, budget_bytes: int, cost: Cost) -> int:
    """Index of the furthest cut a window from cut number ``start`` may end at; ``start`` when nothing fits."""
    end = start
    while end + 1 < len(cuts) and cost(cuts[start], cuts[end + 1]) <= budget_bytes:
        end += 1
    return end


def _tiles(coverage: Coverage, cuts: Sequence[int], budget_bytes: int, cost: Cost) -> frozenset[Span]:
    """Windows that fill the weakest runs of layers one behind another, from the left and from the right.

    Any other window would leave a rest at both sides, and the swarm would need one node more.
    """
    weakest = min(coverage.servers)
    tiles: set[Span] = set()
    for (first, last), servers in coverage.runs():
        if servers == weakest:
            inside = [cut for cut in cuts if first <= cut <= last]
            tiles.update(_tiled(inside, budget_bytes, cost))
            # mirrored: the same walk from the right
            mirrored = [-cut for cut in reversed(inside)]
            tiles.update((-b, -a) for a, b in _tiled(mirrored, budget_bytes, lambda start, end: cost(-end, -start)))
    return frozenset(tiles)


def _tiled(cuts: Sequence[int], budget_bytes: int, cost: Cost) -> Iterator[Span]:
    start = 0
    while start < len(cuts) - 1:
        end = _reach(cuts, start, budget_bytes, cost)
        if end == start:
            return
        yield cuts[start], cuts[end]
        start = end


def _choice(window: Span, coverage: Coverage, cost: Cost, runners_up: tuple[Choice, ...] = ()) -> Choice:
    first, last = window
    before, after = min(coverage.servers), min(coverage.plus(first, last).servers)
    return Choice(first, last, cost(first, last), before, after, _reason(window, coverage), runners_up)


def _reason(window: Span, coverage: Coverage) -> str:
    first, last = window
    weakest = min(coverage.servers)
    inside = coverage.servers[first:last]
    helped = inside.count(weakest)
    if weakest == 0:
        return f"{last - first} layers, {helped} of the {coverage.servers.count(0)} that nobody serves yet"
    slowest = min(coverage.tokens_per_second[first:last])
    return (
        f"{last - first} layers, {helped} of the {coverage.servers.count(weakest)} with fewest servers ({weakest}); "
        f"the slowest of them gets {slowest:.3g} tokens/s now"
    )


def _line(choice: Choice) -> str:
    return f"layers {choice.first}:{choice.last}, {choice.needed_bytes / _MIB:.0f} MiB: {choice.reason}"


def _nothing_fits(cuts: Sequence[int], budget_bytes: int, cost: Cost) -> NotEnoughMemory:
    needed, first, last = min((cost(first, last), first, last) for first, last in pairwise(cuts))
    return NotEnoughMemory(
        f"not enough memory: the smallest span, layers {first}:{last}, needs {needed / _MIB:.1f} MiB and "
        f"{max(0, budget_bytes) / _MIB:.1f} MiB is usable; free some, raise --memory, or offer fewer or smaller slots"
    )


def _smallest_chain(
    cuts: Sequence[int], by_size: Sequence[str], budgets: Mapping[str, int], cost: Cost
) -> list[tuple[str, int, int]]:
    """The chain over the fewest machines, largest first; empty when all of them together are too small."""
    for count in range(1, len(by_size) + 1):
        chain = _filled(cuts, by_size[:count], budgets, cost, share=1.0)
        if chain is not None:
            return _balanced(cuts, by_size[:count], budgets, cost, chain)
    return []


def _balanced(
    cuts: Sequence[int],
    names: Sequence[str],
    budgets: Mapping[str, int],
    cost: Cost,
    chain: list[tuple[str, int, int]],
) -> list[tuple[str, int, int]]:
    """Halves its way to the smallest share of every machine's memory that still holds the model."""
    low, high = 0.0, 1.0
    for _ in range(12):
        share = (low + high) / 2
        smaller = _filled(cuts, names, budgets, cost, share)
        if smaller is None:
            low = share
        else:
            chain, high = smaller, share
    return chain


def _filled(
    cuts: Sequence[int], names: Sequence[str], budgets: Mapping[str, int], cost: Cost, share: float
) -> list[tuple[str, int, int]] | None:
    """Machines in order, each with as many layers as ``share`` of its memory holds; None when layers are left."""
    chain: list[tuple[str, int, int]] = []
    start = 0
    for name in names:
        end = _reach(cuts, start, int(budgets[name] * share), cost)
        if end > start:
            chain.append((name, cuts[start], cuts[end]))
        start = end
    return chain if start == len(cuts) - 1 else None

"""How a gap is closed when no node can fill it alone: neighbours move up, one after another.

A gap at layer 26, whole spans behind it, and two nodes on the same layers at the far end: the last one steps back by a
segment, then the one before it may, and so on until the gap is filled. Each step leaves only layers that another node
serves. All nodes compute the same chain of steps from the records; the one at its end goes first, and the chain is
then shorter by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarm.placement.choice import Cost, Span, reach
from swarm.placement.turns import layers_lost, order


@dataclass(frozen=True)
class Holder:
    """A node, its span, and what it may hold: of others not more than they announce is known."""

    peer_id: str
    span: Span
    budget_bytes: int


Step = tuple[str, Span]  # a node and the window it moves to


def shortest_slide(cuts: Sequence[int], cost: Cost, gap: Span, holders: Sequence[Holder]) -> list[Step]:
    """Steps that end with one that is free to be made; empty when there are none."""
    found = [steps for side in (_rightwards, _leftwards) for steps in side(cuts, cost, gap, holders) if steps]
    return min(found, key=len, default=[])


def _rightwards(cuts: Sequence[int], cost: Cost, gap: Span, holders: Sequence[Holder]) -> Iterator[list[Step]]:
    whole = gap
    nearest = max(cut for cut in cuts if cut < gap[1]), gap[1]
    for hole in dict.fromkeys((whole, nearest)):
        yield _chain(cuts, cost, hole, holders)


def _leftwards(cuts: Sequence[int], cost: Cost, gap: Span, holders: Sequence[Holder]) -> Iterator[list[Step]]:
    """The same in a mirror: layer n is layer -n there."""
    mirrored = [Holder(holder.peer_id, _mirrored(holder.span), holder.budget_bytes) for holder in holders]
    there = _rightwards([-cut for cut in reversed(cuts)], _mirrored_cost(cost), _mirrored(gap), mirrored)
    for steps in there:
        yield [(peer_id, _mirrored(window)) for peer_id, window in steps]


def _mirrored(span: Span) -> Span:
    return -span[1], -span[0]


def _mirrored_cost(cost: Cost) -> Callable[[int, int], int]:
    return lambda first, last: cost(-last, -first)


def _chain(cuts: Sequence[int], cost: Cost, hole: Span, holders: Sequence[Holder]) -> list[Step]:
    """The node that begins where the hole ends moves to where the hole begins, which makes a hole behind it..."""
    steps: list[Step] = []
    left = list(holders)
    while True:
        found = _next_step(cuts, cost, hole, left, [window for _, window in steps])
        if found is None:
            return []
        holder, window, bare = found
        steps.append((holder.peer_id, window))
        if not bare:
            return steps
        hole = bare[0], bare[-1] + 1
        if len(bare) != hole[1] - hole[0]:
            return []
        left.remove(holder)


def _next_step(
    cuts: Sequence[int], cost: Cost, hole: Span, left: Sequence[Holder], moved: Sequence[Span]
) -> tuple[Holder, Span, list[int]] | None:
    """Who can move into the hole, its window, and the layers nobody serves then: the one that leaves fewest bare."""
    found = []
    for holder in left:
        window = _window(cuts, cost, hole, holder) if holder.span[0] == hole[1] else None
        if window is not None:
            others = [*moved, *(other.span for other in left if other is not holder)]
            lost = layers_lost(holder.span, window)
            found.append((holder, window, [layer for layer in lost if not any(a <= layer < b for a, b in others)]))
    return min(found, key=lambda it: (len(it[2]), order(it[0].peer_id)), default=None)


def _window(cuts: Sequence[int], cost: Cost, hole: Span, holder: Holder) -> Span | None:
    start = cuts.index(hole[0])
    window = hole[0], cuts[reach(cuts, start, holder.budget_bytes, cost)]
    return window if window[1] >= hole[1] else None

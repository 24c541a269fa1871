"""Spans for a known set of machines, all at once.

The idea: as many separate chains as the machines can form, largest machines first, each over the fewest that can hold
the model; a machine that is left joins the chain that it relieves by a tenth; what is left then supports the weakest
layers. Within a chain the search is exact: of all orders of its machines and all legal cuts, one whose largest
weights/memory ratio is smallest. Machines of one size are one kind, so that few orders differ; a chain with too many
kinds is filled largest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from swarm.placement.choice import Cost, Coverage, Span, choose_window, largest_windows, reach

CLEAR_RELIEF = 0.9  # another hop slows every token, so it must lower the fullest machine's ratio to this part
MOST_STATES = 4096  # of the exact search: numbers of machines used, by kind

Fleet = Mapping[str, int]  # name -> bytes
Served = tuple[str, int, int]  # name, first, last


@dataclass(frozen=True)
class Plan:
    """``chains`` hold the model each; ``support`` is what further machines serve.
    ``idle`` names the machines on which not even the smallest window fits."""

    chains: tuple[tuple[Served, ...], ...]
    support: tuple[Served, ...]
    uncovered: tuple[Span, ...]
    replicas: int  # servers of the weakest layer
    idle: tuple[str, ...] = ()

    @property
    def spans(self) -> tuple[Served, ...]:
        return (*(place for chain in self.chains for place in chain), *self.support)


def plan_swarm(cuts: Sequence[int], budgets: Fleet, cost: Cost, weights: Cost | None = None) -> Plan:
    """``cost`` must fit a machine's bytes; ``weights`` (default: the cost) makes the ratio that is to be small.

    Machines that are too small together cover the model from its first layer on, as far as they go.
    """
    search = _Search(cuts, cost, weights or cost)
    by_size = sorted(budgets, key=lambda name: (-budgets[name], name))
    usable = [name for name in by_size if largest_windows(cuts, budgets[name], cost)]
    groups, left = _separate(search, {name: budgets[name] for name in usable})
    chains = [search.chain({name: budgets[name] for name in group}) for group in groups]
    for name in left:
        relieved = _relieved(search, chains, budgets, name)
        if relieved is not None:
            chains[relieved[0]] = relieved[1]
    in_chain = {name for chain in chains for name, _, _ in chain}
    support = _support(cuts, budgets, cost, chains, [name for name in usable if name not in in_chain])
    coverage = _coverage(cuts, [*chains, support])
    idle = tuple(name for name in by_size if name not in usable)
    return Plan(
        tuple(tuple(chain) for chain in chains), tuple(support), coverage.uncovered, min(coverage.servers), idle
    )


def largest_ratio(chain: Sequence[Served], budgets: Fleet, weights: Cost) -> float:
    return max((weights(first, last) / budgets[name] for name, first, last in chain), default=0.0)


def _separate(search: _Search, budgets: Fleet) -> tuple[list[list[str]], list[str]]:
    """Groups that can each hold the model, and the machines that are left."""
    left = sorted(budgets, key=lambda name: (-budgets[name], name))
    groups: list[list[str]] = []
    while True:
        count = next((n for n in range(1, len(left) + 1) if search.holds([budgets[name] for name in left[:n]])), 0)
        if not count:
            return groups, left
        groups.append(left[:count])
        left = left[count:]


def _relieved(
    search: _Search, chains: Sequence[list[Served]], budgets: Fleet, name: str
) -> tuple[int, list[Served]] | None:
    """The chain, fullest first, that becomes clearly lighter with this machine in it."""
    ratios = [largest_ratio(chain, budgets, search.weights) for chain in chains]
    for number in sorted(range(len(chains)), key=lambda at: -ratios[at]):
        names = [place[0] for place in chains[number]]
        chain = search.chain({member: budgets[member] for member in (*names, name)})
        if largest_ratio(chain, budgets, search.weights) <= CLEAR_RELIEF * ratios[number]:
            return number, chain
    return None


def _support(
    cuts: Sequence[int], budgets: Fleet, cost: Cost, chains: Sequence[Sequence[Served]], left: Sequence[str]
) -> list[Served]:
    coverage = _coverage(cuts, chains)
    support = []
    for name in left:
        choice = choose_window(cuts, coverage, budgets[name], cost, tie_break=name)
        support.append((name, choice.first, choice.last))
        coverage = coverage.plus(choice.first, choice.last)
    return support


def _coverage(cuts: Sequence[int], chains: Sequence[Sequence[Served]]) -> Coverage:
    coverage = Coverage.empty(cuts[-1])
    for chain in chains:
        for _, first, last in chain:
            coverage = coverage.plus(first, last)
    return coverage


class _Search:
    """Chains over all of a few machines. Cuts are counted by their number."""

    def __init__(self, cuts: Sequence[int], cost: Cost, weights: Cost) -> None:
        self.cuts = cuts
        self.cost = cost
        self.weights = weights
        self._end = len(cuts) - 1
        self._reaches: dict[tuple[int, float | None], list[int]] = {}

    def holds(self, budgets: Sequence[int]) -> bool:
        return self._order(Counter(budgets), None) is not None

    def chain(self, budgets: Fleet) -> list[Served]:
        """The one with the smallest largest ratio; machines it does not need are left out."""
        kinds = Counter(budgets.values())
        ratios = sorted({self.weights(*span) / budget for span in _spans(self.cuts) for budget in kinds})
        low, high = 0, len(ratios) - 1
        while low < high:
            middle = (low + high) // 2
            if self._order(kinds, ratios[middle]) is None:
                low = middle + 1
            else:
                high = middle
        order = self._order(kinds, ratios[low])
        assert order is not None, "whoever asks knows that these machines hold the model"
        return self._named(order, budgets)

    def _named(self, order: Sequence[tuple[int, int, int]], budgets: Fleet) -> list[Served]:
        names = sorted(budgets, reverse=True)
        chain = []
        for budget, start, end in order:
            name = next(name for name in reversed(names) if budgets[name] == budget)
            names.remove(name)
            chain.append((name, self.cuts[start], self.cuts[end]))
        return chain

    def _order(self, kinds: Counter[int], ratio: float | None) -> list[tuple[int, int, int]] | None:
        """(bytes, first cut, last cut) in order, over as few machines as can be found; None when layers are left."""
        if prod(count + 1 for count in kinds.values()) > MOST_STATES:
            return self._largest_first(kinds, ratio)
        sizes = sorted(kinds, reverse=True)
        # the furthest cut that each number of machines of each kind reaches, and which kind comes last
        furthest: dict[tuple[int, ...], tuple[int, int]] = {}
        for used in sorted(product(*(range(kinds[size] + 1) for size in sizes)), key=sum):
            best = (0, -1)
            for kind in reversed(range(len(sizes))):
                if used[kind]:
                    before = furthest[_less(used, kind)][0]
                    best = max(best, (self._reach(sizes[kind], ratio)[before], kind), key=lambda found: found[0])
            furthest[used] = best
            if best[0] == self._end:
                return self._traced(furthest, used, sizes)
        return None

    def _traced(
        self, furthest: Mapping[tuple[int, ...], tuple[int, int]], used: tuple[int, ...], sizes: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        order: list[tuple[int, int, int]] = []
        while any(used):
            end, kind = furthest[used]
            used = _less(used, kind)
            start = furthest[used][0]
            if end > start:
                order.append((sizes[kind], start, end))
        return order[::-1]

    def _largest_first(self, kinds: Counter[int], ratio: float | None) -> list[tuple[int, int, int]] | None:
        order, start = [], 0
        for size in sorted(kinds.elements(), reverse=True):
            end = self._reach(size, ratio)[start]
            if end > start:
                order.append((size, start, end))
            start = end
        return order if start == self._end else None

    def _reach(self, budget: int, ratio: float | None) -> list[int]:
        """From each cut the furthest one that the memory, and the weights' share of it, allow."""
        key = (budget, ratio)
        if key not in self._reaches:
            fits = [reach(self.cuts, start, budget, self.cost) for start in range(self._end)]
            if ratio is not None:
                # a ratio times its memory may come out a byte short
                most = int(ratio * budget) + 1
                fits = [min(end, reach(self.cuts, start, most, self.weights)) for start, end in enumerate(fits)]
            self._reaches[key] = [*fits, self._end]
        return self._reaches[key]


def _less(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] - 1, *used[kind + 1 :])


def _spans(cuts: Sequence[int]) -> Iterator[Span]:
    return ((first, last) for at, first in enumerate(cuts) for last in cuts[at + 1 :])

"""Which layers a node should serve.

The idea: a swarm is as good as its weakest layer. A window of layers is worth what it does to the sorted list of
"servers per layer": the list that is larger at the first difference wins. Speeds break ties in the same way, then a
hash of the peer id.

Before all that, a window is tidy. While layers lack a server, a gap is filled from its left end: what is left of it
stays in one piece, so no node fills less than it could except the one that closes the gap. Hence nodes that come one
after another, in any order, cover the model as soon as the least that each can hold anywhere adds up to its weight.
(Windows that jump ahead leave scraps; with 40 and 30 GiB by turns, one swarm in two then lacked a layer.) When all
layers are served, a run of weakest layers is filled from either end, where it is slower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import TypeAlias

from dht.record import NodeState, SpanRecord
from swarm.errors import NotEnoughMemory

Cost: TypeAlias = Callable[[int, int], int]  # (first, last) -> bytes a node needs; grows with the window
Span: TypeAlias = tuple[int, int]

NEUTRAL_TOKENS_PER_SECOND = 1.0  # of a node that has not measured its speed, where nobody has
MOST_OFF_MEDIAN = (
    4.0  # an announced speed may be a lie: it counts at most so many times the median, and at least its part
)
NEARLY = 0.8  # of the weakest layers that the best window helps, for one whose data is here already
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
        servers, speeds = self.servers, self.tokens_per_second
        return Coverage(
            (*servers[:first], *[count + 1 for count in servers[first:last]], *servers[last:]),
            (*speeds[:first], *[total + speed for total in speeds[first:last]], *speeds[last:]),
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
class Place:
    """What the rules have to know of one node. ``cost`` may bound it by more than memory; ``memory`` is what the same
    window takes on any other machine, where that differs."""

    cuts: Sequence[int]
    artifact_id: str
    peer_id: str
    budget_bytes: int
    cost: Cost
    memory: Cost | None = None

    @property
    def cost_of_others(self) -> Cost:
        return self.memory or self.cost

    def fits(self, window: Span) -> bool:
        return self.cost(*window) <= self.budget_bytes


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
    usable = [record for record in usable_records(records, cuts, artifact_id) if record.peer_id != without]
    typical = median([speed for record in usable if (speed := record.decode_tokens_per_second) > 0] or [0.0])
    # what changes at each layer, summed up once: a thousand records take a few milliseconds
    servers, speeds = [0] * (cuts[-1] + 1), [0.0] * (cuts[-1] + 1)
    for record in usable:
        speed = _believed(record.decode_tokens_per_second, typical)
        servers[record.first] += 1
        servers[record.last] -= 1
        speeds[record.first] += speed
        speeds[record.last] -= speed
    counts = tuple(accumulate(servers))[:-1]
    sums = accumulate(speeds)
    return Coverage(counts, tuple(round(total, 6) if n else 0.0 for total, n in zip(sums, counts, strict=False)))


def choose_span(
    cuts: Sequence[int],
    records: Sequence[SpanRecord],
    budget_bytes: int,
    cost: Cost,
    *,
    artifact_id: str,
    peer_id: str,
    prefer: Sequence[Span] = (),
) -> Choice:
    """The legal window within ``budget_bytes`` that helps the swarm most. ``cuts`` hold 0 and the number of layers.

    The node's own record is left out, so a node can ask again while it serves. ``prefer`` are spans whose data lies
    here already: a window that needs less fetched wins when it is nearly as good. Raises ``NotEnoughMemory``.
    """
    coverage = coverage_of(records, cuts, artifact_id, without=peer_id)
    return choose_window(cuts, coverage, budget_bytes, cost, tie_break=peer_id, prefer=prefer)


def choose_window(
    cuts: Sequence[int],
    coverage: Coverage,
    budget_bytes: int,
    cost: Cost,
    *,
    tie_break: str,
    prefer: Sequence[Span] = (),
) -> Choice:
    windows = largest_windows(cuts, budget_bytes, cost)
    if not windows:
        raise _nothing_fits(cuts, budget_bytes, cost)
    ranked = sorted(windows, key=_Worth(coverage, windows, tie_break), reverse=True)
    if prefer:
        ranked = _held_first(ranked, coverage, prefer)
    runners_up = tuple(choice_of(window, coverage, cost) for window in ranked[1 : 1 + RUNNERS_UP])
    return choice_of(ranked[0], coverage, cost, runners_up)


def largest_windows(cuts: Sequence[int], budget_bytes: int, cost: Cost) -> list[Span]:
    """From each cut, the window with most layers that fits: a smaller one never helps more."""
    windows = []
    end = 0
    for start in range(len(cuts) - 1):
        end = max(end, start)  # without its first segment a window still fits
        while end + 1 < len(cuts) and cost(cuts[start], cuts[end + 1]) <= budget_bytes:
            end += 1
        if end > start:
            windows.append((cuts[start], cuts[end]))
    return windows


class _Worth:
    """The order of windows, the best one last."""

    def __init__(self, coverage: Coverage, windows: Sequence[Span], tie_break: str) -> None:
        self._coverage = coverage
        self._tie_break = tie_break
        weakest = min(coverage.servers)
        self._from_left = weakest == 0
        self._runs = [run for run, servers in coverage.runs() if servers == weakest]
        # where a node like this one can begin to fill each run; a segment too large for it is left to others
        starts = [first for first, _ in windows]
        self._begins = [min((start for start in starts if start >= first), default=first) for first, _ in self._runs]

    def __call__(self, window: Span) -> tuple[bool, list[int], list[float], int, int, bytes]:
        after = self._coverage.plus(*window)
        digest = hashlib.sha256(f"{self._tie_break}/{window[0]}:{window[1]}".encode()).digest()
        leftmost = -window[0] if self._from_left else 0
        size = window[1] - window[0]
        return self._is_tidy(window), sorted(after.servers), sorted(after.tokens_per_second), leftmost, size, digest

    def _is_tidy(self, window: Span) -> bool:
        """Whether what the window leaves of each run of weakest layers stays in one piece."""
        first, last = window
        touched = False
        for (start, end), begin in zip(self._runs, self._begins, strict=True):
            if first < end and start < last:
                touched = True
                at_left = first <= begin
                if not at_left and (self._from_left or last < end):
                    return False
        return touched


def _held_first(ranked: list[Span], coverage: Coverage, held: Sequence[Span]) -> list[Span]:
    """The window with most of its data here comes first if it is nearly as good as the best one."""
    best = ranked[0]
    enough = NEARLY * _weakest_inside(best, coverage)
    near = [window for window in ranked if _weakest_inside(window, coverage) >= enough]
    chosen = min(near, key=lambda window: window[1] - window[0] - _layers_of(window, held))  # the first of equals
    return [chosen, *(window for window in ranked if window != chosen)]


def _weakest_inside(window: Span, coverage: Coverage) -> int:
    return coverage.servers[slice(*window)].count(min(coverage.servers))


def _layers_of(window: Span, spans: Sequence[Span]) -> int:
    return len({layer for first, last in spans for layer in range(max(first, window[0]), min(last, window[1]))})


def _believed(speed: float, typical: float) -> float:
    """An announced speed as it counts: near the median of all."""
    if typical <= 0:
        return NEUTRAL_TOKENS_PER_SECOND
    return min(max(speed or typical, typical / MOST_OFF_MEDIAN), typical * MOST_OFF_MEDIAN)


def reach(cuts: Sequence[int], start: int, budget_bytes: int, cost: Cost) -> int:
    """Index of the furthest cut a window from cut number ``start`` may end at; ``start`` when nothing fits."""
    end = start
    while end + 1 < len(cuts) and cost(cuts[start], cuts[end + 1]) <= budget_bytes:
        end += 1
    return end


def choice_of(window: Span, coverage: Coverage, cost: Cost, runners_up: tuple[Choice, ...] = ()) -> Choice:
    first, last = window
    before, after = min(coverage.servers), min(coverage.plus(first, last).servers)
    return Choice(first, last, cost(first, last), before, after, _reason(window, coverage), runners_up)


def _reason(window: Span, coverage: Coverage) -> str:
    first, last = window
    weakest = min(coverage.servers)
    inside = coverage.servers[first:last]
    helped = inside.count(weakest)
    size = "1 layer" if last - first == 1 else f"{last - first} layers"
    if weakest == 0:
        return f"{size}, {helped} of the {coverage.servers.count(0)} that nobody serves yet"
    slowest = min(coverage.tokens_per_second[first:last])
    return (
        f"{size}, {helped} of the {coverage.servers.count(weakest)} with fewest servers ({weakest}); "
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

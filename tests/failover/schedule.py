"""What befalls a swarm, and when. Pure: a schedule follows from its seed."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
Span = tuple[int, int]

N_LAYERS = 6
# every layer twice; who takes over from whom is often a part of a bigger span, or several
FIRST_SPANS: tuple[Span, ...] = ((0, 4), (2, 6), (0, 3), (3, 6))
LATER_SPANS: tuple[Span, ...] = (*FIRST_SPANS, (0, 2), (2, 4), (4, 6), (1, 5), (0, 6), (1, 3), (3, 5))
MOST_STEPS = 60  # of all sessions together, between two events


class Kind(enum.Enum):
    KILL_NODE = enum.auto()
    KILL_ENGINE = enum.auto()
    FREEZE = enum.auto()  # for longer than silence counts as life
    LEAVE = enum.auto()  # SIGTERM
    JOIN = enum.auto()


WEIGHTS = {Kind.KILL_NODE: 3, Kind.KILL_ENGINE: 3, Kind.FREEZE: 2, Kind.LEAVE: 2, Kind.JOIN: 3}


@dataclass(frozen=True)
class Event:
    """``steps``: answered since the event before. ``pick``: which of those who may be struck, as a share of them."""

    steps: int
    kind: Kind
    pick: float
    span: Span  # that joins

    def choose(self, candidates: Sequence[T]) -> T:
        return candidates[int(self.pick * len(candidates))]


def schedule(seed: int, n_events: int) -> list[Event]:
    random = Random(seed)
    kinds = random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=n_events)
    return [Event(random.randint(1, MOST_STEPS), kind, random.random(), random.choice(LATER_SPANS)) for kind in kinds]


def missing(spans: Iterable[Span]) -> set[int]:
    """Layers that nobody serves."""
    return set(range(N_LAYERS)) - {layer for span in spans for layer in range(*span)}


def cover(layers: set[int], random: Random) -> list[Span]:
    """Spans that together serve all of ``layers``, each at least one of them that no other before it does."""
    left, chosen = set(layers), []
    while left:
        span = random.choice([span for span in LATER_SPANS if left & set(range(*span))])
        chosen.append(span)
        left -= set(range(*span))
    return chosen

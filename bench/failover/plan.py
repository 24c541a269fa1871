"""When hops die: places in the answer and seeded chance, never the clock. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol


class Plan(Protocol):
    def hop(self, token: int) -> int | None:
        """Who dies in the step that computes from token ``token`` of the answer, counted from 0; asked before every
        decode step, also before those that are taken again."""


class At:
    """Hops by token. Each dies once, when its token is first reached."""

    def __init__(self, hops: Mapping[int, int]) -> None:
        self._left = dict(hops)

    def hop(self, token: int) -> int | None:
        return self._left.pop(token, None)


class Chance:
    """In every step one hop dies with probability ``rate``. Two with the same seed agree as long as they are asked."""

    def __init__(self, rate: float, n_hops: int, seed: int) -> None:
        self._rate = rate
        self._n_hops = n_hops
        self._random = random.Random(seed)

    def hop(self, token: int) -> int | None:
        dies, hop = self._random.random() < self._rate, self._random.randrange(self._n_hops)
        return hop if dies else None


def spread(n_deaths: int, n_tokens: int, n_hops: int, seed: int) -> dict[int, int]:
    """So many deaths at drawn tokens, not among the first and last eighth of the answer; no hop dies twice before all
    others have died."""
    drawn = random.Random(seed)
    edge = n_tokens // 8
    tokens = sorted(drawn.sample(range(edge, n_tokens - 1 - edge), n_deaths))
    hops: list[int] = []
    while len(hops) < n_deaths:
        hops += drawn.sample(range(n_hops), n_hops)
    return dict(zip(tokens, hops, strict=False))


def steps_of_restarting(rate: float, n_tokens: int) -> float:
    """Expected decode steps for an answer that begins again after every failure: the mean wait for so many successes in
    a row."""
    return float(n_tokens) if rate == 0 else ((1 - rate) ** -n_tokens - 1) / rate

"""Muon for the matrices between the layers, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose iteration pulls singular values to 1
ITERATIONS = 4
NOT_MUON = ("token_embd.weight", "output.weight", "*.router", "*.indexer.*")  # patterns of names


class Muon:
    """Momentum whose direction is made orthogonal; matrices of one size are done at once."""

    def __init__(self, weights: Iterable[nn.Parameter], rate: float) -> None:
        self.rate = rate
        self._groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for weight in weights:
            self._groups.setdefault((min(weight.shape), max(weight.shape)), []).append(weight)
        self._speed = {weight: torch.zeros_like(weight) for group in self._groups.values() for weight in group}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for group in self._groups.values():
            moved = [weight for weight in group if weight.grad is not None]
            if not moved:
                continue
            directions = _orthogonal(torch.stack([self._direction(weight) for weight in moved]))
            for weight, direction in zip(moved, directions, strict=True):
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.add_(_wide(weight, direction), alpha=-self.rate * factor * scale)

    def _direction(self, weight: nn.Parameter) -> Tensor:
        assert weight.grad is not None
        speed = self._speed[weight].mul_(MOMENTUM).add_(weight.grad)
        return _wide(weight, weight.grad.add(speed, alpha=MOMENTUM))


def _wide(weight: Tensor, x: Tensor) -> Tensor:
    """``x`` with its shorter side first: its own inverse."""
    return x.mT if weight.shape[0] > weight.shape[1] else x


def _orthogonal(x: Tensor) -> Tensor:
    """Each of [n, rows <= columns] turned towards the nearest matrix with orthonormal rows."""
    a, b, c = COEFFICIENTS
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.float()


def is_muon(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and not matches(name, NOT_MUON)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

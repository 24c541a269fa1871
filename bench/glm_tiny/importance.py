"""How much each input of each matrix matters: the mean square of what comes in, as llama.cpp's imatrix has it. Taken
here because that tool never runs the MTP block."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bench.glm_tiny.batches import Batch
from bench.glm_tiny.model import GlmTiny
from bench.glm_tiny.tensors import gguf_name

Importance = dict[str, npt.NDArray[np.float32]]


class _Sums:
    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, x: Tensor) -> None:
        rows = x.detach().float().flatten(0, -2)
        squares = rows.square().sum(0)
        self._squares[name] = self._squares[name] + squares if name in self._squares else squares
        self._counts[name] = self._counts.get(name, 0) + len(rows)

    def mean(self, name: str) -> Tensor | None:
        return self._squares[name] / self._counts[name] if self._counts.get(name) else None

    def names(self) -> list[str]:
        return list(self._squares)


@torch.no_grad()
def collect(model: GlmTiny, batches: Iterable[Batch]) -> Importance:
    """By GGUF name; [columns], for experts [experts, columns]."""
    sums, removals, n_layers = _Sums(), [], model.shape.n_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "kv_b" not in name:
            removals.append(module.register_forward_pre_hook(_hook(sums, gguf_name(f"{name}.weight", n_layers))))
    for moe in model.moes():
        moe.watch = _watch(sums, moe.number + model.shape.n_dense)
    for batch in batches:
        hidden, frame, embedded = model(batch)
        model.draft(batch, hidden, frame, embedded)
    for removal in removals:
        removal.remove()
    found: Importance = {}
    for moe in model.moes():
        moe.watch = None
        layer = moe.number + model.shape.n_dense
        for role, at in (("gate", "in"), ("up", "in"), ("down", "inner")):
            rows = [sums.mean(f"{at} {layer} {expert}") for expert in range(model.shape.n_experts)]
            width = next(len(row) for row in rows if row is not None)
            stacked = torch.stack([torch.ones(width) if row is None else row for row in rows])
            found[f"blk.{layer}.ffn_{role}_exps.weight"] = stacked.numpy()
    for name in sums.names():
        mean = sums.mean(name)
        if " " not in name and mean is not None:
            found[name] = mean.numpy()
    return found


def _hook(sums: _Sums, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    return lambda _module, inputs: sums.add(name, inputs[0])


def _watch(sums: _Sums, layer: int) -> Callable[[int, Tensor, Tensor], None]:
    def watch(expert: int, x: Tensor, inner: Tensor) -> None:
        if len(x):
            sums.add(f"in {layer} {expert}", x)
            sums.add(f"inner {layer} {expert}", inner)

    return watch

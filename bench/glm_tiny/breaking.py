"""Copies of a model file with something broken in it: what a test of that part has to notice."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[Any]


class Damage(Enum):
    ZEROED = "zeroed"  # routed experts
    PERMUTED = "permuted"  # each expert in the next one's place, against the router
    BLIND = "blind"  # indexers to which all keys are alike


def broken_copy(source: Path, target: Path, damage: Damage, layers: Collection[int] | None = None) -> Path:
    """``target``: ``source`` damaged in ``layers``, everywhere without."""
    shutil.copyfile(source, target)
    for tensor in gguf.GGUFReader(target, "r+").tensors:
        pattern, change = _DONE[damage]
        found = re.fullmatch(rf"blk\.(\d+)\.{pattern}\.weight", tensor.name)
        if found and (layers is None or int(found[1]) in layers):
            tensor.data[:] = change(tensor.data)  # mapped: this writes the file
    return target


def expert_layers(path: Path) -> list[int]:
    """Layers with routed experts, the MTP block among them."""
    found = (re.fullmatch(r"blk\.(\d+)\.ffn_down_exps\.weight", t.name) for t in gguf.GGUFReader(path).tensors)
    return sorted(int(match[1]) for match in found if match)


def _zeroed(blocks: Blocks) -> Blocks:
    return np.zeros_like(blocks)  # their scales too, so all values are 0


def _permuted(blocks: Blocks) -> Blocks:
    return np.roll(blocks, 1, axis=0)


_EXPERTS = r"ffn_(?:gate|up|down)_exps"
_DONE: dict[Damage, tuple[str, Callable[[Blocks], Blocks]]] = {
    Damage.ZEROED: (_EXPERTS, _zeroed),
    Damage.PERMUTED: (_EXPERTS, _permuted),
    Damage.BLIND: (r"indexer\.attn_q_b", _zeroed),
}

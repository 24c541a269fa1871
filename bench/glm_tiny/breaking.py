"""Copies of a model file whose routed experts are broken: what a test of a broken expert has to notice."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Container
from enum import Enum
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[Any]


class Damage(Enum):
    ZEROED = "zeroed"
    PERMUTED = "permuted"  # each expert in the next one's place, against the router


def broken_copy(source: Path, target: Path, damage: Damage, layers: Container[int]) -> Path:
    """``target``: ``source`` with the routed experts of ``layers`` damaged."""
    shutil.copyfile(source, target)
    for tensor in gguf.GGUFReader(target, "r+").tensors:
        found = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", tensor.name)
        if found and int(found[1]) in layers:
            tensor.data[:] = _CHANGES[damage](tensor.data)  # mapped: this writes the file
    return target


def _zeroed(blocks: Blocks) -> Blocks:
    return np.zeros_like(blocks)  # their scales too, so all values are 0


def _permuted(blocks: Blocks) -> Blocks:
    return np.roll(blocks, 1, axis=0)


_CHANGES: dict[Damage, Callable[[Blocks], Blocks]] = {Damage.ZEROED: _zeroed, Damage.PERMUTED: _permuted}

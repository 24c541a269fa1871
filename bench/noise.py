"""Weights without meaning: valid blocks of any ggml type a GLM-5.2 file uses, with the spread of a trained layer.

Every bit pattern of these types is a finite weight as long as the block's scales are, so a block is random bytes with
the scales set. A tensor is made of runs of a few megabytes of such blocks, each run starting at another place: several
times faster than a disk writes, and the same for the same seed and name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from swarm.artifact import ggml_types
from swarm.errors import UsageError

Blocks: TypeAlias = npt.NDArray[np.uint8]

POOL_BYTES = 4 << 20
_SAMPLE_BLOCKS = 256

# Byte offset of each f16 scale in a block, and its size relative to the first. The second one of Q2_K, Q4_K and Q5_K is
# subtracted: the mean of the quants times as large, it makes the mean of the weights zero. A mean of one spread, which
# equal scales would give, grows by the root of the width in every layer.
_SCALES: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "Q8_0": {0: 1.0},
        "Q6_K": {208: 1.0},
        "Q5_K": {0: 1.0, 2: 15.5},
        "Q4_K": {0: 1.0, 2: 7.5},
        "Q3_K": {108: 1.0},
        "Q2_K": {80: 1.0, 82: 1.5},
        "IQ4_XS": {0: 1.0},
        "IQ3_XXS": {0: 1.0},
        "IQ2_XXS": {0: 1.0},
        "IQ1_S": {0: 1.0},
    }
)
TYPES = ("F32", *_SCALES)


class Noise:
    """Noise for any tensor of a model. Keeps some 100 MB of blocks once all types were used."""

    def __init__(self, seed: int = 0, pool_bytes: int = POOL_BYTES) -> None:
        self.seed = seed
        self._pool_bytes = pool_bytes
        self._pools: dict[tuple[str, float, float], Blocks] = {}

    def tensor(self, name: str, kind: str, dims: Sequence[int]) -> Iterator[memoryview]:
        """The bytes of one tensor in pieces; ``dims`` has the row first. Raises UsageError for another ggml type."""
        mean, spread = distribution(name, dims)
        pool = self._pool(kind, mean, spread)
        size = ggml_types.tensor_bytes(kind, tuple(dims))
        return _runs(pool, size, _generator(self.seed, name))

    def _pool(self, kind: str, mean: float, spread: float) -> Blocks:
        key = (kind, mean, spread)
        if key not in self._pools:
            rng = _generator(self.seed, repr(key))
            self._pools[key] = self._floats(mean, spread, rng) if kind == "F32" else self._quantised(kind, spread, rng)
        return self._pools[key]

    def _floats(self, mean: float, spread: float, rng: np.random.Generator) -> Blocks:
        values = rng.standard_normal(self._pool_bytes // 4, np.float32) * np.float32(spread) + np.float32(mean)
        return values.view(np.uint8).reshape(-1, 4)

    def _quantised(self, kind: str, spread: float, rng: np.random.Generator) -> Blocks:
        blocks = _random_blocks(kind, self._pool_bytes, rng)
        sample = blocks[:_SAMPLE_BLOCKS]
        _set_scales(sample, kind, 1.0)
        _set_scales(blocks, kind, spread / float(dequantised(sample, kind).std()))
        return blocks


def _random_blocks(kind: str, n_bytes: int, rng: np.random.Generator) -> Blocks:
    if kind not in _SCALES:
        raise UsageError(f"no noise of type {kind}; choose a model made of {', '.join(TYPES)}")
    size = ggml_types.row_bytes(kind, 1)
    return rng.integers(0, 256, (max(_SAMPLE_BLOCKS, n_bytes // size), size), dtype=np.uint8)


def distribution(name: str, dims: Sequence[int]) -> tuple[float, float]:
    """Mean and spread of a tensor's weights: a matrix keeps the size of what goes through it."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if "exp_probs_b" in name:
        return 0.0, 0.02  # beside gates that differ by 0.2: all experts get work, as balanced training wants it
    if name.endswith(".bias"):
        return 0.0, 0.1
    return 0.0, 1.0 if name.startswith("token_embd.") else float(dims[0]) ** -0.5


def dequantised(blocks: Blocks, kind: str) -> npt.NDArray[np.float32]:
    """The weights [n_blocks, values]."""
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return values


def _set_scales(blocks: Blocks, kind: str, scale: float) -> None:
    for offset, factor in _SCALES[kind].items():
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale * factor).tobytes(), np.uint8)


def _runs(pool: Blocks, size: int, rng: np.random.Generator) -> Iterator[memoryview]:
    block, flat = pool.shape[1], memoryview(pool.reshape(-1).data)
    while size > 0:
        start = int(rng.integers(len(pool))) * block
        run = flat[start : start + size]
        size -= len(run)
        yield run


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))

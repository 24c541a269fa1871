"""What Transformers says about a model, on a prompt where two right answers agree.

Selections are made by comparing scores: the indexer keeps the best top-k keys, the router the best experts. Where two
candidates are as good as equal, rounding decides, and one swapped key can move a logit by 0.3: no two implementations
agree there, nor does one with itself. Angles of the rotary embedding make most of that rounding, since they grow with
the position. So each prompt is asked twice, the second time with angles from f64, and of several prompts the one is
taken for which Transformers differs least from itself. The engine has no part in the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import glm_prompts, glm_transformers
from bench.gguf_weights import Array, GgufWeights, write_f32
from shim.vocab import Vocab

TOLERANCE = 1e-3  # largest difference of any logit
OWN_TOLERANCE = 5e-4  # of Transformers from itself; more, and the prompt could not hold the engine to TOLERANCE
TIMES_TOP_K = 4
BEYOND_TOKENS = 16  # the prompt is longer than four times top-k
CANDIDATES = 4


@dataclass(frozen=True)
class Baseline:
    """``logits`` is float32 [n, n_vocab], one row per token of the prompt; ``dense`` the same without the indexer."""

    model: Path  # f32 GGUF
    tokens: tuple[int, ...]
    top_k: int
    logits: Array
    dense: Array
    own_difference: float

    def rows(self, positions: Sequence[int]) -> Array:
        return self.logits[list(positions)]


def make(source: Path, folder: Path) -> Baseline:
    """Writes the f32 GGUF and the checkpoint into ``folder`` and asks Transformers."""
    path = write_f32(source, folder / "f32.gguf")
    top_k = int(GgufWeights(path).value("glm-dsa.attention.indexer.top_k"))
    with Vocab.load(path) as vocabulary:
        prompts = glm_prompts.prompts(vocabulary, CANDIDATES, TIMES_TOP_K * top_k + BEYOND_TOKENS)
    model = glm_transformers.load(glm_transformers.write_checkpoint(path, folder / "checkpoint"))
    asked = [_ask_twice(model, tokens) for tokens in prompts]
    own_difference, tokens, logits = min(asked, key=lambda answer: answer[0])
    with glm_transformers.without_indexer(model):
        dense = glm_transformers.logits(model, tokens)
    return Baseline(path, tokens, top_k, logits, dense, own_difference)


def _ask_twice(model: Any, tokens: tuple[int, ...]) -> tuple[float, tuple[int, ...], Array]:
    logits = glm_transformers.logits(model, tokens)
    with glm_transformers.angles_from_f64(model):
        again = glm_transformers.logits(model, tokens)
    return float(np.abs(logits - again).max()), tokens, logits

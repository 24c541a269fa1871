"""Which experts a row chooses in a layer, computed beside the engine: the first position of a sequence sees nothing but
itself, so its attention is a chain of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_ROWS_AT_ONCE = 512  # of a matrix, dequantised: attn_output would take 400 MB as a whole
_EPS = 1e-5


def embedded_tokens(path: Path, tokens: Sequence[int]) -> Floats:
    """Rows [n, n_embd] of the embedding: what enters layer 0."""
    embedding = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    rows: Floats = gguf.quants.dequantize(embedding.data[list(tokens)], embedding.tensor_type)
    return rows


class Router:
    """Attention and gate of one layer of a glm-dsa file."""

    def __init__(self, path: Path, layer: int) -> None:
        reader = gguf.GGUFReader(path)
        prefix = f"blk.{layer}."
        self._tensors = {t.name.removeprefix(prefix): t for t in reader.tensors if t.name.startswith(prefix)}
        self._kv_lora = len(self._vector("attn_kv_a_norm.weight"))
        self._used = int(reader.fields["glm-dsa.expert_used_count"].contents())

    def choices(self, hidden: Floats) -> npt.NDArray[np.int64]:
        """The experts [n, used] of rows [n, n_embd] that enter the layer, each as the first of its sequence."""
        scores = self.scores(hidden)
        return np.argsort(-(scores + self._vector("exp_probs_b.bias")), axis=1)[:, : self._used]

    def scores(self, hidden: Floats) -> Floats:
        """The gate of every expert, [n, experts]."""
        gates = self.times(self.feed_forward_input(hidden), "ffn_gate_inp.weight")
        return (1 / (1 + np.exp(-gates))).astype(np.float32)

    def feed_forward_input(self, hidden: Floats) -> Floats:
        return _norm(hidden + self.attention(hidden)) * self._vector("ffn_norm.weight")

    def attention(self, hidden: Floats) -> Floats:
        """What attention adds to the rows."""
        x = _norm(hidden) * self._vector("attn_norm.weight")
        latent = self.times(x, "attn_kv_a_mqa.weight")[:, : self._kv_lora]
        latent = _norm(latent) * self._vector("attn_kv_a_norm.weight")
        value = self.matrix("attn_v_b.weight")  # [heads, values, latent]
        heads = np.einsum("hvl,nl->nhv", value, latent)
        return self.times(heads.reshape(len(hidden), -1), "attn_output.weight")

    def times(self, x: Floats, name: str) -> Floats:
        """``x`` [n, in] through a matrix of the layer: [n, out]."""
        tensor = self._tensors[name]
        parts = [
            x @ gguf.quants.dequantize(tensor.data[i : i + _ROWS_AT_ONCE], tensor.tensor_type).T
            for i in range(0, len(tensor.data), _ROWS_AT_ONCE)
        ]
        return np.concatenate(parts, axis=1)

    def matrix(self, name: str) -> Floats:
        """Dequantised, in numpy's order."""
        tensor = self._tensors[name]
        values: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return values

    def _vector(self, name: str) -> Floats:
        return self.matrix(name).reshape(-1)


def _norm(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(_EPS))
    return normed

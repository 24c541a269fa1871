"""A dense Llama in plain numpy, straight from the GGUF: nothing in common with the engine but the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


class NumpyLlama:
    """Weights dequantised to f32, one prompt at a time, no cache."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._weights: dict[str, Array] = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
        }

        def number(key: str) -> float:
            return float(reader.fields[f"llama.{key}"].contents())

        self.n_layers = int(number("block_count"))
        self._heads = int(number("attention.head_count"))
        self._kv_heads = int(number("attention.head_count_kv"))
        self._eps = number("attention.layer_norm_rms_epsilon")
        base = reader.fields.get("llama.rope.freq_base")
        self._rope_base = float(base.contents()) if base else 10000.0

    def logits(self, tokens: list[int]) -> Array:
        """float32 [n, n_vocab] for the whole prompt."""
        x = self._weights["token_embd.weight"][tokens]
        for layer in range(self.n_layers):
            x = self._layer(x, f"blk.{layer}.")
        head = self._weights.get("output.weight", self._weights["token_embd.weight"])
        logits: Array = self._norm(x, "output_norm.weight") @ head.T
        return logits

    def _layer(self, x: Array, prefix: str) -> Array:
        x = x + self._attention(self._norm(x, prefix + "attn_norm.weight"), prefix)
        y = self._norm(x, prefix + "ffn_norm.weight")
        gate = self._linear(y, prefix + "ffn_gate.weight")
        hidden = gate / (1 + np.exp(-gate)) * self._linear(y, prefix + "ffn_up.weight")
        return x + self._linear(hidden, prefix + "ffn_down.weight")

    def _attention(self, x: Array, prefix: str) -> Array:
        n = len(x)
        q = self._rotate(self._linear(x, prefix + "attn_q.weight").reshape(n, self._heads, -1))
        k = self._rotate(self._linear(x, prefix + "attn_k.weight").reshape(n, self._kv_heads, -1))
        v = self._linear(x, prefix + "attn_v.weight").reshape(n, self._kv_heads, -1)
        k = np.repeat(k, self._heads // self._kv_heads, axis=1)
        v = np.repeat(v, self._heads // self._kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
        return self._linear(mixed, prefix + "attn_output.weight")

    def _rotate(self, x: Array) -> Array:
        """Rotary embedding over neighbouring pairs, as GGUF stores Llama's projections."""
        half = x.shape[-1] // 2
        speeds = self._rope_base ** (-np.arange(half) / half)
        factors = self._weights.get("rope_freqs.weight")
        if factors is not None:
            speeds = speeds / factors
        angles = np.arange(len(x))[:, None, None] * speeds
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles))
        return np.stack(turned, -1).reshape(x.shape).astype(np.float32)

    def _norm(self, x: Array, name: str) -> Array:
        scale = 1 / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + self._eps)
        scaled: Array = x * scale * self._weights[name]
        return scaled

    def _linear(self, x: Array, name: str) -> Array:
        product: Array = x @ self._weights[name].T
        return product

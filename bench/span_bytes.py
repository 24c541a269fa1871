"""Bytes that a step reads of a span's weights and KV cache, from its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.artifact import Manifest
from swarm.artifact.manifest import TensorEntry


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer: weights that every step reads, those of one routed expert, and what a row reads per position of
    its context. Attention reads the keys of all positions and masks the ones that the indexer did not choose."""

    always: int
    per_expert: int
    n_expert: int
    n_expert_used: int
    kv_per_token: int

    def step(self, rows: int, context: int, experts: float) -> float:
        """Bytes read by a decode step of ``rows`` sequences that chose ``experts`` different experts in the layer."""
        return self.always + experts * self.per_expert + rows * context * self.kv_per_token

    def most_experts(self, rows: int) -> int:
        """How many different ones the rows can choose."""
        return min(self.n_expert, rows * self.n_expert_used)

    def expected_experts(self, rows: int) -> float:
        """How many different ones they choose when each chooses freely among all."""
        return self.n_expert * (1 - (1 - self.n_expert_used / self.n_expert) ** rows)


def layer_bytes(manifest: Manifest, layer: int) -> LayerBytes:
    tensors = [t for t in manifest.span_tensors(layer, layer + 1) if t.name.startswith(f"blk.{layer}.")]
    experts = [t for t in tensors if _is_routed(t)]
    n_expert = experts[0].dims[-1] if experts else 1
    routed = sum(t.bytes for t in experts)
    return LayerBytes(
        always=sum(t.bytes for t in tensors) - routed,
        per_expert=routed // n_expert,
        n_expert=n_expert,
        n_expert_used=manifest.n_expert_used if experts else 0,
        kv_per_token=manifest.kv_bytes_per_token(layer, layer + 1),
    )


def mean_step(layers: Sequence[LayerBytes], rows: int, context: int, experts: Sequence[float]) -> float:
    """Bytes per layer of a step, over the layers; ``experts`` has one number per layer."""
    return sum(layer.step(rows, context, n) for layer, n in zip(layers, experts, strict=True)) / len(layers)


def _is_routed(tensor: TensorEntry) -> bool:
    return tensor.name.endswith("_exps.weight")

"""The shape of glm-tiny: the target's structure in small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes in elements. The defaults keep what decides the code path (32 indexer heads of 128, a top-k far below a
    conversation's length, rows of 256 for the IQ types) and shrink the rest."""

    n_vocab: int
    hidden: int = 256
    n_layers: int = 8  # without the MTP block, which is block n_layers
    n_dense: int = 3
    ffn: int = 256
    expert_ffn: int = 256
    n_experts: int = 8
    n_used: int = 2
    expert_scale: float = 2.5
    n_heads: int = 4
    nope: int = 64
    rope: int = 64
    value: int = 64
    q_rank: int = 256
    kv_rank: int = 256
    index_heads: int = 32
    index_dim: int = 128
    top_k: int = 64
    rope_base: float = 8e6
    epsilon: float = 1e-5  # llama.cpp uses one for every norm
    context: int = 1 << 20

    def is_full(self, layer: int) -> bool:
        """Whether ``layer`` runs its own indexer: llama.cpp's table for files without ``attention.indexer.types``."""
        return layer < 3 or layer % 4 == 2

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers at which a span may start, without the ends."""
        return tuple(layer for layer in range(1, self.n_layers) if self.is_full(layer))

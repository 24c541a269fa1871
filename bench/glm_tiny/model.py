"""GLM-DSA in plain torch, with the MTP block as llama.cpp computes it.

Linear weights are [out, in] as in the GGUF; experts are stacked [expert, out, in]. Everything is causal within a
conversation; conversations that share a row do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.glm_tiny.batches import Batch
from bench.glm_tiny.shape import Shape

MASKED = -1e30
Watch = Callable[[int, Tensor, Tensor], None]


@dataclass
class Selection:
    """What the indexers choose. Without ``sparse`` attention is dense; with ``teach`` scores and attention are kept
    for the indexers' loss: one entry per full layer, the attention averaged over heads and the layers that share it."""

    sparse: bool = False
    teach: bool = False
    chosen: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)
    attention: list[list[Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Frame:
    """What all layers share: rotations [rows, length, rope / 2], the mask [rows, length, length], the indexers'
    choice, and where the experts' places are taken by others: [MoE layer, row, expert], n_experts meaning nobody."""

    cos: Tensor
    sin: Tensor
    mask: Tensor
    selection: Selection
    swapped: Tensor | None = None

    def first(self, n_rows: int) -> Frame:
        """That of the first rows, with every expert in its place."""
        return Frame(self.cos[:n_rows], self.sin[:n_rows], self.mask[:n_rows], self.selection)


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon)


def _linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over neighbouring pairs. The order within the result is another than llama.cpp's, which dot
    products do not see."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


class Indexer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attn_q_b = _linear(shape.q_rank, shape.index_heads * shape.index_dim)
        self.attn_k = _linear(shape.hidden, shape.index_dim)
        self.k_norm = nn.LayerNorm(shape.index_dim, eps=shape.epsilon)
        self.proj = _linear(shape.hidden, shape.index_heads)

    def forward(self, x: Tensor, q_low: Tensor, frame: Frame) -> Tensor:
        """Scores [rows, query, key]."""
        shape = self.shape
        q = self.attn_q_b(q_low).unflatten(-1, (shape.index_heads, shape.index_dim))
        k = self.k_norm(self.attn_k(x).float())
        cos, sin = frame.cos, frame.sin
        turned = rotate(q[..., : shape.rope], cos[:, :, None], sin[:, :, None])
        q = torch.cat([turned, q[..., shape.rope :]], -1)
        k = torch.cat([rotate(k[..., : shape.rope], cos, sin), k[..., shape.rope :]], -1)
        hits = functional.relu(torch.einsum("bthd,bsd->bhts", q, k))
        weight = self.proj(x) * (shape.index_heads * shape.index_dim) ** -0.5
        return torch.einsum("bhts,bth->bts", hits, weight).float()


class Attention(nn.Module):
    def __init__(self, shape: Shape, *, full: bool) -> None:
        super().__init__()
        self.shape = shape
        width = shape.nope + shape.rope
        self.attn_q_a = _linear(shape.hidden, shape.q_rank)
        self.attn_q_a_norm = Norm(shape.q_rank, shape.epsilon)
        self.attn_q_b = _linear(shape.q_rank, shape.n_heads * width)
        self.attn_kv_a_mqa = _linear(shape.hidden, shape.kv_rank + shape.rope)
        self.attn_kv_a_norm = Norm(shape.kv_rank, shape.epsilon)
        self.attn_kv_b = _linear(shape.kv_rank, shape.n_heads * (shape.nope + shape.value))
        self.attn_output = _linear(shape.n_heads * shape.value, shape.hidden)
        self.indexer = Indexer(shape) if full else None

    def forward(self, x: Tensor, frame: Frame, *, dense: bool) -> Tensor:
        shape = self.shape
        q_low = self.attn_q_a_norm(self.attn_q_a(x))
        q, k, v = self._heads(x, q_low, frame)
        mask = frame.mask
        if not dense:
            mask = self._select(x, q_low, frame)
        scores = (q @ k.transpose(-1, -2)) * (shape.nope + shape.rope) ** -0.5
        weights = scores.float().masked_fill(~mask[:, None], MASKED).softmax(-1)
        if frame.selection.teach and not dense:
            frame.selection.attention[-1].append(weights.detach().mean(1))
        mixed = weights.to(v.dtype) @ v
        out: Tensor = self.attn_output(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor, q_low: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        shape, cos, sin = self.shape, frame.cos, frame.sin
        q = self.attn_q_b(q_low).unflatten(-1, (shape.n_heads, -1))
        low = self.attn_kv_a_mqa(x)
        k_rope = rotate(low[..., shape.kv_rank :], cos, sin)
        kv = self.attn_kv_b(self.attn_kv_a_norm(low[..., : shape.kv_rank])).unflatten(-1, (shape.n_heads, -1))
        q_rope = rotate(q[..., shape.nope :], cos[:, :, None], sin[:, :, None])
        q = torch.cat([q[..., : shape.nope], q_rope], -1)
        k_rope = k_rope[:, :, None].expand(-1, -1, shape.n_heads, -1)
        k = torch.cat([kv[..., : shape.nope], k_rope.to(kv.dtype)], -1)
        return q.transpose(1, 2), k.transpose(1, 2).to(q.dtype), kv[..., shape.nope :].transpose(1, 2)

    def _select(self, x: Tensor, q_low: Tensor, frame: Frame) -> Tensor:
        selection = frame.selection
        if self.indexer is not None and (selection.sparse or selection.teach):
            scores = self.indexer(x.detach(), q_low.detach(), frame)
            if selection.teach:
                selection.scores.append(scores)
                selection.attention.append([])
            if selection.sparse:
                ranked = scores.detach().masked_fill(~frame.mask, MASKED)
                best = ranked.topk(min(self.shape.top_k, scores.shape[-1]), -1).indices
                selection.chosen = torch.zeros_like(frame.mask).scatter(-1, best, True) & frame.mask
        return frame.mask if selection.chosen is None else selection.chosen


class Dense(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = _linear(hidden, ffn)
        self.up = _linear(hidden, ffn)
        self.down = _linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Routed experts and the shared one. ``load`` counts the tokens of each expert in the last pass; ``watch``, when
    set, is given (expert, its inputs, its inner activations)."""

    bias: Tensor

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.shape, self.number = shape, number
        n, hidden, ffn = shape.n_experts, shape.hidden, shape.expert_ffn
        self.router = nn.Parameter(torch.empty(n, hidden))
        self.register_buffer("bias", torch.zeros(n))
        self.gate = nn.Parameter(torch.empty(n, ffn, hidden))
        self.up = nn.Parameter(torch.empty(n, ffn, hidden))
        self.down = nn.Parameter(torch.empty(n, hidden, ffn))
        self.shared = Dense(hidden, ffn)
        self.load = torch.zeros(n)
        self.watch: Watch | None = None

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        shape = self.shape
        flat = x.flatten(0, 1)
        with torch.autocast("cpu", enabled=False):  # as llama.cpp does; bf16 would make ties
            scores = functional.linear(flat.float(), self.router).sigmoid()
        chosen = (scores.detach() + self.bias).topk(shape.n_used, -1).indices
        weight = scores.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True) * shape.expert_scale
        if frame.swapped is not None:
            places = frame.swapped[self.number].repeat_interleave(x.shape[1], 0)
            chosen = places.gather(1, chosen)
        out: Tensor = self._routed(flat, chosen, weight) + self.shared(flat)
        return out.reshape(x.shape)

    def _routed(self, flat: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        n = self.shape.n_experts
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=n + 1)
        self.load = counts[:n]
        order = order[: int(self.load.sum())]  # those with nobody come last
        token = order // self.shape.n_used
        parts = []
        # one unbind is one gradient; indexing each expert would fill a whole stack of zeros every time
        stacks = zip(
            torch.split(flat[token], self.load.tolist()),
            self.gate.unbind(0),
            self.up.unbind(0),
            self.down.unbind(0),
            strict=True,
        )
        for number, (x, gate, up, down) in enumerate(stacks):
            inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
            if self.watch is not None:
                self.watch(number, x, inner)
            parts.append(functional.linear(inner, down))
        out = torch.cat(parts).float() * weight.flatten()[order][:, None]
        return torch.zeros(flat.shape).index_add(0, token, out)


class Block(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.is_mtp = layer == shape.n_layers
        self.attn_norm = Norm(shape.hidden, shape.epsilon)
        self.attention = Attention(shape, full=not self.is_mtp and shape.is_full(layer))
        self.ffn_norm = Norm(shape.hidden, shape.epsilon)
        is_dense = layer < shape.n_dense
        self.dense = Dense(shape.hidden, shape.ffn) if is_dense else None
        self.experts = None if is_dense else Experts(shape, layer - shape.n_dense)

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        x = x + self.attention(self.attn_norm(x), frame, dense=self.is_mtp)
        y = self.ffn_norm(x)
        added: Tensor
        if self.experts is not None:
            added = self.experts(y, frame)
        else:
            assert self.dense is not None
            added = self.dense(y)
        return x + added


class Mtp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm = Norm(shape.hidden, shape.epsilon)
        self.hnorm = Norm(shape.hidden, shape.epsilon)
        self.eh_proj = _linear(2 * shape.hidden, shape.hidden)
        self.shared_head_norm = Norm(shape.hidden, shape.epsilon)
        self.block = Block(shape, shape.n_layers)

    def forward(self, embedded: Tensor, hidden: Tensor, position: Tensor, frame: Frame) -> Tensor:
        """Row i takes the trunk's row before it and token i; a conversation's first row takes zeros."""
        before = torch.zeros_like(hidden)
        before[:, 1:] = hidden[:, :-1]
        before = before * (position > 0)[..., None]
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(before)], -1))
        out: Tensor = self.shared_head_norm(self.block(x, frame))
        return out


class GlmTiny(nn.Module):
    speeds: Tensor

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape, layer) for layer in range(shape.n_layers)])
        self.output_norm = Norm(shape.hidden, shape.epsilon)
        self.output = _linear(shape.hidden, shape.n_vocab)
        self.mtp = Mtp(shape)
        speeds = shape.rope_base ** -(torch.arange(0, shape.rope, 2).float() / shape.rope)
        self.register_buffer("speeds", speeds, persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            spread = weight.shape[-1] ** -0.5
            if name.endswith(("attn_output.weight", "down.weight", "down")):
                spread *= 0.1  # what adds to the stream starts small
            elif name == "token_embd.weight":
                spread = 0.5
            elif name.endswith(("router", "output.weight")):
                spread = 0.02
            nn.init.normal_(weight, std=spread, generator=generator)

    def moes(self) -> list[Experts]:
        """In order of layers, the MTP block's last."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def forward(
        self, batch: Batch, selection: Selection | None = None, swapped: Tensor | None = None
    ) -> tuple[Tensor, Frame, Tensor]:
        """Hidden rows [rows, length, hidden] after the output norm, and what ``draft`` needs beside them."""
        angle = batch.position[..., None].float() * self.speeds
        index = torch.arange(batch.ids.shape[1])
        same = batch.document[:, :, None] == batch.document[:, None, :]
        mask = same & (index[:, None] >= index[None, :])
        frame = Frame(angle.cos(), angle.sin(), mask, selection or Selection(), swapped)
        embedded = self.token_embd(batch.ids)
        x = embedded
        for block in self.blocks:
            x = block(x, frame)
        return self.output_norm(x), frame, embedded

    def draft(self, batch: Batch, hidden: Tensor, frame: Frame, embedded: Tensor) -> Tensor:
        """The MTP block's rows [rows, length, hidden]: row i speaks of token i + 1, knowing the trunk up to i - 1."""
        out: Tensor = self.mtp(embedded, hidden, batch.position, frame)
        return out

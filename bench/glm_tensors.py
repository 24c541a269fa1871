"""Tensors of a GLM-5.2 file: names, dims and the types of its UD-IQ1_S quantisation, for any size of model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from bench.glm_metadata import GlmShape
from swarm.artifact import ggml_types
from swarm.artifact.gguf_file import DEFAULT_ALIGNMENT
from swarm.artifact.manifest import TensorEntry

Dims: TypeAlias = tuple[int, ...]  # the row first

_BY_KIND = {
    "ffn_gate_exps": "IQ1_S",
    "ffn_up_exps": "IQ1_S",
    "ffn_down_exps": "IQ3_XXS",
    "attn_q_a": "Q5_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_gate_shexp": "Q5_K",
    "ffn_up_shexp": "Q5_K",
    "ffn_down": "Q6_K",
    "ffn_down_shexp": "Q6_K",
    "attn_q_b": "Q8_0",
    "attn_kv_a_mqa": "Q8_0",
    "attn_k_b": "Q8_0",
    "attn_v_b": "Q8_0",
    "indexer.attn_k": "Q8_0",
    "indexer.attn_q_b": "Q8_0",
    "token_embd": "Q4_K",
    "output": "Q4_K",
}


def class_a_type(name: str) -> str:
    """The type a tensor has in most layers: 53 of the 75 with experts, and the dense ones."""
    kind = name.removesuffix(".weight").removesuffix(".bias")
    if kind.startswith("blk."):
        kind = kind.split(".", 2)[2]
    return _BY_KIND.get(kind, "F32")


def trunk_tensors(shape: GlmShape) -> Iterator[tuple[str, Dims]]:
    """All tensors without the MTP block, in the order of the artifact."""
    yield "output.weight", (shape.n_embd, shape.n_vocab)
    yield "output_norm.weight", (shape.n_embd,)
    yield "token_embd.weight", (shape.n_embd, shape.n_vocab)
    for layer in range(shape.n_layers):
        for name, dims in layer_tensors(shape, dense=layer < shape.n_dense):
            yield f"blk.{layer}.{name}", dims


def layer_tensors(shape: GlmShape, *, dense: bool) -> list[tuple[str, Dims]]:
    """One layer, with the indexer that shared layers carry too."""
    embd, q_lora, kv_lora, heads = shape.n_embd, shape.q_lora, shape.kv_lora, shape.n_head
    feed_forward = _dense(shape) if dense else _experts(shape)
    tensors: list[tuple[str, Dims]] = [
        ("attn_k_b.weight", (shape.key_nope, kv_lora, heads)),
        ("attn_kv_a_mqa.weight", (embd, kv_lora + shape.rope)),
        ("attn_kv_a_norm.weight", (kv_lora,)),
        ("attn_norm.weight", (embd,)),
        ("attn_output.weight", (heads * shape.value_length, embd)),
        ("attn_q_a.weight", (embd, q_lora)),
        ("attn_q_a_norm.weight", (q_lora,)),
        ("attn_q_b.weight", (q_lora, heads * (shape.key_nope + shape.rope))),
        ("attn_v_b.weight", (kv_lora, shape.value_length, heads)),
        ("ffn_norm.weight", (embd,)),
        ("indexer.attn_k.weight", (embd, shape.indexer_key)),
        ("indexer.attn_q_b.weight", (q_lora, shape.indexer_heads * shape.indexer_key)),
        ("indexer.k_norm.bias", (shape.indexer_key,)),
        ("indexer.k_norm.weight", (shape.indexer_key,)),
        ("indexer.proj.weight", (embd, shape.indexer_heads)),
        *feed_forward,
    ]
    return sorted(tensors)


def _dense(shape: GlmShape) -> list[tuple[str, Dims]]:
    return [
        ("ffn_down.weight", (shape.n_ff, shape.n_embd)),
        ("ffn_gate.weight", (shape.n_embd, shape.n_ff)),
        ("ffn_up.weight", (shape.n_embd, shape.n_ff)),
    ]


def _experts(shape: GlmShape) -> list[tuple[str, Dims]]:
    into, out = (shape.n_embd, shape.n_ff_expert), (shape.n_ff_expert, shape.n_embd)
    return [
        ("exp_probs_b.bias", (shape.n_expert,)),
        ("ffn_down_exps.weight", (*out, shape.n_expert)),
        ("ffn_down_shexp.weight", out),
        ("ffn_gate_exps.weight", (*into, shape.n_expert)),
        ("ffn_gate_inp.weight", (shape.n_embd, shape.n_expert)),
        ("ffn_gate_shexp.weight", into),
        ("ffn_up_exps.weight", (*into, shape.n_expert)),
        ("ffn_up_shexp.weight", into),
    ]


def placed(tensors: Iterable[tuple[str, Dims]], file: int, header_bytes: int) -> tuple[TensorEntry, ...]:
    """The tensors one behind another in one file, each padded, with their class A types."""
    entries: list[TensorEntry] = []
    at = header_bytes
    for name, dims in tensors:
        kind = class_a_type(name)
        size = ggml_types.tensor_bytes(kind, dims)
        entries.append(TensorEntry(name, file, at, size, kind, dims))
        at += size + -size % DEFAULT_ALIGNMENT
    return tuple(entries)

"""A glm-dsa GGUF as a Transformers checkpoint: ``GlmMoeDsaForCausalLM`` with the same weights in f32.

The mapping is written from the two programs' descriptions of the architecture and shares nothing with the engine. Both
rotate neighbouring pairs of values, in attention and indexer, so no row changes its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.gguf_weights import Array, GgufWeights

CONFIG = "config.json"
TENSORS = "model.safetensors"

_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_INDEXER = {
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
}
_DENSE = {f"ffn_{kind}.weight": f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
_SPARSE = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
} | {f"ffn_{kind}_shexp.weight": f"mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up", "down")}
_STACKED = ("attn_k_b.weight", "attn_v_b.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight")
_NAME = re.compile(r"blk\.(\d+)\.(.*)")


class Checkpoint:
    """What of a GGUF goes where. The trunk only: Transformers has no MTP block for this architecture."""

    def __init__(self, source: Path) -> None:
        self._weights = GgufWeights(source)
        blocks, mtp = self._number("block_count"), self._number("nextn_predict_layers", 0)
        self.n_layers = blocks - mtp
        self.n_dense = self._number("leading_dense_block_count", 0)
        self.full = self._indexer_types()

    def config(self) -> dict[str, Any]:
        """The values of ``config.json``."""
        number = self._number
        rope, key = number("rope.dimension_count"), number("attention.key_length_mla")
        heads, shared = number("attention.head_count"), number("expert_shared_count")
        vocabulary, width = self._weights.shape("token_embd.weight")
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "dtype": "float32",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": number("feed_forward_length"),
            "moe_intermediate_size": number("expert_feed_forward_length"),
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "n_routed_experts": number("expert_count"),
            "num_experts_per_tok": number("expert_used_count"),
            "n_shared_experts": shared,
            "routed_scaling_factor": float(self._value("expert_weights_scale")),
            "norm_topk_prob": bool(self._value("expert_weights_norm")),
            "n_group": number("expert_group_count", 1),
            "topk_group": number("expert_group_used_count", 1),
            "first_k_dense_replace": self.n_dense,
            "q_lora_rank": number("attention.q_lora_rank"),
            "kv_lora_rank": number("attention.kv_lora_rank"),
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": key - rope,
            "v_head_dim": number("attention.value_length_mla"),
            "index_topk": number("attention.indexer.top_k"),
            "index_head_dim": number("attention.indexer.key_length"),
            "index_n_heads": number("attention.indexer.head_count"),
            "indexer_types": ["full" if full else "shared" for full in self.full],
            "rms_norm_eps": self.epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": float(self._value("rope.freq_base"))},
            "max_position_embeddings": number("context_length"),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    @property
    def epsilon(self) -> float:
        # the file holds an f32, Transformers computes with the number that was meant
        return float(f"{float(self._value('attention.layer_norm_rms_epsilon')):.6g}")

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Transformers' name and value of each parameter. Raises KeyError when the file lacks one."""
        for ours, theirs in _MODEL.items():
            yield theirs, self._weights.tensor(ours)
        for layer in range(self.n_layers):
            names = _LAYER | (_INDEXER if self.full[layer] else {}) | (_DENSE if layer < self.n_dense else _SPARSE)
            for ours, theirs in names.items():
                yield f"model.layers.{layer}.{theirs}", self._layer_tensor(layer, ours)
            yield f"model.layers.{layer}.self_attn.kv_b_proj.weight", self._kv_b(layer)
            if layer >= self.n_dense:
                yield f"model.layers.{layer}.mlp.experts.gate_up_proj", self._gate_up(layer)

    def unmapped(self) -> list[str]:
        """Tensors of the file that go nowhere, other than the MTP block and the dead indexers of shared layers."""
        return [name for name in self._weights.names if not self._goes_somewhere(name)]

    def _goes_somewhere(self, name: str) -> bool:
        match = _NAME.fullmatch(name)
        if match is None:
            return name in _MODEL
        layer, kind = int(match[1]), match[2]
        known = (_LAYER, _INDEXER, _DENSE, _SPARSE, _STACKED)
        return layer >= self.n_layers or any(kind in table for table in known)

    def _kv_b(self, layer: int) -> Array:
        """llama.cpp keeps the two halves apart, [heads, rank, nope] and [heads, value, rank]; here [heads * (nope +
        value), rank]."""
        keys = self._layer_tensor(layer, "attn_k_b.weight").transpose(0, 2, 1)
        both = np.concatenate([keys, self._layer_tensor(layer, "attn_v_b.weight")], axis=1)
        return both.reshape(-1, both.shape[-1])

    def _gate_up(self, layer: int) -> Array:
        """[experts, 2 * feed-forward, hidden], all rows of the gate first."""
        parts = [self._layer_tensor(layer, f"ffn_{kind}_exps.weight") for kind in ("gate", "up")]
        return np.concatenate(parts, axis=1)

    def _layer_tensor(self, layer: int, name: str) -> Array:
        return self._weights.tensor(f"blk.{layer}.{name}")

    def _indexer_types(self) -> tuple[bool, ...]:
        """GLM-5.2's own files lack the key: their schedule is the first two layers and then every fourth."""
        schedule = [layer < 2 or layer % 4 == 2 for layer in range(self.n_layers)]
        return tuple(bool(full) for full in self._value("attention.indexer.types", schedule))

    def _number(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default))

    def _value(self, key: str, default: Any = None) -> Any:
        return self._weights.value(f"glm-dsa.{key}", default)


def write_checkpoint(source: Path, folder: Path) -> Path:
    """Writes ``config.json`` and the safetensors file into ``folder``. Raises ValueError for a tensor that has no place
    in Transformers' model."""
    from safetensors.numpy import save_file

    checkpoint = Checkpoint(source)
    if unmapped := checkpoint.unmapped():
        raise ValueError(f"{source}: no place for {unmapped[0]} in GlmMoeDsaForCausalLM; extend the mapping")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(checkpoint.config(), indent=1) + "\n")
    tensors = {name: np.ascontiguousarray(value) for name, value in checkpoint.tensors()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    """``GlmMoeDsaForCausalLM`` as Transformers loads it, in f32 with eager attention, experts one by one.

    Raises ValueError unless the checkpoint holds exactly the model's parameters.
    """
    import torch
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, report = GlmMoeDsaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = {what: names for what, names in report.items() if names}
    if wrong:
        raise ValueError(f"{folder}: does not fit GlmMoeDsaForCausalLM: {wrong}")
    for layer in model.model.layers:
        attention = layer.self_attn
        # Transformers gives these the default of 1e-6; llama.cpp has the file's epsilon in every RMS norm ...
        attention.q_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        attention.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        # ... and none in the indexer's layer norm
        if attention.indexer is not None:
            attention.indexer.k_norm.eps = 0.0
    return model.eval()


def logits(model: Any, tokens: Sequence[int]) -> Array:
    """float32 [n, n_vocab] of the whole prompt in one pass, on one thread: on a busy machine OpenMP's threads wait for
    each other spinning, which took a hundred times as long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            rows: Array = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    finally:
        torch.set_num_threads(threads)
    return rows


@contextmanager
def angles_from_f64(model: Any) -> Iterator[None]:
    """Inside, the rotary embedding's angles are exact to f32. They grow with the position and are most of what rounding
    does to a logit: how far a model then differs from itself says what can be asked of another program."""
    import torch

    rotary = model.model.rotary_emb
    width, base = model.config.qk_rope_head_dim, model.config.rope_parameters["rope_theta"]
    speeds = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)

    def angles(_hidden: Any, position_ids: Any) -> tuple[Any, Any]:
        turned = position_ids[..., None].double() * speeds
        both = torch.cat([turned, turned], -1)
        return both.cos().float(), both.sin().float()

    rotary.forward = angles
    try:
        yield
    finally:
        del rotary.forward  # the class has its own


@contextmanager
def without_indexer(model: Any) -> Iterator[None]:
    """Inside, every full layer selects all keys, as if top-k had no end."""
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    for indexer in indexers:
        indexer.index_topk = model.config.max_position_embeddings
    try:
        yield
    finally:
        for indexer in indexers:
            indexer.index_topk = model.config.index_topk

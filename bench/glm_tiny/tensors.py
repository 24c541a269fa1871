"""The model's weights under their names in a GGUF file."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from bench.glm_tiny.model import GlmTiny

EXPERTS = {
    "router": "ffn_gate_inp.weight",
    "bias": "exp_probs_b.bias",
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}


def gguf_name(name: str, n_layers: int) -> str:
    """Of a parameter or module other than ``attn_kv_b``, which the file holds in two parts."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
    if found:
        return f"blk.{found[1]}.{_in_block(found[2])}"
    found = re.fullmatch(r"mtp\.(block\.)?(.*)", name)
    if found:
        return f"blk.{n_layers}.{_in_block(found[2]) if found[1] else 'nextn.' + found[2]}"
    return name


def _in_block(name: str) -> str:
    room, _, rest = name.partition(".")
    if room == "attention":
        return rest
    if room == "dense":
        return f"ffn_{rest}"
    if room == "experts":
        part, _, weight = rest.removeprefix("shared.").partition(".")
        return f"ffn_{part}_shexp.{weight}" if rest.startswith("shared.") else EXPERTS[rest]
    return name


def tensors(model: GlmTiny) -> dict[str, Tensor]:
    """By file order; shapes in numpy order, the last axis being ggml's first. They share the model's memory where
    they can."""
    shape, found = model.shape, {}
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if name == "speeds":
            continue
        if name.endswith("attn_kv_b.weight"):
            heads = value.detach().reshape(shape.n_heads, shape.nope + shape.value, shape.kv_rank)
            prefix = gguf_name(name, shape.n_layers).removesuffix("attn_kv_b.weight")
            found[f"{prefix}attn_k_b.weight"] = heads[:, : shape.nope].transpose(1, 2)
            found[f"{prefix}attn_v_b.weight"] = heads[:, shape.nope :]
        else:
            found[gguf_name(name, shape.n_layers)] = value.detach()
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, int, str]:
    found = re.match(r"blk\.(\d+)\.", name)
    if found:
        return (1, int(found[1]), name)
    return (0, 0, name) if name.startswith("token_embd") else (2, 0, name)


@torch.no_grad()
def load(model: GlmTiny, values: dict[str, Tensor]) -> None:
    """Write ``values`` (by file name) into the model."""
    places = tensors(model)
    for name, value in values.items():
        places[name].copy_(value)  # a view of the parameter, attn_k_b and attn_v_b too

"""The type of every tensor: that of the same role in GLM-5.2 UD-IQ1_S."""

from __future__ import annotations

import re

from gguf import GGMLQuantizationType as Kind

IQ2_LAYERS = (6, 7)  # layer 6 is so there, and 7 stands for the last ones, 75 to 77
IQ4_LAYERS = (7,)
Q5 = ("attn_q_a", "attn_output", "ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp")
Q6 = ("ffn_down", "ffn_down_shexp")
Q8 = ("attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "indexer.attn_k", "indexer.attn_q_b", "nextn.eh_proj")


def kind_of(name: str, n_layers: int) -> Kind:
    """``n_layers`` is also the number of the MTP block."""
    if name in ("token_embd.weight", "output.weight"):
        return Kind.Q4_K
    found = re.fullmatch(r"blk\.(\d+)\.(.*)\.weight", name)
    if not found:
        return Kind.F32
    layer, role = int(found[1]), found[2]
    if role in ("ffn_gate_exps", "ffn_up_exps"):
        return Kind.Q2_K if layer == n_layers else Kind.IQ2_XXS if layer in IQ2_LAYERS else Kind.IQ1_S
    if role == "ffn_down_exps":
        return Kind.Q3_K if layer == n_layers else Kind.IQ4_XS if layer in IQ4_LAYERS else Kind.IQ3_XXS
    for roles, kind in ((Q5, Kind.Q5_K), (Q6, Kind.Q6_K), (Q8, Kind.Q8_0)):
        if role in roles:
            return kind
    return Kind.F32


def all_f32(_name: str, _n_layers: int) -> Kind:
    return Kind.F32

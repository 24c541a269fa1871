"""Small GGUF files for the tests of artifacts: right in structure, with few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

N_EMBD = 32
N_VOCAB = 40
N_FF = 64
TOKENS = [*(f"t{number}" for number in range(N_VOCAB - 4)), "<|endoftext|>", "<|user|>", "<|observation|>", "<|end|>"]
GLM_STOPS = (N_VOCAB - 4, N_VOCAB - 3, N_VOCAB - 2)


def write_llama(path: Path, n_layers: int = 3, *, tied: bool = False, rope_factors: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    _vocabulary(writer)
    _ends(writer, tied=tied)
    if rope_factors:
        _add(writer, "rope_freqs.weight", 4)
    for layer in range(n_layers):
        _add(writer, f"blk.{layer}.attn_norm.weight", N_EMBD)
        _add(writer, f"blk.{layer}.ffn_up.weight", N_FF, N_EMBD)
    return _finish(writer, path)


def write_glm(
    path: Path,
    n_layers: int = 6,
    *,
    full: Sequence[bool] | None = None,
    n_ctx: int = 4096,
    mtp: bool = True,
    mtp_tensors: bool = True,
    dead_indexers: bool = True,
    half: bool = False,
    split_tensors: int = 0,
) -> Path:
    """glm-dsa with indexer tensors in every layer, as GLM-5.2's file has them, unless ``dead_indexers`` is false: then
    only where ``full`` says so. ``half`` makes the indexers' tensors F16. ``split_tensors`` writes a split set whose
    first file holds no tensors; the path returned is that file's."""
    splitting = {"split_max_tensors": split_tensors, "small_first_shard": True} if split_tensors else {}
    writer = gguf.GGUFWriter(path, "glm-dsa", **splitting)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers + mtp)
    if mtp:
        writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(N_FF)
    writer.add_expert_feed_forward_length(16)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(96)
    writer.add_value_length(64)
    writer.add_key_length_mla(32)
    writer.add_value_length_mla(16)
    writer.add_indexer_head_count(2)
    writer.add_indexer_key_length(32)
    writer.add_indexer_top_k(8)
    if full is not None:
        writer.add_array("glm-dsa.attention.indexer.types", list(full))
    _vocabulary(writer)
    _ends(writer, tied=False)
    for layer in range(n_layers + (mtp and mtp_tensors)):
        _add(writer, f"blk.{layer}.attn_norm.weight", N_EMBD)
        if dead_indexers or full is None or (layer < n_layers and full[layer]):
            kind = np.float16 if half else np.float32
            writer.add_tensor(f"blk.{layer}.indexer.attn_k.weight", np.zeros((32, N_EMBD), dtype=kind))
    if mtp and mtp_tensors:
        _add(writer, f"blk.{n_layers}.nextn.eh_proj.weight", N_EMBD, 2 * N_EMBD)
    return _finish(writer, path, split=bool(split_tensors))


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(N_VOCAB - 1)


def _ends(writer: gguf.GGUFWriter, *, tied: bool) -> None:
    _add(writer, "token_embd.weight", N_VOCAB, N_EMBD)
    _add(writer, "output_norm.weight", N_EMBD)
    if not tied:
        _add(writer, "output.weight", N_VOCAB, N_EMBD)


def _add(writer: gguf.GGUFWriter, name: str, *shape: int) -> None:
    writer.add_tensor(name, np.zeros(shape, dtype=np.float32))


def _finish(writer: gguf.GGUFWriter, path: Path, *, split: bool = False) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*.gguf")) if split else path

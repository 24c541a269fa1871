"""Small model files with random weights, written on demand: structure without meaning.

``write_glm`` makes a glm-dsa file with MTP block, shared indexer layers and a top-k far below a test prompt;
``write_llama`` a dense one. Quantised tensors are random blocks whose scale is set so that the values have the wanted
spread: every bit pattern of the types used is valid, so no quantiser is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as T

SPECIALS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_FULL_LAYERS = (True, True, True, False, False, False, True, False, False, False)
GLM_TOP_K = 64
GLM_CUTS = (1, 2, 6)

TypeOf = Callable[[str], T]
Shape = tuple[int, ...]  # numpy order: the last one is ggml's first

# byte offsets of the f16 scales inside a block
_SCALES = {
    T.Q8_0: (0,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
    T.Q2_K: (80, 82),
    T.Q3_K: (108,),
    T.IQ1_S: (0,),
    T.IQ2_XXS: (0,),
    T.IQ3_XXS: (0,),
    T.IQ4_XS: (0,),
}


def f32(_name: str) -> T:
    return T.F32


def ud_mix(name: str) -> T:
    """The type of each tensor in the target artifact, for a ten-layer file with its MTP block at layer 10."""
    if "norm" in name or "ffn_gate_inp" in name or "indexer.proj" in name or "exp_probs" in name:
        return T.F32
    match = re.match(r"blk\.(\d+)\.(.*)\.", name)
    if match is None:
        return T.Q4_K
    layer, kind = int(match[1]), match[2]
    if kind in ("ffn_gate_exps", "ffn_up_exps"):
        return T.Q2_K if layer == 10 else T.IQ2_XXS if layer in (6, 8, 9) else T.IQ1_S
    if kind == "ffn_down_exps":
        return T.Q3_K if layer == 10 else T.IQ4_XS if layer == 8 else T.IQ3_XXS
    if kind in ("attn_q_a", "attn_output", "ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp"):
        return T.Q5_K
    return T.Q6_K if kind in ("ffn_down", "ffn_down_shexp") else T.Q8_0


def write_glm(
    path: Path,
    type_of: TypeOf = f32,
    *,
    seed: int = 0,
    n_head: int = 4,
    schedule_key: bool = True,
    dead_indexers: bool = False,
    context: int = 1 << 20,
) -> Path:
    """A glm-dsa model: 10 layers and an MTP block, hidden 256, 8 experts of 256 (2 used), top-k 64.

    ``schedule_key``: whether the file says which layers have an indexer of their own. ``dead_indexers``: whether the
    other layers carry the tensors of one as well. The weights are the same with and without.
    """
    writer = gguf.GGUFWriter(path, "glm-dsa")
    _glm_metadata(writer, n_head, context, schedule_key=schedule_key)
    _vocabulary(writer, "glm4")
    rng, dead_rng = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    for name, shape in _glm_tensors(len(_tokens()), n_head):
        dead = is_dead(name)
        if dead_indexers or not dead:
            _add(writer, name, shape, type_of(name), dead_rng if dead else rng)
    return _finish(writer, path)


def is_dead(name: str) -> bool:
    """Whether a tensor of ``write_glm``'s file belongs to an indexer that never runs. The MTP block's counts as used:
    files without it are not read."""
    match = re.match(r"blk\.(\d+)\.indexer\.", name)
    return match is not None and int(match[1]) < 10 and not GLM_FULL_LAYERS[int(match[1])]


def write_llama(path: Path, *, tied: bool = False, rope_factors: bool = False, seed: int = 0) -> Path:
    """A dense Llama: 6 layers, hidden 128, 4 heads over 2 KV heads, F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(128)
    writer.add_block_count(6)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    _vocabulary(writer, "smollm")
    rng = np.random.default_rng(seed)
    for name, shape in _llama_tensors(len(_tokens()), tied=tied):
        _add(writer, name, shape, T.F32, rng)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 4, 16, dtype=np.float32))
    return _finish(writer, path)


def untie(source: Path, path: Path) -> Path:
    """A copy of a tied GGUF with an output matrix of its own: the embedding's rows in another order."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            writer.add_tensor("output.weight", np.roll(tensor.data, 7, axis=0), raw_dtype=tensor.tensor_type)
    return _finish(writer, path)


def _glm_metadata(writer: gguf.GGUFWriter, n_head: int, context: int, *, schedule_key: bool) -> None:
    writer.add_name("random glm-dsa")
    writer.add_context_length(context)
    writer.add_embedding_length(256)
    writer.add_block_count(11)
    writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(512)
    writer.add_expert_feed_forward_length(256)
    writer.add_leading_dense_block_count(3)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(256)
    writer.add_kv_lora_rank(256)
    writer.add_key_length(320)
    writer.add_value_length(256)
    writer.add_key_length_mla(128)
    writer.add_value_length_mla(64)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(8e6)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_indexer_head_count(32)
    writer.add_indexer_key_length(128)
    writer.add_indexer_top_k(GLM_TOP_K)
    if schedule_key:
        writer.add_array("glm-dsa.attention.indexer.types", list(GLM_FULL_LAYERS))


def _glm_tensors(n_vocab: int, n_head: int) -> Iterator[tuple[str, Shape]]:
    yield "token_embd.weight", (n_vocab, 256)
    yield "output_norm.weight", (256,)
    yield "output.weight", (n_vocab, 256)
    for layer in range(11):
        for name, shape in _glm_layer(layer, n_head):
            yield f"blk.{layer}.{name}", shape


def _glm_layer(layer: int, n_head: int) -> Iterator[tuple[str, Shape]]:
    yield "attn_norm.weight", (256,)
    yield "attn_q_a.weight", (256, 256)
    yield "attn_q_a_norm.weight", (256,)
    yield "attn_q_b.weight", (128 * n_head, 256)
    yield "attn_kv_a_mqa.weight", (320, 256)
    yield "attn_kv_a_norm.weight", (256,)
    yield "attn_k_b.weight", (n_head, 256, 64)
    yield "attn_v_b.weight", (n_head, 64, 256)
    yield "attn_output.weight", (256, 64 * n_head)
    yield "ffn_norm.weight", (256,)
    yield "indexer.k_norm.weight", (128,)
    yield "indexer.k_norm.bias", (128,)
    yield "indexer.proj.weight", (32, 256)
    yield "indexer.attn_k.weight", (128, 256)
    yield "indexer.attn_q_b.weight", (4096, 256)
    if layer < 3:
        yield "ffn_gate.weight", (512, 256)
        yield "ffn_up.weight", (512, 256)
        yield "ffn_down.weight", (256, 512)
    else:
        yield "ffn_gate_inp.weight", (8, 256)
        yield "exp_probs_b.bias", (8,)
        for kind in ("gate", "up", "down"):
            yield f"ffn_{kind}_exps.weight", (8, 256, 256)
            yield f"ffn_{kind}_shexp.weight", (256, 256)
    if layer == 10:
        yield "nextn.eh_proj.weight", (256, 512)
        yield "nextn.enorm.weight", (256,)
        yield "nextn.hnorm.weight", (256,)
        yield "nextn.shared_head_norm.weight", (256,)


def _llama_tensors(n_vocab: int, *, tied: bool) -> Iterator[tuple[str, Shape]]:
    yield "token_embd.weight", (n_vocab, 128)
    yield "output_norm.weight", (128,)
    if not tied:
        yield "output.weight", (n_vocab, 128)
    for layer in range(6):
        yield f"blk.{layer}.attn_norm.weight", (128,)
        yield f"blk.{layer}.attn_q.weight", (128, 128)
        yield f"blk.{layer}.attn_k.weight", (64, 128)
        yield f"blk.{layer}.attn_v.weight", (64, 128)
        yield f"blk.{layer}.attn_output.weight", (128, 128)
        yield f"blk.{layer}.ffn_norm.weight", (128,)
        yield f"blk.{layer}.ffn_gate.weight", (256, 128)
        yield f"blk.{layer}.ffn_up.weight", (256, 128)
        yield f"blk.{layer}.ffn_down.weight", (128, 256)


def _add(writer: gguf.GGUFWriter, name: str, shape: Shape, kind: T, rng: np.random.Generator) -> None:
    if name.endswith("norm.weight"):
        writer.add_tensor(name, rng.normal(1, 0.1, shape).astype(np.float32))
        return
    spread = 1.0 if name == "token_embd.weight" else 0.1 if name.endswith(".bias") else shape[-1] ** -0.5
    if kind == T.F32:
        writer.add_tensor(name, rng.normal(0, spread, shape).astype(np.float32))
    else:
        writer.add_tensor(name, _random_blocks(shape, kind, spread, rng), raw_dtype=kind)


def _random_blocks(shape: Shape, kind: T, spread: float, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    _set_scales(blocks, kind, 1.0)
    sample = gguf.quants.dequantize(blocks.reshape(-1, size)[:64], kind)
    _set_scales(blocks, kind, spread / float(sample.std()))
    return blocks.reshape(*shape[:-1], -1)


def _set_scales(blocks: npt.NDArray[np.uint8], kind: T, scale: float) -> None:
    for offset in _SCALES[kind]:
        blocks[..., offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)


def _tokens() -> list[str]:
    """One token per byte in GPT-2's spelling, one merge, and the special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = (chr(256 + i) for i in range(256))
    letters = [chr(b) if b in printable else next(rest) for b in range(256)]
    return [*letters, "th", *SPECIALS]


def _vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = _tokens()
    kinds = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_bos_token_id(tokens.index("[gMASK]"))
    writer.add_chat_template("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>")


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""The GGUF file: metadata as the target's, tensors as ``mix`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from bench.glm_tiny import mix
from bench.glm_tiny.dialogue import TEMPLATE
from bench.glm_tiny.importance import Importance
from bench.glm_tiny.model import GlmTiny
from bench.glm_tiny.quantiser import Bytes, quantise
from bench.glm_tiny.shape import Shape
from bench.glm_tiny.tensors import tensors
from bench.glm_tiny.vocabulary import SHOWN, SPECIALS, Vocabulary

NAME = "GLM-tiny"
KindOf = Callable[[str, int], Kind]


def write(
    path: Path,
    model: GlmTiny,
    vocabulary: Vocabulary,
    kind_of: KindOf = mix.kind_of,
    importance: Importance | None = None,
    kept: Mapping[str, Bytes] | None = None,
) -> Path:
    """``kept`` are tensors quantised before, whose bytes go into the file as they are: quantising their dequantised
    values again would give others."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "glm-dsa")
    _metadata(writer, model.shape, quantised=kind_of is not mix.all_f32)
    _vocabulary(writer, vocabulary)
    for name, value in tensors(model).items():
        kind = kind_of(name, model.shape.n_layers)
        if kind == Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(value.float().numpy()))
            continue
        blocks = (kept or {}).get(name)
        if blocks is None:
            blocks = quantise(value.float().numpy(), kind, (importance or {}).get(name))
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.replace(path)


def _metadata(writer: gguf.GGUFWriter, shape: Shape, *, quantised: bool) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(NAME)
    writer.add_description("a small model trained on synthetic questions, with the structure of GLM-5.2")
    writer.add_license("mit")
    writer.add_sampling_temp(1.0)
    writer.add_sampling_top_p(0.95)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_IQ1_S if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.n_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rope)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    _experts(writer, shape)
    _attention(writer, shape)


def _experts(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_leading_dense_block_count(shape.n_dense)
    writer.add_expert_feed_forward_length(shape.expert_ffn)
    writer.add_expert_count(shape.n_experts)
    writer.add_expert_used_count(shape.n_used)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(shape.expert_scale)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _attention(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Without ``attention.indexer.types``, as in the target: its context length selects llama.cpp's table."""
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(shape.q_rank)
    writer.add_kv_lora_rank(shape.kv_rank)
    writer.add_key_length(shape.kv_rank + shape.rope)
    writer.add_value_length(shape.kv_rank)
    writer.add_key_length_mla(shape.nope + shape.rope)
    writer.add_value_length_mla(shape.value)
    writer.add_indexer_head_count(shape.index_heads)
    writer.add_indexer_key_length(shape.index_dim)
    writer.add_indexer_top_k(shape.top_k)


def _vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([_token_type(token) for token in vocabulary.tokens])
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.id_of("[gMASK]"))
    writer.add_eos_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_pad_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_eot_token_id(vocabulary.id_of("<|user|>"))
    writer.add_eom_token_id(vocabulary.id_of("<|observation|>"))
    writer.add_chat_template(TEMPLATE.read_text())


def _token_type(token: str) -> gguf.TokenType:
    if token in SHOWN:
        return gguf.TokenType.USER_DEFINED
    return gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL

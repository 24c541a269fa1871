"""Metadata of a GLM-5.2 file without the file: hyperparameters, and a vocabulary of the right kind and size.

The vocabulary is synthetic: 256 bytes, then every run of two to four small letters until the special tokens begin, each
with the merges that make it. Special tokens stand where GLM-5.2 has them as far as that is known: their order is that
of GLM-4.5, and four of them (text end, mask, user, observation) have published ids that fit it.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass

from bench.gguf_header import flags_pair, ints_pair, pair, texts_pair

N_VOCAB = 154_880
FIRST_SPECIAL = 154_820
SPECIALS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
)
TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_ARCH = "glm-dsa"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# token texts that a chat shows; every other special token only steers the model
_SHOWN = frozenset(SPECIALS[SPECIALS.index("<think>") :])


@dataclass(frozen=True)
class GlmShape:
    """What may differ between a stand-in and GLM-5.2; everything else is fixed by the tensors' sizes."""

    n_layers: int = 78
    n_mtp: int = 1
    n_dense: int = 3
    n_vocab: int = N_VOCAB
    n_embd: int = 6144
    n_ff: int = 12_288
    n_ff_expert: int = 2048
    n_expert: int = 256
    n_expert_used: int = 8
    n_head: int = 64
    q_lora: int = 2048
    kv_lora: int = 512
    key_nope: int = 192
    value_length: int = 256
    indexer_heads: int = 32
    indexer_key: int = 128
    top_k: int = 2048
    n_ctx_train: int = 1 << 20
    indexer_types: tuple[bool, ...] | None = None  # None: no key, the schedule for this context holds

    @property
    def rope(self) -> int:
        return 64


def model_pairs(name: str, shape: GlmShape) -> list[bytes]:
    """Everything but the vocabulary."""
    numbers: dict[str, int | float | bool] = {
        "block_count": shape.n_layers + shape.n_mtp,
        "nextn_predict_layers": shape.n_mtp,
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "expert_feed_forward_length": shape.n_ff_expert,
        "leading_dense_block_count": shape.n_dense,
        "vocab_size": shape.n_vocab,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_expert_used,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": shape.q_lora,
        "attention.kv_lora_rank": shape.kv_lora,
        "attention.key_length": shape.kv_lora + shape.rope,
        "attention.value_length": shape.kv_lora,
        "attention.key_length_mla": shape.key_nope + shape.rope,
        "attention.value_length_mla": shape.value_length,
        "attention.indexer.head_count": shape.indexer_heads,
        "attention.indexer.key_length": shape.indexer_key,
        "attention.indexer.top_k": shape.top_k,
        "rope.dimension_count": shape.rope,
        "rope.freq_base": 8e6,
    }
    pairs = [pair("general.architecture", _ARCH), pair("general.name", name), pair("general.quantization_version", 2)]
    pairs += [pair(f"{_ARCH}.{key}", value) for key, value in numbers.items()]
    if shape.indexer_types is not None:
        pairs.append(flags_pair(f"{_ARCH}.attention.indexer.types", shape.indexer_types))
    return pairs


def vocabulary_pairs(n_vocab: int = N_VOCAB) -> list[bytes]:
    """A byte-level BPE vocabulary of ``n_vocab`` tokens; the special ones keep their distance from its end."""
    first_special = n_vocab - (N_VOCAB - FIRST_SPECIAL)
    tokens, merges = _words(first_special)
    tokens += [*SPECIALS, *(f"[UNUSED{number}]" for number in range(n_vocab - first_special - len(SPECIALS)))]
    ids = {text: number for number, text in enumerate(tokens)}
    return [
        pair("tokenizer.ggml.model", "gpt2"),
        pair("tokenizer.ggml.pre", "glm4"),
        texts_pair("tokenizer.ggml.tokens", tokens),
        ints_pair("tokenizer.ggml.token_type", [_kind(number, text, first_special) for text, number in ids.items()]),
        texts_pair("tokenizer.ggml.merges", merges),
        pair("tokenizer.ggml.bos_token_id", ids["[gMASK]"]),
        pair("tokenizer.ggml.eos_token_id", ids["<|endoftext|>"]),
        pair("tokenizer.ggml.padding_token_id", ids["<|endoftext|>"]),
        pair("tokenizer.ggml.eot_token_id", ids["<|user|>"]),
        pair("tokenizer.ggml.eom_token_id", ids["<|observation|>"]),
        pair("tokenizer.chat_template", TEMPLATE),
    ]


def _kind(number: int, text: str, first_special: int) -> int:
    if number < first_special:
        return _NORMAL
    if text in _SHOWN:
        return _USER_DEFINED
    return _CONTROL if text in SPECIALS else _UNUSED


def _words(n_tokens: int) -> tuple[list[str], list[str]]:
    """Tokens and merges. A word is merged from its first letters and the last, or from the first and its rest."""
    tokens = _byte_letters()
    tokens += itertools.islice(_runs_of_letters(), n_tokens - len(tokens))
    merges: list[str] = []
    for word in tokens[256:]:
        merges.append(f"{word[:-1]} {word[-1]}")
        if len(word) > 2:
            merges.append(f"{word[0]} {word[1:]}")
    return tokens, merges


def _runs_of_letters() -> Iterator[str]:
    for length in (2, 3, 4):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


def _byte_letters() -> list[str]:
    """One visible character per byte, as byte-level BPE spells them."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]

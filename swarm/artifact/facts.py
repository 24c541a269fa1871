"""What the metadata says about a model, architecture by architecture.

The rules repeat llama.cpp's (``load_arch_hparams``): a fact read differently here than in the engine would allow a cut
that the engine can't compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.artifact.cuts import legal_cuts
from swarm.artifact.gguf_file import TensorInfo
from swarm.artifact.metadata import Metadata
from swarm.errors import NotAModel, UnsupportedModel

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20

# GLM-5.2's files do not say which layers have an indexer of their own; llama.cpp then takes this schedule for every
# glm-dsa model trained with at least this context, whatever its depth
_INDEXER_SCHEDULE_CONTEXT = 1 << 20
_INDEXER_SCHEDULE_LAYERS = 78

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GLM_STOP_TEXTS = frozenset({b"<|endoftext|>", b"<|user|>", b"<|observation|>"})


@dataclass(frozen=True)
class ModelFacts:
    """Everything about the model that planning, routing and memory sums need. Layers do not include MTP blocks."""

    arch: str
    n_layers: int
    n_mtp: int  # MTP blocks the files hold; they follow the layers
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: int
    n_ff: int  # the widest dense feed-forward
    n_expert_used: int  # 0 for a dense model, as the next two
    n_ff_expert: int
    n_expert_shared: int
    key_length: int  # values per head in the attention product
    top_k: int  # of the indexer; 0 without one
    indexer_heads: int
    indexer_types: tuple[bool, ...]  # True for a layer with an indexer of its own; empty without indexers
    kv_widths: tuple[tuple[int, ...], ...]  # per layer, then per MTP block: values per token in each cached tensor
    stop_tokens: tuple[int, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Legal cuts, 0 and ``n_layers`` included."""
        return legal_cuts(self.n_layers, self.indexer_types)


def read_facts(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> ModelFacts:
    """Facts of a supported model; ``UnsupportedModel`` for any other architecture."""
    arch = metadata.text("general.architecture")
    reader = _READERS.get(arch)
    if reader is None:
        raise UnsupportedModel(
            f"{metadata.file}: architecture {arch!r} can't be served in spans; "
            f"choose a model of one of these: {', '.join(SUPPORTED)}"
        )
    facts = reader(metadata, tensors)
    _check_tensors(metadata.file, facts, tensors)
    return facts


def _read_llama(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> ModelFacts:
    if metadata.integer("llama.nextn_predict_layers", 0):
        raise UnsupportedModel(f"{metadata.file}: a llama model with MTP blocks; choose a model without")
    n_layers = metadata.integer("llama.block_count", low=1, high=MAX_LAYERS)
    n_embd, n_head = _width(metadata, "llama.embedding_length"), _heads(metadata, "llama", n_layers)
    key = _width(metadata, "llama.attention.key_length", n_embd // n_head)
    value = _width(metadata, "llama.attention.value_length", n_embd // n_head)
    kv_heads = metadata.per_layer("llama.attention.head_count_kv", n_layers, n_head, high=MAX_WIDTH)
    n_used = max(metadata.per_layer("llama.expert_used_count", n_layers, 0, high=1 << 16))
    n_ff = max(metadata.per_layer("llama.feed_forward_length", n_layers, 0, high=MAX_WIDTH))
    return ModelFacts(
        arch="llama",
        n_layers=n_layers,
        n_mtp=0,
        n_embd=n_embd,
        n_vocab=_vocabulary(metadata, tensors),
        n_ctx_train=metadata.integer("llama.context_length", low=1),
        n_head=n_head,
        n_ff=n_ff,
        n_expert_used=n_used,
        n_ff_expert=n_ff if n_used else 0,
        n_expert_shared=0,
        key_length=key,
        top_k=0,
        indexer_heads=0,
        indexer_types=(),
        kv_widths=tuple((heads * key, heads * value) for heads in kv_heads),
        stop_tokens=_stop_tokens(metadata, frozenset()),
    )


def _read_glm_dsa(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> ModelFacts:
    n_blocks = metadata.integer("glm-dsa.block_count", low=1, high=MAX_LAYERS)
    declared_mtp = metadata.integer("glm-dsa.nextn_predict_layers", 0, high=n_blocks - 1)
    n_layers = n_blocks - declared_mtp
    if not metadata.integer("glm-dsa.attention.key_length_mla", 0):
        raise UnsupportedModel(f"{metadata.file}: a glm-dsa model without MLA; choose a file converted for MLA")
    n_embd, n_head = _width(metadata, "glm-dsa.embedding_length"), _heads(metadata, "glm-dsa", n_blocks)
    key = _width(metadata, "glm-dsa.attention.key_length", n_embd // n_head)
    kv_heads = metadata.per_layer("glm-dsa.attention.head_count_kv", n_blocks, n_head, high=MAX_WIDTH)
    context = metadata.integer("glm-dsa.context_length", low=1)
    indexer_types = _indexer_types(metadata, n_layers, context)
    indexer_key = _width(metadata, "glm-dsa.attention.indexer.key_length")
    # the file may declare MTP blocks whose tensors were left out: then there is no MTP
    n_mtp = declared_mtp if f"blk.{n_layers}.nextn.eh_proj.weight" in tensors else 0
    kept = [(heads * key,) for heads in kv_heads[: n_layers + n_mtp]]
    return ModelFacts(
        arch="glm-dsa",
        n_layers=n_layers,
        n_mtp=n_mtp,
        n_embd=n_embd,
        n_vocab=_vocabulary(metadata, tensors),
        n_ctx_train=context,
        n_head=n_head,
        n_ff=max(metadata.per_layer("glm-dsa.feed_forward_length", n_blocks, 0, high=MAX_WIDTH)),
        n_expert_used=max(metadata.per_layer("glm-dsa.expert_used_count", n_blocks, 0, high=1 << 16)),
        n_ff_expert=max(metadata.per_layer("glm-dsa.expert_feed_forward_length", n_blocks, 0, high=MAX_WIDTH)),
        n_expert_shared=metadata.integer("glm-dsa.expert_shared_count", 0, high=1 << 16),
        key_length=key,
        top_k=metadata.integer("glm-dsa.attention.indexer.top_k", low=1),
        indexer_heads=metadata.integer("glm-dsa.attention.indexer.head_count", low=1, high=1 << 16),
        indexer_types=indexer_types,
        kv_widths=tuple(
            (*widths, indexer_key) if layer < n_layers and indexer_types[layer] else widths
            for layer, widths in enumerate(kept)
        ),
        stop_tokens=_stop_tokens(metadata, _GLM_STOP_TEXTS),
    )


_READERS: dict[str, Callable[[Metadata, Mapping[str, TensorInfo]], ModelFacts]] = {
    "llama": _read_llama,
    "glm-dsa": _read_glm_dsa,
}
SUPPORTED = tuple(_READERS)


def _indexer_types(metadata: Metadata, n_layers: int, context: int) -> tuple[bool, ...]:
    key = "glm-dsa.attention.indexer.types"
    if key in metadata:
        types = tuple(bool(full) for full in metadata.per_layer(key, n_layers))
    elif context >= _INDEXER_SCHEDULE_CONTEXT:
        types = tuple(_scheduled_full(layer) for layer in range(n_layers))
    else:
        types = (True,) * n_layers
    if not types[0]:
        raise NotAModel(f"{metadata.file}: its first layer has no indexer of its own; convert the model anew")
    return types


def _scheduled_full(layer: int) -> bool:
    return layer < _INDEXER_SCHEDULE_LAYERS and (layer < 2 or layer % 4 == 2)


def _width(metadata: Metadata, key: str, default: int | None = None) -> int:
    return metadata.integer(key, default, low=1, high=MAX_WIDTH)


def _heads(metadata: Metadata, arch: str, n_blocks: int) -> int:
    heads = max(metadata.per_layer(f"{arch}.attention.head_count", n_blocks, high=1 << 16))
    if heads == 0:
        raise NotAModel(f"{metadata.file}: metadata key {arch}.attention.head_count is 0; convert the model anew")
    return heads


def _vocabulary(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2 or not 0 < embedding.dims[1] <= MAX_VOCAB:
        raise NotAModel(f"{metadata.file}: it has no usable token_embd.weight; download the whole model again")
    return embedding.dims[1]


def _stop_tokens(metadata: Metadata, texts: frozenset[bytes]) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{key}" for key in _STOP_KEYS]
    found = {metadata.integer(key, high=MAX_VOCAB) for key in keys if key in metadata}
    vocabulary = metadata.array("tokenizer.ggml.tokens")
    if texts and vocabulary is not None and vocabulary.format is None:
        found.update(token for token, text in enumerate(vocabulary.texts()) if text in texts)
    return tuple(sorted(found))


def _check_tensors(file: str, facts: ModelFacts, tensors: Mapping[str, TensorInfo]) -> None:
    """The cheap part of what the engine would find missing only after minutes of loading."""
    if tensors["token_embd.weight"].dims[0] != facts.n_embd:
        raise NotAModel(f"{file}: token_embd.weight is not {facts.n_embd} wide; convert the model anew")
    needed = ["output_norm.weight", *(f"blk.{layer}.attn_norm.weight" for layer in range(facts.n_layers))]
    # an indexer that is not there is no error to the engine while it loads: it crashes at the first graph
    needed += [f"blk.{layer}.indexer.attn_k.weight" for layer, full in enumerate(facts.indexer_types) if full]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise NotAModel(f"{file}: incomplete: {_some(missing)} missing; download the whole model again")


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors are" if len(names) > 1 else " is")

"""How much memory a span takes, and how much there is.

Weights, KV cache and output buffers are exact. The compute buffer is a rule, because llama.cpp's own sum is known only
once the model is loaded: the widest of three phases (attention, feed-forward, logits), fitted to what the engine
reports for SmolLM2, for glm-tiny and for layers of GLM-5.2's real shapes. There it is 3 to 20 % above, which is less
than 2 % of a node's total. What the node's own processes take was measured.

Memory of graphics cards is not counted: the engine does not tell how much a card has. An engine that was built for one
keeps weights and KV cache there, so the sums here are then too careful for the machine, and nothing checks the card.
Swap never counts as room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shim.types import ContextSpec, KvType
from swarm.artifact.facts import ModelFacts
from swarm.artifact.manifest import Manifest

BREATHING_BYTES = 128 << 20  # left for the rest of the machine
# the node's own processes when nobody is served: Python with its libraries 310 MiB, the libp2p daemon 60, the worker 30
_PROCESSES_BYTES = 400 << 20
_TOKEN_BYTES = 256  # of a vocabulary, in the worker
_COPIES_OF_A_STEP = 4  # into the node and out of it, into the worker and out of it
CELL_PADDING_TOKENS = 256  # llama.cpp rounds a slot's KV cells up to this
_FLOAT_BYTES = 4
_MASK_BYTES = 2  # f16, per row of a step and KV cell
_INDEXED_MASK_BYTES = 4  # one mask for attention, one for the indexer
_INDEXED_SCORE_BYTES = 4  # while the indexer's choice becomes a mask
_KEPT_STATES = 160  # of a slot for the MTP block, between its steps
_SLACK_PERCENT = 3  # gaps between tensors
_MTP_SLACK_PERCENT = 10
_SMALL_BYTES = 128 << 10  # of any graph: positions, indices


@dataclass(frozen=True)
class SpanMemory:
    """What a node needs to serve a span, in bytes."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    output_bytes: int
    journal_bytes: int = 0
    own_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def engine_bytes(self) -> int:
        """What the engine reports when it is loaded."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.output_bytes

    @property
    def total_bytes(self) -> int:
        return self.engine_bytes + self.journal_bytes + self.own_bytes + self.reserve_bytes


def estimate(
    manifest: Manifest,
    first: int,
    last: int,
    contexts: Sequence[ContextSpec],
    *,
    chunk_tokens: int = 512,
    wanted_rows: int | None = None,
    kv_type: KvType = KvType.F16,
    mtp: bool = False,
    journal_bytes: int = 0,
    own_bytes: int | None = None,
    reserve_bytes: int = BREATHING_BYTES,
) -> SpanMemory:
    """Memory for layers [first, last) with these slots. The span need not be legal. ``wanted_rows`` and ``mtp`` as in
    ``EngineConfig``; ``own_bytes`` None: ``processes_bytes``."""
    cells = sum(spec.slots * _padded_tokens(spec.tokens) for spec in contexts)
    n_slots = sum(spec.slots for spec in contexts)
    is_exit = last == manifest.n_layers
    wanted = chunk_tokens if wanted_rows is None else wanted_rows
    compute = sum(compute_bytes(manifest, spec, chunk_tokens, wanted if is_exit else 0) for spec in contexts)
    # a row per slot: of logits on the exit, else of hidden states
    output = n_slots * (manifest.n_vocab if is_exit else manifest.n_embd) * _FLOAT_BYTES
    if mtp and is_exit and manifest.n_mtp:
        compute += sum(_mtp_compute_bytes(manifest, spec, chunk_tokens) for spec in contexts)
        output += _mtp_output_bytes(manifest, contexts, chunk_tokens)
    return SpanMemory(
        weights_bytes=manifest.span_bytes(first, last, mtp),
        kv_bytes=manifest.kv_bytes(first, last, cells, kv_type, mtp),
        compute_bytes=compute,
        output_bytes=output,
        journal_bytes=journal_bytes,
        own_bytes=processes_bytes(manifest, chunk_tokens) if own_bytes is None else own_bytes,
        reserve_bytes=reserve_bytes,
    )


def processes_bytes(facts: ModelFacts, chunk_tokens: int) -> int:
    """What the node, its libp2p daemon and the worker take beside the span, with one step under way."""
    step = chunk_tokens * facts.n_embd * _FLOAT_BYTES
    return _PROCESSES_BYTES + facts.n_vocab * _TOKEN_BYTES + _COPIES_OF_A_STEP * step


def compute_bytes(facts: ModelFacts, context: ContextSpec, chunk_tokens: int, wanted_rows: int) -> int:
    """The graph's buffers of one context. A decode step has up to ``slots`` rows, a chunk ``chunk_tokens``; the logits
    of ``wanted_rows`` of them are kept, 0 for a span that does not end at the last layer."""
    rows = max(chunk_tokens, context.slots)
    cells = _padded_tokens(context.tokens)
    phases = [
        rows * _attention_bytes(facts, cells),
        rows * (_feed_forward_values(facts) * _FLOAT_BYTES + (0 if facts.top_k else cells * _MASK_BYTES)),
        _logits_bytes(facts, rows, min(rows, max(wanted_rows, context.slots))) if wanted_rows else 0,
    ]
    return max(phases) * (100 + _SLACK_PERCENT) // 100 + _SMALL_BYTES


def _logits_bytes(facts: ModelFacts, rows: int, wanted: int) -> int:
    return (wanted * facts.n_vocab + (rows + wanted) * 2 * facts.n_embd) * _FLOAT_BYTES


def _mtp_compute_bytes(facts: ModelFacts, context: ContextSpec, chunk_tokens: int) -> int:
    """A context of its own: dense attention behind two joined states, and the logits of a row of each slot."""
    rows = max(chunk_tokens, context.slots)
    masks = _padded_tokens(context.tokens) * _MASK_BYTES
    phases = [
        rows * ((3 * facts.n_head * facts.key_length + 2 * facts.n_embd) * _FLOAT_BYTES + masks),
        rows * (_feed_forward_values(facts) * _FLOAT_BYTES + masks),
        _logits_bytes(facts, rows, context.slots),
    ]
    return max(phases) * (100 + _MTP_SLACK_PERCENT) // 100


def _mtp_output_bytes(facts: ModelFacts, contexts: Sequence[ContextSpec], chunk_tokens: int) -> int:
    """The trunk's states of a chunk for each context, the newest of each slot, and a draft's logits."""
    n_slots = sum(spec.slots for spec in contexts)
    states = len(contexts) * chunk_tokens + n_slots * _KEPT_STATES
    return (states * facts.n_embd + n_slots * (facts.n_vocab + facts.n_embd)) * _FLOAT_BYTES


def _attention_bytes(facts: ModelFacts, cells: int) -> int:
    """Of a row: three forms of the queries at once, of the heads or of the indexer, beside the layer's input and
    output; and the masks. The indexer's scores take the place of queries, while they are the smaller."""
    if not facts.top_k:
        return (3 * facts.n_head * facts.key_length + facts.n_embd) * _FLOAT_BYTES + cells * _MASK_BYTES
    indexer_key = max((width for widths in facts.kv_widths for width in widths[1:]), default=0)
    queries = max(facts.n_head * facts.key_length, facts.indexer_heads * indexer_key)
    scores = 0 if facts.top_k < cells <= queries // 2 else cells * _INDEXED_SCORE_BYTES
    return (3 * queries + 2 * facts.n_embd) * _FLOAT_BYTES + cells * _INDEXED_MASK_BYTES + scores


def _feed_forward_values(facts: ModelFacts) -> int:
    """Gate, up and their product; of each expert used the product and its result, once more with its weight."""
    dense = 3 * facts.n_ff + 4 * facts.n_embd
    experts = facts.n_expert_used * (facts.n_ff_expert + 2 * facts.n_embd) + 2 * facts.n_embd
    return max(dense, experts if facts.n_expert_used else 0)


def _padded_tokens(tokens: int) -> int:
    return -(-tokens // CELL_PADDING_TOKENS) * CELL_PADDING_TOKENS


def describe(memory: SpanMemory, available_bytes: int | None = None) -> str:
    """One line: ``weights 38.2 MiB + KV 11.2 MiB + ... = 1.1 GiB of 6.0 GiB available``."""
    parts = (
        ("weights", memory.weights_bytes),
        ("KV", memory.kv_bytes),
        ("compute", memory.compute_bytes),
        ("output", memory.output_bytes),
        ("journal", memory.journal_bytes),
        ("node", memory.own_bytes),
        ("reserve", memory.reserve_bytes),
    )
    total = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    line = f"{total} = {format_bytes(memory.total_bytes)}"
    return line if available_bytes is None else f"{line} of {format_bytes(available_bytes)} available"


def format_bytes(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def available_memory(cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes this process may still take: the system's, or less where a control group says so."""
    rooms = [psutil.virtual_memory().available, *_cgroup_rooms(cgroup_root, own_cgroup)]
    return max(0, min(rooms))


# what a node that ran before has left in the page cache is mostly active: weights are read again and again
_FILE_PAGES = ("inactive_file", "active_file")


def _cgroup_rooms(root: Path, own: Path) -> Iterator[int]:
    """Room left in this process's control group and all above it; page cache that can be dropped counts as room."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _rooms(root, path, ("memory.max", "memory.high"), "memory.current", _FILE_PAGES)
        elif "memory" in controllers.split(","):
            limits = ("memory.limit_in_bytes",)
            cache = [f"total_{pages}" for pages in _FILE_PAGES]
            yield from _rooms(root / "memory", path, limits, "memory.usage_in_bytes", cache)


def _rooms(root: Path, path: str, limits: Sequence[str], usage: str, cache: Sequence[str]) -> Iterator[int]:
    group = root / path.lstrip("/")
    # a container may see its group at the root, under a path that does not exist there
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        used = _number(folder / usage)
        for limit in limits:
            bound = _number(folder / limit)
            if used is not None and bound is not None:
                yield bound - used + sum(_stat(folder / "memory.stat", pages) for pages in cache)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(file: Path, key: str) -> int:
    try:
        words = (line.split() for line in file.read_text().splitlines())
        return next((int(line[1]) for line in words if len(line) == 2 and line[0] == key), 0)
    except (OSError, ValueError):
        return 0

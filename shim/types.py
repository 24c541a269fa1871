"""What goes into an engine and what comes out: plain values shared by the engine, its worker process and the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # command lines name a KV type, and answer --help before numpy would be there
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int32]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Flags: TypeAlias = "npt.NDArray[np.uint8]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
KvData: TypeAlias = "npt.NDArray[Any] | bytes | bytearray | memoryview"  # contiguous


MAX_SLOT_TOKENS = 131_072  # llama.cpp's flash attention gives NaN beyond


class KvType(IntEnum):
    """Element type of the KV cache, by ggml number."""

    F32 = 0
    F16 = 1
    Q8_0 = 8


@dataclass(frozen=True)
class ContextSpec:
    """``slots`` KV streams of ``tokens`` cells each. Slots are numbered through all contexts of an engine in order."""

    slots: int
    tokens: int


@dataclass(frozen=True)
class EngineConfig:
    """What an engine loads. ``last`` None means to the end. ``chunk_tokens`` is the most rows a step may have,
    ``wanted_rows`` the most of them whose logits may be wanted (None: all); a row for each slot always may.
    ``load_mtp`` lets the span that ends with the last layer draft; others ignore it."""

    model_path: Path
    first: int = 0
    last: int | None = None
    contexts: tuple[ContextSpec, ...] = (ContextSpec(1, 4096),)
    threads: int = 1
    chunk_tokens: int = 512
    kv_type: KvType = KvType.F16
    wanted_rows: int | None = None
    load_mtp: bool = False
    lock_weights: bool = False


@dataclass(frozen=True)
class EngineInfo:
    """What was loaded, and the memory it takes."""

    arch: str
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    first: int
    last: int
    contexts: tuple[ContextSpec, ...]
    chunk_tokens: int
    n_mtp: int
    numerics_id: str  # "<build id>/<cpu variant>/<kv type>"
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    output_bytes: int

    @property
    def is_entry(self) -> bool:
        return self.first == 0

    @property
    def is_exit(self) -> bool:
        return self.last == self.n_layers

    @property
    def slot_tokens(self) -> tuple[int, ...]:
        """Capacity of each slot, by slot number."""
        return tuple(spec.tokens for spec in self.contexts for _ in range(spec.slots))


@dataclass(frozen=True)
class StepBatch:
    """Rows of one forward pass through the layers ``run``; see ``swarm_step`` in ``swarm_shim.h`` for the rules.

    ``slot`` and ``position`` are int32 [n]. ``tokens`` (int32 [n]) goes with a run that starts at layer 0, ``hidden``
    (float32 [n, n_embd]) with any other. ``want`` (uint8 [n]) marks the rows whose logits are needed and goes with a
    run that ends at the last layer; such a run returns no hidden states. With the MTP block loaded it may have
    ``tokens`` beside ``hidden``, and needs them for drafts.
    """

    run: tuple[int, int]
    slot: Ints
    position: Ints
    tokens: Ints | None = None
    hidden: Floats | None = None
    want: Flags | None = None
    tiled: bool = False


@dataclass(frozen=True)
class KvRowBytes:
    """Bytes that one layer keeps of one position, by tensor; 0 where it has none. ``swarm_shim.h`` has the layout."""

    keys: int
    values: int
    indexer_keys: int

    @property
    def total(self) -> int:
        return self.keys + self.values + self.indexer_keys


@dataclass(frozen=True)
class SummarySpec:
    """How to sum up one wanted row: its ``top`` largest logits and those of ``ids``."""

    temperature: float = 1.0
    top: int = 256
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowSummary:
    """One logits row, summed up. Ids descend by logit, ties ascend by id.

    ``rest_log_sum_exp`` is over logit / temperature of every id that is not in ``top_ids`` (-inf when none is).
    ``asked`` holds the logits of the ids asked for, in that order.
    """

    top_ids: Ints
    top_logits: Floats
    rest_log_sum_exp: float
    asked: Floats


@dataclass(frozen=True)
class StepResult:
    """``hidden`` is float32 [n, n_embd] of a run that ends before the last layer; ``summaries`` has one entry per
    wanted row of a run that ends there. ``compute_seconds`` is the time inside the engine call."""

    hidden: Floats | None = None
    summaries: Sequence[RowSummary] = field(default_factory=tuple)
    compute_seconds: float = 0.0

"""The engine in this process: one span of a model, stepped synchronously. Use it from one thread at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from shim import abi
from shim.errors import BadConfig, BadStep
from shim.types import (
    Bytes,
    EngineConfig,
    EngineInfo,
    Floats,
    Ints,
    KvData,
    KvRowBytes,
    RowSummary,
    StepBatch,
    StepResult,
    SummarySpec,
)

Progress = Callable[[float], bool]


class Engine:
    """A loaded span and its KV slots. Ownership: ``close`` (or leaving the context manager) frees everything."""

    def __init__(self, handle: Any, config: EngineConfig) -> None:
        ffi, lib = abi.load()
        self._handle = ffi.gc(handle, lib.swarm_engine_free)
        self._config = config
        info = self.info
        self._n_embd, self._n_vocab = info.n_embd, info.n_vocab
        self._logits = np.empty((0, 0), np.float32)  # reused: fresh pages cost more than the copy into them

    @classmethod
    def open(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Loads the span. ``progress`` gets the fraction loaded and returns False to stop, which raises LoadCancelled.
        Other errors: BadConfig, ModelError, UnsupportedError, EngineMemoryError."""
        ffi, lib = abi.load()
        contexts = ffi.new("swarm_context_spec[]", [(spec.slots, spec.tokens) for spec in config.contexts])
        path = ffi.new("char[]", os.fsencode(config.model_path))
        callback = ffi.NULL if progress is None else _progress_callback(ffi, progress)
        params = ffi.new("swarm_engine_params *")
        params.model_path = path
        params.span_first = config.first
        params.span_last = -1 if config.last is None else config.last
        params.contexts = contexts
        params.n_contexts = len(config.contexts)
        params.n_threads = config.threads
        params.chunk_tokens = config.chunk_tokens
        params.kv_type = int(config.kv_type)
        params.wanted_rows = config.chunk_tokens if config.wanted_rows is None else config.wanted_rows
        params.load_mtp = config.load_mtp
        params.lock_weights = config.lock_weights
        params.progress = callback
        out = ffi.new("swarm_engine **")
        status = lib.swarm_engine_init(params, out)
        if status == lib.SWARM_ERR_ARGUMENT:
            raise BadConfig(ffi.string(lib.swarm_last_error()).decode("utf-8", "replace"))
        abi.check(status)
        return cls(out[0], config)

    def close(self) -> None:
        abi.load()[0].release(self._handle)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """What is loaded and the memory it takes now; the output buffers grow with the largest step."""
        ffi, lib = abi.load()
        raw = ffi.new("swarm_engine_info *")
        abi.check(lib.swarm_engine_info_get(self._handle, raw))
        return EngineInfo(
            arch=ffi.string(raw.arch).decode(),
            n_layers=raw.n_layers,
            n_embd=raw.n_embd,
            n_vocab=raw.n_vocab,
            n_ctx_train=raw.n_ctx_train,
            first=raw.span_first,
            last=raw.span_last,
            contexts=self._config.contexts,
            chunk_tokens=self._config.chunk_tokens,
            n_mtp=raw.n_mtp,
            numerics_id=f"{abi.build_id()}/{self._config.kv_type.name.lower()}",
            weights_bytes=raw.weights_bytes,
            kv_bytes=raw.kv_bytes,
            compute_bytes=raw.compute_bytes,
            output_bytes=raw.output_bytes,
        )

    def step(self, batch: StepBatch, summaries: Sequence[SummarySpec] = ()) -> StepResult:
        """Runs the rows. A run to the last layer needs one ``SummarySpec`` per wanted row, in row order, or none at
        all. Raises BadStep, StepGap or SlotFull before anything changed, ComputeError when the touched slots were
        emptied."""
        n_wanted = self._n_wanted(batch)
        if summaries and len(summaries) != n_wanted:
            raise BadStep(f"{len(summaries)} summaries for {n_wanted} wanted rows")
        self._check_summaries(summaries)
        if batch.want is None:
            hidden = np.empty((len(batch.slot), self._n_embd), np.float32)
            return StepResult(hidden=hidden, compute_seconds=self._run(batch, hidden, None))
        logits = self._logits_buffer(len(summaries))
        seconds = self._run(batch, None, logits if len(summaries) else None)
        found = tuple(summarise(row, spec) for row, spec in zip(logits, summaries, strict=True))
        return StepResult(summaries=found, compute_seconds=seconds)

    def logits_step(self, batch: StepBatch) -> Floats:
        """Runs the rows and returns the full logits of the wanted ones, [n_wanted, n_vocab]."""
        logits = np.empty((self._n_wanted(batch), self._n_vocab), np.float32)
        self._run(batch, None, logits)
        return logits

    def row(self, slot: int) -> Floats:
        """Logits [n_vocab] of the slot's last wanted row, kept until its next step. Raises BadStep when there is
        none."""
        ffi, lib = abi.load()
        row = np.empty(self._n_vocab, np.float32)
        abi.check(lib.swarm_engine_row(self._handle, slot, ffi.from_buffer("float[]", row)))
        return row

    def position(self, slot: int) -> int:
        """Tokens the slot holds."""
        ffi, lib = abi.load()
        out = ffi.new("int32_t *")
        abi.check(lib.swarm_engine_position(self._handle, slot, out))
        return int(out[0])

    def truncate(self, slot: int, position: int) -> None:
        """Drops what the slot holds at or above ``position``; 0 empties it."""
        abi.check(abi.load()[1].swarm_engine_truncate(self._handle, slot, position))

    def draft(self, slot: int, count: int) -> Ints:
        """Up to ``count`` tokens that the MTP block guesses to follow the one that the slot's kept row predicts (its
        argmax). None when the slot keeps no row, or the block has not seen all its tokens. Nothing of the slot changes.
        Raises UnsupportedError when no MTP block is loaded."""
        ffi, lib = abi.load()
        room = max(spec.tokens for spec in self._config.contexts)
        ids: Ints = np.empty(min(max(0, count), room), np.int32)
        found = ffi.new("int32_t *", len(ids))
        abi.check(lib.swarm_engine_draft(self._handle, slot, _pointer(ffi, "int32_t[]", ids), found))
        return ids[: found[0]]

    def kv_row_bytes(self, layer: int) -> KvRowBytes:
        """What one position takes in ``kv_read`` and ``kv_write`` of this layer. Raises BadStep for a layer outside the
        span."""
        ffi, lib = abi.load()
        out = ffi.new("int32_t[3]")
        abi.check(lib.swarm_engine_kv_row_bytes(self._handle, layer, out))
        return KvRowBytes(*out)

    def kv_read(self, slot: int, layer: int, first: int, count: int) -> Bytes:
        """What the layer keeps of the positions [first, first + count): uint8 [count * row bytes], one tensor after the
        other as ``swarm_shim.h`` says. Raises StepGap for positions that the layer does not hold, BadStep."""
        ffi, lib = abi.load()
        capacity = ffi.new("int32_t *")
        abi.check(lib.swarm_engine_capacity(self._handle, slot, capacity))
        if not 0 < count <= capacity[0]:
            raise BadStep(f"{count} KV rows of a slot with {capacity[0]}")
        data: Bytes = np.empty(count * self.kv_row_bytes(layer).total, np.uint8)
        buffer = ffi.from_buffer(data)
        abi.check(lib.swarm_engine_kv_read(self._handle, slot, layer, first, count, buffer, data.nbytes))
        return data

    def kv_write(self, slot: int, layer: int, first: int, data: KvData) -> None:
        """Puts whole rows, as ``kv_read`` gave them on an engine of the same artifact and ``numerics_id``, at the
        positions from ``first`` on; the layer then holds these and those below. A step can go on once all layers of its
        run were written. Raises StepGap when the layer does not hold ``first`` positions, SlotFull, BadStep."""
        ffi, lib = abi.load()
        rows = np.frombuffer(data, np.uint8)
        count, rest = divmod(rows.nbytes, self.kv_row_bytes(layer).total)
        if rest or not count:
            raise BadStep(f"{rows.nbytes} bytes are no whole KV rows of layer {layer}")
        buffer = ffi.from_buffer(rows)
        abi.check(lib.swarm_engine_kv_write(self._handle, slot, layer, first, count, buffer, rows.nbytes))

    def kv_copy(self, source: int, target: int, layer: int, first: int, count: int) -> None:
        """``kv_read`` of one slot and ``kv_write`` into another, which may lie in another context. Raises what they
        do."""
        self.kv_write(target, layer, first, self.kv_read(source, layer, first, count))

    def _logits_buffer(self, rows: int) -> Floats:
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._n_vocab), np.float32)
        return self._logits[:rows]

    @staticmethod
    def _n_wanted(batch: StepBatch) -> int:
        return 0 if batch.want is None else int(np.count_nonzero(batch.want))

    def _check_summaries(self, summaries: Sequence[SummarySpec]) -> None:
        for spec in summaries:
            if not 0 <= spec.top <= self._n_vocab:
                raise BadStep(f"the top {spec.top} of {self._n_vocab} logits")
            if any(not 0 <= token < self._n_vocab for token in spec.ids):
                raise BadStep(f"a token asked for is outside the vocabulary of {self._n_vocab}")

    def _run(self, batch: StepBatch, hidden: Floats | None, logits: Floats | None) -> float:
        """Calls the library; seconds inside the call."""
        ffi, lib = abi.load()
        n = len(batch.slot)
        slot = _checked(batch.slot, np.int32, (n,), "slot")
        position = _checked(batch.position, np.int32, (n,), "position")
        tokens = _checked(batch.tokens, np.int32, (n,), "tokens")
        states = _checked(batch.hidden, np.float32, (n, self._n_embd), "hidden")
        want = _checked(batch.want, np.uint8, (n,), "want")
        raw = ffi.new("swarm_step *")
        raw.run_first, raw.run_last = batch.run
        raw.n_rows = n
        raw.tiled = batch.tiled
        raw.slot = _pointer(ffi, "int32_t[]", slot)
        raw.position = _pointer(ffi, "int32_t[]", position)
        raw.token = _pointer(ffi, "int32_t[]", tokens)
        raw.hidden = _pointer(ffi, "float[]", states)
        raw.want = _pointer(ffi, "uint8_t[]", want)
        out = (_pointer(ffi, "float[]", hidden), _pointer(ffi, "float[]", logits))
        started = time.perf_counter()
        status = lib.swarm_engine_step(self._handle, raw, *out)
        seconds = time.perf_counter() - started
        abi.check(status)
        return seconds


def summarise(row: Floats, spec: SummarySpec) -> RowSummary:
    """Sums up one row of logits, [n_vocab]."""
    ffi, lib = abi.load()
    ids: Ints = np.empty(spec.top, np.int32)
    values: Floats = np.empty(spec.top, np.float32)
    rest = ffi.new("double *")
    pointers = (_pointer(ffi, "int32_t[]", ids), _pointer(ffi, "float[]", values), rest)
    abi.check(lib.swarm_logits_top(_pointer(ffi, "float[]", row), len(row), spec.temperature, spec.top, *pointers))
    return RowSummary(ids, values, float(rest[0]), row[list(spec.ids)] if spec.ids else np.empty(0, np.float32))


def _checked(
    array: npt.NDArray[Any] | None, kind: type[np.generic], shape: tuple[int, ...], name: str
) -> npt.NDArray[Any] | None:
    """The array in memory order; the library reads as many values as ``shape`` says."""
    if array is None:
        return None
    if array.dtype != kind or array.shape != shape:
        raise BadStep(f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(kind)}{list(shape)}")
    return np.ascontiguousarray(array)


def _pointer(ffi: Any, kind: str, array: npt.NDArray[Any] | None) -> Any:
    # a NULL for an empty array too: cffi can't take a buffer of no bytes
    return ffi.NULL if array is None or array.size == 0 else ffi.from_buffer(kind, array)


def _progress_callback(ffi: Any, progress: Progress) -> Any:
    return ffi.callback("bool(float, void *)", lambda fraction, _: bool(progress(float(fraction))), error=False)

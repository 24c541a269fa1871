"""How much more two cores do than one: the most that pipelining over two hops can give, with these spans and batches.

The halves of a model compute the same batches in this process, without a swarm around them: one batch in the chain at a
time, then several. What that gains is less than 2 for three reasons, none of which a swarm can help: the first and the
last batch have one half for themselves, cores share memory, and halves may differ. The exit of a chunk nobody wants
logits of leaves out its last layer's experts: a hundredth of the work of a whole model, a third of that of two layers.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, Floats, Ints, StepBatch

DEADLINE_SECONDS = 600.0  # of one batch


@dataclass(frozen=True)
class Batch:
    """Of one sequence; ``tiled``: a chunk, of which no logits are wanted."""

    slot: int
    start: int
    tokens: Ints
    tiled: bool

    def step(self, engine: Engine, hidden: Floats | None) -> Floats | None:
        info, count = engine.info, len(self.tokens)
        want = np.zeros(count, np.uint8) if info.is_exit else None
        if want is not None and not self.tiled:
            want[-1] = 1
        batch = StepBatch(
            run=(info.first, info.last),
            slot=np.full(count, self.slot, np.int32),
            position=np.arange(self.start, self.start + count, dtype=np.int32),
            tokens=self.tokens if info.is_entry else None,
            hidden=hidden,
            want=want,
            tiled=self.tiled,
        )
        return engine.step(batch).hidden


class Ceiling:
    """``spans`` are the two halves. Own ``close``."""

    def __init__(self, model: Path, spans: Sequence[tuple[int, int]], chunk: int, slot_tokens: int) -> None:
        self._stack = ExitStack()
        slots = (ContextSpec(2, slot_tokens),)
        configs = [EngineConfig(model, first, last, slots, 1, chunk) for first, last in spans]
        self._halves = [self._stack.enter_context(Engine.open(config)) for config in configs]
        self._threads = self._stack.enter_context(ThreadPoolExecutor(len(spans)))
        self._chunk = chunk
        self._rng = np.random.default_rng(0)

    def close(self) -> None:
        self._stack.close()

    def prefill(self, n_chunks: int, window: int) -> float:
        """What ``window`` chunks of a prompt in the chain at once gain over one."""
        chunk = self._chunk
        batches = [Batch(0, at * chunk, self._tokens(chunk), tiled=True) for at in range(n_chunks)]
        return self._seconds(batches, 1) / self._seconds(batches, window)

    def decode(self, n_tokens: int) -> float:
        """What two sequences at once gain over one after the other."""
        batches = [Batch(slot, at, self._tokens(1), tiled=False) for at in range(n_tokens) for slot in (0, 1)]
        return self._seconds(batches, 1) / self._seconds(batches, 2)

    def _tokens(self, count: int) -> Ints:
        return self._rng.integers(0, self._halves[0].info.n_vocab, count).astype(np.int32)

    def _seconds(self, batches: Sequence[Batch], window: int) -> float:
        """With at most ``window`` batches between the begin of the first half and the end of the second."""
        chain = _Chain(window)
        cores = sorted(os.sched_getaffinity(0))
        began = time.perf_counter()
        runs = [
            self._threads.submit(run, self._halves[at], cores[at % len(cores)], batches)
            for at, run in enumerate((chain.first_half, chain.second_half))
        ]
        for run in runs:
            run.result()
        return time.perf_counter() - began


class _Chain:
    """Batches on their way from one half to the other."""

    def __init__(self, window: int) -> None:
        self._room = threading.Semaphore(window)
        self._hidden: queue.Queue[Floats | None] = queue.Queue()

    def first_half(self, engine: Engine, core: int, batches: Sequence[Batch]) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        for batch in batches:
            if not self._room.acquire(timeout=DEADLINE_SECONDS):
                raise TimeoutError("the second half does not go on")
            self._hidden.put(batch.step(engine, None))

    def second_half(self, engine: Engine, core: int, batches: Sequence[Batch]) -> None:
        os.sched_setaffinity(0, {core})
        for batch in batches:
            batch.step(engine, self._hidden.get(timeout=DEADLINE_SECONDS))
            self._room.release()

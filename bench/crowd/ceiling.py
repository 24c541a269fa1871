"""How much more two cores do than one: the most that pipelining over two hops can give on this machine at this time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, StepBatch

STEPS = 8


class Ceiling:
    """The two halves of a model in this process, without a swarm. Own ``close``."""

    def __init__(self, model: Path, spans: Sequence[tuple[int, int]], chunk: int) -> None:
        self._stack = ExitStack()
        slots = (ContextSpec(1, max(256, STEPS * chunk)),)
        configs = [EngineConfig(model, first, last, slots, 1, chunk) for first, last in spans]
        self._engines = [self._stack.enter_context(Engine.open(config)) for config in configs]
        self._threads = self._stack.enter_context(ThreadPoolExecutor(len(spans)))
        self._chunk = chunk

    def close(self) -> None:
        self._stack.close()

    def measure(self, *, tiled: bool) -> float:
        """What both do at once, a core each, as a multiple of what one after the other does."""
        cores = sorted(os.sched_getaffinity(0))
        alone = [self._threads.submit(self._run, at, cores[at % len(cores)], tiled).result() for at in (0, 1)]
        began = time.perf_counter()
        runs = [self._threads.submit(self._run, at, cores[at % len(cores)], tiled) for at in (0, 1)]
        for run in runs:
            run.result()
        return sum(alone) / (time.perf_counter() - began)

    def _run(self, at: int, core: int, tiled: bool) -> float:
        """Seconds of a few chunks or rows."""
        os.sched_setaffinity(0, {core})  # of this thread
        engine = self._engines[at]
        rng = np.random.default_rng(at)
        count = self._chunk if tiled else 1
        began = time.perf_counter()
        for number in range(STEPS):
            info = engine.info
            hidden = None if info.is_entry else rng.standard_normal((count, info.n_embd), np.float32)
            tokens = rng.integers(0, info.n_vocab, count).astype(np.int32) if info.is_entry else None
            positions = np.arange(number * count, (number + 1) * count, dtype=np.int32)
            want = np.zeros(count, np.uint8) if info.is_exit else None
            run = (info.first, info.last)
            engine.step(StepBatch(run, np.zeros(count, np.int32), positions, tokens, hidden, want, tiled))
        return time.perf_counter() - began

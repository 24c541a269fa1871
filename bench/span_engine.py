"""Decode and prefill of a span in this process, at chosen contexts.

A context is filled with noise in place of the keys and values that a prompt would have left: to compute 32k tokens
takes an hour, and how long a step takes does not depend on what the cache holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, EngineInfo, Floats, StepBatch, StepResult
from swarm.errors import SwarmError

REPEATS = 3
WARMING_ROWS = 128  # of 8 experts each: hardly one of 256 is left out
LONG_SECONDS = 4.0  # a step that takes longer is steady enough to be measured once


@dataclass(frozen=True)
class Point:
    """One thing to measure: a decode step of ``rows`` sequences, or a prefill chunk of ``rows`` tokens of one; all
    after ``context`` tokens."""

    prefill: bool
    rows: int
    context: int

    def layers(self, n_layers: int) -> tuple[int, int]:
        """The ones that it runs: decode all, prefill one that is neither first nor last, as it takes so long."""
        return (n_layers // 2, n_layers // 2 + 1) if self.prefill and n_layers > 2 else (0, n_layers)

    @property
    def name(self) -> str:
        return f"{'prefill' if self.prefill else 'decode'}_{self.rows}_at_{self.context}"


@dataclass(frozen=True)
class Plan:
    """What is measured. A point gets at least three repeats, and more while ``seconds_per_point`` last; one that takes
    long gets one."""

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds_per_point: float
    budget_seconds: float

    @property
    def slots(self) -> ContextSpec:
        return ContextSpec(max(self.batches), max(self.contexts) + self.chunk_tokens)

    @property
    def chunk_tokens(self) -> int:
        return max(*self.chunks, *self.batches)

    def points(self, context: int) -> list[Point]:
        """Those at one context, of either kind the cheapest first."""
        decode = [Point(False, rows, context) for rows in sorted(self.batches)]
        return [*decode, *(Point(True, rows, context) for rows in sorted(self.chunks))]


class SpanBench:
    """An engine with the whole span, one slot per sequence of the largest batch."""

    def __init__(self, path: Path, plan: Plan, threads: int) -> None:
        self.plan = plan
        config = EngineConfig(path, contexts=(plan.slots,), threads=threads, chunk_tokens=plan.chunk_tokens)
        self.engine = Engine.open(config)
        self.info: EngineInfo = self.engine.info
        self._rng = np.random.default_rng(0)
        self._filled = 0
        self._noise: dict[int, np.ndarray[tuple[int], np.dtype[np.float16]]] = {}

    def __enter__(self) -> SpanBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def fill(self, context: int) -> None:
        """Every slot holds ``context`` positions afterwards. Contexts must not shrink."""
        for slot in range(self.plan.slots.slots):
            self.engine.truncate(slot, self._filled)  # steps have left rows above, not in all layers
            for layer in range(self.info.first, self.info.last) if context > self._filled else ():
                self.engine.kv_write(slot, layer, self._filled, self._rows(layer, context - self._filled))
        self._filled = context

    def _rows(self, layer: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float16]]:
        values = count * self.engine.kv_row_bytes(layer).total // 2
        if len(self._noise.get(layer, ())) < values:
            self._noise[layer] = self._rng.standard_normal(values, np.float32).astype(np.float16)
        return self._noise[layer][:values]

    def warm_up(self) -> None:
        """A chunk that is large enough for every expert to be chosen: the first touch of a page costs more."""
        n = min(WARMING_ROWS, self.info.chunk_tokens)
        tokens = self._rng.integers(0, self.info.n_vocab, n).astype(np.int32)
        steps = np.arange(n, dtype=np.int32)
        rows = StepBatch(
            (0, self.info.n_layers), np.zeros(n, np.int32), steps, tokens, want=np.ones(n, np.uint8), tiled=True
        )
        self.engine.logits_step(rows)

    def seconds(self, point: Point) -> list[float]:
        """Of each repeat. The slots must hold the point's context."""
        taken: list[float] = []
        most = self.plan.seconds_per_point
        while not taken or (max(taken) < LONG_SECONDS and (len(taken) < REPEATS or sum(taken) < most)):
            taken.append(self._step(point))
        return taken

    def _step(self, point: Point) -> float:
        batch = self.batch(point)
        run = self.engine.logits_step if batch.want is not None else self.engine.step
        began = time.perf_counter()
        result = run(batch)
        seconds = time.perf_counter() - began
        values = result.hidden if isinstance(result, StepResult) else result
        assert values is not None
        if not np.isfinite(values).all():
            raise SwarmError(f"{point.name}: the engine's answer is not finite; the figures would mean nothing")
        return seconds

    def batch(self, point: Point) -> StepBatch:
        """Other rows each time, so that other experts are chosen. All logits are wanted: the last layer would else
        leave rows out."""
        n, (first, last) = point.rows, point.layers(self.info.n_layers)
        steps = np.arange(n, dtype=np.int32)
        return StepBatch(
            run=(first, last),
            slot=np.zeros(n, np.int32) if point.prefill else steps,
            position=point.context + (steps if point.prefill else np.zeros(n, np.int32)),
            tokens=self._rng.integers(0, self.info.n_vocab, n).astype(np.int32) if first == 0 else None,
            hidden=self._rng.standard_normal((n, self.info.n_embd), np.float32) if first else None,
            want=np.ones(n, np.uint8) if last == self.info.n_layers else None,
            tiled=point.prefill,
        )

    def hidden(self, layer: int, tokens: Sequence[int]) -> Floats:
        """What the layers below ``layer``, which is not 0, make of tokens that are each the first of its sequence:
        [n, n_embd]. Leaves the slots empty."""
        n = len(tokens)
        batch = StepBatch(
            run=(0, layer),
            slot=np.arange(n, dtype=np.int32),
            position=np.zeros(n, np.int32),
            tokens=np.array(tokens, np.int32),
        )
        hidden = self.engine.step(batch).hidden
        assert hidden is not None
        for slot in range(n):
            self.engine.truncate(slot, 0)
        return hidden


@dataclass(frozen=True)
class Measured:
    """Seconds of every repeat of the points that the time sufficed for, and the names of the others."""

    seconds: dict[Point, list[float]]
    skipped: tuple[Point, ...]


def measure_points(bench: SpanBench) -> Measured:
    """Goes through the contexts from the shortest on, and leaves out what would end after the budget."""
    began = time.perf_counter()
    bench.warm_up()
    seconds: dict[Point, list[float]] = {}
    skipped: list[Point] = []
    for context in sorted(bench.plan.contexts):
        bench.fill(context)
        for point in bench.plan.points(context):
            left = bench.plan.budget_seconds - (time.perf_counter() - began)
            if expected_seconds(point, seconds) > left:
                skipped.append(point)
                continue
            seconds[point] = bench.seconds(point)
            print(f"{point.name}: {min(seconds[point]):.3f} s", file=sys.stderr, flush=True)
    return Measured(seconds, tuple(skipped))


def expected_seconds(point: Point, known: dict[Point, list[float]]) -> float:
    """A cautious guess from the points that are like it: time grows at most with the rows and, beyond what a short
    context takes, with the context."""
    guesses = [
        min(taken) * max(1.0, point.rows / other.rows) * max(1.0, point.context / max(other.context, 2048))
        for other, taken in known.items()
        if other.prefill == point.prefill and other.context <= point.context
    ]
    return min(guesses, default=0.0)

"""Short ways to write steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, Floats, StepBatch


def config(
    path: Path,
    first: int = 0,
    last: int | None = None,
    *,
    slots: int = 1,
    tokens: int = 256,
    threads: int = 1,
    chunk_tokens: int = 512,
) -> EngineConfig:
    return EngineConfig(
        path, first, last, contexts=(ContextSpec(slots, tokens),), threads=threads, chunk_tokens=chunk_tokens
    )


def token_rows(
    run: tuple[int, int],
    tokens: Sequence[int],
    position: int = 0,
    *,
    slot: int = 0,
    want: Sequence[int] | None = None,
    tiled: bool = False,
) -> StepBatch:
    """Rows of one slot from ``position`` on; ``want`` lists the rows whose logits are wanted."""
    n = len(tokens)
    return StepBatch(
        run,
        slot=np.full(n, slot, np.int32),
        position=np.arange(position, position + n, dtype=np.int32),
        tokens=np.array(tokens, np.int32),
        want=None if want is None else np.isin(np.arange(n), want).astype(np.uint8),
        tiled=tiled,
    )


def with_hidden(batch: StepBatch, run: tuple[int, int], hidden: Floats, want: Sequence[int] | None = None) -> StepBatch:
    """The same rows, later in the chain."""
    wanted = None if want is None else np.isin(np.arange(len(batch.slot)), want).astype(np.uint8)
    return StepBatch(run, batch.slot, batch.position, hidden=hidden, want=wanted, tiled=batch.tiled)


def chain_logits(engines: Sequence[Engine], batch: StepBatch, want: Sequence[int]) -> Floats:
    """Logits of the wanted rows after the rows went through every engine's whole span."""
    for engine in engines[:-1]:
        info = engine.info
        run = (info.first, info.last)
        entering = StepBatch(run, batch.slot, batch.position, batch.tokens, batch.hidden, None, batch.tiled)
        hidden = engine.step(entering).hidden
        assert hidden is not None
        batch = with_hidden(batch, run, hidden)
    info = engines[-1].info
    wanted = np.isin(np.arange(len(batch.slot)), want).astype(np.uint8)
    run = (info.first, info.last)
    return engines[-1].logits_step(
        StepBatch(run, batch.slot, batch.position, batch.tokens, batch.hidden, wanted, batch.tiled)
    )


def prompt(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, n)]


def run_whole(engine: Engine, tokens: Sequence[int], *, slot: int = 0, chunk: int = 512, tiled: bool = True) -> Floats:
    """Feeds ``tokens`` in chunks into an empty slot; logits of the last one."""
    n_layers = engine.info.n_layers
    logits = np.empty(0, np.float32)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = engine.logits_step(
            token_rows((0, n_layers), part, start, slot=slot, want=[len(part) - 1], tiled=tiled)
        )[0]
    return logits

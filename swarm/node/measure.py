"""How fast this node's span is: a few rows and chunks of noise through the engine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from shim.types import EngineInfo, StepBatch, SummarySpec
from swarm.node.engine_host import EngineHost
from swarm.node.speed import Speed

DECODE_ROWS = 5  # or fewer, when they take long
FIRST_CHUNK_TOKENS = 16
LONGEST_CHUNK_TOKENS = 256
ENOUGH_SECONDS = 0.25  # what takes this long is measured well enough


@dataclass(frozen=True)
class _Noise:
    """Rows without meaning for any span."""

    info: EngineInfo
    slot: int
    hidden: np.ndarray[tuple[int, int], np.dtype[np.float32]]

    def batch(self, start: int, count: int, *, tiled: bool) -> StepBatch:
        info = self.info
        return StepBatch(
            run=(info.first, info.last),
            slot=np.full(count, self.slot, np.int32),
            position=np.arange(start, start + count, dtype=np.int32),
            tokens=np.arange(count, dtype=np.int32) % info.n_vocab if info.is_entry else None,
            hidden=None if info.is_entry else self.hidden[:count],
            want=np.eye(1, count, count - 1, dtype=np.uint8)[0] if info.is_exit else None,
            tiled=tiled,
        )


async def measure_speed(host: EngineHost, slot: int = 0) -> Speed:
    """Uses the slot, which must be free, and leaves it empty. Raises EngineDied."""
    info = host.info
    most = min(LONGEST_CHUNK_TOKENS, info.chunk_tokens, info.slot_tokens[slot] - DECODE_ROWS - 1)
    if most < 1:
        return Speed()
    noise = _Noise(info, slot, np.random.default_rng(0).standard_normal((most, info.n_embd), dtype=np.float32))
    decode = await _decode_seconds(host, noise)
    tokens, seconds = await _chunk(host, noise, most)
    await host.truncate(slot, 0)
    return Speed(1 / decode, tokens / seconds)


async def _decode_seconds(host: EngineHost, noise: _Noise) -> float:
    await _seconds(host, noise.batch(0, 1, tiled=False))  # pages the weights in
    rows: list[float] = []
    while len(rows) < DECODE_ROWS and sum(rows) < ENOUGH_SECONDS:
        rows.append(await _seconds(host, noise.batch(1 + len(rows), 1, tiled=False)))
    return statistics.median(rows)


async def _chunk(host: EngineHost, noise: _Noise, most: int) -> tuple[int, float]:
    tokens = min(FIRST_CHUNK_TOKENS, most)
    while True:
        seconds = await _seconds(host, noise.batch(0, tokens, tiled=True))
        if seconds > ENOUGH_SECONDS or 2 * tokens > most:
            return tokens, seconds
        tokens *= 2


async def _seconds(host: EngineHost, batch: StepBatch) -> float:
    summaries = () if batch.want is None else (SummarySpec(),)
    result, ipc_seconds = await host.step((), batch, summaries)
    return max(result.compute_seconds + ipc_seconds, 1e-9)

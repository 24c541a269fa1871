"""Logged engine calls again, on engines in this process: what the same batches take without a swarm around them.

An engine has a thread. A call waits for what it depended on in the swarm and for nothing else: the hidden states of its
rows, and at the entry the answer to the client's token before. So engines overlap here as nodes did there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.crowd.calls import Call, Part
from shim.engine import Engine
from shim.types import Floats, Ints, StepBatch, SummarySpec

DEADLINE_SECONDS = 600.0


@dataclass(frozen=True)
class Replayed:
    """What the decode calls took. The processor time is this process's."""

    seconds: float
    processor_seconds: float


class Replay:
    """``engines`` of adjacent spans, from the first layer to the last, with slots for as many sessions as come."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._threads = ThreadPoolExecutor(len(self._engines))

    def close(self) -> None:
        self._threads.shutdown()

    def run(self, logs: Sequence[Sequence[Call]], tokens: Mapping[str, Sequence[int]]) -> Replayed:
        """The chunks, then the decode calls, which are measured; one log for each engine."""
        slots = {session: slot for slot, session in enumerate(tokens)}
        held = _Held(len(self._engines))
        for tiled in (True, False):
            began, spent = time.perf_counter(), time.process_time()
            runs = [
                self._threads.submit(_Hop(index, engine, held, slots, tokens).run, [c for c in log if c.tiled == tiled])
                for index, (engine, log) in enumerate(zip(self._engines, logs, strict=True))
            ]
            for run in runs:
                run.result()
        return Replayed(time.perf_counter() - began, time.process_time() - spent)


class _Held:
    """How far each session is in each hop, and hidden states on their way to the next."""

    def __init__(self, hops: int) -> None:
        self._changed = threading.Condition()
        self._positions: list[dict[str, int]] = [{} for _ in range(hops)]
        self._hidden: list[dict[tuple[str, int], Floats]] = [{} for _ in range(hops)]

    def wait(self, hop: int, parts: Sequence[Part], tiled: bool) -> None:
        if hop == 0 and tiled:
            return  # chunks are sent ahead
        before = self._positions[hop - 1]  # of the exit, for the entry
        with self._changed:
            there = self._changed.wait_for(
                lambda: all(before.get(p.session, 0) >= p.start + (p.count if hop else 0) for p in parts),
                DEADLINE_SECONDS,
            )
        if not there:
            raise TimeoutError("the logs of the hops don't belong together")

    def take(self, hop: int, part: Part) -> Floats:
        return self._hidden[hop - 1].pop((part.session, part.start))

    def put(self, hop: int, parts: Sequence[Part], hidden: Floats | None) -> None:
        at = 0
        with self._changed:
            for part in parts:
                if hidden is not None:
                    self._hidden[hop][part.session, part.start] = hidden[at : at + part.count]
                    at += part.count
                self._positions[hop][part.session] = part.start + part.count
            self._changed.notify_all()


class _Hop:
    def __init__(
        self,
        index: int,
        engine: Engine,
        held: _Held,
        slots: Mapping[str, int],
        tokens: Mapping[str, Sequence[int]],
    ) -> None:
        self._index = index
        self._engine = engine
        self._info = engine.info
        self._held = held
        self._slots = slots
        self._tokens = tokens

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._held.wait(self._index, call.parts, call.tiled)
            batch = self._batch(call)
            wanted = 0 if batch.want is None else len(call.parts)
            result = self._engine.step(batch, (SummarySpec(),) * wanted)
            self._held.put(self._index, call.parts, result.hidden)

    def _batch(self, call: Call) -> StepBatch:
        parts = call.parts
        counts = [part.count for part in parts]
        return StepBatch(
            run=(self._info.first, self._info.last),
            slot=np.repeat(np.array([self._slots[part.session] for part in parts], np.int32), counts),
            position=np.concatenate([np.arange(p.start, p.start + p.count, dtype=np.int32) for p in parts]),
            tokens=None if self._index else np.concatenate([self._ids(part) for part in parts]),
            hidden=np.concatenate([self._held.take(self._index, part) for part in parts]) if self._index else None,
            want=last_rows(counts) if self._info.is_exit else None,
            tiled=call.tiled,
        )

    def _ids(self, part: Part) -> Ints:
        return np.array(self._tokens[part.session][part.start : part.start + part.count], np.int32)


def last_rows(counts: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Wants the last row of each part."""
    want = np.zeros(sum(counts), np.uint8)
    want[np.cumsum(counts) - 1] = 1
    return want

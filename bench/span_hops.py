"""The same tokens through the span in one process and through chains of nodes that share the file's page cache.

All contenders stay open and take turns token by token, so that noise of the machine meets all alike.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.hop_overhead import unsplit_step
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig
from swarm.artifact import Manifest
from swarm.client import LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.local_swarm import even_spans, local_swarm
from swarm.protocol import pb

ONE_PROCESS = 0
MIN_SLOT_TOKENS = 256  # a node offers no shorter ones

Step = Callable[[Sequence[int], int, bool], Awaitable[None]]  # tokens, start, whether a prefill chunk


@dataclass(frozen=True)
class HopPlan:
    """Prompts are really prefilled, in chunks of ``chunk``; then ``tokens`` are decoded."""

    hops: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int
    tokens: int
    threads: int

    @property
    def slot_tokens(self) -> int:
        return max(MIN_SLOT_TOKENS, self.chunk, max(self.contexts) + self.tokens + 1)


@dataclass
class HopSamples:
    """Seconds by number of hops and context."""

    prefill: dict[tuple[int, int], float] = field(default_factory=dict)
    decode: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def decode_ratio(self, hops: int, context: int) -> float:
        """Speed of the chain as a share of the one process's: the median over tokens, both having taken turns."""
        pairs = zip(self.decode[ONE_PROCESS, context], self.decode[hops, context], strict=True)
        return statistics.median(alone / chain for alone, chain in pairs)

    def prefill_ratio(self, hops: int, context: int) -> float:
        return self.prefill[ONE_PROCESS, context] / self.prefill[hops, context]


async def measure_hops(path: Path, manifest: Manifest, plan: HopPlan) -> HopSamples:
    config = EngineConfig(
        path, contexts=(ContextSpec(1, plan.slot_tokens),), threads=plan.threads, chunk_tokens=plan.chunk
    )
    samples = HopSamples()
    async with AsyncExitStack() as stack:
        contenders = {ONE_PROCESS: _in_process(stack.enter_context(Engine.open(config)))}
        for hops in plan.hops:
            address = await asyncio.to_thread(_start, stack, path, manifest, hops, plan)
            contenders[hops] = _over(await _open(stack, address, hops, plan))
        for step in contenders.values():
            await step(range(plan.chunk), 0, True)  # the first touch of a page costs more
        for context in plan.contexts:
            await _one_context(contenders, context, manifest.n_vocab, plan, samples)
    return samples


async def _one_context(
    contenders: dict[int, Step], context: int, n_vocab: int, plan: HopPlan, samples: HopSamples
) -> None:
    tokens = np.random.default_rng(context).integers(0, n_vocab, context + plan.tokens).tolist()
    for hops, step in contenders.items():
        began = time.perf_counter()
        for start in range(0, context, plan.chunk):
            await step(tokens[start : min(context, start + plan.chunk)], start, True)
        samples.prefill[hops, context] = time.perf_counter() - began
        print(f"{hops or 'no'} hops: {context} tokens prefilled", file=sys.stderr, flush=True)
        samples.decode[hops, context] = []
    for position in range(context, context + plan.tokens):
        for hops, step in contenders.items():
            began = time.perf_counter()
            await step(tokens[position : position + 1], position, False)
            samples.decode[hops, context].append(time.perf_counter() - began)


def _in_process(engine: Engine) -> Step:
    async def step(tokens: Sequence[int], start: int, prefill: bool) -> None:
        # in a thread: heartbeats of the chains go on meanwhile
        await asyncio.to_thread(unsplit_step, engine, tokens, start, tiled=prefill)

    return step


def _over(session: LastingSession) -> Step:
    async def step(tokens: Sequence[int], start: int, prefill: bool) -> None:
        await session.step(StepRequest(start, tuple(tokens), pb.PREFILL if prefill else pb.DECODE, WantedRow()))

    return step


def _start(stack: AsyncExitStack, path: Path, manifest: Manifest, hops: int, plan: HopPlan) -> str:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glm-swarm-bench-")))
    arguments = ["--threads", str(plan.threads), "--slots", f"1x{plan.slot_tokens}", "--chunk-tokens", str(plan.chunk)]
    return stack.enter_context(local_swarm(path, even_spans(manifest, hops), folder, arguments)).address


async def _open(stack: AsyncExitStack, address: str, hops: int, plan: HopPlan) -> LastingSession:
    client = await stack.enter_async_context(SwarmClient.connect([address]))
    session = await stack.enter_async_context(await client.open_session(plan.slot_tokens))
    assert len(session.places) == hops
    return session

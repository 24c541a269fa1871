"""A chain over real nodes beside the same steps on the unsplit model in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, KvType, StepBatch
from swarm.client import LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.protocol import pb

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Script:
    """What is computed: ``prompt`` in chunks of ``chunk_tokens``, then ``decoded`` one by one."""

    prompt: tuple[int, ...]
    decoded: tuple[int, ...]
    chunk_tokens: int

    @staticmethod
    def random(n_vocab: int, n_prompt: int, n_decoded: int, chunk_tokens: int, seed: int = 1) -> Script:
        tokens = np.random.default_rng(seed).integers(0, n_vocab, n_prompt + n_decoded).tolist()
        return Script(tuple(tokens[:n_prompt]), tuple(tokens[n_prompt:]), chunk_tokens)

    @property
    def requests(self) -> list[StepRequest]:
        """The steps; each asks for its last row."""
        n_prompt, size = len(self.prompt), self.chunk_tokens
        chunks = [
            StepRequest(at, self.prompt[at : at + size], pb.PREFILL, WantedRow()) for at in range(0, n_prompt, size)
        ]
        rows = [StepRequest(n_prompt + i, (t,), pb.DECODE, WantedRow()) for i, t in enumerate(self.decoded)]
        return [*chunks, *rows]


def unsplit_logits(
    model: Path, script: Script, *, threads: int = 1, kv_type: KvType = KvType.F16, context_tokens: int = 1024
) -> list[Logits]:
    """The last row of each step, float32 [n_vocab], from the whole model."""
    contexts = (ContextSpec(1, context_tokens),)
    config = EngineConfig(model, contexts=contexts, threads=threads, chunk_tokens=script.chunk_tokens, kv_type=kv_type)
    with Engine.open(config) as engine:
        return [engine.logits_step(_batch(request, engine.info.n_layers))[0] for request in script.requests]


async def chain_logits(session: LastingSession, script: Script) -> list[Logits]:
    """The same rows through the chain, whole, fetched from the exit."""
    rows = []
    for request in script.requests:
        await session.step(request)
        rows.append(await session.fetch_row(request.start + len(request.tokens) - 1))
    return rows


@asynccontextmanager
async def open_chain(address: str, context_tokens: int) -> AsyncIterator[LastingSession]:
    async with SwarmClient.connect([address]) as client, await client.open_session(context_tokens) as session:
        yield session


def spans_of(session: LastingSession) -> list[tuple[int, int]]:
    return [place.layers for place in session.places]


def differing(ours: Sequence[Logits], theirs: Sequence[Logits]) -> list[int]:
    """Numbers of the steps whose bits differ."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [number for number, (a, b) in pairs if not np.array_equal(a.view(np.uint32), b.view(np.uint32))]


def _batch(request: StepRequest, n_layers: int) -> StepBatch:
    n = len(request.tokens)
    want = np.zeros(n, np.uint8)
    want[-1] = 1
    return StepBatch(
        run=(0, n_layers),
        slot=np.zeros(n, np.int32),
        position=np.arange(request.start, request.start + n, dtype=np.int32),
        tokens=np.array(request.tokens, np.int32),
        want=want,
        tiled=request.kind == pb.PREFILL,
    )

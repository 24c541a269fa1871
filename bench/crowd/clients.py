"""Clients that decode tokens of their own choice, one after the other, and note when each was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from swarm.client import LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.client.trace import HopTrace, StepTrace
from swarm.protocol import pb


@dataclass(eq=False)
class Client:
    """``tokens`` are the prompt and what is decoded after it."""

    session: LastingSession
    tokens: Sequence[int]
    n_prompt: int
    token_seconds: list[float] = field(default_factory=list)  # from one answer to the next
    token_starts: list[float] = field(default_factory=list)  # when each of them began, by time.perf_counter()
    chunk_ends: list[float] = field(default_factory=list)  # when each chunk of the prompt was answered
    traces: list[StepTrace] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.session.session_id.hex()

    async def prefill(self, window: int = 4) -> list[StepTrace]:
        """Sends up to ``window`` chunks ahead of their answers, as an answer's prompt is sent."""
        size = self.session.terms.chunk_tokens
        starts = range(0, self.n_prompt, size)
        in_flight: list[int] = []
        traces = []
        for start in starts:
            if len(in_flight) >= window:
                traces.append(await self._chunk(in_flight.pop(0)))
            chunk = self.tokens[start : min(start + size, self.n_prompt)]
            row = WantedRow() if start == starts[-1] else None
            in_flight.append(await self.session.send(StepRequest(start, chunk, pb.PREFILL, row)))
        return traces + [await self._chunk(number) for number in in_flight]

    async def _chunk(self, number: int) -> StepTrace:
        trace = (await self.session.answer(number)).trace
        self.chunk_ends.append(time.perf_counter())
        return trace

    async def decode(self) -> None:
        """All tokens behind the prompt."""
        await self.decode_until(asyncio.Event())

    async def decode_until(self, stop: asyncio.Event) -> None:
        """Or what of them is answered before ``stop``."""
        before = time.perf_counter()
        for position in range(self.n_prompt, len(self.tokens)):
            if stop.is_set():
                return
            step = StepRequest(position, self.tokens[position : position + 1], pb.DECODE, WantedRow())
            self.traces.append((await self.session.step(step)).trace)
            now = time.perf_counter()
            self.token_starts.append(before)
            self.token_seconds.append(now - before)
            before = now


@dataclass(frozen=True)
class Crowd:
    """Clients whose sessions are open."""

    clients: tuple[Client, ...]

    @property
    def sessions(self) -> frozenset[str]:
        return frozenset(client.id for client in self.clients)

    async def prefill(self) -> None:
        await asyncio.gather(*(client.prefill() for client in self.clients))

    async def decode(self) -> float:
        """All at once; seconds until the last one is done."""
        began = time.perf_counter()
        await asyncio.gather(*(client.decode() for client in self.clients))
        return time.perf_counter() - began

    @property
    def hops(self) -> list[HopTrace]:
        """Of all steps behind the prompts."""
        return [hop for client in self.clients for trace in client.traces for hop in trace.hops]

    @property
    def token_seconds(self) -> list[list[float]]:
        """Of each client."""
        return [client.token_seconds for client in self.clients]


@asynccontextmanager
async def crowd(
    peers: Sequence[SwarmClient], scripts: Sequence[Sequence[int]], n_prompt: int, context_tokens: int
) -> AsyncIterator[Crowd]:
    """A client for each script, shared out among ``peers``."""
    async with AsyncExitStack() as stack:
        made = []
        for number, tokens in enumerate(scripts):
            session = await peers[number % len(peers)].open_session(context_tokens)
            made.append(Client(await stack.enter_async_context(session), tokens, n_prompt))
        yield Crowd(tuple(made))

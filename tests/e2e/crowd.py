"""Clients that share a swarm: one computes its script to the end, the others come and go."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from swarm.client import LastingSession, StepRequest, SwarmClient
from swarm.client.trace import StepTrace
from swarm.protocol import pb
from tests.e2e.chains import Logits, Script, differing


class Leave(Enum):
    """How a neighbour ends a session."""

    CLOSE = auto()  # when it has its answers
    CANCEL = auto()  # its task, while it waits for one
    ABANDON = auto()  # closes with several steps sent and none answered


@dataclass
class Answers:
    """Rows and traces of the steps that were answered."""

    rows: list[Logits] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)

    def shared(self, kind: pb.StepKind.ValueType, script: Script) -> int:
        """How many steps of a kind were computed beside another session's, in at least one hop."""
        steps = zip(self.traces, script.requests, strict=False)
        return sum(
            any(hop.batch_sessions > 1 for hop in trace.hops) for trace, request in steps if request.kind == kind
        )


async def compute(session: LastingSession, requests: Sequence[StepRequest], into: Answers) -> None:
    """One step after the other; the whole row of each."""
    for request in requests:
        answer = await session.step(request)
        into.traces.append(answer.trace)
        into.rows.append(await session.fetch_row(request.start + len(request.tokens) - 1))


@dataclass
class Neighbour:
    """Opens a session, computes a part of its script, leaves, and comes again until it is stopped."""

    client: SwarmClient
    script: Script
    expected: Sequence[Logits]
    context_tokens: int
    random: random.Random
    left: Counter[Leave] = field(default_factory=Counter)
    compared: int = 0

    async def run(self) -> None:
        while True:
            await self._visit(self.random.choice(list(Leave)))

    async def _visit(self, leave: Leave) -> None:
        requests = self.script.requests[: self.random.randint(1, len(self.script.requests))]
        answers = Answers()
        async with await self.client.open_session(self.context_tokens) as session:
            if leave is Leave.CLOSE:
                await compute(session, requests, answers)
            elif leave is Leave.ABANDON:
                for request in requests[:4]:
                    await session.send(request)
            else:
                await self._cancelled(session, requests, answers)
        assert differing(answers.rows, self.expected[: len(answers.rows)]) == []
        self.compared += len(answers.rows)
        self.left[leave] += 1

    async def _cancelled(self, session: LastingSession, requests: Sequence[StepRequest], answers: Answers) -> None:
        *before, last = requests
        await compute(session, before, answers)
        step = asyncio.create_task(session.step(last))
        await asyncio.sleep(0)  # it is sent, and cannot be answered yet
        step.cancel()
        await asyncio.wait({step})


@asynccontextmanager
async def company(neighbours: Sequence[Neighbour]) -> AsyncIterator[None]:
    """All of them run until the block ends; what one of them saw go wrong is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(neighbour.run()) for neighbour in neighbours]
        yield
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def clients(address: str, count: int) -> AsyncIterator[list[SwarmClient]]:
    """Peers of their own."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SwarmClient.connect([address])) for _ in range(count)]

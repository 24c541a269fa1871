"""Answers under a schedule of deaths and joins, over real processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from random import Random

import psutil
import pytest

from bench.faults import Accounting, Fault, injected, until_accounts
from bench.faults.fault import engine_of, kill_node
from bench.links.linked_swarm import LinkedNode, LinkedSwarm
from swarm.client import Generation, GenerationOptions, SwarmClient
from swarm.client.sampler import GREEDY, SamplingParams
from swarm.errors import SessionLost, SwarmError
from tests.failover.schedule import Event, Kind, cover, missing

N_PROMPT = 100
N_TOKENS = 24
FREEZE_SECONDS = 6.0
PACE_SECONDS = 0.02  # between tokens: nodes that join need the machine, too
MOST_NODES = 6
APART = 6  # answers of every session between two deaths of engines; more than it sends ahead

Tokens = list[int]


@dataclass(frozen=True)
class Question:
    seed: int
    sampling: SamplingParams

    @property
    def prompt(self) -> Tokens:
        return [(self.seed * at + at * at) % 250 for at in range(N_PROMPT)]

    async def ask(self, client: SwarmClient) -> Generation:
        return await client.generate(self.prompt, GenerationOptions(max_tokens=N_TOKENS, sampling=self.sampling))


QUESTIONS = [Question(seed, sampling) for seed in (7, 11) for sampling in (GREEDY, SamplingParams(1.0, seed=5))]
N_SESSIONS = 3  # at a time


class Storm:
    """``run`` returns when every event has come and the answers after the last one were right. What it tells of the
    events is in ``log``."""

    def __init__(self, swarm: LinkedSwarm, client: SwarmClient, seed: int) -> None:
        self.swarm = swarm
        self.log: list[str] = []
        self.recovered = 0
        self._client = client
        self._random = Random(seed)
        self._began = time.monotonic()
        self._living = {node.number: node for node in swarm.nodes}  # and not on their way out
        self._joining: Counter[tuple[int, int]] = Counter()
        self._frozen: set[int] = set()
        self._lost_engines: set[int] = set()
        self._expected: dict[Question, Tokens] = {}
        self._running: dict[int, Generation] = {}
        self._answered = [0] * N_SESSIONS  # steps of the answers before the running one
        self._at_engine_death: list[int] | None = None
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> list[str]:
        """Of the nodes that are well."""
        return [node.address for number, node in self._living.items() if number not in self._frozen]

    async def undisturbed(self) -> None:
        for question in QUESTIONS:
            generation = await question.ask(self._client)
            await generation.finish()
            self._expected[question] = generation.progress.token_ids

    async def run(self, events: Sequence[Event]) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in range(N_SESSIONS):
                group.create_task(self._work(worker))
            for event in events:
                await self._progress(sum(self._steps()) + event.steps)
                await self._strike(event, group)
            while self._tasks:
                await asyncio.wait(self._tasks)
            self._over = True

    async def abandoned(self, client: SwarmClient, layer: int) -> tuple[str, list[LinkedNode]]:
        """How an answer ends when all nodes that serve ``layer`` die and nobody comes, and which they are."""
        generation = await QUESTIONS[0].ask(client)
        killed = [node for node in self._living.values() if layer in range(*node.span)]
        with pytest.raises(SessionLost) as lost:
            async for _ in generation:
                if len(generation.progress.token_ids) == N_TOKENS // 2:
                    for node in killed:
                        self._note("kill", node)
                        del self._living[node.number]
                        await kill_node(node)
        tokens = generation.progress.token_ids
        assert tokens == self._expected[QUESTIONS[0]][: len(tokens)] and len(tokens) >= N_TOKENS // 2
        return str(lost.value), killed

    async def settled(self) -> None:
        """Nothing is left of any session in the nodes that live."""
        await until_accounts(self.swarm, {})
        for number, account in (await Accounting.of_swarm(self.swarm)).items():
            assert account.temporary_files == 0, (number, account)

    # --- answers

    async def _work(self, worker: int) -> None:
        turn = worker
        while not self._over:
            await self._answer(worker, QUESTIONS[turn % len(QUESTIONS)])
            turn += 1
        await self._answer(worker, QUESTIONS[turn % len(QUESTIONS)])

    async def _answer(self, worker: int, question: Question) -> None:
        generation = self._running[worker] = await question.ask(self._client)
        async for _ in generation:
            await asyncio.sleep(PACE_SECONDS)
        self._answered[worker] += _steps(self._running.pop(worker))
        self.recovered += len(generation.progress.recoveries)
        assert generation.progress.token_ids == self._expected[question], question

    def _steps(self) -> list[int]:
        """Answered so far, of each worker."""
        running = self._running
        return [
            before + (_steps(running[worker]) if worker in running else 0)
            for worker, before in enumerate(self._answered)
        ]

    async def _progress(self, steps: int) -> None:
        while sum(self._steps()) < steps:  # noqa: ASYNC110 (of many tasks)
            await asyncio.sleep(0.002)

    # --- events

    async def _strike(self, event: Event, group: asyncio.TaskGroup) -> None:
        match event.kind:
            case Kind.JOIN:
                if len(self._living) + self._joining.total() < MOST_NODES:
                    self._later(group, self._join(event.span))
            case Kind.KILL_NODE if node := self._victim(event):
                self._note("kill", node)
                del self._living[node.number]
                await kill_node(node)
                self._mend(group)
            case Kind.LEAVE if node := self._victim(event):
                self._note("ask to leave", node)
                del self._living[node.number]
                node.process.stop()
                self._later(group, self._gone(node))
                self._mend(group)
            case Kind.FREEZE if node := self._victim(event):
                self._later(group, self._freeze(node))
            case Kind.KILL_ENGINE:
                await self._kill_engine(event)

    def _victim(self, event: Event) -> LinkedNode | None:
        """One that is in use, if there is one; there must be others to join and to ask."""
        healthy = [node for number, node in self._living.items() if number not in self._frozen]
        if len(healthy) < 2:
            return None
        used = {place.peer_id for generation in self._running.values() for place in generation.route}
        return event.choose([node for node in healthy if node.peer_id in used] or healthy)

    async def _kill_engine(self, event: Event) -> None:
        """Never twice in the same steps: that would be poison."""
        while (before := self._at_engine_death) is not None and any(  # noqa: ASYNC110 (of many tasks)
            now < then + APART for now, then in zip(self._steps(), before, strict=True)
        ):
            await asyncio.sleep(0.002)
        node = self._victim(event)
        if node is None or node.number in self._lost_engines:
            return
        try:
            engine = engine_of(node)
            self._note("kill the engine of", node)
            engine.kill()
        except psutil.NoSuchProcess:
            return
        self._lost_engines.add(node.number)
        self._at_engine_death = self._steps()

    async def _freeze(self, node: LinkedNode) -> None:
        self._note("freeze", node)
        self._frozen.add(node.number)
        async with injected(Fault.STOP_NODE, self.swarm, node):
            await asyncio.sleep(FREEZE_SECONDS)
        self._frozen.remove(node.number)
        self._note("thaw", node)

    async def _gone(self, node: LinkedNode) -> None:
        code = await asyncio.to_thread(node.process.process.wait)
        self._note(f"{code} is the exit code of", node)
        assert code == 0, node.process.last_line()

    def _mend(self, group: asyncio.TaskGroup) -> None:
        """Somebody comes for layers that nobody serves any more."""
        spans = [*(node.span for node in self._living.values()), *self._joining]
        for span in cover(missing(spans), self._random):
            self._later(group, self._join(span))

    async def _join(self, span: tuple[int, int]) -> None:
        self._joining[span] += 1
        while True:
            try:
                node = await self.swarm.add(span, ("--initial-peers", *self.addresses))
                break
            except SwarmError as error:  # those that it knew have gone
                self.log.append(f"a node of {span} did not come up: {error}")
        self._living[node.number] = node
        self._joining[span] -= 1
        self._joining += Counter()
        self._note("join of", node)

    def _later(self, group: asyncio.TaskGroup, what: Coroutine[None, None, None]) -> None:
        task = group.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note(self, what: str, node: LinkedNode) -> None:
        first, last = node.span
        seconds = time.monotonic() - self._began
        self.log.append(f"{seconds:6.2f} s, steps {self._steps()}: {what} node {node.number} ({first}:{last})")


def _steps(generation: Generation) -> int:
    return len(generation.progress.prefill) + len(generation.progress.token_ids)

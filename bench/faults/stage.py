"""Where the cells of the fault matrix are run: three spans served twice, and a client that tells who takes part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.faults.accounting import Accounting, idle_accounts, until_accounts
from bench.faults.fault import kill_node
from bench.faults.side_door import node_door, watched_swarm
from bench.links.linked_swarm import LinkedNode, LinkedSwarm
from dht.record import NodeState
from swarm.client import ClientConfig, Generation, GenerationOptions, SwarmClient, Timeouts
from swarm.client.blame import Avoided
from swarm.client.sampler import GREEDY, SamplingParams
from swarm.ids import PeerId

REPLICAS = 2
CHUNK_TOKENS = 16
# all that is journaled goes to files: where the disk is full, nothing is kept
OPTIONS = ("--slots", "6x256", "--threads", "1", "--memory", "1GiB", "--journal-memory", "0")
PROMPT = tuple((7 * at + at * at) % 250 for at in range(6 * CHUNK_TOKENS))
N_TOKENS = 16
SAMPLINGS = (GREEDY, SamplingParams(temperature=1.0, seed=5))
TIMEOUTS = Timeouts(heartbeat_interval_seconds=0.5, heartbeat_seconds=4.0, recover_seconds=90.0)
SEEN_SECONDS = 60.0  # for a new node to be seen by the client
LEFT_SECONDS = 15.0  # for nodes of a cell that failed to get rid of what is left


class Stage:
    """Made by ``stage``. ``expected`` are the tokens of undisturbed answers, one for each of ``SAMPLINGS``."""

    def __init__(self, swarm: LinkedSwarm, client: SwarmClient, spans: Sequence[tuple[int, int]]) -> None:
        self.swarm = swarm
        self.client = client
        self.expected: list[list[int]] = []
        self._spans = tuple(spans)
        self._books: dict[int, Accounting] = {}
        self._turn = 0

    def living(self, span: tuple[int, int]) -> list[LinkedNode]:
        return [node for node in self.swarm.nodes if node.span == span and node.process.process.poll() is None]

    def other(self, node: LinkedNode) -> LinkedNode:
        """The other one that serves the same layers."""
        return next(other for other in self.living(node.span) if other is not node)

    async def make_whole(self) -> None:
        """Every span is served by all its replicas, none of which holds anything of any session."""
        missing = [span for span in self._spans for _ in range(REPLICAS - len(self.living(span)))]
        async with asyncio.TaskGroup() as adding:
            for span in missing:
                adding.create_task(self.swarm.add(span))
        await self._all_seen()
        if missing or not self._books:
            self._books = await idle_accounts(self.swarm) | self._books

    async def settled(self) -> None:
        """Returns when all nodes hold what they held before. Raises AssertionError with the differences."""
        await until_accounts(self.swarm, self._books)

    async def clean(self) -> None:
        """After a cell that failed: what does not get rid of its sessions is ended."""
        self.swarm.heal()
        try:
            await self.release_all()
            await until_accounts(self.swarm, self._books, LEFT_SECONDS)
        except (AssertionError, OSError, TimeoutError):
            for span in self._spans:
                for node in self.living(span):
                    await kill_node(node)

    def chain(self) -> list[LinkedNode]:
        """The hops of the next answers; another replica of each span takes its turn."""
        self._turn += 1
        chain = [self.living(span)[self._turn % REPLICAS] for span in self._spans]
        avoided = self.client._avoided = Avoided()
        for node in self.swarm.nodes:
            if node not in chain:
                avoided.add(PeerId(node.peer_id))
        return chain

    def admit_all(self) -> None:
        """From now on every node may be chosen."""
        for node in self.swarm.nodes:
            self.client._avoided.forgive(PeerId(node.peer_id))

    async def generations(self) -> list[Generation]:
        return [
            await self.client.generate(PROMPT, GenerationOptions(max_tokens=N_TOKENS, sampling=sampling))
            for sampling in SAMPLINGS
        ]

    async def release_all(self) -> None:
        for span in self._spans:
            for node in self.living(span):
                await node_door(node).release()

    async def _all_seen(self) -> None:
        wanted = {node.peer_id for span in self._spans for node in self.living(span)}
        async with asyncio.timeout(SEEN_SECONDS):
            while not wanted <= await self._online():  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(0.1)

    async def _online(self) -> set[str]:
        records = (await self.client.snapshot()).records
        return {record.peer_id for record in records if record.state is NodeState.ONLINE}


@contextlib.asynccontextmanager
async def stage(model: Path, spans: Sequence[tuple[int, int]], folder: Path) -> AsyncIterator[Stage]:
    """Logs, keys and journals go to ``folder``. Raises what a node or the client can't start for."""
    options = [*OPTIONS, "--chunk-tokens", str(CHUNK_TOKENS), "--journal-dir", str(folder / "journals")]
    async with watched_swarm(model, [*spans] * REPLICAS, folder, options) as swarm:
        config = ClientConfig(TIMEOUTS, folder)
        async with SwarmClient.connect([swarm.address], config) as client:
            made = Stage(swarm, client, spans)
            await made.make_whole()
            made.expected = await _undisturbed(made)
            await made.settled()
            yield made


async def _undisturbed(made: Stage) -> list[list[int]]:
    made.chain()
    generations = await made.generations()
    await asyncio.gather(*(generation.finish() for generation in generations))
    assert not any(generation.progress.recoveries for generation in generations)
    tokens = [generation.progress.token_ids for generation in generations]
    assert all(len(one) == N_TOKENS for one in tokens), f"{tokens}: an answer ended early; choose another prompt"
    return tokens

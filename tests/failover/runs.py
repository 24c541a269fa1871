"""Answers over a yard, undisturbed and disturbed, and what must be left of them: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dht.record import NodeState
from swarm.client import ClientConfig, Generation, GenerationOptions, SwarmClient, Timeouts
from swarm.client.artifact_cache import Source
from swarm.client.info import InfoReader
from swarm.client.sampler import GREEDY, SamplingParams
from swarm.ids import PeerId
from swarm.protocol import pb
from tests.failover.yard import Yard

PROMPT = [(7 * at + at * at) % 250 for at in range(200)]  # 13 chunks
N_TOKENS = 24
SAMPLINGS = (GREEDY, SamplingParams(temperature=1.0, seed=5))
TIMEOUTS = Timeouts(heartbeat_interval_seconds=0.5, heartbeat_seconds=4.0, recover_seconds=240.0)

Tokens = list[int]


Disturb = Callable[[list[Generation]], None]


@dataclass
class Rig:
    """A yard and its client. ``expected`` are the tokens of undisturbed answers, greedy and sampled."""

    yard: Yard
    client: SwarmClient
    said: list[str]
    expected: list[Tokens] = field(default_factory=list)

    async def generation(self, sampling: SamplingParams = GREEDY) -> Generation:
        return await self.client.generate(PROMPT, GenerationOptions(max_tokens=N_TOKENS, sampling=sampling))

    async def answers(self, disturb: Disturb = lambda _: None) -> list[Generation]:
        """A greedy and a sampled answer at the same time, ``disturb`` being called all the while. Their tokens must be
        those of the undisturbed ones, and nothing may be left of them."""
        generations = [await self.generation(sampling) for sampling in SAMPLINGS]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(generation.finish()) for generation in generations]
            while not all(task.done() for task in running):
                disturb(generations)
                await asyncio.sleep(0.001)
        tokens = [generation.progress.token_ids for generation in generations]
        self.expected = self.expected or tokens
        assert tokens == self.expected
        return generations

    async def whole_again(self) -> None:
        """Starts the dead again; returns when all are there and none holds anything of any session."""
        await asyncio.to_thread(self.yard.revive)
        await self._all_there()
        while self.yard.journal_files() or not await self._is_idle():  # noqa: ASYNC110 (of other processes)
            await asyncio.sleep(0.05)

    async def _is_idle(self) -> bool:
        reader = InfoReader(self.client._network, TIMEOUTS)
        for name, address in self.yard.addresses.items():
            said = await reader.describe(Source(PeerId(address.rpartition("/")[2]), (address,)))
            free = all(slot.free == slot.total for slot in said.slots)
            if not free or said.state != pb.ONLINE or said.journal_free_bytes != self.yard.journal_bytes(name):
                return False
        return True

    async def _all_there(self) -> None:
        """Waits for the records of all nodes, and notes their addresses."""
        yard = self.yard
        while True:
            records = (await self.client.snapshot()).records
            for record in records:
                name = name_of(record.public_name)
                if yard.labels.get(name) == record.public_name and record.state is NodeState.ONLINE:
                    yard.addresses[name] = record.addresses[0]
            if len(yard.addresses) == len(yard.spans):
                return
            await asyncio.sleep(0.1)


def name_of(label: str) -> str:
    return label.partition(".")[0]


def on_route(generation: Generation, hop: int) -> str:
    """The yard's name of a hop."""
    return name_of(generation.route[hop].name)


@asynccontextmanager
async def rig(yard: Yard, folder: Path, *, standby: bool = False) -> AsyncIterator[Rig]:
    said: list[str] = []
    config = ClientConfig(cache_dir=folder, timeouts=TIMEOUTS, standby=standby)
    async with SwarmClient.connect([yard.address], config, on_status=said.append) as client:
        made = Rig(yard, client, said)
        await made.whole_again()
        await made.answers()  # undisturbed
        await made.whole_again()
        yield made

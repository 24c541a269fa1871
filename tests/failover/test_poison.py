"""A session whose step ends engines, in the middle of others: it is given up, and they go on as if it had not been."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from bench.faults import node_door, until_accounts, watched_swarm
from bench.faults.fault import engine_of
from bench.links.linked_swarm import LinkedNode
from swarm.client import ClientConfig, SwarmClient
from swarm.client.artifact_cache import Source
from swarm.client.chain import StepRequest, WantedRow
from swarm.client.info import InfoReader
from swarm.client.lasting import LastingSession
from swarm.errors import SessionPoisoned
from swarm.ids import PeerId
from swarm.protocol import pb
from tests.failover.runs import TIMEOUTS

OPTIONS = ["--slots", "8x256", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "16"]
N_PROMPT = 12
N_TOKENS = 8
SESSIONS = ("before", "behind", "poison", "neighbour", "other neighbour")
SHARED = 3  # engine calls are made of: two are on their way already when these come


class Greedy:
    """One session, step by step."""

    def __init__(self, session: LastingSession, seed: int) -> None:
        self.session = session
        self.tokens: list[int] = []
        self._prompt = tuple((17 * seed + 5 * at) % 250 for at in range(N_PROMPT))

    async def step(self) -> None:
        last = tuple(self.tokens[-1:])
        start = N_PROMPT + len(self.tokens) - 1 if last else 0
        kind = pb.DECODE if last else pb.PREFILL
        answer = await self.session.step(StepRequest(start, last or self._prompt, kind, WantedRow()))
        assert answer.row is not None
        self.tokens.append(int(answer.row.top_ids[0]))

    async def finish(self) -> list[int]:
        while len(self.tokens) < N_TOKENS:
            await self.step()
        return self.tokens


async def _greedy(client: SwarmClient, seed: int) -> Greedy:
    return Greedy(await client.open_session(64), seed)


async def _undisturbed(client: SwarmClient, seed: int) -> list[int]:
    one = await _greedy(client, seed)
    async with one.session:
        return await one.finish()


async def _queued(client: SwarmClient, node: LinkedNode, count: int) -> None:
    reader = InfoReader(client._network, TIMEOUTS)
    source = Source(PeerId(node.peer_id), (node.address,))
    async with asyncio.timeout(60):
        while (await reader.describe(source)).queue != count:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.01)


def _deaths(node: LinkedNode) -> int:
    return node.process.log.read_text().count("the engine died")


async def test_a_poisonous_session_ends_two_engines_and_its_neighbours_survive(
    llama_untied_path: Path, tmp_path: Path
) -> None:
    async with watched_swarm(llama_untied_path, [(0, 3), (3, 6)], tmp_path, OPTIONS) as swarm:
        config = ClientConfig(cache_dir=tmp_path, timeouts=TIMEOUTS)
        async with SwarmClient.connect([swarm.address], config) as client:
            expected = [await _undisturbed(client, seed) for seed in range(len(SESSIONS))]
            made = {name: await _greedy(client, seed) for seed, name in enumerate(SESSIONS)}
            for _ in range(2):
                await asyncio.gather(*(one.step() for one in made.values()))
            last = swarm.nodes[1]
            spare = await swarm.add((3, 6))  # not before: all were to be in one engine
            for node in (last, spare):
                await node_door(node).poison(made["poison"].session.session_id, N_PROMPT + 1)
            engine_of(last).send_signal(signal.SIGSTOP)
            finishing = {}
            for count, name in enumerate(SESSIONS, 1):
                finishing[name] = asyncio.create_task(made[name].finish())
                if count <= len(SESSIONS) - SHARED:
                    await _queued(client, last, count)
            await _queued(client, last, len(SESSIONS))
            engine_of(last).send_signal(signal.SIGCONT)
            await asyncio.wait(finishing.values())
            with pytest.raises(SessionPoisoned, match="from position 13 on ended 2 engines"):
                finishing["poison"].result()
            for name, tokens in zip(SESSIONS, expected, strict=True):
                assert name == "poison" or finishing[name].result() == tokens
                if "neighbour" in name:
                    told = [line for recovery in made[name].session.recoveries for line in recovery.story]
                    assert sum("engine died in a step of this session" in line for line in told) == 1, told
                await made[name].session.close()
            assert (_deaths(last), _deaths(spare)) == (1, 1)
        await until_accounts(swarm, {})

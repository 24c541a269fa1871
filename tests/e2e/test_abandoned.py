"""Sessions that are opened, used and abandoned in random ways: nothing is left of them, nor do nodes grow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from bench.faults import idle_accounts, until_accounts, watched_swarm
from bench.links.linked_swarm import LinkedSwarm
from swarm.client import ClientConfig, Generation, GenerationOptions, SwarmClient
from swarm.client.config import Timeouts
from swarm.client.steps import StepRequest
from swarm.protocol import pb

OPTIONS = ["--slots", "6x256", "--threads", "1", "--memory", "1GiB", "--chunk-tokens", "16"]
SPANS = [(0, 2), (2, 4), (4, 6)]
SESSIONS, AT_ONCE = 20, 4  # of a round
WARM_ROUNDS = 4  # allocators and tables reach their size
MOST_GROWTH_BYTES = 2 << 20  # of a process in all rounds after those

Use = Callable[[SwarmClient, Random], Awaitable[None]]


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_nothing_is_left_of_abandoned_sessions(llama_untied_path: Path, tmp_path: Path, rounds: int) -> None:
    random = Random(5)
    config = ClientConfig(cache_dir=tmp_path, timeouts=Timeouts(route_seconds=60))
    async with (
        watched_swarm(llama_untied_path, SPANS, tmp_path, OPTIONS) as swarm,
        SwarmClient.connect([swarm.address], config) as client,
    ):
        await finished(client, random)
        before = await idle_accounts(swarm)
        grown: list[dict[str, int]] = []
        for _ in range(rounds):
            await one_round(client, random)
            await until_accounts(swarm, before)
            assert not client._sessions
            grown.append(resident_bytes(swarm))
    warm, last = grown[min(WARM_ROUNDS, rounds) - 1], grown[-1]
    growth = {name: last[name] - warm[name] for name in warm}
    assert max(growth.values()) <= MOST_GROWTH_BYTES, grown


async def one_round(client: SwarmClient, random: Random) -> None:
    uses = [random.choice(USES) for _ in range(SESSIONS - 1)] + [client_gone]
    random.shuffle(uses)
    places = asyncio.Semaphore(AT_ONCE)

    async def use(way: Use) -> None:
        async with places:
            await way(client, random)

    async with asyncio.TaskGroup() as group:
        for way in uses:
            group.create_task(use(way))


def resident_bytes(swarm: LinkedSwarm) -> dict[str, int]:
    """Of the nodes' Python and of their engines; the memory of libp2p's daemon is its collector's affair."""
    found: dict[str, int] = {}
    for node in swarm.nodes:
        process = psutil.Process(node.pid)
        found[f"node {node.number}"] = process.memory_info().rss
        for child in process.children(recursive=True):
            if child.name() != "p2pd":
                found[f"engine {node.number}"] = child.memory_info().rss
    return found


# --- ways to use a session


async def asked(client: SwarmClient, random: Random) -> Generation:
    prompt = [random.randrange(250) for _ in range(random.randrange(1, 120))]
    return await client.generate(prompt, GenerationOptions(max_tokens=random.randrange(1, 12)))


async def finished(client: SwarmClient, random: Random) -> None:
    await (await asked(client, random)).finish()


async def left_amid_the_answer(client: SwarmClient, random: Random) -> None:
    tokens = random.randrange(4)
    async with await asked(client, random) as generation:
        async for _ in generation:
            if len(generation.progress.token_ids) > tokens:
                return


async def cancelled(client: SwarmClient, random: Random) -> None:
    """At any moment: after so many turns of the loop, from before it was opened to its end."""
    answering = asyncio.create_task((await asked(client, random)).finish())
    for _ in range(random.randrange(200)):
        if answering.done():
            return
        await asyncio.sleep(0)
    answering.cancel()
    await asyncio.wait({answering})


async def never_used(client: SwarmClient, random: Random) -> None:
    async with await client.open_session(random.randrange(1, 256)):
        pass


async def forked(client: SwarmClient, random: Random) -> None:
    async with await client.open_session(64) as session:
        await session.step(StepRequest(0, range(random.randrange(1, 16)), pb.PREFILL))
        async with await client.fork(session) as fork:
            await fork.send(StepRequest(len(fork.tokens), [1], pb.DECODE))  # whose answer nobody takes


async def client_gone(client: SwarmClient, random: Random) -> None:
    """With all it has open."""
    async with SwarmClient.connect(client._initial_peers, client.config) as other:
        session = await other.open_session(64)
        await session.send(StepRequest(0, range(random.randrange(1, 16)), pb.PREFILL))


USES: tuple[Use, ...] = (finished, left_amid_the_answer, cancelled, cancelled, never_used, forked)

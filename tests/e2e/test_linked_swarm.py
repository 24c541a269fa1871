"""A swarm behind links: what the links do to it, and that nothing goes past them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.links import Shape
from bench.links.linked_swarm import LinkedNode, LinkedSwarm, linked_swarm
from swarm.client import ClientConfig, GenerationOptions, LastingSession, StepRequest, SwarmClient, WantedRow
from swarm.client.config import Timeouts
from swarm.errors import SwarmError
from swarm.protocol import pb

OPTIONS = ["--slots", "2x256", "--threads", "1", "--memory", "1GiB"]
SPANS = [(0, 2), (2, 4), (4, 6)]
DELAY_SECONDS = 0.04  # from one machine to another
SILENCE_SECONDS = 4.0  # that counts as death here


@asynccontextmanager
async def connected(swarm: LinkedSwarm, folder: Path) -> AsyncIterator[SwarmClient]:
    timeouts = Timeouts(connect_seconds=5.0, heartbeat_interval_seconds=0.5, heartbeat_seconds=SILENCE_SECONDS)
    async with SwarmClient.connect([swarm.address], ClientConfig(timeouts, folder)) as client:
        yield client


async def token_seconds(session: LastingSession, start: int) -> float:
    """The fastest of three tokens."""
    taken = []
    for position in range(start, start + 3):
        began = time.monotonic()
        await session.step(StepRequest(position, (1,), pb.DECODE, WantedRow()))
        taken.append(time.monotonic() - began)
    return min(taken)


async def test_links_of_a_swarm(llama_untied_path: Path, tmp_path: Path) -> None:
    """One story, for a swarm takes seconds to start: a new node, a delay, a cut, a lost pair, a reset, a death."""
    async with (
        linked_swarm(llama_untied_path, SPANS, tmp_path, OPTIONS) as swarm,
        connected(swarm, tmp_path) as client,
    ):
        answer = await _answer(client)
        assert swarm.bypassing() == []
        assert all(node.link.up.passed_bytes and node.link.down.passed_bytes for node in swarm.nodes)
        heir = await swarm.add(SPANS[1])
        assert heir.link.passed_bytes
        await _delay(swarm, client)
        await _cut(swarm, client)
        await _lost_pair(swarm, client)
        await _reset(swarm, client)
        await _kill(swarm, client)
        assert await _answer_in_the_end(client) == answer
        assert swarm.bypassing() == []


async def _answer(client: SwarmClient) -> list[int]:
    generation = await client.generate("hello", GenerationOptions(max_tokens=6))
    await generation.finish()
    return generation.progress.token_ids


async def _answer_in_the_end(client: SwarmClient) -> list[int]:
    async with asyncio.timeout(60):
        while True:
            try:
                return await _answer(client)
            except SwarmError:
                await asyncio.sleep(0.2)


def _node(swarm: LinkedSwarm, session: LastingSession, index: int) -> LinkedNode:
    """The hop of that index now."""
    return next(node for node in swarm.nodes if node.peer_id == session.places[index].peer_id)


async def _delay(swarm: LinkedSwarm, client: SwarmClient) -> None:
    """A token passes four pairs of cables: to three nodes and back to the client. How late it is then says
    ``test_links``; what a busy machine adds here nobody knows."""
    swarm.shape(Shape(delay_seconds=DELAY_SECONDS / 2))
    async with await client.open_session(64) as session:
        assert await token_seconds(session, 0) >= 4 * DELAY_SECONDS
    swarm.shape(Shape())


async def _cut(swarm: LinkedSwarm, client: SwarmClient) -> None:
    """Whoever is cut off can be reached by nobody: its link carries nothing, there is no other, and so it is missed;
    another takes its layers."""
    async with await client.open_session(64) as session:
        await token_seconds(session, 0)
        middle = _node(swarm, session, 1)
        middle.link.cut()
        passed = middle.link.passed_bytes
        await token_seconds(session, 3)
        assert (middle.peer_id, SPANS[1]) in session.recoveries[0].lost
        assert _node(swarm, session, 1) is not middle
        assert middle.link.passed_bytes == passed
        assert swarm.bypassing() == []
        middle.link.heal()


async def _lost_pair(swarm: LinkedSwarm, client: SwarmClient) -> None:
    """Both nodes answer the client while the step between them is held."""
    async with await client.open_session(64) as session:
        await token_seconds(session, 0)
        swarm.edge(_node(swarm, session, 0), _node(swarm, session, 1)).cut()
        step = asyncio.create_task(session.step(StepRequest(3, (1,), pb.DECODE, WantedRow())))
        await asyncio.wait([step], timeout=1.0)
        assert not step.done()
        swarm.heal()
        await step


async def _reset(swarm: LinkedSwarm, client: SwarmClient) -> None:
    """Seen at once, not after a silence; the node itself is well, and as nobody else has its layers, it comes back."""
    async with await client.open_session(64) as session:
        await token_seconds(session, 0)
        last = _node(swarm, session, 2)
        assert await last.link.reset() >= 2
        await token_seconds(session, 3)
        assert session.recoveries
        assert not any("silent" in what for recovery in session.recoveries for what in recovery.story)
        assert _node(swarm, session, 2) is last


async def _kill(swarm: LinkedSwarm, client: SwarmClient) -> None:
    async with await client.open_session(64) as session:
        await token_seconds(session, 0)
        middle = _node(swarm, session, 1)
        middle.process.process.kill()
        await token_seconds(session, 3)
        assert (middle.peer_id, SPANS[1]) in session.recoveries[0].lost
        assert _node(swarm, session, 1) is not middle
